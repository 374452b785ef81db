"""Compiled code at fault: a step that is finite eagerly, but not as torch.compile has compiled it."""

from __future__ import annotations

import sys

from ampwise.trace.failure import COMPILER
from ampwise.trace.failure_facts import FixTrial
from ampwise.trace.ranks import RankGroup
from ampwise.trace.replay import Replay, ReplayResult, ReplaySettings

__all__ = ["try_compilers"]

# By backend, from the one that changes the code most to the one that changes it least: what is at fault if the step is
# finite with it, but with none before it.
AT_FAULT = {
    "aot_eager": "the code that the backend generates",
    "eager": "AOTAutograd, which prepares the graph for the backend",
}
CAPTURE = "the capture of the graph by dynamo"
AGAIN = 2  # compiled runs that must all fail: a result that comes and goes is not the compiler's


def try_compilers(replay: Replay, together: RankGroup) -> tuple[ReplayResult, FixTrial] | None:
    """Run a step that is finite eagerly as it was compiled, then with backends that change less.

    Returns how the compiled step ended, and the first trial in which it is finite; None if nothing is compiled, or it
    is finite too.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not dynamo.utils.counters["frames"]["total"]:
        return None  # nothing was ever compiled
    settings = ReplaySettings(scale=replay.subject.scale)
    ended = [together.each(lambda: replay.compiled(settings)) for _ in range(AGAIN)]
    if together.several:
        bad = all(not all(together.all_of(each.finite)) for each in ended)
    else:
        bad = not any(each.finite for each in ended)
    if not bad:
        return None
    for backend, stage in AT_FAULT.items():
        try:
            other = together.each(lambda backend=backend: replay.compiled(settings, backend))  # type: ignore[misc]
        except Exception:  # it cannot compile the code, or this version of torch cannot switch
            continue
        if all(together.all_of(other.finite)):
            code = f'model = torch.compile(model, backend="{backend}")'
            what = f'backend="{backend}"'
            return ended[0], FixTrial(
                what=what, code=code, finite=True, change=COMPILER, argument=stage, loss=other.loss
            )
    eager = replay.plain(settings)
    return ended[0], FixTrial(
        what="without torch.compile",
        code='torch.compiler.set_stance("force_eager")',
        finite=True,
        change=COMPILER,
        argument=CAPTURE,
        loss=eager.loss,
    )
