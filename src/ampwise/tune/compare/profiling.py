"""Run one step under torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.profiler_ranges import UPDATE, module_ranges
from ampwise.watch.patches import Patches
from ampwise.watch.profiler import Profiler

__all__ = ["profiled_step"]


def profiled_step(contender: Contender) -> Any:
    """Return the profiler's record of a step, with a range for each module unless compiled: hooks would recompile it.

    Call it in the contender's turn.
    """
    step = contender.step
    ranges = nullcontext() if contender.compiled else module_ranges(step.case.model)
    with _profiler() as profiler, ranges:
        _synchronize(step.case.device)
        profiler.start()
        try:
            step.forward_and_backward()
            with record_function(UPDATE):
                step.update()
            _synchronize(step.case.device)
        finally:
            recorded = profiler.stop()
    return recorded


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _profiler() -> Iterator[Profiler]:
    patches = Patches()
    try:
        yield Profiler(patches)
    finally:
        patches.undo()
