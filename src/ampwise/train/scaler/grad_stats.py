"""Read an optimizer's gradients once, and decide from that whether to step and how to scale.

Gradients → ``GradStats`` (totals, and a census per parameter) → ``StepDecision`` (norm, skip, divisor). A Triton kernel
reads a GPU's gradients in one launch; a C loop reads those in host memory. Without either (CUDA without Triton, other
devices, FP64), torch's norms give the totals, and there is no census. ``decision_numbers`` defines the decision in
plain numbers; ``kernel.py`` does the same on a GPU without a sync.

If ranks hold parts of the same gradients, one small all-reduce sums their totals. A gradient replicated on several
ranks is weighted by each in proportion, so that a plain sum over all ranks gives the totals.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from operator import is_not, mul
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.count_row import INFS, NANS, SINGLE
from ampwise.numbers.census.cpu import count_all_on_cpu
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.numbers.census.flat_values import DTYPE_CODES, flat_values
from ampwise.numbers.census.kernels import has_kernels
from ampwise.train.scaler.gradients import (
    OptimizerGradients,
    collect_gradients,
    first_device,
    multiply_,
    to_device,
    versions_of,
)

__all__ = [
    "CLIP_EPSILON",
    "NO_CLIPPING",
    "WITH_LOSS",
    "CheckedGradients",
    "DecisionRequest",
    "DeviceStats",
    "GpuStats",
    "GradStats",
    "HostStats",
    "NormStats",
    "RankReduction",
    "StepDecision",
    "check_gradients",
    "clip_in_memory_",
    "decide_step",
    "decision_numbers",
    "in_fp32",
    "inverse_scale",
    "make_reduction",
    "named_census",
    "read_gradients",
]

NO_CLIPPING = float("inf")
WITH_LOSS = 6  # numbers of a decision that holds the loss too
CLIP_EPSILON = 1e-6  # added to the norm as in clip_grad_norm_


class DecisionRequest(NamedTuple):
    """What a decision depends on besides the gradients, if they are all that it depends on."""

    max_norm: float = NO_CLIPPING
    loss: Tensor | None = None  # to become the decision's last number
    skip_bad_loss: bool = False  # also if only the loss is not finite
    to_host: bool = False  # also to pinned memory


class DeviceStats(Protocol):
    """Statistics of the gradients of one device, read by one method."""

    positions: Sequence[int]  # in the optimizer's gradients
    counts: bool  # whether there is a census, besides the totals
    decision: StepDecision | None  # if it was requested and costs less than from the totals

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        """Return sum of squares (each tensor's times its weight), infinities and NaNs, in FP64 on the part's device."""

    def fetch(self) -> list[Census]:
        """Return censuses in the order of ``positions``, or an empty list without a census; syncs with the device."""


class GradStats:
    """Statistics of an optimizer's gradients by parameter. Fetching them syncs with the device."""

    def __init__(self, gradients: OptimizerGradients, parts: list[DeviceStats]) -> None:
        self.parts = parts
        self._present = list(map(is_not, gradients.seen, repeat(None)))

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


StatsReader = Callable[[Sequence[int], list[Tensor], Tensor | None, bool, DecisionRequest | None], DeviceStats]


@torch.no_grad()
def read_gradients(
    gradients: OptimizerGradients,
    scale: Tensor | None,
    *,
    unscale: bool = False,
    request: DecisionRequest | None = None,
) -> GradStats:
    """Read gradients divided by ``scale``; with ``unscale`` they stay divided in memory.

    If all are on one device, ``request`` may be answered by the same read.
    """
    values = gradients.values
    if gradients.ordinary:
        first = values[0]
        if scale is not None and scale.device != first.device:
            scale = to_device(scale, first.device)
        return GradStats(gradients, [_reader(first)(range(len(values)), values, scale, unscale, request)])
    alike: dict[tuple[torch.device, StatsReader], list[int]] = {}
    for position, value in enumerate(values):
        alike.setdefault((value.device, _reader(value)), []).append(position)
    parts = []
    for (device, reader), positions in alike.items():
        local_scale = None if scale is None else to_device(scale, device)
        of_part = [values[position] for position in positions]
        parts.append(reader(positions, of_part, local_scale, unscale, request if len(alike) == 1 else None))
    return GradStats(gradients, parts)


def inverse_scale(scale: Tensor) -> Tensor:
    """Return one over the scale, computed in FP64 as torch does."""
    return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()


def _reader(value: Tensor) -> StatsReader:
    counted = value.dtype in DTYPE_CODES or value.element_size() == 1  # FP64 would take 60 times as long
    if counted and value.device.type == "cpu":
        return HostStats
    if value.dtype in DTYPE_CODES and value.device.type == "cuda" and has_kernels():
        return GpuStats
    return NormStats


class GpuStats:
    """Gradients of one GPU, read by the Triton kernel."""

    def __init__(
        self,
        positions: Sequence[int],
        values: list[Tensor],
        scale: Tensor | None,
        unscale: bool,
        request: DecisionRequest | None = None,
    ) -> None:
        self.positions, self.counts = positions, True
        dense = values if all(map(Tensor.is_contiguous, values)) else list(map(flat_values, values))
        self.decision: StepDecision | None = None
        if request is None:
            from ampwise.numbers.census.launch import launch_census

            self.counted = launch_census(dense, scale, write=unscale)
        else:
            from ampwise.train.scaler.kernel import launch_check

            max_norm, loss, skip_bad_loss, to_host = request
            self.counted, self.decision = launch_check(
                dense, scale, max_norm, loss, write=unscale, skip_bad_loss=skip_bad_loss, to_host=to_host
            )
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


class HostStats:
    """Gradients in host memory, read by the C loop: a row of counts and a sum of squares for each."""

    def __init__(
        self,
        positions: Sequence[int],
        values: list[Tensor],
        scale: Tensor | None,
        unscale: bool,
        request: DecisionRequest | None = None,
    ) -> None:
        self.positions, self.counts = positions, True
        dense = [
            value if value.is_contiguous() and value.dtype in DTYPE_CODES else flat_values(value) for value in values
        ]
        inverse = None if scale is None else inverse_scale(scale)
        self._rows, self._sums = count_all_on_cpu(dense, 1.0 if inverse is None else inverse.item())
        if unscale and inverse is not None:
            multiply_(values, inverse)
        self.decision: StepDecision | None = None
        if request is not None:
            skips = request.skip_bad_loss and request.loss is not None and not math.isfinite(request.loss.item())
            numbers = decision_numbers(self._plain_totals(), scale, request.max_norm, skips=skips)
            self.decision = StepDecision(torch.tensor(numbers, dtype=torch.float32, device="cpu"))

    def _plain_totals(self, weights: tuple[float, ...] | None = None) -> list[float]:
        """Return the totals as Python numbers."""
        squares = self._sums.tolist()
        total = math.fsum(squares if weights is None else map(mul, squares, weights))
        return [total, *self._rows[:, INFS : NANS + 1].sum(0).tolist()]

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        return torch.tensor(self._plain_totals(weights), dtype=torch.float64, device="cpu")

    def fetch(self) -> list[Census]:
        pairs = zip(self._rows.tolist(), self._sums.tolist(), strict=True)
        return [SINGLE.census(row, total) for row, total in pairs]


class NormStats:
    """Gradients that neither kernel nor C loop can read: totals from torch's norms, and no census."""

    decision: StepDecision | None = None

    def __init__(
        self,
        positions: Sequence[int],
        values: list[Tensor],
        scale: Tensor | None,
        unscale: bool,
        _request: DecisionRequest | None = None,
    ) -> None:
        self.positions, self.counts = positions, False
        # The largest magnitude shows whether all values are finite: unlike the norm, it cannot overflow itself.
        wide = torch.float32 if values[0].device.type == "mps" else torch.float64
        self._largest = torch.stack([
            (torch.linalg.vector_norm(value, math.inf) if value.numel() else value.new_zeros(())).to(wide)
            for value in values
        ])  # fmt: skip
        self._norms = torch.stack([torch.linalg.vector_norm(value, dtype=wide) for value in values])
        if scale is not None:
            inverse = inverse_scale(scale)
            self._norms = self._norms * inverse
            if unscale:
                multiply_(values, inverse)

    def totals(self, weights: tuple[float, ...] | None) -> Tensor:
        norms, largest = (each.cpu() if each.device.type == "mps" else each for each in (self._norms, self._largest))
        squares = torch.where(largest.isfinite(), norms.double().square(), 0.0)
        weighted = squares if weights is None else squares * squares.new_tensor(weights)
        return torch.stack([weighted.sum(), largest.isinf().sum().double(), largest.isnan().sum().double()])

    def fetch(self) -> list[Census]:
        return []


def named_census(stats: Sequence[tuple[Optimizer, GradStats]], model: Module | None) -> DeviceCensus:
    """Return the censuses by parameter name: the model's, else the optimizer's own, else group and index.

    They stay on the device until read.
    """
    by_identity = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    all_names: list[str] = []
    parts: list[Callable[[], Mapping[str, Census]]] = []
    for number, (optimizer, of_optimizer) in enumerate(stats):
        known: list[tuple[str | None, str]] = []  # name, if there is one, and group and index
        for group_index, group in enumerate(optimizer.param_groups):
            own = group.get("param_names")  # set if the optimizer was created with named_parameters()
            for index, parameter in enumerate(group["params"]):
                name = by_identity.get(id(parameter)) or (own[index] if own else None)
                known.append((name, f"{group_index}.{index}"))
        names: list[str] = []
        for index in of_optimizer.parameters:
            # A parameter may have been removed from its group since.
            name, place = known[index] if index < len(known) else (None, f"parameter {index}")
            # Several optimizers share group and index, and may share names.
            same = len(stats) > 1 and (name is None or name in all_names)
            names.append(f"{number}:{name or place}" if same else name or place)
        all_names += names
        parts.append(lambda names=names, of_optimizer=of_optimizer: dict(zip(names, of_optimizer.fetch(), strict=True)))  # type: ignore[misc]
    return DeviceCensus(all_names, parts)


class StepDecision:
    """Decision on one step: FP32 numbers in one tensor on the device, the first five of which are named here.

    norm: of all unscaled gradients before clipping; NaN if there is a NaN, else infinity if there is one.
    found_inf: exactly 0 or 1, a 0-dim tensor, as fused optimizers compare it with 1.
    divisor: what clipping divides unscaled gradients by, at least 1.
    grad_scale: what gradients in memory must be divided by, scale times divisor.
    applied: 1 if the step is taken, 0 if it is skipped.

    A sixth number, if there is one, is the loss of the step, so that it is copied to the host with the others.
    """

    __slots__ = ("applied", "divisor", "found_inf", "grad_scale", "norm", "numbers", "on_host")

    def __init__(self, numbers: Tensor, on_host: Tensor | None = None) -> None:
        self.numbers = numbers
        self.on_host = on_host  # pinned memory to which a kernel writes the same numbers
        self.norm, self.found_inf, self.divisor, self.grad_scale, self.applied, *_ = numbers.unbind()

    def or_found(self, flags: Sequence[Tensor]) -> StepDecision:
        """Return the same decision, but skip also if one of the flags is set."""
        numbers = self.numbers.clone()
        numbers[1] = torch.stack([flag.reshape(()).to(numbers) for flag in (self.found_inf, *flags)]).amax() > 0
        numbers[4] = 1 - numbers[1]
        return StepDecision(numbers)


def in_fp32(number: float) -> float:
    """Round a number to FP32; infinity if it is out of range."""
    return ctypes.c_float(number).value


def decide_step(totals: Tensor, scale: Tensor | None, max_norm: float = NO_CLIPPING) -> StepDecision:
    """Return the decision for the totals [sum of squares, infinities, NaNs] of unscaled gradients."""
    if totals.is_cuda and has_kernels():
        from ampwise.train.scaler.kernel import launch_decision

        return launch_decision(totals, scale, max_norm)
    numbers = decision_numbers(totals.tolist(), scale, max_norm)
    return StepDecision(torch.tensor(numbers, dtype=torch.float32, device=totals.device))


def decision_numbers(
    totals: Sequence[float], scale: Tensor | None, max_norm: float, *, skips: bool = False
) -> tuple[float, float, float, float, float]:
    """Return norm, found_inf, divisor, grad_scale and applied. Syncs if the scale is on a device.

    skips: whether the step is skipped whatever the gradients are.
    """
    squares, infinities, nans = totals
    factor = 1.0 if scale is None else float(scale.item())
    norm = math.sqrt(squares)
    divisor = 1.0 if max_norm == NO_CLIPPING else max((norm + CLIP_EPSILON) / max_norm, 1.0)
    # A divisor beyond FP32's range would turn every gradient into zero, so skip.
    bad = skips or bool(infinities or nans) or not math.isfinite(in_fp32(factor * divisor))
    shown = math.nan if nans else math.inf if infinities else norm
    return (shown, 1.0, 1.0, factor, 0.0) if bad else (shown, 0.0, divisor, factor * divisor, 1.0)


@dataclass(slots=True)
class CheckedGradients:
    """An optimizer's gradients with their statistics and the decision on its step, all still on the device."""

    gradients: OptimizerGradients
    stats: GradStats
    decision: StepDecision
    max_norm: float = NO_CLIPPING  # clipping that the step still has to do
    scaled: bool = False  # memory holds gradients of the scaled loss
    alone: bool = True  # decided without another optimizer's, or another rank's, gradients
    joint_with: frozenset[int] = frozenset()  # ids of the optimizers that were checked together

    def unscale_and_clip_(self) -> None:
        """Unscale and clip the gradients in memory, without a sync."""
        if self.scaled or self.max_norm != NO_CLIPPING:
            multiply_(self.gradients.values, inverse_scale(self.decision.grad_scale))
            self.scaled, self.max_norm = False, NO_CLIPPING
            self.gradients.versions = versions_of(self.gradients.values)


def check_gradients(
    several: Sequence[OptimizerGradients],
    scale: Tensor | None,
    max_norm: float = NO_CLIPPING,
    *,
    home: torch.device,
    process_group: Any | None = None,
    unscale: bool = False,
    loss: Tensor | None = None,
    skip_bad_loss: bool = False,
) -> list[CheckedGradients]:
    """Check the gradients of one or several optimizers together.

    With ``unscale`` the same read also unscales them in memory; else the step does. ``home`` is the device for the
    small arithmetic. The ``loss`` becomes part of the decision's numbers if a kernel makes it. With ``skip_bad_loss``
    a loss that is not finite skips the step, on this rank.
    """
    alone = len(several) == 1 and not several[0].shards and process_group is None
    # What reads the gradients can look at such a loss, too.
    beside = loss is not None and loss.device == home and (home.type == "cpu" or loss.dtype == torch.float32)
    if alone:
        request = DecisionRequest(max_norm, loss, skip_bad_loss and beside, to_host=scale is None)
        stats = [read_gradients(several[0], scale, unscale=unscale, request=request)]
        decision = stats[0].parts[0].decision if len(stats[0].parts) == 1 else None
    else:
        stats = [read_gradients(gradients, scale, unscale=unscale) for gradients in several]
        decision = None
    looked = decision is not None and decision.numbers.device == home and beside
    if decision is None or decision.numbers.device != home:
        totals = []
        for gradients, each in zip(several, stats, strict=True):
            reduction = make_reduction(len(gradients.values), gradients.shards, process_group)
            totals.append(reduction.reach(each.totals(home, reduction.weights)))
        decision = decide_step(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0), scale, max_norm)
    if skip_bad_loss and loss is not None and not looked:
        decision = decision.or_found([~loss.isfinite()])
    scaled = scale is not None and not unscale
    return [
        CheckedGradients(gradients, each, decision, max_norm, scaled, alone)
        for gradients, each in zip(several, stats, strict=True)
    ]


