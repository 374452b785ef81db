"""Measure where the time of a running script goes, without affecting the script."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ampwise.finding.call_site import CallSite
from ampwise.hardware.kernel_faults import faults_here
from ampwise.trace.call_site import calling_site
from ampwise.watch.data_loading import DataLoading
from ampwise.watch.patches import Patches
from ampwise.watch.profile import OURS, Profile
from ampwise.watch.profiler import Profiler, profile_of
from ampwise.watch.time_use import TimeUse

__all__ = ["NOTHING", "PROFILED", "RunTiming", "SyncCounter"]

PROFILED = (6, 200)  # steps to profile
FIRST = 3  # warm-up steps: workers start, caches fill, torch.compile compiles
ATTEMPTS = 3  # profiles given up to the script's own profiler before no more are tried
WORK = "matmuls and casts"
SYNCS = "host-device syncs"
# Torch's warning at each sync, and the one when the mode is first switched on.
SYNC_WARNINGS = re.compile(r"called a synchronizing CUDA operation|Synchronization debug mode is a prototype feature")
SYNC = "called a synchronizing CUDA operation"
OFF, WARN = 0, 1  # torch's sync debug modes

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
        profile_at: Sequence[int] = PROFILED,
        sync_every: int = 50,
        clock: Callable[[], float] = time.perf_counter,
        waits: SyncCounter | None = None,
        loading: DataLoading | None = None,
    ) -> None:
        self._clock = clock
        self._profile_at = sorted(profile_at)
        self._first = min(profile_at, default=None)
        self._sync_every = sync_every
        self._sync_counter = SyncCounter() if waits is None else waits
        self._profiler: Profiler | None = None
        self._loading = DataLoading(patches, clock) if loading is None else loading
        self._loading.off = False
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

    def step_ended(self, step: int) -> None:
        """Count the training step of this number (from 1) and start what is measured in the next."""
        undisturbed, profiler = True, self._profiler  # False: a profiler has slowed the step
        if profiler is not None and (profiler.is_on or profiler.given_up):
            undisturbed = False
            with self._reporting_failures(WORK, giving_up_on=self._profile_at):
                if profiler.is_on:
                    self._recorded.append(profiler.stop())
                    self._profile_at.pop(0)
                else:
                    profiler.given_up = False
                    self._given_up += 1
        if self._sync_counter.listening:
            with self._reporting_failures(SYNCS):
                self._syncs.update(self._sync_counter.stop())
                self._sync_steps += 1
        data_waits = self._loading.take()
        if self._last is not None and undisturbed and step > FIRST:
            self._steps += 1
            self._seconds += self._clock() - self._last
            for site, seconds in data_waits.items():
                self._data_waits[site] = self._data_waits.get(site, 0.0) + seconds
        self._start_measuring(step + 1)
        self._last = self._clock()

    def _start_measuring(self, step: int) -> None:
        profiler = self._profiler
        if profiler and self._profile_at and step >= self._profile_at[0] and self._given_up < ATTEMPTS:
            if not profiler.is_free:
                self._script_profiles = True
                return
            with self._reporting_failures(WORK, giving_up_on=self._profile_at):
                profiler.start()
        elif step > FIRST and (step - FIRST - 1) % self._sync_every == 0 and torch.cuda.is_initialized():
            with self._reporting_failures(SYNCS):
                self._sync_counter.listen()

    @property
    def measuring(self) -> bool:
        """Whether this step is profiled or its syncs are counted."""
        return self._sync_counter.listening or (self._profiler is not None and self._profiler.is_on)

    def skips_steps(self, skips: bool) -> None:
        """Begin or end a series of skipped steps. When it ends, the next step begins now."""
        self._loading.off = skips
        self._last = self._clock()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context for the watch's own work within a step, which is left out of the measurement."""
        return self._excluded() if self.measuring else NOTHING

    @contextmanager
    def _excluded(self) -> Iterator[None]:
        with self._sync_counter.paused(), torch.autograd.profiler.record_function(OURS):
            yield

    def abandon(self) -> None:
        """Discard the measurement of this step, and leave torch as it was."""
        with self._reporting_failures(WORK):
            if self._profiler is not None:
                self._profiler.give_up()
        with self._reporting_failures(SYNCS):
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
            self._sync_counter.stop()

    def use(self, autocast: str | None = None) -> TimeUse:
        """Return where the time went. autocast: the precision of the script's autocast, if it used it."""
        self.abandon()
        profile = Profile()
        for result in self._recorded:
            with self._reporting_failures(WORK):
                profile += profile_of(result)
        flops: dict[str, float] = {}
        for product in profile.products:
            flops[product.precision] = flops.get(product.precision, 0.0) + product.flops
        total = sum(profile.seconds.values())
        faults = [
            fault
            for fault in (faults_here() if torch.cuda.is_initialized() and profile.attention else ())
            if any(fault.is_about(call.op) and fault.matches(call.keys, mask=call.mask) for call in profile.attention)
        ]
        return TimeUse(
            device="cuda" if torch.cuda.is_initialized() else "cpu",
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
            faulty_kernels=tuple(faults),
            not_measured=(*self._not_measured(), *profile.unknown),
        )

    def _not_measured(self) -> Iterator[str]:
        yield from self._failures
        if not self._recorded and not any(failure.startswith(WORK) for failure in self._failures):
            if self._forked:
                yield f"{WORK}: the script forked in each step chosen for profiling"
            elif self._given_up or self._script_profiles:
                yield f"{WORK}: the script's own profiler was on"
            elif self._first is not None:
                yield f"{WORK}: the run ended before step {self._first} did"
        if not torch.cuda.is_initialized():
            yield f"{SYNCS}: the run did not use a CUDA device"
        elif not self._sync_steps:
            yield f"{SYNCS}: not counted; the run was too short, or uses torch's sync debug mode itself"
        if not self._steps:
            yield f"waiting for data: the run ended within its first {FIRST} steps"

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


