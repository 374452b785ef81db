"""The watch over a training that a framework runs: begun and ended by its callbacks, with numbers for its loggers."""

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
from ampwise.record.reader import Run
from ampwise.record.rows import Seen, StepRow
from ampwise.record.writer import Writer
from ampwise.sinks import Asking, openings
from ampwise.sinks.metrics import Fact, Metrics, Skips, Told
from ampwise.sinks.together import Sinks
from ampwise.watch.watch import Watch

__all__ = ["Numbers", "Watching"]


class Numbers:
    """What became known of steps, by the names that sinks use, until somebody logs it; each once."""

    def __init__(self, but: Iterable[str] = ()) -> None:
        self._but = frozenset(but)
        self._metrics, self._skips = Metrics(), Skips()
        self._waiting: dict[str, float] = {}

    def tell(self, told: Told) -> None:
        """A fact of the run. Of a number that is known again before it was logged, the newer holds."""
        rate = self._skips.rate(told) if isinstance(told, StepRow) else None
        row = self._metrics.row(Fact(time.time(), told, rate))
        if row is not None:
            self._waiting.update((name, value) for name, value in row.metrics.items() if name not in self._but)

    def take(self) -> dict[str, float]:
        """What is new since this was called last."""
        taken, self._waiting = self._waiting, {}
        return taken


_OPEN: list[Watching] = []  # one, or none; until the training ends, or another begins


class Watching:
    """``ampwise run`` for one training: the same watch, record, sinks and summary.

    asked: how the user has asked for it, for what is said. output: the folder of the record; None keeps none. but:
    numbers that the framework logs itself. when_ended: called at the end, also of a training that died.
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
            raise BadInput(f"{asked}(every={every!r}): a whole number of steps above 0 is expected, or None.")
        if isinstance(sinks, str) or not isinstance(sinks, Iterable):
            raise BadInput(f"{asked}(sinks={sinks!r}): a list is expected: sinks=['tensorboard:logs', a_function].")
        self._asking = Asking(f"{asked}(sinks=[{{}}])", quoted=True, each="give each a string of its own")
        self._asked, self._force, self._sinks, self._quiet = asked, force, list(sinks), quiet
        self._output = None if output is None else Path(output)
        self._options = {"every": every, "activations": activations, "timing": timing}
        self._but = tuple(but)
        self._aside: tempfile.TemporaryDirectory[str] | None = None
        self._folder = Path()
        self._speaks = True
        self._watch: Watch | None = None
        self._when_ended = when_ended
        self._training: object = None  # what is watched, told from others by being the same
        self._numbers = Numbers(self._but)
        self.run: Run | None = None  # the last that has ended

    def begin(self, training: object, *, rank: int = 0, world_size: int = 1) -> bool:
        """Watch from now on; False if somebody does. What a training that died has left behind is ended first."""
        for other in [each for each in _OPEN if each is self or each._training is not training]:
            other.end(failed=True)
        if getattr(torch.autograd.backward, "_ampwise", False):
            _say(f"{self._asked}: this is watched already, by `ampwise run` or another callback; once is enough.")
            return False
        self._speaks = rank == 0
        if self._output is None:
            self._aside, rank, world_size = tempfile.TemporaryDirectory(), 0, 1
            self._folder = Path(self._aside.name) / "run"
        else:
            self._folder = self._output
        wanted = openings(self._sinks, base=self._base(), asking=self._asking, sends=self._speaks)
        script = Path(sys.argv[0]).name or None
        try:
            record = Writer.create(
                self._folder, force=self._force, rank=rank, world_size=world_size, command=sys.argv, script=script
            )
        except BadInput as error:
            said = str(error).replace("-f ", "force=True ").replace("-o ", "output ")  # not the command line's words
            raise BadInput(f"{self._asked}(output={str(self._output)!r}): {said}") from error
        self._folder = record.folder
        self._listen(record, wanted if self._speaks else [])
        self._watch = Watch(record, **self._options).install()  # type: ignore[arg-type]
        self._training = training
        _OPEN.append(self)
        atexit.register(self._end_at_exit)
        return True

    def _base(self) -> Path:
        """Beside which sinks write that were given no place."""
        stem = f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return Path.cwd() / stem if self._output is None else self._output

    def _listen(self, record: Writer, wanted: Sequence[Any]) -> None:
        self._numbers = numbers = Numbers(self._but)
        for opening in wanted:
            opening.load()
        sinks = Sinks(wanted, lambda finding: record.add_finding(Seen(finding=finding)))

        def tell(told: Told) -> None:
            numbers.tell(told)
            sinks.tell(told)

        record.listen(tell, before_end=sinks.close)

    def adopt(self, *things: Any) -> None:
        """Models, optimizers and scalers that were made before it began."""
        if self._watch is not None:
            self._watch.adopt(things)

    def take(self) -> dict[str, float]:
        """Numbers for the framework's loggers that it has not been given; on the first rank only."""
        return self._numbers.take() if self._speaks else {}

    def end(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """Judge the whole, write the record's end, and say on stderr what was found."""
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
            if self._speaks and not self._quiet:
                self._show(self.run)
        finally:
            if self._aside is not None:
                self._aside.cleanup()
                self._aside = None

    def _end_at_exit(self) -> None:
        self.end(failed=True)  # the training has died, and its framework has no word for that

    def _show(self, run: Run) -> None:
        from ampwise.printers.terminal import console, wants_colour, write
        from ampwise.report.summary import summary

        kept = (
            "" if self._aside is None else f"`{self._asked}(output='RUN')` keeps the record, for `ampwise report RUN`."
        )
        text = summary(run, colour=wants_colour(sys.stderr), width=console(sys.stderr).width, not_kept=kept)
        sys.stdout.flush()
        write("\n" + text, sys.stderr)


def _say(said: str) -> None:
    from ampwise.printers.terminal import say

    say("ampwise: warning: {}", said)