def clip_in_memory_(
    optimizers: Sequence[Optimizer], max_norm: float, norm_type: float, process_group: Any | None
) -> Tensor:
    """Clip gradients that are already unscaled, by the norm of all of them together; return the norm."""
    if norm_type != 2.0:
        if process_group is not None:
            raise BadInput(f"clip_(norm_type={norm_type:g}): with a process_group, only norm_type=2 is supported.")
        parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    every = [
        gradients for gradients in map(collect_gradients, optimizers) if len(gradients) or process_group is not None
    ]
    home = first_device(optimizers)
    if not every:
        return torch.zeros((), dtype=torch.float32, device=home)
    all_checked = check_gradients(every, None, max_norm, home=home, process_group=process_group)
    for checked in all_checked:
        checked.unscale_and_clip_()
    return all_checked[0].decision.norm


@dataclass(frozen=True, slots=True)
class RankReduction:
    """Process groups over which totals are summed, and the weight of each gradient on this rank."""

    groups: tuple[Any, ...] = ()
    device_type: str = ""  # the device type that the groups communicate on; "" for any
    weights: tuple[float, ...] | None = None

    def reach(self, totals: Tensor) -> Tensor:
        """Return the totals over all ranks, the same on each."""
        if not self.groups:
            return totals
        here = totals.device
        shared = totals if self.device_type in ("", here.type) else totals.to(self.device_type)
        for group in self.groups:
            dist.all_reduce(shared, group=group)
        return shared.to(here)


