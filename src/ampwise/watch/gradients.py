"""Read the gradients of a step once, without a sync: a row per step, and now and then a census by parameter."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.train.low_bit.optimizers import keeps_small_updates
from ampwise.train.scaler.grad_stats import GpuStats, GradStats, read_gradients
from ampwise.train.scaler.gradients import collect_gradients, first_device, to_device
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.gradient_health import UpdateCounts
from ampwise.watch.inspection import parameters_of
from ampwise.watch.overhead import TimeBudget
from ampwise.watch.shards import (
    ShardCounts,
    ShardExchange,
    ShardGroup,
    is_counted,
    is_read,
    local_gradient,
    shard_group,
)
from ampwise.watch.tracked import TrackedOptimizer

__all__ = [
    "GradientReader",
    "ReadStep",
    "StepOutcome",
    "WeightComparison",
    "are_finite_on_host",
    "copy_weights",
    "is_ours",
    "outcome_of",
]

READING_SHARE = 0.02  # share of the time for reading gradients
SAMPLING_SHARE = 0.01  # share of the time for turning counts into censuses
PATIENCE = 3  # skipped steps in a row after which the bad parameters are named
MOST_PENDING = 16  # steps whose numbers from other ranks are waited for
COMPARED_TENSORS = 16  # weights to compare before and after an update
COMPARED_VALUES = 4096  # of each


# The result of a step


@dataclass(slots=True)
class StepOutcome:
    """Result of one optimizer's step: what the host knows, and device tensors with what it does not know yet."""

    skipped: bool | None = False  # None: see the flags
    flags: list[Tensor] = field(default_factory=list)  # on the device: above zero if the step was skipped
    scale: Tensor | None = None
    reading: GradStats | None = None  # of the gradients, if the scaler has read them


def is_ours(scaler: Any | None) -> bool:
    """Whether the scaler is one of ampwise, which reads gradients itself."""
    return scaler is not None and type(scaler).__module__.startswith("ampwise.")


def outcome_of(optimizer: Any, scaler: Any | None, *, ran: bool) -> StepOutcome:
    """Return the outcome of a step without a sync. ran: the optimizer's own step was called."""
    scale = scaler._scale if scaler is not None and scaler._enabled else None
    if scaler is not None and is_ours(scaler):
        result, stats = scaler.result_of(optimizer), scaler.stats_of(optimizer)
        if result is None:
            return StepOutcome(scale=scale)
        if result.skipped_on_host is not None or result.numbers is None:
            return StepOutcome(bool(result.skipped_on_host), scale=scale, reading=stats)
        return StepOutcome(None, [result.numbers[1]], scale, stats)
    if scaler is None or scale is None:
        return StepOutcome()
    hooked = isinstance(optimizer, Optimizer)  # other objects do not run the step hooks
    if hooked and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return StepOutcome(not ran, scale=scale)  # the scaler has synced and decided
    return StepOutcome(None, list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()), scale)


# Gradients


@dataclass(slots=True)
class ReadStep:
    """A step that has ended, and its numbers: those below ``posted`` are known once they have arrived on the host."""

    state: TrackedOptimizer
    names: Sequence[str]  # of the parameters
    outcome: StepOutcome
    reading: GradStats | None  # of the gradients
    losses: list[bool]  # for each, whether it is scaled
    counts: list[_PendingCounts] | None  # if the step is sampled
    posted: AsyncScalars | None
    row: StepRow
    shards: ShardGroup | None = None  # who counts the gradients, if they are sharded over ranks
    of_all: ShardCounts | None = None  # of the shards of all ranks, once they have arrived
    finite: bool = True  # loss and gradients, as far as they were read
    sample: LayerSample | None = None
    bad: tuple[str, ...] = ()  # parameters whose gradients are not finite; empty for an ordinary overflow
    when_known: list[Callable[[bool], None]] = field(default_factory=list)  # called with whether it was skipped

    def layers(self) -> dict[str, Census]:
        """Return the census of each parameter. Without ``counts`` this syncs with the device."""
        if self.of_all is not None and self.of_all.layers:
            return {self.names[index]: census for index, census in self.of_all.layers.items()}
        return {self.names[index]: census for index, census in self.own_layers().items()}

    def own_layers(self) -> dict[int, Census]:
        """Return the census of each parameter by its index; of this rank's shards, where gradients are sharded."""
        if self.reading is None:
            return {}
        counts = self.counts
        if counts is None:
            counts = [_PendingCounts(part) for part in self.reading.parts if part.counts]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        found: dict[int, Census] = {}
        for part in counts:
            found.update(zip(part.positions, part.fetch(), strict=True))
        by_parameter = zip(self.reading.parameters, sorted(found), strict=True)
        return {parameter: found[position] for parameter, position in by_parameter}

    def own_counts(self, totals: Sequence[float]) -> ShardCounts:
        """Return what this rank counts of sharded gradients; by parameter if the step is sampled."""
        layers = self.own_layers() if self.counts is not None else {}
        assert self.shards is not None
        owned = {index: census for index, census in layers.items() if self.shards.owned[index]}
        return ShardCounts(totals=totals, layers=owned)