class SyncCounter:
    """Counter of host-GPU syncs by source line, from ``listen`` to ``stop``.

    Torch reports syncs as warnings. A warning filter at the front of the list lets them through to a hook that counts
    them and passes on all other warnings. Torch's mode is off wherever the script catches warnings itself, so that a
    sync can neither be raised as an error there nor be found among the warnings that the script collects.
    """

    def __init__(
        self, set_mode: Callable[[int], None] | None = None, get_mode: Callable[[], int] | None = None
    ) -> None:
        self._set_mode = set_mode or (lambda mode: torch._C._cuda_set_sync_debug_mode(mode))
        self._get_mode = get_mode or (lambda: torch._C._cuda_get_sync_debug_mode())
        self._patches: Patches | None = None
        self._filter: tuple[Any, ...] = ("always", SYNC_WARNINGS, Warning, None, 0)
        self._counts: dict[CallSite, int] = {}
        self._catching = 0

    @property
    def listening(self) -> bool:
        return self._patches is not None

    def listen(self) -> bool:
        """Start counting. Return False, and do nothing, if the script uses torch's mode itself."""
        if self.listening or self._get_mode() != OFF:
            return False
        self._counts, self._catching = {}, 0
        patches = self._patches = Patches()
        patches.wrap(warnings, "_showwarnmsg", self.show_warning)
        for name in ("filterwarnings", "simplefilter", "resetwarnings"):
            patches.wrap(warnings, name, self.change_filters)
        patches.wrap(warnings.catch_warnings, "__enter__", self.enter_catch_warnings)
        patches.wrap(warnings.catch_warnings, "__exit__", self.leave_catch_warnings)
        patches.wrap(torch.cuda, "set_sync_debug_mode", self.change_mode)
        self._put_filter_first()
        self._set_mode(WARN)
        return True

    def stop(self) -> dict[CallSite, int]:
        """Stop, and return how often each line has synced."""
        if self._patches is not None:
            if self._get_mode() == WARN:
                self._set_mode(OFF)
            self._patches.undo()
            self._patches = None
            self._take_filter_out()
        counts, self._counts = self._counts, {}
        return counts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch torch's mode off in this context."""
        was_on = self.listening and self._get_mode() == WARN
        if was_on:
            self._set_mode(OFF)
        try:
            yield
        finally:
            if was_on and self.listening:
                self._set_mode(WARN)

    def _put_filter_first(self) -> None:
        self._take_filter_out()
        # Straight into the list: warnings.filterwarnings would also reset which warnings were already shown.
        warnings.filters.insert(0, self._filter)  # type: ignore[attr-defined]

    def _take_filter_out(self) -> None:
        filters: Any = warnings.filters  # a list, contrary to the type stubs
        filters[:] = [one for one in filters if one is not self._filter]

    # Wrappers

    def show_warning(self, show: Callable[[Any], None], message: Any) -> None:
        text = str(message.message)
        if not SYNC_WARNINGS.match(text):
            show(message)
        elif text.startswith(SYNC):
            site = calling_site()
            self._counts[site] = self._counts.get(site, 0) + 1

    def change_filters(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return change(*args, **kwargs)
        finally:
            if self.listening and not self._catching:
                self._put_filter_first()

    def enter_catch_warnings(self, enter: Callable[..., Any], block: Any) -> Any:
        self._catching += 1
        if self.listening and self._get_mode() == WARN:
            self._set_mode(OFF)
        self._take_filter_out()
        return enter(block)

    def leave_catch_warnings(self, leave: Callable[..., Any], block: Any, *exc_info: Any) -> Any:
        try:
            return leave(block, *exc_info)
        finally:
            self._catching = max(self._catching - 1, 0)
            if self.listening and not self._catching:
                self._put_filter_first()
                if self._get_mode() == OFF:
                    self._set_mode(WARN)

    def change_mode(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.stop()  # from here on the script sets the mode
        return change(*args, **kwargs)
