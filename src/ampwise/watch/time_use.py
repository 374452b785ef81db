"""Where a run's time went: measurements of the watch, as plain data for the rules about time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.finding.call_site import CallSite
from ampwise.hardware.kernel_faults import KernelFault

__all__ = ["HALVES", "ProfiledMatmul", "TimeUse"]

HALVES = frozenset(("fp16", "bf16", "fp8"))  # formats that tensor cores run fast, 16 bits and below


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledMatmul:
    """A matmul or convolution of one size in one precision, and how often it ran in the profiled steps."""

    op: str  # "mm", "convolution_backward"
    shape: str  # "4096×768 @ 768×50257"
    precision: str  # "bf16", "fp32"
    flops: float  # of all runs
    count: int = 1
    aligned: bool | None = None  # its rows start at multiples of 16 bytes; None: unknown

    @property
    def is_half(self) -> bool:
        return self.precision in HALVES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where a run's time went. What could not be measured is None or empty, and ``not_measured`` says why."""

    device: str = "cpu"  # "cuda" if the run used one
    autocast: str | None = None  # the precision of the script's autocast, if it used it
    steps: int = 0  # covered by ``seconds``: without the first few and the profiled ones
    seconds: float = 0.0
    data_wait_seconds: float = 0.0  # part of ``seconds`` spent waiting for a DataLoader
    data_waits: Mapping[CallSite, float] = field(default_factory=dict)  # by the line that waited
    profiled_steps: int = 0  # covered by the following fields
    flops_by_precision: Mapping[str, float] = field(default_factory=dict)
    matmuls: tuple[ProfiledMatmul, ...] = ()  # most work first
    time_by_kind: Mapping[str, float] = field(default_factory=dict)  # device seconds
    cast_share: float | None = None  # fraction of the device time spent in casts
    sync_steps: int = 0  # in which syncs were counted
    syncs: Mapping[CallSite, int] = field(default_factory=dict)  # GPU syncs in those steps, by line
    faulty_kernels: tuple[KernelFault, ...] = ()  # known bugs that may show in the calls of these steps
    not_measured: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return sum(self.flops_by_precision.values())

    @property
    def half_share(self) -> float | None:
        """Fraction of the matmul work in 16 bits or fewer; None if there was none."""
        half = sum(flops for precision, flops in self.flops_by_precision.items() if precision in HALVES)
        return half / self.flops if self.flops else None

    @property
    def data_wait_share(self) -> float | None:
        """Fraction of the wall time spent waiting for data; None if no step was timed."""
        return self.data_wait_seconds / self.seconds if self.seconds > 0 else None

    @property
    def syncs_per_step(self) -> float | None:
        """GPU syncs per step; None if not counted."""
        return sum(self.syncs.values()) / self.sync_steps if self.sync_steps else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with lines as text and derived fractions."""
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
            "matrix_products": [asdict(product) for product in self.matmuls],
            "time_by_kind": dict(self.time_by_kind),
            "cast_share": self.cast_share,
            "sync_steps": self.sync_steps,
            "syncs": {str(site): count for site, count in self.syncs.items()},
            "syncs_per_step": self.syncs_per_step,
            "faulty_kernels": [fault.link for fault in self.faulty_kernels],
            "not_measured": list(self.not_measured),
        }
