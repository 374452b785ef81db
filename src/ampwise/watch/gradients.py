"""Gradients of a step, read once and without waiting: a row for the step, and now and then a census by parameter."""

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

from ampwise.census.algebra import Census
from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.gradients import gradients_of, home_of, there
from ampwise.engine.scaling.reading import Launched, Reading, read
from ampwise.record.rows import LayerSample, StepRow
from ampwise.watch.asking import parameters_of
from ampwise.watch.outcomes import StepOutcome
from ampwise.watch.pace import Pace
from ampwise.watch.state import OptimizerState

if TYPE_CHECKING:
    from ampwise.census.launch import Batch

__all__ = ["Gradients", "Known"]

READING_SHARE = 0.02  # of the time, for reading gradients
SAMPLING_SHARE = 0.01  # and for turning counts into censuses
PATIENCE = 3  # skips in a row from which on the parameters to blame are named


@dataclass(slots=True)
class Known:
    """What has become known of a step."""

    row: StepRow
    finite: bool  # as far as its gradients and loss are known
    sample: LayerSample | None = None
    bad: tuple[str, ...] = ()  # parameters whose gradients are not finite
    serious: bool = True  # if it is not: no ordinary overflow of scaled gradients


@dataclass(slots=True)
class _Awaited:
    """A step whose numbers are on their way."""

    state: OptimizerState
    row: StepRow
    posted: Posted | None
    read: bool
    scaled: bool
    losses: list[bool]  # of each, whether it is multiplied by the scale
    flags: int
    names: Sequence[str]
    reading: Reading | None
    sampled: list[_Late] | None
    after: list[Callable[[bool], None]] = field(default_factory=list)


class _Late:
    """Counts of one device on their way to the host."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._host: Tensor | None = None
        self._batch: Batch | None = None
        self.positions: list[int] = part.positions
        if isinstance(part, Launched) and part.counted.buffer.is_cuda:
            buffer, self._batch = part.counted.buffer, part.counted.batch
            self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=True)
            self._host.copy_(buffer, non_blocking=True)  # before the facts, whose arrival is waited for

    def fetch(self) -> list[Census]:
        if self._host is None or self._batch is None:
            return list(self._part.fetch())
        from ampwise.census.launch import read_census  # which needs Triton, as does whoever comes here

        return read_census(self._host, self._batch)


class Gradients:
    """Reads gradients before each step, as often as the time allows, and tells what has become known."""

    def __init__(self, tell: Callable[[OptimizerState, Known], None], every: int | None = None) -> None:
        self._tell = tell
        self._began = time.monotonic()
        self._reads = Pace(READING_SHARE, None if every is None else 1)
        self._samples = Pace(SAMPLING_SHARE, every)
        self._readings: dict[int, Reading] = {}  # of optimizers whose step is yet to come
        self._awaited: deque[_Awaited] = deque()
        self._skips: dict[int, int] = {}  # in a row

    def ready(self, optimizer: Any, scale: Tensor | None, state: OptimizerState) -> None:
        """Read the gradients, which are multiplied by ``scale``."""
        if state.read:
            return
        state.read = True
        self._readings.pop(state.index, None)
        if not self._reads.asked():
            return
        with self._reads.timed(), torch.no_grad():
            gradients = None if _is_divided(optimizer) else gradients_of(_untouched(optimizer))
            if gradients is not None and len(gradients):
                self._readings[state.index] = read(gradients, scale)

    def taken(
        self,
        optimizer: Any,
        state: OptimizerState,
        names: Sequence[str],
        outcome: StepOutcome,
    ) -> None:
        """A step is over."""
        mine = self._readings.pop(state.index, None)
        reading = outcome.reading or mine
        home = home_of([optimizer])
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
        self._awaited.append(
            _Awaited(
                state=state,
                row=row,
                posted=Posted(*parts) if parts else None,
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
    def waiting(self) -> bool:
        """For numbers of some step."""
        return bool(self._awaited)

    def bad_already(self, optimizer: Any, state: OptimizerState, *, scaled: bool) -> tuple[float | None] | None:
        """The loss of the step to come, if that is known not to be finite, it or the gradients; None if not.

        On the CPU alone: any other device would have to be waited for. scaled: gradients may well be too large.
        """
        losses = list(state.losses.values())
        if any(each.device.type != "cpu" for each in losses):
            return None
        loss = sum(each.item() for each in losses) if losses else None
        if loss is not None and not math.isfinite(loss):
            return (loss,)
        reading = None if scaled else self._readings.get(state.index)
        home = None if reading is None else home_of([optimizer])
        if reading is None or home is None or home.type != "cpu":
            return None
        _, infinities, nans = reading.totals(home).tolist()
        return (loss,) if infinities + nans else None

    def when_known(self, state: OptimizerState, tell: Callable[[bool], None]) -> None:
        """Call with whether the optimizer's last step was skipped, once that is known."""
        last = next((each for each in reversed(self._awaited) if each.state is state), None)
        if last is not None:
            last.after.append(tell)
        else:
            tell(self._skips.get(state.index, 0) > 0)

    def settle(self, *, wait: bool = False) -> None:
        """Tell of all steps whose numbers have arrived."""
        while self._awaited:
            posted = self._awaited[0].posted
            if posted is not None and not posted.arrived and not wait:
                return
            self._resolve(self._awaited.popleft())

    def _sampled(self, reading: Reading | None) -> list[_Late] | None:
        if reading is None or not self._samples.asked():
            return None
        return [_Late(part) for part in reading.parts if part.counts]

    def _resolve(self, awaited: _Awaited) -> None:
        numbers = iter([] if awaited.posted is None else awaited.posted.read())
        norm, bad = None, False
        if awaited.read:
            squares, infinities, nans = next(numbers), next(numbers), next(numbers)
            bad = infinities + nans > 0
            norm = math.nan if nans else math.inf if infinities else math.sqrt(squares)
        scale = next(numbers) if awaited.scaled else None
        flags = [next(numbers) > 0 for _ in range(awaited.flags)]
        skipped = awaited.row.skipped or any(flags)
        losses = [next(numbers) / (scale if by and scale else 1.0) for by in awaited.losses]
        loss = sum(losses) if losses else None
        row = replace(awaited.row, norm=norm, scale=scale, skipped=skipped, loss=loss)
        index = awaited.state.index
        self._skips[index] = self._skips.get(index, 0) + 1 if skipped else 0
        known = Known(row, finite=not bad and row.finite, serious=self._is_serious(row))
        if not known.finite and known.serious:
            known.bad = _bad_parameters(awaited)
        if awaited.sampled is None or skipped:
            self._tell(awaited.state, known)
        else:
            with self._samples.timed():  # with what whoever is told makes of it
                known.sample = _sample(awaited, row)
                self._tell(awaited.state, known)
        if awaited.sampled is not None and skipped:
            self._samples.again()  # a step that did not count says nothing of those that do
        for tell in awaited.after:
            tell(skipped)

    def _is_serious(self, row: StepRow) -> bool:
        """An overflow of scaled gradients while the scaler finds its scale is ordinary."""
        if row.scale is None or row.scale <= 1 or (row.loss is not None and not math.isfinite(row.loss)):
            return True
        return self._skips.get(row.optimizer, 0) >= PATIENCE


