"""What each rank holds when a model is trained on several: derived from the step of one.

FSDP divides what is kept (parameters, gradients, the optimizer's state) and gathers weights block by block. DDP keeps
everything on every rank, and buckets for the gradients beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ampwise.errors import BadInput
from ampwise.tune.memory.blocks import repeated_blocks
from ampwise.tune.memory.log import CASTS, PER_PARAMETER, Log

__all__ = ["BUCKETS", "GATHERED", "REDUCED", "Fsdp", "Units", "buckets", "units_of"]

GATHERED = "gathered weights"
REDUCED = "gradient reduction"
BUCKETS = "DDP buckets"
SHARDED = frozenset(PER_PARAMETER)

# Blocks that are there in full at the same time: the one that computes, and of the next one what comes in from the
# other ranks and the weights it is copied to.
GATHERED_BLOCKS = 3
# The gradients of the block that computes, and of the one before it those that are on their way to the other ranks,
# copied together.
REDUCED_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What FSDP gathers at once, in elements."""

    block: int  # the largest of the blocks
    outside: int  # what is in no block: gathered from the first use to the end of the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """FSDP2, a group for each block: weights and state in FP32 and divided, gathered in what is computed in."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise BadInput(f"--fsdp {self.ranks}: a number of ranks is expected, at least 1.")

    def share(self, log: Log) -> Log:
        """The step of one rank, without what it gathers. Gathered weights come in 16 bits: no cast, and no cache."""
        return log.resized(self._size)

    def extra(self, units: Units, element_bytes: int) -> dict[str, int]:
        """Bytes that come on top."""
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


def units_of(model: nn.Module) -> Units:
    """By its repeated blocks; a model without any is gathered as a whole."""
    blocks = repeated_blocks(model)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = _elements(parameter for parameter in model.parameters() if parameter not in inside)
    return Units(block=max((_elements(block.parameters()) for block in blocks), default=0), outside=outside)


def buckets(model: nn.Module) -> dict[str, int]:
    """DDP's copies of all gradients; none with ``gradient_as_bucket_view=True``."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return {BUCKETS: sum(parameter.numel() * parameter.element_size() for parameter in trained)}


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
