"""One step under torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.scopes import UPDATE, scopes_on
from ampwise.watch.patches import Patches
from ampwise.watch.profiler import Profiler

__all__ = ["profiled_step"]


def profiled_step(contender: Contender) -> Any:
    """What torch has recorded of a step; with ranges for modules unless it is compiled, which they would change.

    The caller has given the contender its turn.
    """
    step = contender.step
    ranges = nullcontext() if contender.compiled else scopes_on(step.subject.model)
    with _profiler() as profiler, ranges:
        _wait(step.subject.device)
        profiler.start()
        try:
            step.forward_and_backward()
            with record_function(UPDATE):
                step.update()
            _wait(step.subject.device)
        finally:
            recorded = profiler.stop()
    return recorded


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _profiler() -> Iterator[Profiler]:
    patches = Patches()
    try:
        yield Profiler(patches)
    finally:
        patches.undo()
