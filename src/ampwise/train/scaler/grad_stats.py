"""Statistics of an optimizer's gradients in one read: totals for the step decision, and a census per parameter.

A Triton kernel reads a GPU's gradients in one launch; a C loop reads those in host memory. Without either (CUDA without
Triton, other devices, FP64), torch's norms give the totals, and there is no census.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.count_row import INFS, NANS, SINGLE
from ampwise.numbers.census.cpu import count_all_on_cpu
from ampwise.numbers.census.flat_values import DTYPE_CODES, flat_values
from ampwise.numbers.census.kernels import has_kernels, launcher
from ampwise.train.scaler.gradients import OptimizerGradients, multiply_, to_device

__all__ = ["DeviceStats", "GpuStats", "GradStats", "inverse_scale", "read_gradients"]


class DeviceStats(Protocol):
    """Statistics of the gradients of one device, read by one method."""

    positions: list[int]  # in the optimizer's gradients
    counts: bool  # whether there is a census, besides the totals

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        """Return sum of squares (each tensor's times its weight), infinities and NaNs, in FP64 on the part's device."""

    def fetch(self) -> list[Census]:
        """Return censuses in the order of ``positions``, or an empty list without a census; syncs with the device."""


class GradStats:
    """Statistics of an optimizer's gradients by parameter. Fetching them syncs with the device."""

    def __init__(self, gradients: OptimizerGradients, parts: list[DeviceStats]) -> None:
        self.parts = parts
        self._present = [gradient is not None for gradient in gradients.seen]

    def totals(self, home: torch.device, weights: tuple[float, ...] | None = None) -> Tensor:
        """Return the totals of all parts together, on one device."""
        of_parts = [
            to_device(part.totals(weights and tuple([weights[position] for position in part.positions])), home)
            for part in self.parts
        ]
        if not of_parts:  # a rank without a shard of the gradients
            return torch.zeros(3, dtype=torch.float64, device=home)
        return of_parts[0] if len(of_parts) == 1 else torch.stack(of_parts).sum(0)

    @property
    def parameters(self) -> list[int]:
        """Indices of the optimizer's parameters that have a census."""
        present = [index for index, present in enumerate(self._present) if present]
        return [present[position] for position in self._counted]

    @property
    def _counted(self) -> list[int]:
        return sorted(position for part in self.parts if part.counts for position in part.positions)

    def fetch(self) -> list[Census]:
        """Return the censuses in the order of ``parameters``; syncs with the device."""
        found: dict[int, Census] = {}
        for part in self.parts:
            if part.counts:
                found.update(zip(part.positions, part.fetch(), strict=True))
        return [found[position] for position in self._counted]


@torch.no_grad()
def read_gradients(gradients: OptimizerGradients, scale: Tensor | None, *, unscale: bool = False) -> GradStats:
    """Read gradients divided by ``scale``; with ``unscale`` they stay divided in memory."""
    parts: list[DeviceStats] = []
    for (device, way), positions in _ways(gradients).items():
        values = [gradients.values[position] for position in positions]
        local_scale = scale if scale is None else to_device(scale, device)
        parts.append(way(positions, values, local_scale, unscale))
    return GradStats(gradients, parts)


def inverse_scale(scale: Tensor) -> Tensor:
    """Return one over the scale, computed in FP64 as torch does."""
    return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()


StatsReader = Callable[[list[int], list[Tensor], Tensor | None, bool], DeviceStats]


def _ways(gradients: OptimizerGradients) -> dict[tuple[torch.device, StatsReader], list[int]]:
    """Group gradients by device and by the method that reads them."""
    if gradients.ordinary:
        first = gradients.values[0]
        return {(first.device, _way(first)): list(range(len(gradients)))}
    found: dict[tuple[torch.device, StatsReader], list[int]] = {}
    for position, value in enumerate(gradients.values):
        found.setdefault((value.device, _way(value)), []).append(position)
    return found


def _way(value: Tensor) -> StatsReader:
    counted = value.dtype in DTYPE_CODES or value.element_size() == 1  # FP64 would take 60 times as long
    if counted and value.device.type == "cpu":
        return _on_cpu
    if value.dtype in DTYPE_CODES and value.device.type == "cuda" and has_kernels():
        return GpuStats
    return _Norms


class GpuStats:
    """Gradients of one GPU, read by the Triton kernel."""

    def __init__(self, positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> None:
        launch = launcher()
        assert launch is not None
        self.positions, self.counts = positions, True
        dense = [value if value.is_contiguous() else flat_values(value) for value in values]
        self.counted = launch(dense, scale, write=unscale)
        if unscale:
            for value, copy in zip(values, dense, strict=True):
                if copy.data_ptr() != value.data_ptr():  # not contiguous: the kernel worked on a copy
                    value.copy_(copy.view_as(value))
            torch.autograd.graph.increment_version(values)

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        from ampwise.train.scaler.kernel import launch_totals

        return launch_totals(self.counted, weights)

    def fetch(self) -> list[Census]:
        return self.counted.fetch()


class _Rows:
    """Gradients in host memory, whose counts are rows of a table."""

    def __init__(self, positions: list[int], rows: Tensor, sums: Tensor) -> None:
        self.positions, self.counts = positions, True
        self._rows, self._sums = rows, sums

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        # In Python: for a few hundred numbers on the CPU, a torch operation takes longer.
        squares, counts = self._sums.tolist(), self._rows[:, INFS : NANS + 1].tolist()
        if weights is not None:
            squares = [square * weight for square, weight in zip(squares, weights, strict=True)]
        infinities, nans = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        return torch.tensor([math.fsum(squares), infinities, nans], dtype=torch.float64)

    def fetch(self) -> list[Census]:
        pairs = zip(self._rows.tolist(), self._sums.tolist(), strict=True)
        return [SINGLE.census(row, total) for row, total in pairs]


def _on_cpu(positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> DeviceStats:
    factor = 1.0 if scale is None else inverse_scale(scale).item()
    dense = [value if value.is_contiguous() and value.dtype in DTYPE_CODES else flat_values(value) for value in values]
    part = _Rows(positions, *count_all_on_cpu(dense, factor))
    if unscale and scale is not None:
        multiply_(values, inverse_scale(scale))
    return part


def _largest(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value, math.inf) if value.numel() else value.new_zeros(())


class _Norms:
    """Gradients that neither kernel nor C loop can read: totals from torch's norms, and no census."""

    def __init__(self, positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> None:
        self.positions, self.counts = positions, False
        # The largest magnitude shows whether all values are finite: unlike the norm, it cannot overflow itself.
        wide = torch.float32 if values[0].device.type == "mps" else torch.float64
        largest = torch.stack([_largest(value).to(wide) for value in values])
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=wide) for value in values])
        self._largest = largest
        self._norms = norms if scale is None else norms * inverse_scale(scale)
        if unscale and scale is not None:
            multiply_(values, inverse_scale(scale))

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        norms, largest = (each.cpu() if each.device.type == "mps" else each for each in (self._norms, self._largest))
        squares = torch.where(largest.isfinite(), norms.double().square(), 0.0)
        weighted = squares if weights is None else squares * squares.new_tensor(weights)
        return torch.stack([weighted.sum(), largest.isinf().sum().double(), largest.isnan().sum().double()])

    def fetch(self) -> list[Census]:
        return []
