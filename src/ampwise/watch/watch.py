"""Watch a script: torch's entry points → events and gradients → rules → findings, and a record of them."""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import time
import traceback
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampwise.finding.call_site import CallSite
from ampwise.hardware.torch_info import read_device
from ampwise.runs.events import EVENT_LISTENERS, LoggedEvent
from ampwise.runs.rows import CountedFinding
from ampwise.runs.writer import RecordWriter, exception_data
from ampwise.trace import bad_steps
from ampwise.trace.call_site import code_owner, own_files
from ampwise.trace.capsule.saving import SHARED_CAPSULES, Capsules
from ampwise.watch.data_loading import DataLoading
from ampwise.watch.entry_points import EntryPoints
from ampwise.watch.findings import Findings, is_cause, list_passed_checks, point_to_cause
from ampwise.watch.fix_diffs import add_diffs
from ampwise.watch.gradient_health import GradientHealth, suggested_settings
from ampwise.watch.models import Models
from ampwise.watch.patches import FORK_LISTENERS, Patches
from ampwise.watch.run_events import OptimizerStep, RunEvent, ScalerStep, ScriptFailed
from ampwise.watch.script_source import findings_in_script
from ampwise.watch.spent_generators import spent_generators
from ampwise.watch.step_watch import StepWatch
from ampwise.watch.time_use import TimeUse
from ampwise.watch.timing import PROFILED, RunTiming

__all__ = ["Watch"]

WRITTEN_EVERY = 2.0  # seconds between writes of findings while the script runs
FEW_OPTIMIZERS = 8  # up to this many are written as soon as they are known
AROUND = 6  # lines of an excerpt before and after its line
MOST_FAILURES = 20


