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
from ampwise.runs.reader import Run
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkSyntax, requested_sinks
from ampwise.runs.sinks.metrics import MetricRows, SinkEvent, SkipCounter, TimedEvent
from ampwise.runs.sinks.run_sinks import Sinks
from ampwise.runs.writer import RecordWriter
from ampwise.watch.watch import Watch

__all__ = ["PendingMetrics", "TrainingWatch"]


class PendingMetrics:
    """Metrics of steps, under the names that sinks use, kept until they are logged once."""

    def __init__(self, but: Iterable[str] = ()) -> None:
        self._but = frozenset(but)
        self._metrics, self._skips = MetricRows(), SkipCounter()
        self._waiting: dict[str, float] = {}

    def tell(self, told: SinkEvent) -> None:
        """Add the metrics of a step or event; a newer value replaces one that was not logged yet."""
        rate = self._skips.rate(told) if isinstance(told, StepRow) else None
        row = self._metrics.row(TimedEvent(time.time(), told, rate))
        if row is not None:
            self._waiting.update((name, value) for name, value in row.metrics.items() if name not in self._but)

    def take(self) -> dict[str, float]:
        """Return the metrics that are new since the last call."""
        taken, self._waiting = self._waiting, {}
        return taken


_OPEN: list[TrainingWatch] = []  # at most one, until its training ends or another one begins


class TrainingWatch:
    """Watch over one training, with the record, sinks and summary of ``ampwise run``.

    asked: the callback's public name, for messages. output: the folder of the record; None keeps none. but: metrics
    that the framework logs itself. when_ended: called at the end, also if the training failed.
    """

    def __init__(
        self,
        asked: str,
        output: str | Path | None = None,
        *,
        force: bool = False,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        sinks: Sequence[str | Callable[[Any], None]] = (),
        quiet: bool = False,
        but: Iterable[str] = (),
        when_ended: Callable[[], None] | None = None,
    ) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise BadInput(f"{asked}(every={every!r}): expected a whole number of steps above 0, or None.")
        if isinstance(sinks, str) or not isinstance(sinks, Iterable):
            raise BadInput(f"{asked}(sinks={sinks!r}): expected a list such as sinks=['tensorboard:logs', a_function].")
        self._asking = SinkSyntax(f"{asked}(sinks=[{{}}])", quoted=True, each="give each a string of its own")
        self._asked, self._force, self._sinks, self._quiet = asked, force, list(sinks), quiet
        self._output = None if output is None else Path(output)
        self._options = {"every": every, "activations": activations, "timing": timing}
        self._but = tuple(but)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folder = Path()
        self._is_first_rank = True
        self._watch: Watch | None = None
        self._when_ended = when_ended
        self._training: object = None  # the training that is watched, compared by identity
        self._numbers = PendingMetrics(self._but)
        self.run: Run | None = None  # of the last training that ended

    def begin(self, training: object, *, rank: int = 0, world_size: int = 1) -> bool:
        """Start watching; False if the training is already watched. The watch of a failed training is ended first."""
        for other in [each for each in _OPEN if each is self or each._training is not training]:
            other.end(failed=True)
        if getattr(torch.autograd.backward, "_ampwise", False):
            _say(f"{self._asked}: ignored, since `ampwise run` or another callback already watches this training.")
            return False
        self._is_first_rank = rank == 0
        if self._output is None:
            self._temporary, rank, world_size = tempfile.TemporaryDirectory(), 0, 1
            self._folder = Path(self._temporary.name) / "run"
        else:
            self._folder = self._output
        wanted = requested_sinks(self._sinks, base=self._base(), asking=self._asking, sends=self._is_first_rank)
        script = Path(sys.argv[0]).name or None
        try:
            record = RecordWriter.create(
                self._folder, force=self._force, rank=rank, world_size=world_size, command=sys.argv, script=script
            )
        except BadInput as error:
            message = str(error).replace("-f ", "force=True ").replace("-o ", "output ")  # options as arguments
            raise BadInput(f"{self._asked}(output={str(self._output)!r}): {message}") from error
        self._folder = record.folder
        self._listen(record, wanted if self._is_first_rank else [])
        self._watch = Watch(record, **self._options).install()  # type: ignore[arg-type]
        self._training = training
        _OPEN.append(self)
        atexit.register(self._end_at_exit)
        return True

    def _base(self) -> Path:
        """Return the path beside which sinks without a target write."""
        stem = f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return Path.cwd() / stem if self._output is None else self._output

    def _listen(self, record: RecordWriter, wanted: Sequence[Any]) -> None:
        self._numbers = numbers = PendingMetrics(self._but)
        for opening in wanted:
            opening.load()
        sinks = Sinks(wanted, record.event)

        def tell(told: SinkEvent) -> None:
            numbers.tell(told)
            sinks.send(told)

        record.listen(tell, before_end=sinks.close)

    def adopt(self, *things: Any) -> None:
        """Watch models, optimizers and scalers that were made before the watch began."""
        if self._watch is not None:
            self._watch.adopt(things)

    def take(self) -> dict[str, float]:
        """Return new metrics for the framework's loggers; on the first rank only."""
        return self._numbers.take() if self._is_first_rank else {}

    def end(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """End the watch: run the final checks, finish the record, and print the summary to stderr."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._training = None
        _OPEN.remove(self)
        if self._when_ended is not None:
            self._when_ended()
        atexit.unregister(self._end_at_exit)
        if isinstance(error, Exception):
            watch.died(error)
        stopped = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        watch.close(stopped if failed or error is not None else "finished", None, error)
        try:
            self.run = Run.read(self._folder)
            if self._is_first_rank and not self._quiet:
                self._show(self.run)
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _end_at_exit(self) -> None:
        self.end(failed=True)  # the training failed, and its framework has no callback for that

    def _show(self, run: Run) -> None:
        from ampwise.finding.terminal import console, wants_colour, write
        from ampwise.report.run_text import run_text

        kept = (
            ""
            if self._temporary is None
            else f"`{self._asked}(output='RUN')` keeps the record, for `ampwise report RUN`."
        )
        text = run_text(run, colour=wants_colour(sys.stderr), width=console(sys.stderr).width, not_kept=kept)
        sys.stdout.flush()
        write("\n" + text, sys.stderr)


def _say(text: str) -> None:
    from ampwise.finding.terminal import say

    say("ampwise: warning: {}", text)