def _is_divided(optimizer: Any) -> bool:
    """Among ranks, each of which has a share only: adding them up would be up to all of them together."""
    return any(hasattr(each.grad, "placements") for each in parameters_of(optimizer))


def _untouched(optimizer: Any) -> Any:
    """The optimizer; or a stand-in with copies of those gradients that reading them would put in order."""
    every = parameters_of(optimizer)
    unusual = [each for each in every if each.grad is not None and (each.grad.is_sparse or each.grad.is_conj())]
    if not unusual:
        return optimizer
    copies = {id(each): SimpleNamespace(grad=_in_order(each.grad)) for each in unusual}
    return SimpleNamespace(param_groups=[{"params": [copies.get(id(each), each) for each in every]}])


def _in_order(gradient: Tensor) -> Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient.resolve_conj()


def _parts(
    home: torch.device,
    reading: Reading | None,
    outcome: StepOutcome,
    losses: Sequence[Tensor],
) -> list[Tensor]:
    """What is to travel, in the order in which it is read."""
    parts = [] if reading is None else [reading.totals(home)]
    parts += [] if outcome.scale is None else [there(outcome.scale.detach(), home).reshape(1)]
    parts += [there(flag.detach(), home).reshape(1) for flag in outcome.flags]
    return parts + [loss.reshape(1) for loss in losses]


def _sample(awaited: _Awaited, row: StepRow) -> LayerSample:
    layers = _layers(awaited.reading, awaited.sampled or [], awaited.names)
    return LayerSample(optimizer=row.optimizer, first=row.step, last=row.step, scale=row.scale, layers=layers)


def _layers(reading: Reading | None, parts: Sequence[_Late], names: Sequence[str]) -> dict[str, Census]:
    assert reading is not None
    found: dict[int, Census] = {}
    for part in parts:
        found.update(zip(part.positions, part.fetch(), strict=True))
    parameters = reading.parameters
    positions = sorted(found)
    return {names[parameter]: found[position] for parameter, position in zip(parameters, positions, strict=True)}


def _bad_parameters(awaited: _Awaited) -> tuple[str, ...]:
    if awaited.reading is None:
        return ()
    parts = awaited.sampled or [_Late(part) for part in awaited.reading.parts if part.counts]
    if torch.cuda.is_available() and awaited.sampled is None:
        torch.cuda.synchronize()  # a step that failed is worth the wait
    layers = _layers(awaited.reading, parts, awaited.names)
    return tuple(name for name, census in layers.items() if not census.finite)


def _lr(optimizer: Any) -> float | None:
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(lr, Tensor):
        return float(lr) if lr.device.type == "cpu" else None  # asking the device would wait
    return float(lr) if isinstance(lr, int | float) else None