class _PendingCounts:
    """Counts of one device that are being copied to the host."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._host: Tensor | None = None
        self.positions: list[int] = part.positions
        if isinstance(part, GpuStats) and part.counted.buffer.is_cuda:
            buffer = part.counted.buffer
            self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=True)
            self._host.copy_(buffer, non_blocking=True)  # before the numbers that ``settle`` waits for

    def fetch(self) -> list[Census]:
        if self._host is None:
            return list(self._part.fetch())
        from ampwise.numbers.census.launch import read_census  # needs Triton

        return read_census(self._host, self._part.counted.batch)


class GradientReader:
    """Read gradients before steps, as often as the time allows, and report numbers as they arrive."""

    def __init__(self, callback: Callable[[ReadStep], None], every: int | None = None) -> None:
        self._callback = callback
        self._every = every
        self._exchange = ShardExchange()
        self._began = time.monotonic()
        self._reads = TimeBudget(READING_SHARE, None if every is None else 1)
        self._samples = TimeBudget(SAMPLING_SHARE, every)
        self._readings: dict[int, GradStats] = {}  # by optimizer, before its step
        self._pending: deque[ReadStep] = deque()
        self._skips: dict[int, int] = {}  # skipped steps in a row, by optimizer

    def ready(self, optimizer: Any, scale: Tensor | None, state: TrackedOptimizer) -> None:
        """Read the gradients of the next step. scale: what they are multiplied by."""
        if state.read:
            return
        state.read = True
        self._readings.pop(state.index, None)
        grads = [each.grad for group in optimizer.param_groups for each in group["params"]]
        sharded = any(hasattr(grad, "placements") for grad in grads)
        if sharded:
            group = shard_group(optimizer)
            if group is None or not is_read(state.steps + 1, self._every):
                return
            self._exchange.open(group)
        elif not (self._reads.is_due() or not are_finite_on_host(grads)):
            return
        began = time.perf_counter()
        with torch.no_grad():
            if sharded:
                grads = [local_gradient(grad) for grad in grads]
            if sharded or any(grad is not None and (grad.is_sparse or grad.is_conj()) for grad in grads):
                # Reading would coalesce or resolve these: read copies instead.
                copies = [grad if grad is None or not grad.is_sparse else grad.coalesce() for grad in grads]
                copies = [grad if grad is None or not grad.is_conj() else grad.resolve_conj() for grad in copies]
                params = [SimpleNamespace(grad=grad) for grad in copies]
                optimizer = SimpleNamespace(param_groups=[{"params": params}])
            gradients = collect_gradients(optimizer)
            if len(gradients):
                self._readings[state.index] = read_gradients(gradients, scale)
        if not sharded:
            self._reads.took(time.perf_counter() - began)

    def step_ended(self, optimizer: Any, state: TrackedOptimizer, names: Sequence[str], outcome: StepOutcome) -> None:
        """Note the end of a step, and start to copy its numbers to the host."""
        mine = self._readings.pop(state.index, None)
        reading = outcome.reading or mine
        home = first_device([optimizer])
        losses = {by: loss for by, loss in state.losses.items() if loss.device == home}
        lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if isinstance(lr, Tensor) and lr.device.type == "cpu":  # reading it from a device would sync
            lr = float(lr)
        row = StepRow(
            optimizer=state.index,
            step=state.steps + 1,
            seconds=time.monotonic() - self._began,
            skipped=bool(outcome.skipped),
            lr=float(lr) if isinstance(lr, int | float) else None,
        )
        shards = None
        if reading is not None and _has_shards(optimizer):
            shards = shard_group(optimizer)
            if shards is None:
                reading = None  # not summed over ranks yet
        if shards is not None and not is_read(row.step, self._every):
            reading = shards = None  # of an engine, which reads every step
        counts = None
        if shards is not None:
            is_sampled = is_counted(row.step, self._every)
        else:
            is_sampled = reading is not None and self._samples.is_due()
        if reading is not None and is_sampled:
            counts = [_PendingCounts(part) for part in reading.parts if part.counts]
        # In the order in which ``_resolve`` reads them.
        parts = [] if reading is None else [reading.totals(home, None if shards is None else shards.weights)]
        parts += [] if outcome.scale is None else [to_device(outcome.scale.detach(), home).reshape(1)]
        parts += [to_device(flag.detach(), home).reshape(1) for flag in outcome.flags]
        parts += [loss.reshape(1) for loss in losses.values()]
        posted = AsyncScalars(*parts) if parts else None
        self._pending.append(ReadStep(state, names, outcome, reading, list(losses), counts, posted, row, shards))
        self._reads.step()
        self._samples.step()
        self.settle()

    @property
    def pending(self) -> bool:
        """Whether numbers of some step have not arrived."""
        return bool(self._pending)

    def bad_already(self, optimizer: Any, state: TrackedOptimizer, *, scaled: bool) -> tuple[float | None] | None:
        """Return (loss,) of the next step if its loss or gradients are known not to be finite; None otherwise.

        Only on the CPU: any other device would need a sync. scaled: overflows of gradients are ordinary.
        """
        losses = list(state.losses.values())
        if any(each.device.type != "cpu" for each in losses):
            return None
        loss = sum([each.item() for each in losses]) if losses else None
        if loss is not None and not math.isfinite(loss):
            return (loss,)
        reading = None if scaled else self._readings.get(state.index)
        home = None if reading is None else first_device([optimizer])
        if reading is None or home is None or home.type != "cpu":
            return None
        _, infinities, nans = reading.totals(home).tolist()
        return (loss,) if infinities + nans else None

    def when_known(self, state: TrackedOptimizer, callback: Callable[[bool], None]) -> None:
        """Call back with whether the optimizer's last step was skipped, once that is known."""
        last = next((each for each in reversed(self._pending) if each.state is state), None)
        if last is not None:
            last.when_known.append(callback)
        else:
            callback(self._skips.get(state.index, 0) > 0)

    def settle(self, *, wait: bool = False) -> None:
        """Report all steps whose numbers have arrived. wait: sync for the others."""
        while self._pending:
            step = self._pending[0]
            if step.posted is not None and not step.posted.arrived and not wait:
                return
            if step.shards is not None and step.posted is not None and not self._exchanged(step, step.shards, wait):
                return
            self._resolve(self._pending.popleft())

    def _exchanged(self, step: ReadStep, shards: ShardGroup, wait: bool) -> bool:
        """Send the counts of this rank's shards, or collect those of all; return whether the step can be reported."""
        assert step.posted is not None
        own = step.own_counts(step.posted.read()[:3])
        if not shards.leads:
            self._exchange.send(shards, step.row.optimizer, step.row.step, own)
            return True
        step.of_all = self._exchange.collect(shards, step.row.optimizer, step.row.step, own, wait=wait)
        if step.of_all is None and not wait and len(self._pending) <= MOST_PENDING:
            return False
        self._exchange.incomplete += step.of_all is None
        return True

    def not_measured(self) -> list[str]:
        """Return sentences on what was not read."""
        return self._exchange.not_measured()

    def _resolve(self, step: ReadStep) -> None:
        numbers = iter([] if step.posted is None else step.posted.read())
        norm, bad, index = None, False, step.row.optimizer
        if step.reading is not None:
            squares, infinities, nans = next(numbers), next(numbers), next(numbers)
            if step.of_all is not None:
                squares, infinities, nans = step.of_all.totals
            bad = infinities + nans > 0
            if step.shards is None or step.of_all is not None:  # else it is the norm of some shards only
                norm = math.nan if nans else math.inf if infinities else math.sqrt(squares)
        scale = next(numbers) if step.outcome.scale is not None else None
        flags = [next(numbers) > 0 for _ in step.outcome.flags]
        skipped = step.row.skipped or any(flags)
        losses = [next(numbers) / (scale if scaled and scale else 1.0) for scaled in step.losses]
        loss = sum(losses) if losses else None
        row = step.row = replace(step.row, norm=norm, scale=scale, skipped=skipped, loss=loss)
        step.finite = not bad and row.finite
        self._skips[index] = self._skips.get(index, 0) + 1 if skipped else 0
        if not step.finite:
            # While the scaler looks for its scale, scaled gradients that overflow are ordinary.
            unscaled = scale is None or scale <= 1
            if unscaled or (loss is not None and not math.isfinite(loss)) or self._skips[index] >= PATIENCE:
                step.bad = tuple([name for name, census in step.layers().items() if not census.finite])
        began = time.perf_counter()
        of_some = step.shards is not None and step.of_all is None
        if step.counts is not None and not skipped and not of_some:
            step.sample = LayerSample(optimizer=index, first=row.step, last=row.step, scale=scale, layers=step.layers())
        self._callback(step)
        if step.shards is not None:
            pass  # sampled at the same steps on all ranks, whatever it takes
        elif step.sample is not None:
            self._samples.took(time.perf_counter() - began)  # including the callback's work
        elif step.counts is not None:
            self._samples.again()  # a skipped step is no sample
        for callback in step.when_known:
            callback(skipped)


