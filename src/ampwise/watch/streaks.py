"""Consecutive bad steps: a scaler searching for its scale, or a real failure?"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from ampwise.numbers.formats import find_scalar_format

__all__ = ["BadStep", "Streak", "Streaks"]

LONG = 8  # skips in a row after a good step: 256 times below a scale that worked
NO_SCALING = 1.0  # at this scale and below, the unscaled gradients overflow
FALLS = 3  # of the scale that count as repeated
KEPT = 64  # streaks; ordinary ones are dropped first
KEPT_BAD = 32  # bad steps with details, at each end of the run
TRUSTED = 5  # good steps needed to know what is usual
USUAL = 20  # steps back
IMPLAUSIBLE = 2.0**10  # times the usual norm: such an overflow is not caused by the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """A step whose loss or gradients were not finite."""

    step: int
    loss: float | None = None
    scale: float | None = None  # None without a scaler
    parameters: tuple[str, ...] = ()  # those whose gradients were not finite
    module: str | None = None  # first module whose output was not finite, if known
    healthy_before: bool | None = True  # the weights were finite before the step; None: unknown

    @property
    def bad_loss(self) -> bool:
        return _is_bad(self.loss)


@dataclass(slots=True, kw_only=True)
class Streak:
    """Consecutive bad steps."""

    first: int
    last: int
    count: int = 1
    first_scale: float | None = None
    lowest_scale: float | None = None
    loss: float | None = None  # at its first step
    after_good: bool = False  # good steps came before
    implausible: bool = False  # gradients were far from overflow at this scale
    bad_losses: int = 0  # steps whose loss was not finite
    last_bad_loss: int | None = None  # step
    corrupted_from: int | None = None  # first step whose loss was bad too, or unknown after the weights were corrupted

    @property
    def bad_loss(self) -> bool:
        """Whether it began with a loss that was not finite."""
        return _is_bad(self.loss)

    @property
    def gradients_alone(self) -> int:
        """Steps whose gradients were not finite while the loss was, as far as known."""
        return self.count if self.corrupted_from is None else max(self.corrupted_from - self.first, 0)

    def is_real(self, precision: str) -> bool:
        """Return whether this is more than an ordinary overflow of scaled gradients, which a lower scale fixes."""
        if self.bad_loss or self.lowest_scale is None or precision == "bf16":
            return True  # the loss scale does not affect the loss; BF16 has FP32's range
        persists = self.after_good and self.count > LONG
        return self.lowest_scale <= NO_SCALING or persists or self.implausible


class Streaks:
    """Streaks of a run, built step by step; details of bad steps may come before or shortly after their rows."""

    def __init__(self) -> None:
        self.all: list[Streak] = []
        self.bad: list[BadStep] = []
        self.total = 0  # streaks, kept or not
        self.good = 0  # good steps
        self._is_open = False
        self._usual: deque[tuple[float, float]] = deque(maxlen=USUAL)  # scale, scaled norm

    @property
    def open(self) -> Streak | None:
        """Streak that has not ended, if any."""
        return self.all[-1] if self.all and self._is_open else None

    def add_good(self, step: int, scale: float | None, norm: float | None) -> None:
        if self.all and self._is_open and step <= self.all[-1].last:
            return  # the details came first and are more accurate
        self._is_open = False
        self.good += 1
        if scale is not None and norm is not None:
            self._usual.append((scale, scale * norm))

    def add_bad(self, step: int, loss: float | None, scale: float | None) -> None:
        last = self.all[-1] if self.all else None
        # A scaler skipped the steps before, so they did not cause this bad loss: a new failure.
        is_new = last is not None and _is_bad(loss) and scale is not None and not last.bad_loss
        if last is not None and step == last.last + 1 and not is_new:
            self._is_open = True
            last.last, last.count = step, last.count + 1
            if scale is not None:
                last.lowest_scale = scale if last.lowest_scale is None else min(scale, last.lowest_scale)
        elif last is None or step > last.last:
            self._begin(step, loss, scale)
        elif step == last.first and last.loss is None:
            last.loss = loss
        if _is_bad(loss):
            self._mark_corrupted(step, bad_loss=True)

    def add_details(self, bad: BadStep) -> None:
        self.add_bad(bad.step, bad.loss, bad.scale)
        if bad.loss is None and bad.healthy_before is False:
            self._mark_corrupted(bad.step, bad_loss=False)
        self.bad.append(bad)
        if len(self.bad) > 2 * KEPT_BAD:
            del self.bad[KEPT_BAD]

    def details(self, streak: Streak) -> BadStep | None:
        """Return the details of its first step, or of the first one with details."""
        inside = sorted((bad for bad in self.bad if streak.first <= bad.step <= streak.last), key=lambda bad: bad.step)
        if not inside:
            return None
        # Modules may have been examined only at a later step, which is valid as long as the weights are unchanged.
        module = next((bad.module for bad in inside if bad.module and bad.healthy_before), None)
        return replace(inside[0], module=inside[0].module or module)

    def collapse(self) -> Streak | None:
        """Return the longest run of bad steps in which the scale fell too far, whatever was bad about each step."""
        joined: list[Streak] = []
        for streak in self.all:
            if joined and streak.first == joined[-1].last + 1:
                scales = [each.lowest_scale for each in (joined[-1], streak) if each.lowest_scale is not None]
                count = joined[-1].count + streak.count
                joined[-1] = replace(joined[-1], last=streak.last, count=count, lowest_scale=min(scales, default=None))
            else:
                joined.append(streak)
        fallen = []
        for streak in joined:
            if streak.first_scale is None or streak.lowest_scale is None:
                continue
            below = streak.lowest_scale < NO_SCALING and self.total - 1 + streak.count >= FALLS
            fell = streak.lowest_scale < streak.first_scale  # an engine keeps the scale if the loss itself is bad
            if below or (fell and streak.after_good and streak.count >= LONG):
                fallen.append(streak)
        return max(fallen, key=lambda streak: streak.count, default=None)

    def _mark_corrupted(self, step: int, *, bad_loss: bool) -> None:
        streak = next((each for each in reversed(self.all) if each.first <= step <= each.last), None)
        if streak is None:
            return  # not kept
        streak.corrupted_from = step if streak.corrupted_from is None else min(step, streak.corrupted_from)
        if bad_loss and (streak.last_bad_loss is None or step > streak.last_bad_loss):  # reported twice, counted once
            streak.bad_losses, streak.last_bad_loss = streak.bad_losses + 1, step

    def _begin(self, step: int, loss: float | None, scale: float | None) -> None:
        self.all.append(
            Streak(
                first=step,
                last=step,
                first_scale=scale,
                lowest_scale=scale,
                loss=loss,
                after_good=self.good > 0,
                implausible=self._is_implausible(scale),
            )
        )
        self.total += 1
        self._is_open = True
        if len(self.all) > KEPT:
            ordinary = (i for i, streak in enumerate(self.all[:-1]) if not streak.is_real("fp16"))
            del self.all[next(ordinary, KEPT // 2)]

    def _is_implausible(self, scale: float | None) -> bool:
        if scale is None or len(self._usual) < TRUSTED or scale > max(used for used, _ in self._usual):
            return False
        return max(norm for _, norm in self._usual) * IMPLAUSIBLE <= find_scalar_format("fp16").max


def _is_bad(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)
