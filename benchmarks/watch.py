"""Cost of watching: a training step under `ampwise run`, the same step unwatched, and other tools.

Runs all parts, each with its own result, or one: ``python -m benchmarks.watch --part waits``.

whole   GPT-2 124M in FP16: what a step costs where the device is busy.
tiny    a model so small that the host is what limits it: what watching costs the host.
waits   whether the host waits for the device where it did not before, and how far it gets ahead.

On a CPU there is the first, with the model of examples/char_gpt.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.contenders import Task
from benchmarks.gpt import GPT2_124M, GPT_1M, GPT_ONE_LAYER, Shape
from benchmarks.harness import Result, Times, note, publish_parts
from benchmarks.step import (
    AHEAD,
    PAIRED,
    Make,
    Row,
    Turns,
    ahead_of_the_device,
    device,
    has_gpu,
    line_up,
    race,
    suffix,
)
from benchmarks.watch_contenders import (
    ENGINE,
    ENGINE_RUN,
    FRESH,
    PLAIN,
    RUN,
    anomaly_detected,
    demo_task,
    engine_alone,
    engine_watched,
    histogram_hooked,
    looped_over,
    module_hooked,
    unwatched,
    watched,
)

OURS: tuple[Make, ...] = (unwatched, watched, engine_alone, engine_watched)
OTHERS: tuple[Make, ...] = (looped_over, histogram_hooked, module_hooked, anomaly_detected)
WANTED = {"gpu": {RUN: 1.02, ENGINE_RUN: 1.01}, "cpu": {RUN: 1.10, ENGINE_RUN: 1.10}}
# A watch counts in full only every n-th step: a turn has several of these, or the median would be of turns without.
ON_GPU, ON_CPU = Turns(6, 10), Turns(6, 5)
WAITED_STEPS = 40
WAIT = "called a synchronizing CUDA operation"  # what torch says of one
STEP = "forward and backward pass in FP16, unscaled, clipped to 1.0, fused AdamW, next scale, gradients dropped"
FRESH_NOTE = (
    "All in one process, one after the other. The last row is from before, rounds in which nobody else took part: well "
    "below 1, it would tell of something that a watch leaves behind and that slows down everyone."
)
OTHERS_NOTE = (
    "Others' ways are written here as they are shown or done, and look at every step. wandb.watch itself takes its "
    "histograms at every 1000th unless told otherwise; transformers' hooks look at forward passes alone."
)


def all_times(task: Task, turns: Turns, notes: list[str]) -> list[Times]:
    """Of everyone; and first, while nothing of a watch can have been left behind, of the plain loop alone."""
    (fresh,) = race((unwatched,), task, turns, notes)
    return [*race((*OURS, *OTHERS), task, turns, notes), replace(fresh, name=FRESH)]


def pairs(times: Sequence[Times]) -> Iterator[tuple[Times, Times]]:
    """Each with what it is compared to: the engine's step watched with that unwatched, the others with the plain."""
    by_name = {each.name: each for each in times}
    if missing := [repr(name) for name in (PLAIN, RUN, ENGINE, ENGINE_RUN) if name not in by_name]:
        raise RuntimeError(f"benchmarks.watch: {', '.join(missing)} did not take part, for the reason told before")
    for each in times:
        yield each, by_name[ENGINE if each.name == ENGINE_RUN else PLAIN]


# Whole steps


def rows_of(times: Sequence[Times], wanted: dict[str, float]) -> Iterator[Row]:
    for each, base in pairs(times):
        limit = f"{wanted[each.name]:.2f} at most" if each.name in wanted else ""
        yield [each.name, each.median_ms, each.ratio(base), base.name, limit]


def whole(turns: Turns | None = None, task: Task | None = None) -> Result:
    turns = turns or (ON_GPU if has_gpu() else ON_CPU)
    task = task or (on_gpu(GPT2_124M) if has_gpu() else demo_task())
    result = Result(
        name=f"watch_{suffix()}",
        title=f"What watching a training step costs on a {suffix().upper()}",
        claim=f"{task.shape.name}, {task.shape.batch}×{task.shape.length} tokens: {STEP}. Ratio of a step's time to "
        "that of the same step unwatched, in one run.",
        columns=["step", "ms", "ratio", "over", "wanted"],
    )
    times = all_times(task, turns, result.notes)
    result.rows += rows_of(times, WANTED[suffix()])
    result.notes += [PAIRED.format(**turns._asdict()), FRESH_NOTE, OTHERS_NOTE]
    if not has_gpu():
        result.notes.append("CPU time of the process, one thread; products in FP32 of operands rounded to FP16.")
    return result


def on_gpu(shape: Shape) -> Task:
    return Task(shape=shape, precision="fp16", device=device())


# A tiny model


def tiny(turns: Turns | None = None, shape: Shape = GPT_1M) -> Result:
    turns = turns or Turns(25, 20)
    result = Result(
        name=f"watch_tiny_{suffix()}",
        title=f"What watching costs the host, {shape.name} on a {suffix().upper()}",
        claim=f"{shape.batch}×{shape.length} tokens, a model too small to keep a GPU busy: {STEP}. Time of the host "
        "for a step, and until the device is done, over those of the same step unwatched.",
        columns=["step", "host ms", "ratio", "ms", "ratio", "over"],
    )
    times = all_times(on_gpu(shape), turns, result.notes)
    for each, base in pairs(times):
        host, until_done = each.host_ratio(base), each.ratio(base)
        result.rows.append([each.name, each.median_host_ms, host, each.median_ms, until_done, base.name])
    result.notes += [PAIRED.format(**turns._asdict()), FRESH_NOTE, OTHERS_NOTE]
    return result


# Waits


def waits_in(work: Callable[[], object], steps: int = WAITED_STEPS) -> int:
    """How often torch says that the host waited for the device."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(WAIT in str(each.message) for each in told)


def waits() -> Result:
    result = Result(
        name="watch_waits_gpu",
        title="Whether watching makes a step wait for the GPU",
        claim=f"{STEP.capitalize()}: waits that torch.cuda.set_sync_debug_mode('warn') tells of in {WAITED_STEPS} "
        f"steps; and of {AHEAD} steps, how many the host queues while the device is busy otherwise. Wanted: as many "
        "watched as unwatched.",
        columns=["step", f"waits in {WAITED_STEPS} steps", "steps ahead"],
    )
    for contender in line_up((*OURS, *OTHERS), on_gpu(GPT_ONE_LAYER), result.notes):
        with contender.around():
            torch.cuda.synchronize()
            found, ahead = waits_in(contender.work), ahead_of_the_device(contender.work)  # type: ignore[arg-type]
        result.rows.append([contender.name, found, ahead])
        note(f"waits, {contender.name}: {found}, {ahead} steps ahead")
    result.notes.append("The debug mode does not see a wait for an event; the last column does.")
    return result


PARTS: dict[str, Callable[[], Result]] = {"whole": whole, "tiny": tiny, "waits": waits}
ONLY_ON_GPU = ("tiny", "waits")


def main(arguments: Sequence[str] | None = None) -> None:
    publish_parts("watch", "What watching costs.", PARTS, ONLY_ON_GPU, arguments)


if __name__ == "__main__":
    main()
