"""Two ranks of DistributedDataParallel on a CPU: engine.step and a plain torch loop.

The torch loop reduces gradients only in the last micro-batch of a step, with ``no_sync``, as the engine does. Ranks are
processes of one thread each that communicate through gloo.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import ampwise
from benchmarks.contenders import Task
from benchmarks.gpt import GPT_4M, Shape
from benchmarks.harness import Contender, Result, Times, alternate, note

RANKS = 2
WINDOWS = (1, 4)
SHORT = replace(GPT_4M, length=64, batch=1)


def trainee(shape: Shape) -> tuple[DistributedDataParallel, AdamW, tuple[torch.Tensor, torch.Tensor]]:
    model, _, batch = Task(shape=shape, precision="fp32", device="cpu").trainee()
    ranked = DistributedDataParallel(model)
    return ranked, AdamW(ranked.parameters(), lr=1e-4, fused=True), batch


def by_hand(shape: Shape, accumulate: int) -> Contender:
    model, optimizer, batch = trainee(shape)
    parameters = list(model.parameters())

    def step() -> None:
        for index in range(accumulate):
            with nullcontext() if index == accumulate - 1 else model.no_sync():
                (model(*batch) / accumulate).backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(name="by hand", work=step)


def engines(shape: Shape, accumulate: int) -> Contender:
    model, optimizer, batch = trainee(shape)
    engine = ampwise.Engine(model, optimizer, "fp32", clip_norm=1.0, accumulate=accumulate)

    def step() -> None:
        for _ in range(accumulate):
            engine.step(model, *batch)

    return Contender(name="ampwise.Engine", work=step)


def on_rank(rank: int, port: int, shape: Shape, rounds: int, answer: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found: dict[int, tuple[list[Times], list[Times]]] = {}
    for accumulate in WINDOWS:
        pair = [by_hand(shape, accumulate), engines(shape, accumulate)]
        wall, processor = (
            alternate(pair, rounds=rounds, calls=1, clock=clock, ready=dist.barrier)
            for clock in (time.perf_counter, time.process_time)
        )
        found[accumulate] = wall, processor
        if rank == 0:
            note(f"accumulate {accumulate}: ratio {wall[1].ratio(wall[0]):.4f}")
    if rank == 0:
        answer.put(found)
    dist.destroy_process_group()


def measure(shape: Shape = SHORT, rounds: int = 20) -> dict[int, tuple[list[Times], list[Times]]]:
    """For each size of a window, wall times and processor times of the first rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = get_context("spawn").SimpleQueue()
    ranks = spawn(on_rank, args=(port, shape, rounds, answer), nprocs=RANKS, join=False)
    assert ranks is not None
    while not ranks.join(timeout=1) and answer.empty():  # a rank that failed raises here
        pass
    found: dict[int, tuple[list[Times], list[Times]]] = answer.get()
    while not ranks.join():
        pass
    return found


def ranked(shape: Shape = SHORT, rounds: int = 20) -> Result:
    result = Result(
        name="ddp_cpu",
        title="Two ranks of DDP on a CPU",
        claim=f"{shape.name}, {shape.batch}×{shape.length} tokens a rank and micro-batch, FP32, fused AdamW, clipped "
        "to 1.0: time of a step over that of the loop written by hand with no_sync, in one run; wanted: 1.03 at most.",
        columns=["accumulate", "by hand ms", "ampwise.Engine ms", "ratio", "ratio of CPU time"],
    )
    for accumulate, (wall, processor) in measure(shape, rounds).items():
        hand, ours = wall
        row: list[str | float] = [str(accumulate), hand.median_ms, ours.median_ms, ours.ratio(hand)]
        result.rows.append([*row, processor[1].ratio(processor[0])])
    result.notes += [
        f"Gloo, {RANKS} processes of one thread each; of the first rank.",
        f"Contenders take turns; medians over {rounds} rounds. Ratio: median of the ratios within a round.",
    ]
    return result


def main() -> None:
    torch.set_num_threads(1)
    ranked().publish()


if __name__ == "__main__":
    main()
