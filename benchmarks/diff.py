"""Cost of comparing a training step in two precisions, module by module.

GPT-2 124M on a GPU, a small GPT on a CPU: the time of a comparison in plain FP32 steps, and its memory beyond that of
such a step. Everything is included: side a forward, forward and backward, and all of that again for its noise; side b
forward, forward and backward, twice if the gradients do not fit in memory; statistics of every module's output, input
and gradient.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ampwise.tune.diff.diff import DiffOptions, compare_sides
from ampwise.tune.diff.result import Difference
from ampwise.tune.diff.side import parse_side
from ampwise.tune.train_case import TrainCase, TrainingStep, make_factory, make_optimizer
from benchmarks.gpt import GPT2_124M, GPT_1M
from benchmarks.harness import Result, note
from benchmarks.step import Row, device, has_gpu, suffix
from benchmarks.subjects import gpt

WANTED_STEPS, WANTED_MEMORY = 6, 1.30
PLAIN_STEPS, TIMES = 5, 3
ON_GPU = ("bf16", "fp16", "tf32", "e4m3")
ON_CPU = ("e4m3", "mxfp8")  # emulated: few CPUs multiply in 16 bits at a pace that says something


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one way to do it."""

    seconds: float
    peak: int  # bytes; 0 where nobody counts

    @classmethod
    def of(cls, work: Callable[[], object], times: int) -> Cost:
        """The median of several calls, after one that is not timed."""
        work()
        found = [_timed(work) for _ in range(times)]
        return cls(seconds=statistics.median(each.seconds for each in found), peak=max(each.peak for each in found))


def _timed(work: Callable[[], object]) -> Cost:
    gc.collect()
    _wait()
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if has_gpu() else time.process_time  # on a CPU, what others do does not show
    start = clock()
    work()
    _wait()
    seconds = clock() - start
    return Cost(seconds=seconds, peak=torch.cuda.max_memory_allocated() if has_gpu() else 0)


def _wait() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def difference(subject: TrainCase, b: str, *, floor: bool = True) -> Difference:
    """FP32 against another side."""
    sides = parse_side("fp32"), parse_side(b)
    options = DiffOptions(floor=floor)
    return compare_sides(
        subject.loss_fn, subject.args, subject.kwargs, {"": subject.model}, *sides, options, name=subject.name
    )


def rows(subject: TrainCase, name: str) -> list[Row]:
    """The cost of a plain step, then of each difference."""
    optimizer = make_optimizer("adamw", subject.parameters, fused=has_gpu())
    plain = Cost.of(TrainingStep(subject, "fp32", optimizer), PLAIN_STEPS)
    note(f"{name}: a plain FP32 step takes {plain.seconds * 1e3:.4g} ms and {plain.peak / 2**30:.3g} GiB")
    found: list[Row] = [[name, "a plain FP32 step", plain.seconds * 1e3, 1.0, "", 1.0 if plain.peak else "", ""]]
    others = ON_GPU if has_gpu() else ON_CPU
    for b in others:
        cost = Cost.of(partial(difference, subject, b), TIMES)
        found.append(_row(name, f"fp32 against {b}", cost, plain))
    without = Cost.of(partial(difference, subject, others[0], floor=False), TIMES)
    found.append(_row(name, f"fp32 against {others[0]}, the noise of fp32 not measured", without, plain))
    return found


def _row(name: str, what: str, cost: Cost, plain: Cost) -> Row:
    steps = cost.seconds / plain.seconds
    memory: str | float = cost.peak / plain.peak if plain.peak else ""
    note(f"{what}: {steps:.3g} plain steps, memory {memory}")
    is_claim = has_gpu() and what == "fp32 against bf16"
    wanted = f"{WANTED_STEPS} at most" if is_claim else ""
    return [name, what, cost.seconds * 1e3, steps, wanted, memory, f"{WANTED_MEMORY:.2f} at most" if is_claim else ""]


def main() -> None:
    if not has_gpu():
        torch.set_num_threads(1)
    shape = GPT2_124M if has_gpu() else GPT_1M
    torch.manual_seed(0)
    subject = make_factory(lambda: gpt(shape), "gpt").make(device())
    result = Result(
        name=f"diff_{suffix()}",
        title=f"What a difference of two precisions costs on a {suffix().upper()}",
        claim=f"{shape.name}, {shape.batch}×{shape.length} tokens, module by module, forward and backward, with the "
        "gradients of all parameters. In plain FP32 training steps (AdamW, clipped to 1.0), and in the peak memory of "
        "one.",
        columns=["model", "what", "ms", "plain steps", "wanted", "peak memory over a plain step's", "wanted "],
    )
    result.rows += rows(subject, shape.name)
    seen = difference(subject, (ON_GPU if has_gpu() else ON_CPU)[0])
    result.notes.append(f"What it says: {seen.verdict}.")
    result.notes.append(
        f"A difference: the median of {TIMES} calls after one that is not timed. Memory: the largest peak that torch's "
        "allocator has seen, optimizer state included."
    )
    if not has_gpu():
        result.notes.append("CPU time of the process, one thread.")
    result.publish()


if __name__ == "__main__":
    main()
