"""Read the gradients of a step once, without a sync: a row per step, and now and then a census by parameter."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampwise.numbers.census.algebra import Census
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.train.scaler.grad_stats import GpuStats, GradStats, read_gradients
from ampwise.train.scaler.gradients import collect_gradients, first_device, to_device
from ampwise.watch.inspection import parameters_of
from ampwise.watch.step_outcomes import StepOutcome
from ampwise.watch.time_budget import TimeBudget
from ampwise.watch.tracked_objects import TrackedOptimizer

if TYPE_CHECKING:
    from ampwise.numbers.census.launch import TensorBatch

__all__ = ["GradientReader", "StepNumbers"]

READING_SHARE = 0.02  # share of the time for reading gradients
SAMPLING_SHARE = 0.01  # share of the time for turning counts into censuses
PATIENCE = 3  # skipped steps in a row after which the bad parameters are named


@dataclass(slots=True)
class StepNumbers:
    """Numbers of a step that have arrived on the host."""

    row: StepRow
    finite: bool  # loss and gradients, as far as they were read
    sample: LayerSample | None = None
    bad: tuple[str, ...] = ()  # parameters whose gradients are not finite
    serious: bool = True  # if not finite: more than an ordinary overflow of scaled gradients


@dataclass(slots=True)
class _PendingStep:
    """A step whose numbers are being copied to the host."""

    state: TrackedOptimizer
    row: StepRow
    posted: AsyncScalars | None
    read: bool
    scaled: bool
    losses: list[bool]  # for each, whether it is scaled
    flags: int
    names: Sequence[str]
    reading: GradStats | None
    sampled: list[_PendingCounts] | None
    after: list[Callable[[bool], None]] = field(default_factory=list)


class _PendingCounts:
    """Counts of one device that are being copied to the host."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._host: Tensor | None = None
        self._batch: TensorBatch | None = None
        self.positions: list[int] = part.positions
        if isinstance(part, GpuStats) and part.counted.buffer.is_cuda:
            buffer, self._batch = part.counted.buffer, part.counted.batch
            self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=True)
            self._host.copy_(buffer, non_blocking=True)  # before the numbers that ``settle`` waits for

    def fetch(self) -> list[Census]:
        if self._host is None or self._batch is None:
            return list(self._part.fetch())
        from ampwise.numbers.census.launch import read_census  # needs Triton

        return read_census(self._host, self._batch)


class GradientReader:
    """Read gradients before steps, as often as the time allows, and report numbers as they arrive."""

    def __init__(self, callback: Callable[[TrackedOptimizer, StepNumbers], None], every: int | None = None) -> None:
        self._callback = callback
        self._began = time.monotonic()
        self._reads = TimeBudget(READING_SHARE, None if every is None else 1)
        self._samples = TimeBudget(SAMPLING_SHARE, every)
        self._readings: dict[int, GradStats] = {}  # by optimizer, before its step
        self._pending: deque[_PendingStep] = deque()
        self._skips: dict[int, int] = {}  # skipped steps in a row, by optimizer

    def ready(self, optimizer: Any, scale: Tensor | None, state: TrackedOptimizer) -> None:
        """Read the gradients of the next step. scale: what they are multiplied by."""
        if state.read:
            return
        state.read = True
        self._readings.pop(state.index, None)
        if not self._reads.is_due():
            return
        with self._reads.timed(), torch.no_grad():
            gradients = None if _is_sharded(optimizer) else collect_gradients(_without_side_effects(optimizer))
            if gradients is not None and len(gradients):
                self._readings[state.index] = read_gradients(gradients, scale)

    def step_ended(
        self,
        optimizer: Any,
        state: TrackedOptimizer,
        names: Sequence[str],
        outcome: StepOutcome,
    ) -> None:
        """Note the end of a step, and start to copy its numbers to the host."""
        mine = self._readings.pop(state.index, None)
        reading = outcome.reading or mine
        home = first_device([optimizer])
        losses = {by: loss for by, loss in state.losses.items() if loss.device == home}
        row = StepRow(
            optimizer=state.index,
            step=state.steps + 1,
            seconds=time.monotonic() - self._began,
            skipped=bool(outcome.skipped),
            lr=_lr(optimizer),
        )
        sampled = self._sampled(reading)
        parts = _parts(home, reading, outcome, list(losses.values()))
        self._pending.append(
            _PendingStep(
                state=state,
                row=row,
                posted=AsyncScalars(*parts) if parts else None,
                read=reading is not None,
                scaled=outcome.scale is not None,
                losses=list(losses),
                flags=len(outcome.flags),
                names=names,
                reading=reading,
                sampled=sampled,
            )
        )
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
        loss = sum(each.item() for each in losses) if losses else None
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
            last.after.append(callback)
        else:
            callback(self._skips.get(state.index, 0) > 0)

    def settle(self, *, wait: bool = False) -> None:
        """Report all steps whose numbers have arrived. wait: sync for the others."""
        while self._pending:
            posted = self._pending[0].posted
            if posted is not None and not posted.arrived and not wait:
                return
            self._resolve(self._pending.popleft())

    def _sampled(self, reading: GradStats | None) -> list[_PendingCounts] | None:
        if reading is None or not self._samples.is_due():
            return None
        return [_PendingCounts(part) for part in reading.parts if part.counts]

    def _resolve(self, pending: _PendingStep) -> None:
        numbers = iter([] if pending.posted is None else pending.posted.read())
        norm, bad = None, False
        if pending.read:
            squares, infinities, nans = next(numbers), next(numbers), next(numbers)
            bad = infinities + nans > 0
            norm = math.nan if nans else math.inf if infinities else math.sqrt(squares)
        scale = next(numbers) if pending.scaled else None
        flags = [next(numbers) > 0 for _ in range(pending.flags)]
        skipped = pending.row.skipped or any(flags)
        losses = [next(numbers) / (scale if by and scale else 1.0) for by in pending.losses]
        loss = sum(losses) if losses else None
        row = replace(pending.row, norm=norm, scale=scale, skipped=skipped, loss=loss)
        index = pending.state.index
        self._skips[index] = self._skips.get(index, 0) + 1 if skipped else 0
        known = StepNumbers(row, finite=not bad and row.finite, serious=self._is_serious(row))
        if not known.finite and known.serious:
            known.bad = _bad_parameters(pending)
        if pending.sampled is None or skipped:
            self._callback(pending.state, known)
        else:
            with self._samples.timed():  # including the callback's work
                known.sample = _sample(pending, row)
                self._callback(pending.state, known)
        if pending.sampled is not None and skipped:
            self._samples.again()  # a skipped step is no sample
        for callback in pending.after:
            callback(skipped)

    def _is_serious(self, row: StepRow) -> bool:
        """Return False for an overflow of scaled gradients while the scaler looks for its scale."""
        if row.scale is None or row.scale <= 1 or (row.loss is not None and not math.isfinite(row.loss)):
            return True
        return self._skips.get(row.optimizer, 0) >= PATIENCE


