"""Where the time of a running script goes, measured so that the script cannot tell."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ampwise.evidence.conduct import Site
from ampwise.evidence.timing import TimeUse
from ampwise.watch.loading import Loading
from ampwise.watch.patches import Patches
from ampwise.watch.profile import OURS, Profile
from ampwise.watch.profiler import Profiler, profile_of
from ampwise.watch.waits import Waits

__all__ = ["Timing"]

FIRST = 3  # steps that warm up: workers start, caches fill, torch.compile compiles
ATTEMPTS = 3  # windows given up to the script's own profiler before ours stays away

WORK = "matrix work and casts"
WAITS = "waits of the host for the device"
K = TypeVar("K")
N = TypeVar("N", int, float)
NOTHING: AbstractContextManager[None] = nullcontext()


class Timing:
    """Told when a step has ended, and asked at the end.

    A profile is of whole steps: it begins when the step before has ended. ``profile_at`` says which; where the
    script's own profiler is on, a later one. Waits for the device are listened to in one of ``sync_every`` steps. A
    failure in here becomes a sentence in ``not_measured``, and never an exception in training.
    """

    def __init__(
        self,
        patches: Patches,
        *,
        profile_at: Sequence[int] = (6, 200),
        sync_every: int = 50,
        clock: Callable[[], float] = time.perf_counter,
        waits: Waits | None = None,
    ) -> None:
        self._clock = clock
        self._profile_at = sorted(profile_at)
        self._asked = min(profile_at, default=None)
        self._sync_every = sync_every
        self._waits = waits
        self._profiler: Profiler | None = None
        self._loading: Loading | None = None
        self._last: float | None = None
        self._steps, self._seconds = 0, 0.0
        self._data_waits: dict[Site, float] = {}
        self._recorded: list[Any] = []
        self._given_up, self._made_way = 0, False
        self._forked = 0  # windows that a fork fell into
        self._sync_steps, self._syncs = 0, Counter[Site]()
        self._failures: dict[str, None] = {}  # in order, each once
        with self._surviving(WORK):
            self._profiler = Profiler(patches)
        with self._surviving("waiting for data"):
            self._loading = Loading(patches, clock)

    def step_ended(self, step: int) -> None:
        """The training step of this number, from 1 on, is over."""
        undisturbed = self._end_windows()
        with self._surviving("wall time"):
            self._count(step, undisturbed)
        self._begin_windows(step + 1)
        self._last = self._clock()

    @property
    def measuring(self) -> bool:
        """Whether something is measured in the present step."""
        return bool(self._profiler and self._profiler.is_on) or bool(self._waits and self._waits.listening)

    def rests(self, resting: bool) -> None:
        """Steps are passed over; or no more are, and the next begins now."""
        if self._loading is not None:
            self._loading.off = resting
        self._last = self._clock()

    def paused(self) -> AbstractContextManager[None]:
        """Around the watch's own work within a step: it is no part of what the script does."""
        return self._left_out() if self.measuring else NOTHING

    def abandon(self) -> None:
        """Forget what is being measured in the present step, and leave torch as it was."""
        with self._surviving(WORK):
            if self._profiler is not None:
                self._profiler.give_up()
        with self._surviving(WAITS):
            if self._waits is not None:
                self._waits.heard()

    def about_to_fork(self) -> None:
        """The profiler must not be on across a fork: what its library has locked would stay so in the child."""
        with self._surviving(WORK):
            if self._profiler is not None and self._profiler.is_on:
                self._profiler.give_up()
                self._forked += self._profiler.given_up

    def forked(self) -> None:
        """In a forked child."""
        if self._profiler is not None:
            self._profiler.forked()
        with self._surviving(WAITS):
            if self._waits is not None:
                self._waits.heard()

    def use(self, autocast: str | None = None) -> TimeUse:
        """Where the time went; ``autocast`` is the precision the script used it with, if it did."""
        self.abandon()
        profile = self._read()
        flops: dict[str, float] = {}
        for product in profile.products:
            flops[product.precision] = flops.get(product.precision, 0.0) + product.flops
        total = sum(profile.seconds.values())
        return TimeUse(
            device=self._device(),
            autocast=autocast,
            steps=self._steps,
            seconds=self._seconds,
            data_wait_seconds=sum(self._data_waits.values()),
            data_waits=_most_first(self._data_waits),
            profiled_steps=len(self._recorded),
            flops_by_precision=_most_first(flops),
            matrix_products=profile.products,
            time_by_kind=dict(profile.seconds),
            cast_share=profile.seconds.get("casts", 0.0) / total if total else None,
            sync_steps=self._sync_steps,
            syncs=_most_first(self._syncs),
            not_measured=tuple(self._not_measured(profile)),
        )

    def _end_windows(self) -> bool:
        """Take in what was measured in this step; False if measuring, or the script's profiler, has slowed it."""
        undisturbed = True
        profiler, waits = self._profiler, self._waits
        with self._surviving(WORK, giving_up_on=self._profile_at):
            if profiler is not None and profiler.is_on:
                undisturbed = False
                self._recorded.append(profiler.stop())
                self._profile_at.pop(0)
            elif profiler is not None and profiler.given_up:
                undisturbed, profiler.given_up = False, False
                self._given_up += 1
        with self._surviving(WAITS):
            if waits is not None and waits.listening:
                self._syncs.update(waits.heard())
                self._sync_steps += 1
        return undisturbed

    def _count(self, step: int, undisturbed: bool) -> None:
        data_waits = {} if self._loading is None else self._loading.taken()
        if self._last is not None and undisturbed and step > FIRST:
            self._steps += 1
            self._seconds += self._clock() - self._last
            for site, seconds in data_waits.items():
                self._data_waits[site] = self._data_waits.get(site, 0.0) + seconds

    def _begin_windows(self, step: int) -> None:
        """Begin what is to be measured in the step of this number."""
        profiler = self._profiler
        due = bool(self._profile_at) and step >= self._profile_at[0] and self._given_up < ATTEMPTS
        if due and profiler is not None and not profiler.is_free:
            self._made_way = True
        elif due and profiler is not None:
            with self._surviving(WORK, giving_up_on=self._profile_at):
                profiler.start()
        elif step > FIRST and (step - FIRST - 1) % self._sync_every == 0 and self._device() == "cuda":
            with self._surviving(WAITS):
                self._waits = self._waits or Waits()
                self._waits.listen()

    def _read(self) -> Profile:
        total = Profile()
        for result in self._recorded:
            with self._surviving(WORK):
                total += profile_of(result)
        return total

    def _device(self) -> str:
        return "cuda" if torch.cuda.is_initialized() else "cpu"

    def _not_measured(self, profile: Profile) -> Iterator[str]:
        yield from self._failures
        if not self._recorded and not any(failure.startswith(WORK) for failure in self._failures):
            if self._forked:
                yield f"{WORK}: the script forked in each step that was to be profiled"
            elif self._given_up or self._made_way:
                yield f"{WORK}: the script's own profiler was on"
            elif self._asked is not None:
                yield f"{WORK}: the run ended before its step {self._asked} did"
        if self._device() != "cuda":
            yield f"{WAITS}: the run used no CUDA device"
        elif not self._sync_steps:
            yield f"{WAITS}: no step was listened to; the run was too short, or uses torch's sync debug mode itself"
        if not self._steps:
            yield f"waiting for data: the run ended within its first {FIRST} steps"
        yield from profile.unknown

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        listening = nullcontext() if self._waits is None else self._waits.paused()
        with listening, torch.autograd.profiler.record_function(OURS):
            yield

    @contextmanager
    def _surviving(self, what: str, giving_up_on: list[int] | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self._failures[f"{what}: {type(error).__name__}: {first}"] = None
            if giving_up_on:
                giving_up_on.clear()


def _most_first(counts: Mapping[K, N]) -> dict[K, N]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
