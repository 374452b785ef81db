"""Cost of finding the first operation that is not finite: nothing until a step is bad, then a replay.

Runs all parts, each with its own result, or one: ``python -m benchmarks.trace --part explained``.

explained   GPT-2 124M in FP16: the time and the memory of an explanation, in plain steps, beside what looking at
            every step costs: torch's anomaly detection, and a dispatch mode that asks each result whether it is finite.
awaited     what the engine's step costs while nothing is bad, with and without what it keeps for a replay.

On a CPU both are run with smaller models.
"""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ampwise
from benchmarks.contenders import Task, by_hand
from benchmarks.gpt import GPT2_124M, GPT_1M, GPT_4M, Shape
from benchmarks.harness import Contender, Result, note, publish_parts
from benchmarks.step import PAIRED, Row, Turns, device, has_gpu, race, suffix
from benchmarks.watch_contenders import Loop, anomaly_detected

WANTED_STEPS, WANTED_MEMORY = 12, 1.15
STEPS = 8  # plain ones, before each explanation
TURNS = {"gpu": Turns(5, 3), "cpu": Turns(3, 2)}
TINY_TURNS = {"gpu": Turns(20, 20), "cpu": Turns(10, 5)}
PER_OP = "isfinite of each operation's results"


# Faults


def activations_overflow(model: Any) -> Callable[..., Tensor]:
    """In the middle of the forward pass: a normalisation's gain has grown, and the product after it leaves FP16."""
    blocks = model.blocks
    with torch.no_grad():
        blocks[len(blocks) // 2].ln_2.weight.fill_(1e6)
    return model  # type: ignore[no-any-return]


def derivative_is_infinite(model: Any) -> Callable[..., Tensor]:
    """In the backward pass alone: the root of a norm that is zero."""

    def loss_fn(*batch: Tensor) -> Tensor:
        return model(*batch) + (model.wpe.weight[0] * 0.0).square().sum().sqrt()  # type: ignore[no-any-return]

    return loss_fn


FAULTS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "an activation overflows in the middle of the model": activations_overflow,
    "a derivative is infinite": derivative_is_infinite,
}


class Explained(NamedTuple):
    """Of one bad step."""

    step_ms: float  # a plain one, in the same run
    ms: float
    memory: float  # peak, as a ratio to that of a plain step
    found: str


def explanation(task: Task, plant: Callable[[Any], Callable[..., Tensor]]) -> Explained:
    """A fresh engine takes plain steps, and then one that fails."""
    model, optimizer, batch = task.trainee()
    engine = ampwise.Engine(model, optimizer, task.precision, clip_norm=task.clip)
    times = [_timed(lambda: engine.step(model, *batch)) for _ in range(STEPS)]
    plain_peak = _peak_of(lambda: engine.step(model, *batch))
    loss_fn = plant(model)
    with contextlib.redirect_stderr(io.StringIO()):
        took = _timed(lambda: (engine.step(loss_fn, *batch), engine.findings))
    peak = _peak()
    found = [finding.rule.name for finding in engine.findings]
    return Explained(statistics.median(times[2:]), took, peak / plain_peak if plain_peak else 0.0, ", ".join(found))


def _timed(work: Callable[[], object]) -> float:
    _settle()
    start = time.perf_counter()
    work()
    if has_gpu():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _settle() -> None:
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if has_gpu() else 0


def _peak_of(work: Callable[[], object]) -> int:
    _timed(work)
    return _peak()


class _PerOp(TorchDispatchMode):
    """As one writes it in an afternoon."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, Tensor) and each.is_floating_point():
                bool(torch.isfinite(each).all())
        return result


def each_operation_asked(task: Task) -> Contender:
    return Contender(name=PER_OP, work=Loop(task).step, around=_PerOp)


def explained(shape: Shape | None = None) -> Result:
    task = Task(shape=shape or (GPT2_124M if has_gpu() else GPT_1M), precision="fp16", device=device())
    result = Result(
        name=f"trace_{suffix()}",
        title=f"What an explanation of a bad step costs on a {suffix().upper()}",
        claim=f"{task.shape.name}, {task.shape.batch}×{task.shape.length} tokens, FP16: the step that failed and its "
        "explanation (recorded, looked at closer, remedies tried), in plain steps of the engine, once. Below, ways to "
        "look at every step, in plain steps of the loop by hand, each time.",
        columns=["what", "ms", "plain steps", "wanted", "peak memory over a plain step's", "found"],
    )
    for name, plant in FAULTS.items():
        runs = [explanation(task, plant) for _ in range(3)]
        _let_go()
        best = sorted(runs, key=lambda run: run.ms / run.step_ms)[1]  # the median
        memory = "" if not best.memory else f"{best.memory:.3f} (wanted: {WANTED_MEMORY} at most)"
        row: Row = [name, best.ms, best.ms / best.step_ms, f"{WANTED_STEPS} at most", memory, best.found]
        result.rows.append(row)
        note(f"{name}: {best}")
    times = race((by_hand, anomaly_detected, each_operation_asked), task, TURNS[suffix()], result.notes)
    for each in times[1:]:
        result.rows.append([f"every step: {each.name}", each.median_ms, each.ratio(times[0]), "", "", ""])
    result.notes.append(
        PAIRED.format(**TURNS[suffix()]._asdict()) + " Explanations: the median of three fresh engines."
    )
    return result


def _let_go() -> None:
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


# Until a step is bad


def _engine(task: Task, *, trace: bool) -> Contender:
    model, optimizer, batch = task.trainee()
    engine = ampwise.Engine(model, optimizer, task.precision, clip_norm=task.clip, trace=trace)
    name = "ampwise.Engine" if trace else "ampwise.Engine, trace=False"
    return Contender(name=name, work=partial(engine.step, model, *batch))


def _cases() -> Iterator[tuple[Task, Turns]]:
    shapes = (GPT2_124M, GPT_1M) if has_gpu() else (GPT_4M, GPT_1M)
    for shape, turns in zip(shapes, (TURNS[suffix()], TINY_TURNS[suffix()]), strict=True):
        yield Task(shape=shape, precision="bf16" if has_gpu() else "fp32", device=device()), turns


def awaited() -> Result:
    result = Result(
        name=f"trace_awaited_{suffix()}",
        title=f"What it costs to be able to explain, on a {suffix().upper()}, while nothing is bad",
        claim="Whole training steps, fused AdamW, clipped to 1.0: with what is kept for a replay, and without. Ratio "
        "over the engine without, in one run.",
        columns=["model", "step", "ms", "ratio", "over"],
    )
    for task, turns in _cases():
        without, with_trace = race(
            (partial(_engine, trace=False), partial(_engine, trace=True)), task, turns, result.notes
        )
        result.rows.append(
            [task.shape.name, with_trace.name, with_trace.median_ms, with_trace.ratio(without), without.name]
        )
    result.notes.append("Contenders take turns. Ratio: median of the ratios within a round.")
    return result


PARTS: dict[str, Callable[[], Result]] = {"explained": explained, "awaited": awaited}

if __name__ == "__main__":
    publish_parts("trace", "What an explanation of a bad step costs.", PARTS, ())