class Watch:
    """Watch everything a script does from ``install`` to ``remove``.

    record: where to write; None keeps the results in memory. every: count gradients in full at each n-th step; None: as
    often as one per cent of the time allows. activations: measure modules' outputs at every step. capsules: a folder to
    save bad steps in (they are replayed in any case); weights: save the model's weights with them; quiet: without a
    line on stderr.
    """

    installed: ClassVar[Watch | None] = None  # the one that is watching this process

    def __init__(
        self,
        record: RecordWriter | None = None,
        *,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        capsules: Path | None = None,
        weights: bool = True,
        quiet: bool = False,
    ) -> None:
        self.findings = Findings()
        self.events: list[LoggedEvent] = []  # of guards
        self.failures: list[str] = []  # errors of ampwise, which never reach the script
        self.time_use: TimeUse | None = None
        self._record, self._with_timing = record, timing
        self._pid, self._began, self._folder = os.getpid(), time.time(), ""
        with contextlib.suppress(OSError):  # the folder was removed
            self._folder = os.getcwd()  # noqa: PTH109
        self._patches: Patches | None = None
        self.step_watch = StepWatch(
            *(self.findings, record, self.tell, self.failed, self._write_progress),
            every=every,
            activations=activations,
            capsules=capsules,
            weights=weights,
            quiet=quiet,
        )
        self._tracker = self.step_watch.tracker
        # Lists through which ampwise's own engines and guards report, and what to add to each.
        self._listeners: list[tuple[list[Any], Any]] = [
            (bad_steps.FINDING_LISTENERS, self.findings.add),
            (EVENT_LISTENERS, self.log),
            (bad_steps.REPLAY_CONTEXTS, self._tracker.follows.paused),
        ]
        if capsules is not None:
            self._listeners.append((SHARED_CAPSULES, Capsules(capsules, weights=weights)))
        self._started_processes = False  # by the script; these are not watched
        self._kinds: dict[str, int] = {}  # number of events by class
        self._written = time.monotonic()
        self._early_written: object = None  # facts written to the record before the end
        self._early_written_at = -math.inf

    @property
    def steps(self) -> int:
        """Number of steps of all optimizers."""
        return self.step_watch.steps

    @property
    def healths(self) -> dict[int, GradientHealth]:
        """Statistics of the gradients, by optimizer."""
        return self.step_watch.healths

    # On and off

    def install(self) -> Watch:
        """Start watching."""
        if self._patches is None:
            patches, steps = Patches(), self.step_watch
            self._patches = patches
            steps.models = Models(patches, steps, steps.skipper)
            patches.wrap(BaseProcess, "start", self._process_starts)
            self._entry_points = EntryPoints(patches, steps)
            steps.models.followed_step = self._entry_points.followed_step
            steps.bad_steps.draws.install(patches)
            loading = DataLoading(patches)
            loading.on_batch, loading.off = self._entry_points.batch_drawn, True
            if self._with_timing:
                profiled = [step for step in PROFILED if step > self.steps]
                steps.timing = RunTiming(patches, profile_at=profiled, loading=loading)
            for optimizer, _ in self._tracker.optimizers.pairs():  # from an earlier installation
                steps.optimizer_made(optimizer)
            for listeners, ours in self._listeners:
                listeners.append(ours)
            FORK_LISTENERS.add(self)
            Watch.installed = Watch.installed or self
        return self

    def remove(self) -> None:
        """Restore torch as it was."""
        if self._patches is None:
            return
        steps = self.step_watch
        try:
            steps.follow_again()
            if steps.timing is not None:
                halves = [each.precision for each in self.healths.values() if each.precision != "fp32"]
                self.time_use = steps.timing.use(halves[0] if halves else None)
        finally:
            if steps.timing is not None:
                steps.timing.abandon()
                steps.timing = None
            self._stop_listening()
            self._entry_points.remove()
            self._patches.undo()
            self._patches = None
            if Watch.installed is self:
                Watch.installed = None

    def _stop_listening(self) -> None:
        for listeners, ours in self._listeners:
            listeners.remove(ours)
        self.step_watch.forget()

    def about_to_fork(self) -> None:
        if self.step_watch.timing is not None:
            self.step_watch.timing.about_to_fork()

    def forked(self) -> None:
        """Stop watching in a forked child: the record belongs to its parent."""
        steps, patches, self._patches = self.step_watch, self._patches, None
        timing, steps.timing = steps.timing, None
        if patches is None:
            return
        self._tracker.follows.stop()
        self._record = steps.record = None
        if timing is not None:
            timing.forked()
        self._stop_listening()
        patches.undo()  # the optimizers' step hooks stay, as one may be running; they do nothing

    def adopt(self, things: Iterable[Any]) -> None:
        """Register models, optimizers and scalers that were made before."""
        every = list(things) if self._patches is not None else []
        for thing in every:
            if isinstance(thing, nn.Module | FunctionType):
                self.step_watch.models.remember(thing)
        for thing in every:  # after the models
            if isinstance(thing, Optimizer):
                self.step_watch.optimizer_made(thing)
            elif isinstance(thing, GradScaler):
                self._entry_points.wrap_scaler(type(thing))
                self._tracker.scaler_state(thing)

    def flushed_folder(self) -> Path | None:
        """Return where the record is written, with all steps so far; None if there is no record."""
        if self._record is None:
            return None
        self._record.flush()
        return self._record.folder

    def replaced(self) -> list[tuple[Any, Any]]:
        """Return (original, replacement) for each replaced function."""
        return [] if self._patches is None else self._patches.pairs()

    def __enter__(self) -> Watch:
        return self.install()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.died(error)
        self.close("finished" if error is None else "failed")

    def close(self, status: str = "finished", exit_code: int | None = None, error: BaseException | None = None) -> None:
        """End the watch: judge the whole run, and finish the record."""
        if os.getpid() != self._pid:  # a forked child: the record belongs to its parent
            return
        try:
            try:
                self.step_watch.settle()
            finally:
                self.remove()
            events = self._tracker.finish()
            if any(forward.precision == "bf16" and forward.device == "cuda" for forward in events.forwards):
                device = read_device(torch, 0)
                events.bf16_emulated_on = device.name if device.bf16_native is False else None
            self.step_watch.learning.settle(wait=True)
            self.step_watch.stale.update(self.step_watch.frozen.asking_lines())
            learned = self.step_watch.learned_so_far()
            files = {*own_files(), *(use.step_site.file or "" for use in learned.optimizers)}
            learned.spent = dict(spent_generators(sorted(files)) if self.steps else ())
            learned.ended = status == "finished"
            for evidence in (events, *self.healths.values(), learned, self.time_use):
                if evidence is not None:
                    self.findings.judge_whole(evidence)
            if not self.steps and self._started_processes:
                for finding in findings_in_script():
                    self.findings.add(finding)
            add_diffs(self.seen(), self._folder, self._began)
        except Exception as problem:
            self.failed(problem)
        if self._record is not None:
            for name, value in self.facts().items():
                self._record.fact(name, value)
            self._record.findings(self.seen())
            self._record.close(status, exit_code, error)

    def died(self, error: BaseException) -> None:
        """Report an exception that ended the script."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if code_owner(each.filename) == "own"]
        site = CallSite(file=frames[-1].filename, line=frames[-1].lineno) if frames else CallSite()
        summary = exception_data(error)
        self.tell(ScriptFailed(site=site, error=summary["type"], message=summary["message"]), self._tracker.steps + 1)

    def failed(self, error: Exception) -> None:
        """Note an error of ampwise's own."""
        if len(self.failures) < MOST_FAILURES:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")  # noqa: PTH119
        if os.environ.get("AMPWISE_DEBUG"):
            raise error

    # Judging and writing

    def _process_starts(self, original: Any, process: Any) -> Any:
        self._started_processes = True
        return original(process)

    def tell(self, event: RunEvent, step: int) -> None:
        kind = type(event).__name__
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if isinstance(event, ScalerStep | OptimizerStep) and event.backwards > 1:
            self._kinds["Accumulation"] = self._kinds.get("Accumulation", 0) + 1
        self.findings.judge(event, step)

    def log(self, event: LoggedEvent) -> None:
        self.events.append(event)
        if self._record is not None:
            self._record.event(event)

    def _write_progress(self) -> None:
        """Write findings, and precision and optimizers as soon as they are known, for readers of a running script."""
        if self._record is None:
            return
        now = time.monotonic()
        if self.findings.changed and now - self._written > WRITTEN_EVERY:
            self._written = now
            self.findings.changed = False
            self._record.findings(self.seen())
        facts = self._early_facts()
        is_due = len(facts["optimizers"]) <= FEW_OPTIMIZERS or now - self._early_written_at >= WRITTEN_EVERY
        if is_due and facts != self._early_written:  # each of many optimizers would write the whole list again
            self._early_written_at, self._early_written = now, facts
            for name, value in facts.items():
                self._record.fact(name, value)

    def seen(self) -> list[CountedFinding]:
        """Return the findings so far, worst first, each with an excerpt of the source."""
        found = list(self.findings)
        known = any(is_cause(each.finding) for each in found)
        point_to_cause(found, known=known, after_model=self.step_watch.bad_steps.after_model)
        for each in found:
            file, line = each.finding.place.file, each.finding.place.line
            if not each.excerpt and file is not None and line is not None:
                first = max(line - AROUND, 1)
                lines = linecache.getlines(file)[first - 1 : line + AROUND]
                each.excerpt = {"first_line": first, "lines": [text.rstrip("\n") for text in lines]}
        return found

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run other than findings."""
        return {
            "steps": self._tracker.steps,
            "backward_passes": self.step_watch.calls.backward_passes,
            **self._early_facts(),
            "what_was_fine": list_passed_checks(self._tracker.run_events, self._kinds, self.seen(), self.healths),
            "not_measured": self.not_measured(),
            "timing": None if self.time_use is None else self.time_use.as_dict(),
            "settings": [
                {"name": name, "value": value, "reason": reason}
                for health in self.healths.values()
                for name, (value, reason) in suggested_settings(health).items()
            ],
            "dtype_flow": self.step_watch.flow.rows(),
            "memory": self.step_watch.memory.facts(),
            **({"replicas": sums} if (sums := self.step_watch.replicas.facts()) else {}),
            "activations": {
                name: {"dtype": dtype, "largest": value} for name, (dtype, value) in self.step_watch.largest.items()
            },
        }

    def _early_facts(self) -> dict[str, Any]:
        """Return facts that are known after the first steps and seldom change: precision and optimizers."""
        optimizers = [
            {"index": index, "name": name, "model": " and ".join(models)}
            for index, (name, models) in sorted(self.step_watch.described.items())
        ]
        return {"precision": next((each.precision for each in self.healths.values()), None), "optimizers": optimizers}

    def not_measured(self) -> list[str]:
        """Return sentences on what was not measured, and why."""
        sentences = [*self.step_watch.not_measured, *self.step_watch.bad_steps.sentences]
        if self._tracker.follows.others:
            sentences.append("Several threads trained at the same time; only one of them was followed.")
        if self.failures:
            sentences.append(f"Some calls could not be followed: {self.failures[0]}")
        if not self.step_watch.always_measures:
            sentences.append("Activations were not measured; use --activations.")
        steps = self.step_watch
        if steps.models.has_compiled_functions and not steps.steps and steps.calls.backward_passes:
            sentences.append(
                "No step of an optimizer was seen, perhaps because a compiled function takes them. Steps are followed "
                "if `optimizer.step` itself is compiled, or not at all."
            )
        sentences += [*steps.gradients.not_measured(), *steps.flow.not_measured(), *steps.memory.not_measured()]
        return sentences if self.time_use is None else [*sentences, *self.time_use.not_measured]
