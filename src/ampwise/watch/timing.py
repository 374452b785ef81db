"""Measure where the time of a running script goes, without affecting the script."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ampwise.finding.call_site import CallSite
from ampwise.watch.data_loading import DataLoading
from ampwise.watch.patches import Patches
from ampwise.watch.profile import OURS, Profile
from ampwise.watch.profiler import Profiler, profile_of
from ampwise.watch.sync_counter import SyncCounter
from ampwise.watch.time_use import TimeUse

__all__ = ["RunTiming"]

FIRST = 3  # warm-up steps: workers start, caches fill, torch.compile compiles
ATTEMPTS = 3  # profiles given up to the script's own profiler before no more are tried

WORK = "matmuls and casts"
SYNCS = "host-device syncs"
K = TypeVar("K")
N = TypeVar("N", int, float)
NOTHING: AbstractContextManager[None] = nullcontext()


class RunTiming:
    """Call ``step_ended`` after each step, and ``use`` at the end.

    Whole steps are profiled, from the end of the step before. ``profile_at`` says which; a later one where the script's
    own profiler is on. Syncs with the device are counted in one of ``sync_every`` steps. A failure in here becomes a
    sentence in ``not_measured``, never an exception in training.
    """

    def __init__(
        self,
        patches: Patches,
        *,
        profile_at: Sequence[int] = (6, 200),
        sync_every: int = 50,
        clock: Callable[[], float] = time.perf_counter,
        waits: SyncCounter | None = None,
    ) -> None:
        self._clock = clock
        self._profile_at = sorted(profile_at)
        self._first = min(profile_at, default=None)
        self._sync_every = sync_every
        self._sync_counter = waits
        self._profiler: Profiler | None = None
        self._loading: DataLoading | None = None
        self._last: float | None = None
        self._steps, self._seconds = 0, 0.0
        self._data_waits: dict[CallSite, float] = {}
        self._recorded: list[Any] = []
        self._given_up, self._script_profiles = 0, False
        self._forked = 0  # profiles given up because of a fork
        self._sync_steps, self._syncs = 0, Counter[CallSite]()
        self._failures: dict[str, None] = {}  # in order, each once
        with self._reporting_failures(WORK):
            self._profiler = Profiler(patches)
        with self._reporting_failures("waiting for data"):
            self._loading = DataLoading(patches, clock)

    def step_ended(self, step: int) -> None:
        """Count the training step of this number (from 1) and start what is measured in the next."""
        undisturbed = self._stop_measuring()
        with self._reporting_failures("wall time"):
            self._count(step, undisturbed)
        self._start_measuring(step + 1)
        self._last = self._clock()

    @property
    def measuring(self) -> bool:
        """Whether this step is profiled or its syncs are counted."""
        return bool(self._profiler and self._profiler.is_on) or bool(
            self._sync_counter and self._sync_counter.listening
        )

    def skips_steps(self, skips: bool) -> None:
        """Begin or end a series of skipped steps. When it ends, the next step begins now."""
        if self._loading is not None:
            self._loading.off = skips
        self._last = self._clock()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context for the watch's own work within a step, which is left out of the measurement."""
        return self._excluded() if self.measuring else NOTHING

    def abandon(self) -> None:
        """Discard the measurement of this step, and leave torch as it was."""
        with self._reporting_failures(WORK):
            if self._profiler is not None:
                self._profiler.give_up()
        with self._reporting_failures(SYNCS):
            if self._sync_counter is not None:
                self._sync_counter.stop()

    def about_to_fork(self) -> None:
        """Stop the profiler before a fork: locks that its library holds would stay locked in the child."""
        with self._reporting_failures(WORK):
            if self._profiler is not None and self._profiler.is_on:
                self._profiler.give_up()
                self._forked += self._profiler.given_up

    def forked(self) -> None:
        """Clean up in a forked child."""
        if self._profiler is not None:
            self._profiler.forked()
        with self._reporting_failures(SYNCS):
            if self._sync_counter is not None:
                self._sync_counter.stop()

    def use(self, autocast: str | None = None) -> TimeUse:
        """Return where the time went. autocast: the precision of the script's autocast, if it used it."""
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
            data_waits=_largest_first(self._data_waits),
            profiled_steps=len(self._recorded),
            flops_by_precision=_largest_first(flops),
            matmuls=profile.products,
            time_by_kind=dict(profile.seconds),
            cast_share=profile.seconds.get("casts", 0.0) / total if total else None,
            sync_steps=self._sync_steps,
            syncs=_largest_first(self._syncs),
            not_measured=tuple(self._not_measured(profile)),
        )

    def _stop_measuring(self) -> bool:
        """Collect what was measured in this step. Return False if a profiler has slowed the step."""
        undisturbed = True
        profiler, waits = self._profiler, self._sync_counter
        with self._reporting_failures(WORK, giving_up_on=self._profile_at):
            if profiler is not None and profiler.is_on:
                undisturbed = False
                self._recorded.append(profiler.stop())
                self._profile_at.pop(0)
            elif profiler is not None and profiler.given_up:
                undisturbed, profiler.given_up = False, False
                self._given_up += 1
        with self._reporting_failures(SYNCS):
            if waits is not None and waits.listening:
                self._syncs.update(waits.stop())
                self._sync_steps += 1
        return undisturbed

    def _count(self, step: int, undisturbed: bool) -> None:
        data_waits = {} if self._loading is None else self._loading.take()
        if self._last is not None and undisturbed and step > FIRST:
            self._steps += 1
            self._seconds += self._clock() - self._last
            for site, seconds in data_waits.items():
                self._data_waits[site] = self._data_waits.get(site, 0.0) + seconds

    def _start_measuring(self, step: int) -> None:
        """Start what is to be measured in the step of this number."""
        profiler = self._profiler
        due = bool(self._profile_at) and step >= self._profile_at[0] and self._given_up < ATTEMPTS
        if due and profiler is not None and not profiler.is_free:
            self._script_profiles = True
        elif due and profiler is not None:
            with self._reporting_failures(WORK, giving_up_on=self._profile_at):
                profiler.start()
        elif step > FIRST and (step - FIRST - 1) % self._sync_every == 0 and self._device() == "cuda":
            with self._reporting_failures(SYNCS):
                self._sync_counter = self._sync_counter or SyncCounter()
                self._sync_counter.listen()

    def _read(self) -> Profile:
        total = Profile()
        for result in self._recorded:
            with self._reporting_failures(WORK):
                total += profile_of(result)
        return total

    def _device(self) -> str:
        return "cuda" if torch.cuda.is_initialized() else "cpu"

    def _not_measured(self, profile: Profile) -> Iterator[str]:
        yield from self._failures
        if not self._recorded and not any(failure.startswith(WORK) for failure in self._failures):
            if self._forked:
                yield f"{WORK}: the script forked in each step chosen for profiling"
            elif self._given_up or self._script_profiles:
                yield f"{WORK}: the script's own profiler was on"
            elif self._first is not None:
                yield f"{WORK}: the run ended before step {self._first} did"
        if self._device() != "cuda":
            yield f"{SYNCS}: the run did not use a CUDA device"
        elif not self._sync_steps:
            yield f"{SYNCS}: not counted; the run was too short, or uses torch's sync debug mode itself"
        if not self._steps:
            yield f"waiting for data: the run ended within its first {FIRST} steps"
        yield from profile.unknown

    @contextmanager
    def _excluded(self) -> Iterator[None]:
        listening = nullcontext() if self._sync_counter is None else self._sync_counter.paused()
        with listening, torch.autograd.profiler.record_function(OURS):
            yield

    @contextmanager
    def _reporting_failures(self, what: str, giving_up_on: list[int] | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self._failures[f"{what}: {type(error).__name__}: {first}"] = None
            if giving_up_on:
                giving_up_on.clear()


def _largest_first(counts: Mapping[K, N]) -> dict[K, N]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
