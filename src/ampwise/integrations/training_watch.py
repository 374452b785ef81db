"""Watch a training that a framework runs: its callbacks begin and end the watch, its loggers get the metrics."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.finding.terminal import console, wants_colour, write
from ampwise.runs.reader import Run
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkSyntax, requested_sinks
from ampwise.runs.sinks.metrics import MetricRows, SkipCounter, TimedEvent
from ampwise.runs.sinks.run_sinks import SinkThreads
from ampwise.runs.writer import RecordWriter, RunEvent
from ampwise.watch.patches import Patches
from ampwise.watch.watch import Watch

__all__ = ["TrainingWatch"]


_OPEN: list[TrainingWatch] = []  # at most one, until its training ends or another one begins


class TrainingWatch:
    """Base of the frameworks' callbacks: watches a training, with the record, sinks and summary of ``ampwise run``."""

    _name: str  # of the public class, for messages
    _part: str = ""  # of a script that is watched: "block"; "" for a whole training
    _logged_already: frozenset[str] = frozenset()  # metrics that the framework logs itself

    def __init__(
        self,
        output: str | Path | None = None,
        *,
        force: bool = False,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        sinks: Sequence[str | Callable[[Any], None]] = (),
        quiet: bool = False,
    ) -> None:
        asked = self._name
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise BadInput(f"{asked}(every={every!r}): expected a whole number of steps above 0, or None.")
        if isinstance(sinks, str) or not isinstance(sinks, Iterable):
            raise BadInput(f"{asked}(sinks={sinks!r}): expected a list such as sinks=['tensorboard:logs', a_function].")
        self._asking = SinkSyntax(f"{asked}(sinks=[{{}}])", quoted=True, each="give each a string of its own")
        self._force, self._sinks, self._quiet = force, list(sinks), quiet
        self._output = None if output is None else Path(output)
        self._options = {"every": every, "activations": activations, "timing": timing}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folder = Path()
        self._patches = Patches()  # of the framework, until the training ends
        self._is_first_rank = True
        self._watch: Watch | None = None
        self._training: object = None  # the training that is watched, compared by identity
        self._new_metrics: dict[str, float] = {}  # not logged yet, under the names that sinks use
        self._run: Run | None = None

    @property
    def run(self) -> Run | None:
        """Record of the last training that ended."""
        return self._run

    def _begin(self, training: object, *, rank: int = 0, world_size: int = 1) -> bool:
        """Start watching; False if the training is already watched. The watch of a failed training is ended first."""
        for other in [each for each in _OPEN if each is self or each._training is not training]:
            other._end(failed=True)
        if getattr(torch.autograd.backward, "_ampwise", False):
            why = "since `ampwise run` or another callback already watches this training."
            log("warning", "{}: ignored, {}", self._name, why)
            return False
        self._is_first_rank = rank == 0
        if self._output is None:
            self._temporary, rank, world_size = tempfile.TemporaryDirectory(), 0, 1
            self._folder = Path(self._temporary.name) / "run"
        else:
            self._folder = self._output
        base = self._output or Path.cwd() / f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        wanted = requested_sinks(self._sinks, base=base, asking=self._asking, sends=self._is_first_rank)
        script = Path(sys.argv[0]).name or None
        try:
            record = RecordWriter.create(
                self._folder, force=self._force, rank=rank, world_size=world_size, command=sys.argv, script=script
            )
        except BadInput as error:
            message = str(error).replace("-f ", "force=True ").replace("-o ", "output ")  # options as arguments
            raise BadInput(f"{self._name}(output={str(self._output)!r}): {message}") from error
        self._folder = record.folder
        if self._part:
            record.fact("watched", self._part)
        self._listen(record, wanted if self._is_first_rank else [])
        self._watch = Watch(record, **self._options).install()  # type: ignore[arg-type]
        self._training = training
        _OPEN.append(self)
        atexit.register(self._end_at_exit)
        return True

    def _listen(self, record: RecordWriter, wanted: Sequence[Any]) -> None:
        """Send what happens in the run to the sinks, and keep its metrics until they are logged."""
        metrics, skips = MetricRows(), SkipCounter()
        self._new_metrics = {}
        for opening in wanted:
            opening.load()
        sinks = SinkThreads(wanted, record.event)

        def tell(told: RunEvent) -> None:
            rate = skips.rate(told) if isinstance(told, StepRow) else None
            row = metrics.row(TimedEvent(time.time(), told, rate))
            found = {} if row is None else row.metrics
            self._new_metrics.update((name, value) for name, value in found.items() if name not in self._logged_already)
            sinks.send(told)

        record.listen(tell, before_end=sinks.close)

    def _adopt(self, *things: Any) -> None:
        """Watch models, optimizers and scalers that were made before the watch began."""
        if self._watch is not None:
            self._watch.adopt(things)

    def _take(self) -> dict[str, float]:
        """Return new metrics for the framework's loggers; on the first rank only."""
        taken, self._new_metrics = self._new_metrics, {}
        return taken if self._is_first_rank else {}

    def _end(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """End the watch: run the final checks, finish the record, and print the summary to stderr."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._training = None
        _OPEN.remove(self)
        self._patches.undo()
        atexit.unregister(self._end_at_exit)
        if isinstance(error, Exception):
            watch.died(error)
        stopped = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        watch.close(stopped if failed or error is not None else "finished", None, error)
        try:
            self._run = Run.read(self._folder)
            if self._is_first_rank and not self._quiet:
                self._show(self._run)
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _end_at_exit(self) -> None:
        self._end(failed=True)  # the training failed, and its framework has no callback for that

    def _show(self, run: Run) -> None:
        from ampwise.report.run_text import run_text

        kept = f"`{self._name}(output='RUN')` keeps the record, for `ampwise report RUN`." if self._temporary else ""
        text = run_text(run, colour=wants_colour(sys.stderr), width=console(sys.stderr).width, not_kept=kept)
        sys.stdout.flush()
        write("\n" + text, sys.stderr)
