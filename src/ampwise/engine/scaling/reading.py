"""One read of an optimizer's gradients: their totals for the verdict, their censuses for whoever asks.

The kernel reads a GPU's gradients in one launch; the C loop those in host memory. Where there is neither (CUDA
without Triton, other devices, FP64), torch's norms give the totals, and there is no census.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ampwise.census.algebra import Census
from ampwise.census.cpu import count_all_on_cpu
from ampwise.census.flat import KINDS, flat_values
from ampwise.census.launcher import has_kernels, launcher
from ampwise.census.layout import INFS, NANS, SINGLE
from ampwise.engine.scaling.gradients import Gradients, multiply_, there

__all__ = ["Launched", "Part", "Reading", "inverse_of", "read"]


class Part(Protocol):
    """The gradients of one device that are read in one way."""

    positions: list[int]  # in the optimizer's gradients
    counts: bool  # by powers of two, besides adding up

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        """FP64 on the part's device: the sum of squares, each tensor's times its weight; infinities; NaNs."""

    def fetch(self) -> list[Census]:
        """In the order of ``positions``, or empty where nothing was counted; waits for the device."""


class Reading:
    """What was read, by parameter. Fetching it waits for the device."""

    def __init__(self, gradients: Gradients, parts: list[Part]) -> None:
        self.parts = parts
        self._present = [gradient is not None for gradient in gradients.seen]

    def totals(self, home: torch.device, weights: tuple[float, ...] | None = None) -> Tensor:
        """Of all parts together, on one device."""
        of_parts = [
            there(part.totals(weights and tuple([weights[position] for position in part.positions])), home)
            for part in self.parts
        ]
        if not of_parts:  # a rank without a share of the gradients
            return torch.zeros(3, dtype=torch.float64, device=home)
        return of_parts[0] if len(of_parts) == 1 else torch.stack(of_parts).sum(0)

    @property
    def parameters(self) -> list[int]:
        """Which of the optimizer's parameters had a gradient that was counted."""
        present = [index for index, present in enumerate(self._present) if present]
        return [present[position] for position in self._counted]

    @property
    def _counted(self) -> list[int]:
        return sorted(position for part in self.parts if part.counts for position in part.positions)

    def fetch(self) -> list[Census]:
        """In the order of ``parameters``."""
        found: dict[int, Census] = {}
        for part in self.parts:
            if part.counts:
                found.update(zip(part.positions, part.fetch(), strict=True))
        return [found[position] for position in self._counted]


@torch.no_grad()
def read(gradients: Gradients, scale: Tensor | None, *, unscale: bool = False) -> Reading:
    """Read gradients in true units, that is divided by ``scale``; with ``unscale`` they stay divided in memory."""
    parts: list[Part] = []
    for (device, way), positions in _ways(gradients).items():
        values = [gradients.values[position] for position in positions]
        local_scale = scale if scale is None else there(scale, device)
        parts.append(way(positions, values, local_scale, unscale))
    return Reading(gradients, parts)


def inverse_of(scale: Tensor) -> Tensor:
    """One over the scale, through FP64 as torch has it."""
    return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()


Way = Callable[[list[int], list[Tensor], Tensor | None, bool], Part]


def _ways(gradients: Gradients) -> dict[tuple[torch.device, Way], list[int]]:
    """How each gradient is to be read; those of one device, read in one way, together."""
    if gradients.ordinary:
        first = gradients.values[0]
        return {(first.device, _way(first)): list(range(len(gradients)))}
    found: dict[tuple[torch.device, Way], list[int]] = {}
    for position, value in enumerate(gradients.values):
        found.setdefault((value.device, _way(value)), []).append(position)
    return found


def _way(value: Tensor) -> Way:
    counted = value.dtype in KINDS or value.element_size() == 1  # FP64 would take sixty times as long
    if counted and value.device.type == "cpu":
        return _on_cpu
    if value.dtype in KINDS and value.device.type == "cuda" and has_kernels():
        return Launched
    return _Norms


class Launched:
    """Gradients of one GPU, read by the kernel."""

    def __init__(self, positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> None:
        launch = launcher()
        assert launch is not None
        self.positions, self.counts = positions, True
        dense = [value if value.is_contiguous() else flat_values(value) for value in values]
        self.counted = launch(dense, scale, write=unscale)
        if unscale:
            for value, copy in zip(values, dense, strict=True):
                if copy.data_ptr() != value.data_ptr():  # gaps in memory: a copy was read and written
                    value.copy_(copy.view_as(value))
            torch.autograd.graph.increment_version(values)

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        from ampwise.engine.scaling.kernel import launch_totals

        return launch_totals(self.counted, weights)

    def fetch(self) -> list[Census]:
        return self.counted.fetch()


class _Rows:
    """Gradients whose counts are rows of a table already."""

    def __init__(self, positions: list[int], rows: Tensor, sums: Tensor) -> None:
        self.positions, self.counts = positions, True
        self._rows, self._sums = rows, sums

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        # In Python, as these are few numbers on the CPU: a torch operation takes longer than adding up hundreds.
        squares, counts = self._sums.tolist(), self._rows[:, INFS : NANS + 1].tolist()
        if weights is not None:
            squares = [square * weight for square, weight in zip(squares, weights, strict=True)]
        infinities, nans = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        return torch.tensor([math.fsum(squares), infinities, nans], dtype=torch.float64)

    def fetch(self) -> list[Census]:
        pairs = zip(self._rows.tolist(), self._sums.tolist(), strict=True)
        return [SINGLE.census(row, total) for row, total in pairs]


def _on_cpu(positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> Part:
    factor = 1.0 if scale is None else inverse_of(scale).item()
    dense = [value if value.is_contiguous() and value.dtype in KINDS else flat_values(value) for value in values]
    part = _Rows(positions, *count_all_on_cpu(dense, factor))
    if unscale and scale is not None:
        multiply_(values, inverse_of(scale))
    return part


def _largest(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value, math.inf) if value.numel() else value.new_zeros(())


class _Norms:
    """Gradients where nothing of ours counts: the totals from torch's norms, and no census."""

    def __init__(self, positions: list[int], values: list[Tensor], scale: Tensor | None, unscale: bool) -> None:
        self.positions, self.counts = positions, False
        # The largest magnitude tells what is finite: unlike the norm, it cannot overflow by itself.
        wide = torch.float32 if values[0].device.type == "mps" else torch.float64
        largest = torch.stack([_largest(value).to(wide) for value in values])
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=wide) for value in values])
        self._largest = largest
        self._norms = norms if scale is None else norms * inverse_of(scale)
        if unscale and scale is not None:
            multiply_(values, inverse_of(scale))

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        norms, largest = (each.cpu() if each.device.type == "mps" else each for each in (self._norms, self._largest))
        squares = torch.where(largest.isfinite(), norms.double().square(), 0.0)
        weighted = squares if weights is None else squares * squares.new_tensor(weights)
        return torch.stack([weighted.sum(), largest.isinf().sum().double(), largest.isnan().sum().double()])

    def fetch(self) -> list[Census]:
        return []