def _has_shards(optimizer: Any) -> bool:
    return any(hasattr(each.grad, "placements") for each in parameters_of(optimizer))


def are_finite_on_host(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether the gradients on the CPU are finite, in one fast pass. Those on other devices are not read."""
    grads = [each for each in gradients if each is not None and each.is_cpu and each.is_floating_point()]
    plain = [each for each in grads if each.layout == torch.strided and not hasattr(each, "placements")]
    if not plain:
        return True
    with torch.no_grad():
        norms = torch._foreach_norm(plain)
        # The squares of large numbers may overflow.
        return math.isfinite(sum(norms)) or all(bool(each.isfinite().all()) for each in plain)


# Whether updates change BF16 weights


@dataclass(slots=True)
class WeightComparison:
    """Some weights before a step."""

    names: list[str]
    weights: list[Tensor]  # views of the current weights
    before: list[Tensor]
    tried: list[Tensor]  # where there was a gradient
    posted: AsyncScalars | None = None

    def after_step(self) -> None:
        """Count changed weights, on the device."""
        with torch.no_grad():
            moved = [
                torch.stack([((now != then) & tried).sum(), tried.sum()])
                for now, then, tried in zip(self.weights, self.before, self.tried, strict=True)
            ]
            self.posted = AsyncScalars(torch.stack(moved).float())

    @property
    def arrived(self) -> bool:
        return self.posted is not None and self.posted.arrived

    def shares(self) -> dict[str, UpdateCounts]:
        """Return the counts by parameter. Syncs with the device unless ``arrived``."""
        assert self.posted is not None
        numbers = iter(self.posted.read())
        return {name: UpdateCounts(moved=int(next(numbers)), tried=int(next(numbers))) for name in self.names}


def copy_weights(optimizer: Any, names: Sequence[str]) -> WeightComparison | None:
    """Copy some of an optimizer's BF16 weights. None if none has a gradient, or if it handles small updates itself."""
    if keeps_small_updates(optimizer):  # e.g. stochastic rounding: a weight may stay the same without a loss
        return None
    found = [
        (name, each.detach(), each.grad)
        for name, each in zip(names, parameters_of(optimizer), strict=True)
        if each.dtype == torch.bfloat16
        and each.grad is not None
        and each.grad.layout == torch.strided
        and each.is_contiguous()
        and each.grad.is_contiguous()
        and not hasattr(each, "placements")
    ]
    chosen = found[:: max(len(found) // COMPARED_TENSORS, 1)][:COMPARED_TENSORS]
    if not chosen:
        return None
    with torch.no_grad():
        strides = [max(weight.numel() // COMPARED_VALUES, 1) for _, weight, _ in chosen]
        weights = [weight.view(-1)[::by] for (_, weight, _), by in zip(chosen, strides, strict=True)]
        tried = [grad.view(-1)[::by] != 0 for (_, _, grad), by in zip(chosen, strides, strict=True)]
        return WeightComparison([name for name, _, _ in chosen], weights, [each.clone() for each in weights], tried)
