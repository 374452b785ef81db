"""Gloo ranks that train under a guard, case by case, mostly two; writes what each rank found as JSON.

    python guard_ranks.py FOLDER FILE

Torch is loaded once: for each case, ranks are forked. They meet in a file, and answer through pipes.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampwise import Engine, Guard, Ladder, Stopped
from ampwise.guard import checkpointing
from ampwise.guard import stopping as ends
from ampwise.guard.disk import reading, writing
from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.disk.manifest import DamagedCheckpoint
from ampwise.guard.disk.reading import CheckpointReader
from ampwise.runs import files, tensor_files

LIMIT_S = 120  # for a case; all of them take a second or two if all is well, and a rank that waits for another longer
LADDER = Ladder(skips=1, healthy=3, rollbacks=2)


def data(count, bad=()):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(count)]
    return [batch * float("nan") if number in bad else batch for number, batch in enumerate(batches)]


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def training(directory, *, seed=1, model=None, **options):
    wrapped = DistributedDataParallel(model_of(seed) if model is None else model, bucket_cap_mb=0.0001)
    engine = Engine(wrapped, torch.optim.AdamW(wrapped.parameters(), 0.01), "fp32", trace=False)
    options = {"every": "4 steps", "keep": 20, "snapshot_every": 1000, "patience": "600s", "ladder": LADDER, **options}
    guard = Guard(engine, directory, **options)
    return SimpleNamespace(model=wrapped, engine=engine, guard=guard, loss=lambda x: wrapped(x).square().mean())


def train(run, batches, after=lambda run: None, at_the_end=lambda: None):
    """What came of it: the code of a stop, or None. Checkpoints are on disk before the next step."""
    try:
        with run.guard:
            for batch in run.guard.batches(batches):
                run.guard.step(run.loss, batch)
                after(run)
            at_the_end()
    except Stopped as stopped:
        return stopped.code
    return None


def collect(run):
    run.guard._checkpointing.keep_wanted()
    run.guard._checkpointing.collect(wait=True)


def found(run, **facts):
    return {
        "told": [event.name for event in run.guard.events],
        "sources": [event.fields["source"] for event in run.guard.events if "source" in event.fields],
        "applied": run.engine.applied_steps,
        "last": None if run.guard.last_checkpoint is None else run.guard.last_checkpoint.step,
        **facts,
    }


def is_unbroken(run, batches):
    """Whether weights are to the bit those of one process that never met a bad batch: half and half is the whole."""
    model = model_of(1)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 0.01), "fp32", trace=False)
    for batch in batches:
        engine.step(lambda x: model(x).square().mean(), batch)
    return all(map(torch.equal, model.parameters(), run.model.parameters()))


# --- cases ---------------------------------------------------------------------------------------------------------


def back_to_disk_while_writing(rank, directory):
    """It goes back to memory from step 21, and then to disk, while step 20 is written, which ends with the run."""
    checkpointing.LATE_S = LIMIT_S  # that it takes long is meant
    run, write, slow, is_over = training(directory), writing.write_tensors, [], threading.Event()

    def write_tensors(path, tensors):
        if slow and rank == 1:
            assert is_over.wait(LIMIT_S / 2)
        return write(path, tensors)

    writing.write_tensors = write_tensors
    busy = []

    def after(run):
        if run.guard._recovery.rollbacks == 0:
            collect(run)
        elif run.guard._recovery.rollbacks == 1:
            slow.append(1)
        elif not busy:
            busy.append(run.guard._checkpointing.saver.busy)

    code = train(run, data(30, bad=[20, 21]), after, at_the_end=is_over.set)
    kept = [batch for number, batch in enumerate(data(30)) if number not in (20, 21)]
    disk = [[each.step, each.undone] for each in checkpoints(directory)]
    return found(run, code=code, busy=busy, unbroken=is_unbroken(run, kept), disk=disk)


def back_at_the_end(rank, directory):
    """The last two steps are bad, and the step that it goes back to has a checkpoint: there is nothing to save."""
    run = training(directory, ladder=Ladder(skips=2, healthy=3))
    with run.guard:
        for batch in data(15, bad=[13, 14]):  # which are not gone back in
            run.guard.step(run.loss, batch)
            collect(run)
    return found(run, number=run.guard._number)


def damaged_for_one(rank, directory):
    """One rank cannot read its own part of the newest checkpoint."""
    first = training(directory)
    first.guard.begin()
    for batch in data(9):
        first.guard.step(first.loss, batch)
        collect(first)
    first.guard.close()  # as a kill would leave it
    read = CheckpointReader.plain

    def read_plain(reader, its_rank):
        if reader._manifest.step == 8 and rank == 1:
            raise DamagedCheckpoint("plain-00001.json cannot be read: Input/output error.")
        return read(reader, its_rank)

    CheckpointReader.plain = read_plain
    second = training(directory, seed=2)
    second.guard.begin()
    begun_at, words = second.engine.applied_steps, [event.message for event in second.guard.events]
    for batch in data(9)[begun_at:]:
        second.guard.step(second.loss, batch)
    second.guard.close()
    return found(second, begun_at=begun_at, words=words, unbroken=is_unbroken(second, data(9)))


def flipped_in_one(rank, directory):
    """A bit of one file of the newest checkpoint, each in turn: of two ranks' files, by whoever is here."""
    if dist.get_world_size() == len(FILES) // 2:
        first = training(directory.parent / WRITTEN)
        first.guard.begin()
        for batch in data(9):
            first.guard.step(first.loss, batch)
            collect(first)
        first.guard.close()
    proven, open_regular = [], files.open_regular

    def noted(path, *arguments, **options):
        if path.parent.name == "step-00000008" and path.name in FILES:
            proven.append(path.name)
        return open_regular(path, *arguments, **options)

    tensor_files.open_regular = reading.open_regular = noted
    return {"": resumed(rank, directory / "whole", "", proven)} | {
        name: resumed(rank, directory / name, name, proven) for name in FILES
    }


