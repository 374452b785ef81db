"""Report an engine's steps to sinks, each when its numbers have arrived on the host: nothing syncs with the device."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.terminal import log_line
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkRequest, SinkSyntax, requested_sinks
from ampwise.runs.sinks.run_sinks import Sinks
from ampwise.train.callback import Callback
from ampwise.train.ranks import is_main_process
from ampwise.train.scaler.step_result import AsyncScalars, StepResult
from ampwise.train.step import Step

if TYPE_CHECKING:
    from ampwise.train.engine import Engine

__all__ = ["SinkReporter", "make_reporter"]

SINK_OPTION = SinkSyntax("Engine(sinks=[{}])", quoted=True, each="give each a string of its own")
_NAMES: set[Path] = set()  # base names of the files that this process's engines write


def make_reporter(sinks: Any) -> SinkReporter | None:
    """Return what reports steps to these sinks; None without sinks, and on all ranks but the first."""
    if sinks is None:
        return None
    if isinstance(sinks, str) or callable(sinks) or not isinstance(sinks, Iterable):
        raise BadInput(f"Engine(sinks={sinks!r}): expected a list, such as sinks=['tensorboard:logs', a_function].")
    # A file name for sinks without a target, unique even among runs started in the same second.
    stem = f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (Path.cwd() / (stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
    base = next(name for name in names if name not in _NAMES and not any(name.parent.glob(f"{name.name}.*")))
    wanted = requested_sinks(sinks, base=base, asking=SINK_OPTION, sends=is_main_process())
    if not wanted or not is_main_process():
        return None
    _NAMES.add(base)
    for opening in wanted:
        opening.load()
    return SinkReporter(wanted)


class SinkReporter(Callback):
    """Sends steps to sinks. It does not keep the engine alive, which may be deleted before the last step arrives."""

    def __init__(self, wanted: Sequence[SinkRequest]) -> None:
        self._sinks = Sinks(wanted, partial(log_line, "ampwise: warning: {}"), at_exit=self.close)
        self._scale: AsyncScalars | None = None  # the loss scale of the current step
        self._awaited: deque[tuple[Step, AsyncScalars | None]] = deque()
        self._pid = os.getpid()
        atexit.register(self.close)  # the sinks make sure that this runs early enough

    def on_attach(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Record the scale of the step's gradients, before the step changes it."""
        engine = self._engine()
        scale = None if engine is None else engine.scaler.scale_tensor
        self._scale = None if scale is None else AsyncScalars(scale.detach().reshape(1))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Send the steps whose numbers have arrived."""
        self._awaited.append((step.bare(), self._scale))
        while self._awaited and self._awaited[0][0].known:
            self._tell(*self._awaited.popleft())

    def end(self) -> None:
        """Send the remaining steps, syncing with the last; the sinks close when they have them.

        Called when the engine is garbage-collected. That may happen on a sink's own thread, so this does not wait for
        the sinks.
        """
        if os.getpid() != self._pid:
            return
        while self._awaited:
            self._tell(*self._awaited.popleft())
        self._sinks.end()

    def close(self) -> None:
        """Send the remaining steps, and wait until the sinks are closed."""
        atexit.unregister(self.close)
        self.end()
        if os.getpid() == self._pid:
            self._sinks.close()

    def _tell(self, step: Step, scale: AsyncScalars | None) -> None:
        self._sinks.send(
            StepRow(
                step=step.number,
                loss=step.loss,
                scale=None if scale is None else scale.read()[0],
                norm=step.grad_norm,
                skipped=step.skipped,
                lr=step.lr,
            )
        )
