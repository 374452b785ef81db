"""Result of ``memory`` as plain data: for Python, for JSON, for a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.tune.memory.allocation_log import PER_PARAMETER
from ampwise.tune.memory.decoder_shapes import DecoderShape
from ampwise.tune.memory.device_memory import CONTEXT, DeviceMemory
from ampwise.tune.memory.peak import Fit

__all__ = ["Estimate", "MemoryEstimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A step in one precision with one batch size; per rank, if there are several. In bytes."""

    precision: str
    batch: int | None
    peak: int  # torch.cuda.max_memory_allocated()
    reserved: int  # torch.cuda.max_memory_reserved()
    phase: str  # in which the peak occurs
    split: Mapping[str, int] = field(hash=False)  # of the peak, by kind
    most: Mapping[str, int] = field(hash=False)  # by kind, each at its own moment
    phases: Mapping[str, int] = field(hash=False)  # the peak of each
    fits: Fit | None  # whether it fits the GPU; None without a GPU
    ranks: int | None  # the fewest FSDP ranks on which it fits that GPU; None if it fits, or nothing helps
    smallest: DeviceMemory | None = None  # the smallest GPU memory in the catalog that suffices

    @property
    def per_parameter(self) -> int:
        """Bytes that do not depend on the batch: weights, gradients and optimizer state; of one rank."""
        return sum(self.most.get(kind, 0) for kind in PER_PARAMETER)

    @property
    def needed(self) -> int:
        """Reserved bytes plus CUDA's context."""
        return self.reserved + CONTEXT

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "precision": self.precision,
            "batch": self.batch,
            "peak_bytes": self.peak,
            "reserved_bytes": self.reserved,
            "needed_bytes": self.needed,
            "phase": self.phase,
            "peak_split_bytes": dict(self.split),
            "most_bytes": dict(self.most),
            "phase_peak_bytes": dict(self.phases),
            "fits": None if self.fits is None else str(self.fits),
            "fsdp_ranks": self.ranks,
            "smallest_memory_bytes": None if self.smallest is None else self.smallest.total,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Result of ``ampwise.memory``."""

    name: str
    parameters: int
    trained: int
    shape: DecoderShape | None  # of a model given by its sizes
    optimizer: str
    checkpointing: bool
    fsdp: int | None
    ddp: bool
    gpu: DeviceMemory | None
    estimates: tuple[Estimate, ...]
    largest_batch: Mapping[str, int] | None = field(hash=False)  # by precision, on that GPU; 0 if not even one row fits
    notes: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(estimate.precision for estimate in self.estimates))

    @property
    def batches(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(estimate.batch for estimate in self.estimates))

    def at(self, precision: str, batch: int | None = None) -> Estimate:
        """Return the estimate of a precision; the first one unless a batch is given."""
        fitting = (each for each in self.estimates if each.precision == precision)
        return next(each for each in fitting if batch is None or each.batch == batch)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "shape": None if self.shape is None else asdict(self.shape),
            "optimizer": self.optimizer,
            "checkpointing": self.checkpointing,
            "fsdp": self.fsdp,
            "ddp": self.ddp,
            "gpu": None if self.gpu is None else self.gpu.as_dict(),
            "context_bytes": CONTEXT,
            "estimates": [
                estimate.as_dict() | {"bytes_per_parameter": round(estimate.per_parameter / self.parameters, 4)}
                for estimate in self.estimates
            ],
            "largest_batch": None if self.largest_batch is None else dict(self.largest_batch),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from ampwise.tune.memory.text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from ampwise.tune.memory.notebook import memory_html

        return memory_html(self)
