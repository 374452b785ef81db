"""Telling sinks of an engine's steps, each when its facts have arrived: nothing waits for the device."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ampwise.engine.ranks import speaks
from ampwise.engine.scaling.facts import Posted
from ampwise.engine.step import Step
from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.record.rows import StepRow
from ampwise.sinks import Asking, Opening, openings
from ampwise.sinks.together import Sinks

__all__ = ["Telling", "telling"]

ASKING = Asking("Engine(sinks=[{}])", quoted=True, each="give each a string of its own")
_NAMES: set[Path] = set()  # of the files of this process's engines


def telling(sinks: Any) -> Telling | None:
    """None where nobody is to be told; of several ranks the first tells."""
    if sinks is None:
        return None
    if isinstance(sinks, str) or callable(sinks) or not isinstance(sinks, Iterable):
        raise BadInput(f"Engine(sinks={sinks!r}): a list is expected: sinks=['tensorboard:logs', a_function].")
    base = _free_name()
    wanted = openings(sinks, base=base, asking=ASKING, sends=speaks())
    if not wanted or not speaks():
        return None
    _NAMES.add(base)
    for opening in wanted:
        opening.load()
    return Telling(wanted)


def _free_name() -> Path:
    """For the files of sinks without a target. Runs that begin in the same second, here or elsewhere, have others."""
    stem = f"ampwise-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (Path.cwd() / (stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if name not in _NAMES and not any(name.parent.glob(f"{name.name}.*")))


def _say(finding: Finding) -> None:
    from ampwise.printers.terminal import say

    say("ampwise: warning: {} {}: {}", finding.rule.code, finding.rule.name, finding.message)


class Telling:
    """Steps on their way to sinks. It knows nothing of the engine, which may end while they travel."""

    def __init__(self, wanted: Sequence[Opening]) -> None:
        self._sinks = Sinks(wanted, _say, at_exit=self.close)
        self._scale: Posted | None = None  # of the step that is being taken
        self._awaited: deque[tuple[Step, Posted | None]] = deque()
        self._pid = os.getpid()
        atexit.register(self.close)  # the sinks see to it that it comes early enough

    def step_begins(self, scale: Tensor | None) -> None:
        """The scale that its gradients have, which it may change."""
        self._scale = None if scale is None else Posted(scale.detach().reshape(1))

    def step_ended(self, step: Step) -> None:
        """Tell of the steps that are known by now."""
        self._awaited.append((step.bare(), self._scale))
        while self._awaited and self._awaited[0][0].known:
            self._tell(*self._awaited.popleft())

    def end(self) -> None:
        """Tell the rest, which waits for the last step; the sinks close when they have it. For an engine that is gone:
        it may be a sink's own thread that has found it so, and would wait for itself."""
        if os.getpid() != self._pid:
            return
        while self._awaited:
            self._tell(*self._awaited.popleft())
        self._sinks.end()

    def close(self) -> None:
        """Tell the rest, and wait until the sinks are closed."""
        atexit.unregister(self.close)
        self.end()
        if os.getpid() == self._pid:
            self._sinks.close()

    def _tell(self, step: Step, scale: Posted | None) -> None:
        self._sinks.tell(
            StepRow(
                step=step.number,
                loss=step.loss,
                scale=None if scale is None else scale.read()[0],
                norm=step.grad_norm,
                skipped=step.skipped,
                lr=step.lr,
            )
        )