def _is_sharded(optimizer: Any) -> bool:
    """Whether gradients are sharded over ranks: their sum would need communication."""
    return any(hasattr(each.grad, "placements") for each in parameters_of(optimizer))


def _without_side_effects(optimizer: Any) -> Any:
    """Return the optimizer, or a stand-in with copies of gradients that reading would coalesce or resolve."""
    every = parameters_of(optimizer)
    unusual = [each for each in every if each.grad is not None and (each.grad.is_sparse or each.grad.is_conj())]
    if not unusual:
        return optimizer
    copies = {id(each): SimpleNamespace(grad=_readable(each.grad)) for each in unusual}
    return SimpleNamespace(param_groups=[{"params": [copies.get(id(each), each) for each in every]}])


def _readable(gradient: Tensor) -> Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient.resolve_conj()


def _parts(
    home: torch.device,
    reading: GradStats | None,
    outcome: StepOutcome,
    losses: Sequence[Tensor],
) -> list[Tensor]:
    """Return the tensors to copy to the host, in the order in which they are read."""
    parts = [] if reading is None else [reading.totals(home)]
    parts += [] if outcome.scale is None else [to_device(outcome.scale.detach(), home).reshape(1)]
    parts += [to_device(flag.detach(), home).reshape(1) for flag in outcome.flags]
    return parts + [loss.reshape(1) for loss in losses]


def _sample(pending: _PendingStep, row: StepRow) -> LayerSample:
    layers = _layers(pending.reading, pending.sampled or [], pending.names)
    return LayerSample(optimizer=row.optimizer, first=row.step, last=row.step, scale=row.scale, layers=layers)


def _layers(reading: GradStats | None, parts: Sequence[_PendingCounts], names: Sequence[str]) -> dict[str, Census]:
    assert reading is not None
    found: dict[int, Census] = {}
    for part in parts:
        found.update(zip(part.positions, part.fetch(), strict=True))
    parameters = reading.parameters
    positions = sorted(found)
    return {names[parameter]: found[position] for parameter, position in zip(parameters, positions, strict=True)}


def _bad_parameters(pending: _PendingStep) -> tuple[str, ...]:
    if pending.reading is None:
        return ()
    parts = pending.sampled or [_PendingCounts(part) for part in pending.reading.parts if part.counts]
    if torch.cuda.is_available() and pending.sampled is None:
        torch.cuda.synchronize()  # a bad step is worth a sync
    layers = _layers(pending.reading, parts, pending.names)
    return tuple(name for name, census in layers.items() if not census.finite)


def _lr(optimizer: Any) -> float | None:
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(lr, Tensor):
        return float(lr) if lr.device.type == "cpu" else None  # reading it from a device would sync
    return float(lr) if isinstance(lr, int | float) else None
