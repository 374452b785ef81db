"""``Sinks``: send an engine's steps to sinks, each when its numbers have arrived on the host; nothing syncs."""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkRequest, SinkSyntax, requested_sinks
from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.run_sinks import SinkThreads
from ampwise.train.callback import Callback
from ampwise.train.ranks import is_main_process
from ampwise.train.scaler.step_result import AsyncScalars, StepResult
from ampwise.train.step import Step

if TYPE_CHECKING:
    from ampwise.train.engine import Engine

__all__ = ["Sinks"]

SYNTAX = SinkSyntax("Sinks({})", quoted=True, each="give each a string of its own")
_NAMES: set[Path] = set()  # base names of the files that this process's sinks write


class Sinks(Callback):
    """Callback that sends the numbers of each step to TensorBoard, W&B, MLflow, trackio, a file or a function.

    ``Engine(..., callbacks=[Sinks("tensorboard:logs", "wandb")])``. Each sink has a thread of its own: training does
    not wait for it, and does not fail because of it. They receive each step a little later. With several ranks, only
    the first sends. The sinks are closed by ``engine.close()``, or when the program ends.

    Args:
        sinks: names of sinks, "kind" or "kind:target", such as "jsonl:metrics.jsonl"; and functions that take a
            ``MetricsRow``, such as ``lambda row: print(row.step, row.metrics)``.

    Raises:
        BadInput: not the name of a sink.
        MissingDependency: the package of a sink is not installed.

    >>> Sinks("jsonl:metrics.jsonl", print)
    <Sinks jsonl, print>
    """

    def __init__(self, *sinks: str | Callable[[MetricsRow], None]) -> None:
        # A file name for sinks without a target, unique even among runs started in the same second.
        stem = f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        names = (Path.cwd() / (stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
        base = next(name for name in names if name not in _NAMES and not any(name.parent.glob(f"{name.name}.*")))
        self._wanted: list[SinkRequest] = requested_sinks(sinks, base=base, asking=SYNTAX, sends=is_main_process())
        _NAMES.add(base)
        self._threads: SinkThreads | None = None  # while it is attached to an engine
        self._engine: Callable[[], Engine | None] = lambda: None  # which it does not keep alive
        self._scale: AsyncScalars | None = None  # the loss scale of the current step
        self._awaited: deque[tuple[Step, AsyncScalars | None]] = deque()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Sinks {', '.join(each.label for each in self._wanted)}>"

    def on_attach(self, engine: Engine) -> None:
        if self._threads is not None:
            raise BadInput("Sinks(...) is already in use by another engine: create one for each.")
        self._engine = weakref.ref(engine)
        if not is_main_process():
            return
        for wanted in self._wanted:
            wanted.load()
        self._threads = SinkThreads(self._wanted, partial(log, "warning", "{}"), at_exit=self.close)
        atexit.register(self.close)  # the threads make sure that this runs early enough
        weakref.finalize(engine, self.end).atexit = False

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Record the scale of the step's gradients, before the step changes it."""
        engine = None if self._threads is None else self._engine()
        scale = None if engine is None else engine.scaler.scale_tensor
        self._scale = None if scale is None else AsyncScalars(scale.detach().reshape(1))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Send the steps whose numbers have arrived."""
        if self._threads is None:
            return
        self._awaited.append((step.bare(), self._scale))
        while self._awaited and self._awaited[0][0].known:
            self._send(*self._awaited.popleft())

    def on_close(self) -> None:
        self.close()
        engine = self._engine()
        if engine is not None:
            engine.remove_callback(self)
        self._threads = None

    def end(self) -> None:
        """Send the remaining steps, syncing with the last; the sinks close when they have them.

        Called when the engine is garbage-collected. That may happen on a sink's own thread, so this does not wait for
        the sinks.
        """
        if self._threads is None or os.getpid() != self._pid:
            return
        while self._awaited:
            self._send(*self._awaited.popleft())
        self._threads.end()

    def close(self) -> None:
        """Send the remaining steps, and wait until the sinks are closed."""
        atexit.unregister(self.close)
        self.end()
        if self._threads is not None and os.getpid() == self._pid:
            self._threads.close()

    def _send(self, step: Step, scale: AsyncScalars | None) -> None:
        assert self._threads is not None
        self._threads.send(
            StepRow(
                step=step.number,
                loss=step.loss,
                scale=None if scale is None else scale.read()[0],
                norm=step.grad_norm,
                skipped=step.skipped,
                lr=step.lr,
            )
        )