NO_REDUCTION = RankReduction()


def make_reduction(count: int, shards: Mapping[int, Any], process_group: Any | None) -> RankReduction:
    """Return the reduction for ``count`` gradients, of which those in ``shards`` are DTensors.

    Plain gradients are taken to be the same on every rank, as DDP leaves them; with a ``process_group``, to be
    sharded over its ranks.
    """
    if process_group is not None:
        ranks = dist.get_world_size(process_group)
        weights = [_shards(shards[i]) / ranks if i in shards else 1.0 for i in range(count)]
        return RankReduction((process_group,), "", tuple(weights))
    if not shards:
        return NO_REDUCTION
    meshes = [shard.device_mesh for shard in shards.values()]
    mesh = meshes[0]
    if any(other != mesh for other in meshes):  # then one that spans all ranks
        everyone = [other for other in meshes if other.size() == dist.get_world_size()]
        if not everyone:
            raise BadInput(
                "the gradients of this optimizer are on several device meshes, none of which spans all ranks. "
                "Name the ranks to sum over: GradScaler(process_group=...)."
            )
        mesh = everyone[0]
    weights = [(_shards(shards[i]) if i in shards else 1) / mesh.size() for i in range(count)]
    if mesh.size() == dist.get_world_size():
        return RankReduction((None,), mesh.device_type, tuple(weights))
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return RankReduction(groups, mesh.device_type, tuple(weights))


def _shards(gradient: Any) -> int:
    """Return how many different shards a DTensor has."""
    dimensions = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    # Not is_shard(): it is False for a shard of a shard, as in FSDP over tensor parallelism.
    return prod(size for size, placement in dimensions if not placement.is_replicate())
