"""Gloo ranks with a loop of their own under a guard, as ``guard_ranks.py``: DDP and FSDP2, two and four ranks.

    python guard_loop_ranks.py FOLDER FILE

A rank's data is its share of each batch. The last layer has one output: with FSDP2 only one rank has a part of it.
"""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ampwise import GradScaler, Guard, Ladder, Stopped
from ampwise.errors import BadInput

BAD = (5, 1)  # batch and rank
OPTIONS = {"every": "2 steps", "keep": 20, "snapshot_every": 2, "patience": "60s", "ladder": Ladder(skips=1, healthy=2)}


def training(directory, wrap, *, seed=1, scaler=None, **options):
    from guard_ranks import model_of  # here, because pytest looks for doctests without this folder on the path

    model = model_of(seed)
    if wrap == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)  # its buckets stay as they are
    elif wrap == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    guard = Guard(directory, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, **OPTIONS, **options)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, guard=guard)


def loader(rank, *, bad=(), without=()):
    from guard_ranks import data

    world = dist.get_world_size()
    batches = [torch.cat([each, -each[:2]]).chunk(world)[rank] for each in data(10)]
    if rank == BAD[1]:
        batches = [each * math.nan if number in bad else each for number, each in enumerate(batches)]
    return DataLoader([each for number, each in enumerate(batches) if number not in without], batch_size=None)


def own_step(run, loss, *, steps=True):
    """What a script writes itself."""
    if run.scaler is None:
        loss.backward()
        if steps:
            run.optimizer.step()
    else:
        run.scaler.scale(loss).backward()
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    run.optimizer.zero_grad()
    step = run.guard.end_step(loss)
    if step.applied:
        run.scheduler.step()


def train(run, batches, *, own, end=math.inf, left_out=None):
    """The code of a stop, or None. It ends as a kill would leave it when ``end`` steps are done."""
    run.guard.begin()
    if run.guard.number == end:
        return None
    try:
        for x in run.guard.batches(batches):
            loss = run.model(x).square().mean()
            if own:
                own_step(run, loss, steps=(run.guard.batch, dist.get_rank()) != left_out)
            else:
                run.guard.step(loss)
            run.guard._checkpointing.collect(wait=True)
            if run.guard.number >= end:
                break
    except Stopped as stopped:
        return stopped.code
    run.guard.close()
    return None


def state(run):
    """All weights and moments in full, and the learning rates."""
    tensors = [each for state in run.optimizer.state.values() for each in state.values()]
    full = [
        each.full_tensor() if hasattr(each, "full_tensor") else each for each in [*run.model.parameters(), *tensors]
    ]
    return [each.tolist() for each in full], run.scheduler.get_last_lr()


def told(run):
    return [[each.name, each.step, each.message.partition(" ms, ")[2]] for each in run.guard.events]


def survives(wrap, *, own, scaler=None, **options):
    """A bad batch on one rank, a kill, a resumed run: as a run without that batch. Also what each rank has said."""

    def case(rank, directory):
        def begun(folder, seed=1):
            scale = None if scaler is None else scaler("cpu", init_scale=16.0)
            return training(directory.parent / (directory.name + folder), wrap, seed=seed, scaler=scale, **options)

        plain, first, second = begun("-plain"), begun(""), begun("", seed=2)
        window = options.get("accumulate", 1)
        left = range(BAD[0] // window * window, (BAD[0] // window + 1) * window)
        code = train(plain, loader(rank, without=left), own=own)
        bad = loader(rank, bad=[BAD[0]])
        codes = [code, train(first, bad, own=own, end=8 // window), train(second, bad, own=own)]
        return {
            "codes": codes,
            "events": told(first),
            "resumed": told(second),
            "passed": second.guard.passed_over,
            "same": state(plain) == state(second),
        }

    return case


def one_leaves_out_its_step(wrap):
    def case(rank, directory):
        run, plain = training(directory, wrap), training(directory.parent / (directory.name + "-plain"), wrap)
        codes = [
            train(plain, loader(rank, without=BAD[:1]), own=True),
            train(run, loader(rank), own=True, left_out=BAD),
        ]
        return {
            "codes": codes,
            "events": told(run),
            "passed": run.guard.passed_over,
            "same": state(plain) == state(run),
        }

    return case


def goes_on(wrap):
    """The run in a directory that ranks of other numbers share, three steps further."""

    def case(rank, directory):
        run = training(directory.parent / f"resharded-{wrap}", wrap, seed=7)
        run.guard.begin()
        before, begun_at = state(run), run.guard.number
        with run.guard:
            for x in loader(rank):
                run.guard.step(run.model(x).square().mean())
                if run.guard.number == begun_at + 3:
                    break
        return {"begun_at": begun_at, "before": before, "after": state(run)}

    return case


def each_on_its_own(rank, directory):
    run = training(directory, "")
    try:
        train(run, loader(rank), own=False)
    except BadInput as error:
        return {"refused": str(error)}
    return {"trained": run.guard.number}


WORLDS = (1, 2, 4, 2, 1) if "AMPWISE_NIGHTLY" in os.environ else (2, 4, 1)  # one after the other
CASES = {
    "ddp": (survives("ddp", own=False, clip_norm=0.5), 2),
    "ddp_own_torch": (survives("ddp", own=True, scaler=torch.amp.GradScaler), 4),
    "fsdp2": (survives("fsdp2", own=False, clip_norm=0.5, accumulate=2), 4),
    "fsdp2_own_ampwise": (survives("fsdp2", own=True, scaler=GradScaler), 2),
    "on_their_own": (each_on_its_own, 2),
    "left_out": (one_leaves_out_its_step("fsdp2"), 2),
} | {f"resharded_{place}": (goes_on("fsdp2"), world) for place, world in enumerate(WORLDS)}


if __name__ == "__main__":
    from guard_ranks import answers

    where = Path(sys.argv[1])
    said = {name: answers(name, case, world, where) for name, (case, world) in CASES.items()}
    Path(sys.argv[2]).write_text(json.dumps(said))
