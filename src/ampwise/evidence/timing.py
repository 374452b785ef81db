"""Where the time of a run went: what the watch measured of it, as plain data for the rules in ``rules/time``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.evidence.conduct import Site

__all__ = ["HALVES", "MatrixProduct", "TimeUse"]

HALVES = frozenset(("fp16", "bf16", "fp8"))  # what the matrix units run fast, 16 bits and below


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A product, or a convolution, of one size in one precision, and how often it ran in the steps looked at."""

    op: str  # "mm", "convolution_backward"
    shape: str  # "4096×768 @ 768×50257"
    precision: str  # "bf16", "fp32"
    flops: float  # of all of them
    count: int = 1
    aligned: bool | None = None  # its rows start at multiples of 16 bytes; None: not known

    @property
    def is_half(self) -> bool:
        return self.precision in HALVES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where the time of a run went. What could not be measured is None or empty, and ``not_measured`` says why."""

    device: str = "cpu"  # "cuda" where the run used one
    autocast: str | None = None  # the precision of the script's autocast, if it used it
    steps: int = 0  # that ``seconds`` are of: not the first few, nor those the profiler looked at
    seconds: float = 0.0
    data_wait_seconds: float = 0.0  # of them, spent waiting for a DataLoader
    data_waits: Mapping[Site, float] = field(default_factory=dict)  # the same, by the line that waited
    profiled_steps: int = 0  # that all of the following is of
    flops_by_precision: Mapping[str, float] = field(default_factory=dict)
    matrix_products: tuple[MatrixProduct, ...] = ()  # the most work first
    time_by_kind: Mapping[str, float] = field(default_factory=dict)  # seconds of the device
    cast_share: float | None = None  # of the device's time, changing precision and nothing else
    sync_steps: int = 0  # that were listened to
    syncs: Mapping[Site, int] = field(default_factory=dict)  # waits of the host for the device in those
    not_measured: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return sum(self.flops_by_precision.values())

    @property
    def half_share(self) -> float | None:
        """Of the matrix work, what ran in 16 bits or fewer; None where none was seen."""
        half = sum(flops for precision, flops in self.flops_by_precision.items() if precision in HALVES)
        return half / self.flops if self.flops else None

    @property
    def data_wait_share(self) -> float | None:
        """Of the wall time, what was spent waiting for data; None where no step was timed."""
        return self.data_wait_seconds / self.seconds if self.seconds > 0 else None

    @property
    def syncs_per_step(self) -> float | None:
        """How often the host waits for the device in a step; None where nobody listened."""
        return sum(self.syncs.values()) / self.sync_steps if self.sync_steps else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: lines as text, shares worked out."""
        return {
            "device": self.device,
            "autocast": self.autocast,
            "steps": self.steps,
            "seconds": self.seconds,
            "seconds_per_step": self.seconds / self.steps if self.steps else None,
            "data_wait_seconds": self.data_wait_seconds,
            "data_wait_share": self.data_wait_share,
            "data_waits": {str(site): seconds for site, seconds in self.data_waits.items()},
            "profiled_steps": self.profiled_steps,
            "flops_by_precision": dict(self.flops_by_precision),
            "half_share": self.half_share,
            "matrix_products": [asdict(product) for product in self.matrix_products],
            "time_by_kind": dict(self.time_by_kind),
            "cast_share": self.cast_share,
            "sync_steps": self.sync_steps,
            "syncs": {str(site): count for site, count in self.syncs.items()},
            "syncs_per_step": self.syncs_per_step,
            "not_measured": list(self.not_measured),
        }