WRITTEN = "written"  # the folder of what two ranks have, which others read then
FILES = [name for rank in range(2) for name in (writing.tensors_file(rank), writing.plain_file(rank))]


def resumed(rank, directory, flipped, proven):
    """Where a run goes on, and what it says, if the newest checkpoint has a bit flipped in this file."""
    if rank == 0:
        shutil.copytree(directory.parent.parent / WRITTEN, directory)
        if flipped:
            path = directory / "step-00000008" / flipped
            path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    dist.barrier()
    proven.clear()
    second = training(directory, seed=2)
    second.guard.begin()
    begun_at, words = second.engine.applied_steps, [event.message for event in second.guard.events]
    weights = torch.cat([each.detach().reshape(-1) for each in second.model.parameters()]).tolist()
    second.guard.close()
    return found(second, begun_at=begun_at, words=words, weights=weights, proven=list(proven))


class Cramped(torch.autograd.Function):
    """Runs out of memory in a backward pass, when some gradients are with the others already."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Cramped.fails:
            Cramped.fails = False
            raise torch.OutOfMemoryError("no room in the backward pass")
        return gradient


class CrampedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(Cramped.apply(self.first(x).tanh()))


def no_memory_on_one(rank, directory):
    run = training(directory, model=CrampedModel(), split=True)

    def after(run):
        Cramped.fails = rank == 1 and run.guard._number == 3

    raised = ""
    try:
        code = train(run, data(6), after)
    except torch.OutOfMemoryError as error:
        code, raised = None, str(error)
    return found(run, code=code, raised=raised)


def alive_for_long(rank, directory):
    """An evaluation that takes longer than there is patience, by a clock that is moved."""
    run, moved = training(directory, patience="60s"), []

    def monotonic():
        return time.monotonic() + sum(moved)

    ends.time = SimpleNamespace(monotonic=monotonic)

    def after(run):
        if run.guard._number == 2:
            for _ in range(2):
                moved.append(45.0)
                time.sleep(1.2)  # it looks every second
                run.guard.alive()

    return found(run, code=train(run, data(4), after))


def told_to_end_after_the_last_step(rank, directory):
    run = training(directory, exit_code=5)
    code = train(run, data(3), at_the_end=lambda: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
    return found(run, code=code)


def gone_after_the_last_step(rank, directory):
    run = training(directory)
    code = train(run, data(3), at_the_end=lambda: rank == 1 and os._exit(1))
    return found(run, code=code)


WORLDS = (2, 3, 1) if "AMPWISE_NIGHTLY" in os.environ else (2, 3)
CASES = {
    case.__name__: (case, 2)
    for case in [
        back_to_disk_while_writing,
        back_at_the_end,
        damaged_for_one,
        no_memory_on_one,
        alive_for_long,
        told_to_end_after_the_last_step,
        gone_after_the_last_step,
    ]
} | {f"flipped_in_one_of_{world}": (flipped_in_one, world) for world in WORLDS}  # the first of them writes


# --- ranks ---------------------------------------------------------------------------------------------------------


def be(rank, world, case, directory, store, pipe):
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    try:
        timeout = timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        facts = case(rank, directory)
    except BaseException as error:  # an answer too
        traceback.print_exc()
        facts = {"error": f"{type(error).__name__}: {error}"}
    pipe.send(facts)
    sys.stderr.flush()
    os._exit(0)  # at once: torch takes long to leave


def answers(name, case, world, folder):
    """What all ranks say; None of one that died."""
    context = multiprocessing.get_context("fork")
    store, directory = folder / f"{name}.store", folder / name
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=be, args=(rank, world, case, directory, store, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    said = []
    for process, (ours, _) in zip(ranks, pipes, strict=True):
        try:
            said.append(ours.recv() if ours.poll(LIMIT_S) else None)
        except EOFError:
            said.append(None)
        process.join(2)
        process.kill()
    return said


if __name__ == "__main__":
    where = Path(sys.argv[1])
    said = {name: answers(name, case, world, where) for name, (case, world) in CASES.items()}
    Path(sys.argv[2]).write_text(json.dumps(said))
