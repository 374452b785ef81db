"""Whole training steps with ampwise.Engine, a plain torch loop, Accelerate and Lightning Fabric.

Runs all parts, each with its own result, or one: ``python -m benchmarks.step --part tiny``.

whole   GPT-2 124M in every precision, eager and compiled: what a step costs if the device is the bottleneck.
tiny    a model so small that the host is the bottleneck: what a step costs the host.
waits   whether the host ever syncs with the device, and how far it gets ahead.
graph   the tiny model with its passes in CUDA graphs.

On a CPU there are the first two, with smaller models.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

import ampwise
from benchmarks.contenders import Refused, Task, accelerates, by_hand, engines, lightnings, ready, unclipped
from benchmarks.gpt import GPT2_124M, GPT_1M, GPT_4M, GPT_ONE_LAYER, Shape
from benchmarks.harness import Contender, Result, Times, alternate, note, publish_parts

Make = Callable[[Task], Contender]
Row = list[str | float]

OURS: tuple[Make, ...] = (by_hand, engines)
ALL: tuple[Make, ...] = (by_hand, engines, accelerates, lightnings)
PEERS: dict[Make, str] = {accelerates: "Accelerate", lightnings: "Lightning Fabric"}
PAIRED = (
    "Contenders take turns; medians over {rounds} rounds of {calls} steps. Ratio: median of the ratios within a round."
)
BUSY_CYCLES = 1_000_000_000  # about half a second of an H200
AHEAD = 4  # steps that are queued behind a busy device; with one layer, they fit into its queue


class Turns(NamedTuple):
    rounds: int
    calls: int


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def suffix() -> str:
    return "gpu" if has_gpu() else "cpu"


def line_up(makes: Iterable[Make], task: Task, notes: list[str]) -> list[Contender]:
    """Those that take part; of those that do not, ``notes`` tell why."""
    found = []
    for make in makes:
        try:
            found.append(ready(make, task))
        except Refused as refusal:
            who = PEERS.get(make, "left out")
            told = f"{who}, {task.precision}: {refusal}."
            if told not in notes:
                notes.append(told)
                note(told)
    return found


def race(makes: Iterable[Make], task: Task, turns: Turns, notes: list[str]) -> list[Times]:
    """Times of all that take part; by hand comes first."""
    torch._dynamo.reset()  # what was compiled before, of which torch keeps eight for each function
    contenders = line_up(makes, task, notes)
    # On a CPU, time of this process: what others do does not show.
    times = alternate(contenders, **turns._asdict(), clock=time.perf_counter if has_gpu() else time.process_time)
    del contenders
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()
    how = f"{task.precision}{', compiled' if task.compiled else ''}{'' if task.clip else ', not clipped'}"
    note(f"{task.shape.name}, {how}: " + ", ".join(f"{each.name} {each.median_ms:.4g} ms" for each in times))
    return times


# Whole steps


class Heat(NamedTuple):
    """Who is compared in which precision."""

    precision: str
    compiled: bool
    makes: tuple[Make, ...]
    turns: Turns


FABRIC_UNCLIPPED = partial(unclipped, lightnings)  # with a fused optimizer it refuses to clip what is scaled
ON_GPU = (
    Heat("fp32", False, ALL, Turns(4, 3)),
    Heat("tf32", False, ALL, Turns(8, 4)),
    Heat("fp16", False, (*ALL, FABRIC_UNCLIPPED), Turns(10, 5)),
    Heat("bf16", False, ALL, Turns(10, 5)),
    Heat("bf16", True, ALL, Turns(10, 5)),
    Heat("fp16", True, OURS, Turns(10, 5)),
    Heat("tf32", True, OURS, Turns(8, 4)),
)
ON_CPU = (Heat("fp32", False, ALL, Turns(10, 1)), Heat("fp32", True, OURS, Turns(10, 1)))


def run_heat(heat: Heat, shape: Shape, result: Result) -> None:
    task = Task(shape=shape, precision=heat.precision, device=device(), compiled=heat.compiled)
    times = race(heat.makes, task, heat.turns, result.notes)
    base = float(result.rows[0][3]) if result.rows else times[0].median_ms  # FP32 by hand comes first
    for each in times:
        speed = shape.tokens / each.median_ms * 1e3
        how = "compiled" if heat.compiled else "eager"
        result.rows.append(
            [heat.precision, how, each.name, each.median_ms, speed, each.ratio(times[0]), base / each.median_ms]
        )


def whole(heats: Sequence[Heat] | None = None) -> Result:
    shape = GPT2_124M if has_gpu() else GPT_4M
    result = Result(
        name=f"step_{suffix()}",
        title=f"Whole training steps on a {suffix().upper()}",
        claim=f"{shape.name}, {shape.batch}×{shape.length} tokens, fused AdamW, clipped to 1.0. Ratio of a step's time "
        "to that of the loop written by hand in the same precision, and speed over that loop in FP32, in one run.",
        columns=["precision", "model", "step", "ms", "tokens/s", "ratio", "over fp32"],
    )
    try:
        for heat in heats or (ON_GPU if has_gpu() else ON_CPU):
            run_heat(heat, shape, result)
    except KeyboardInterrupt:
        result.notes.append("Stopped early: what is missing was not run.")
    result.notes.append("Contenders take turns; medians over 4 to 10 rounds. Ratio: median of those within a round.")
    if not has_gpu():
        result.notes.append("CPU time of the process, one thread.")
    return result


# A tiny model


def tiny(turns: Turns | None = None) -> Result:
    turns = turns or (Turns(25, 20) if has_gpu() else Turns(30, 5))
    shape = GPT_1M if has_gpu() else GPT_ONE_LAYER
    result = Result(
        name=f"step_tiny_{suffix()}",
        title=f"What a step costs the host, {shape.name} on a {suffix().upper()}",
        claim=f"{shape.batch}×{shape.length} tokens, fused AdamW, a model too small to keep a GPU busy. Time of the "
        "host for a step, and until the device is done, over those of the loop written by hand; wanted: 1.05 at most.",
        columns=["precision", "clip", "step", "host ms", "ratio", "ms", "ratio"],
    )
    precisions = ("fp32", "fp16", "bf16") if has_gpu() else ("fp32",)  # many CPUs take seconds a step in 16 bits
    for precision, clip in product(precisions, (1.0, None)):
        task = Task(shape=shape, precision=precision, device=device(), clip=clip)
        times = race(ALL if clip else OURS, task, turns, result.notes)
        for each in times:
            host, until_done = each.host_ratio(times[0]), each.ratio(times[0])
            row: Row = [precision, str(clip or "no"), each.name, each.median_host_ms, host, each.median_ms, until_done]
            result.rows.append(row)
    result.notes.append(PAIRED.format(**turns._asdict()))
    if not has_gpu():
        result.notes.append("CPU time of the process, one thread: computing is in it.")
    return result


# Waits


class Windows:
    """Steps of two micro-batches, clipped and with a scheduler or without, by the engine or by hand."""

    def __init__(self, precision: str, *, scheduled: bool) -> None:
        self.task = Task(shape=GPT_ONE_LAYER, precision=precision, device="cuda")
        self.model, self.optimizer, self.batch = self.task.trainee()
        self.scheduler = CosineAnnealingLR(self.optimizer, 1000) if scheduled else None

    def by_engine(self) -> Callable[[], None]:
        engine = ampwise.Engine(
            self.model, self.optimizer, self.task.precision, clip_norm=1.0, accumulate=2, scheduler=self.scheduler
        )

        def window() -> None:
            engine.step(self.model, *self.batch)
            engine.step(self.model, *self.batch)

        return window

    def by_hand(self) -> Callable[[], None]:
        scaler = torch.amp.GradScaler("cuda", enabled=self.task.precision == "fp16")

        def window() -> None:
            for _ in range(2):
                with self.task.autocast():
                    loss = self.model(*self.batch)
                scaler.scale(loss / 2).backward()
            scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()  # noqa: AMP114 - to know better would wait for the device

        return window


def waits_in(window: Callable[[], None], steps: int = 10) -> str:
    """What torch says of the first wait it sees, or "none"."""
    for _ in range(5):
        window()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            window()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def ahead_of_the_device(window: Callable[[], None]) -> int:
    """Steps that are queued while the device does something else; an event that is waited for shows here too."""
    window()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    free = torch.cuda.current_stream().record_event()
    ahead = 0
    for _ in range(AHEAD):
        window()
        if free.query():
            break
        ahead += 1
    torch.cuda.synchronize()
    return ahead


def waits() -> Result:
    result = Result(
        name="step_waits_gpu",
        title="Whether a step waits for the GPU",
        claim="Two micro-batches, fused AdamW, clipped to 1.0: waits that torch.cuda.set_sync_debug_mode('error') "
        f"finds in 10 steps; and of {AHEAD} steps, how many the host queues while the device is busy otherwise.",
        columns=["precision", "scheduler", "step", "waits", "steps ahead"],
    )
    for precision, scheduled in product(("fp16", "bf16"), (True, False)):
        for name, way in (("by hand", Windows.by_hand), ("ampwise.Engine", Windows.by_engine)):
            window = way(Windows(precision, scheduled=scheduled))
            found, ahead = waits_in(window), ahead_of_the_device(window)
            result.rows.append([precision, "yes" if scheduled else "no", name, found, ahead])
            note(f"waits, {precision}, {name}: {found}, {ahead} steps ahead")
    result.notes += [
        "By hand, the scheduler moves on a skipped step too. The engine's stands still, for which it has to know "
        "whether the step before was skipped.",
        "The debug mode does not see a wait for an event; the last column does.",
    ]
    return result


# CUDA graphs


def graph(turns: Turns | None = None) -> Result:
    turns, shape = turns or Turns(25, 20), GPT_1M
    result = Result(
        name="step_graph_gpu",
        title=f"CUDA graphs, {shape.name}",
        claim=f"{shape.batch}×{shape.length} tokens, fused AdamW, clipped to 1.0, forward and backward passes "
        "captured: time of a step over that of the loop written by hand without graphs, in one run.",
        columns=["precision", "step", "ms", "ratio", "host ms", "ratio"],
    )
    makes: list[Make] = [by_hand, partial(by_hand, graph=True), engines]
    if "graph" in inspect.signature(ampwise.Engine).parameters:
        makes.append(partial(engines, graph=True))
    for precision in ("fp32", "fp16", "bf16"):
        times = race(makes, Task(shape=shape, precision=precision, device="cuda"), turns, result.notes)
        for each in times:
            host = each.host_ratio(times[0])
            row: Row = [precision, each.name, each.median_ms, each.ratio(times[0]), each.median_host_ms, host]
            result.rows.append(row)
    result.notes.append(PAIRED.format(**turns._asdict()))
    return result


PARTS: dict[str, Callable[[], Result]] = {"whole": whole, "tiny": tiny, "waits": waits, "graph": graph}
ONLY_ON_GPU = ("waits", "graph")


def main(arguments: Sequence[str] | None = None) -> None:
    publish_parts("step", "Whole training steps.", PARTS, ONLY_ON_GPU, arguments)


if __name__ == "__main__":
    main()
