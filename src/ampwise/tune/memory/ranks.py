"""Memory of each rank in distributed training, derived from the step of one rank.

FSDP shards parameters, gradients and optimizer state, and gathers weights block by block. DDP keeps everything on
every rank, and adds buckets for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ampwise.errors import BadInput
from ampwise.tune.memory.allocation_log import CASTS, PER_PARAMETER, AllocationLog
from ampwise.tune.memory.blocks import repeated_blocks

__all__ = ["BUCKETS", "GATHERED", "REDUCED", "Fsdp", "FsdpUnits", "ddp_buckets", "fsdp_units"]

GATHERED = "gathered weights"
REDUCED = "gradient reduction"
BUCKETS = "DDP buckets"
SHARDED = frozenset(PER_PARAMETER)

# Blocks held in full at the same time: the one that computes, and for the next one both the receive buffer and the
# weights it is copied to.
GATHERED_BLOCKS = 3
# Gradients of the block that computes, and for the one before it the gradients being reduced and their packed copy.
REDUCED_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnits:
    """What FSDP gathers at once, in elements."""

    block: int  # the largest block
    outside: int  # parameters in no block: gathered from first use to the end of the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """FSDP2 with a group for each block: weights and state sharded in FP32, gathered in the compute dtype."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise BadInput(f"--fsdp {self.ranks}: expected at least 1 rank.")

    def share(self, log: AllocationLog) -> AllocationLog:
        """Return one rank's log, without gathered weights. These arrive in 16 bits: no casts, and no cache."""
        return log.resized(self._size)

    def extra(self, units: FsdpUnits, element_bytes: int) -> dict[str, int]:
        """Return the additional bytes for gathered weights and gradient reduction."""
        if self.ranks == 1:
            return {}
        return {
            GATHERED: element_bytes * (units.outside + GATHERED_BLOCKS * units.block),
            REDUCED: element_bytes * (units.outside + REDUCED_BLOCKS * units.block),
        }

    def _size(self, kind: str, nbytes: int) -> int:
        if self.ranks == 1:
            return nbytes
        if kind in SHARDED:
            return -(-nbytes // self.ranks)
        return 0 if kind == CASTS else nbytes


def fsdp_units(model: nn.Module) -> FsdpUnits:
    """Measure a model by its repeated blocks; without any, it is gathered as a whole."""
    blocks = repeated_blocks(model)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = _elements(parameter for parameter in model.parameters() if parameter not in inside)
    return FsdpUnits(block=max((_elements(block.parameters()) for block in blocks), default=0), outside=outside)


def ddp_buckets(model: nn.Module) -> dict[str, int]:
    """Return the bytes of DDP's copies of all gradients; with ``gradient_as_bucket_view=True`` there are none."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return {BUCKETS: sum(parameter.numel() * parameter.element_size() for parameter in trained)}


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
