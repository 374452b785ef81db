"""Gloo ranks that write and read checkpoints, each phase with ranks of its own; prints what they found, as JSON.

Torch is imported once, here, and the ranks are forked from it.
"""

import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # by DTensor, when it is first used: here it is imported once for all ranks
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.disk.reading import CheckpointReader
from ampwise.guard.disk.writing import write_checkpoint

PATIENCE_S = 120  # for an answer; a rank that waits for another waits longer


def whole():
    """The same on every rank, and in every process."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "rows": (7, 4),
        "columns": (3, 5),
        "short": (2, 3),
        "copy": (2, 2),
        "none": (0, 4),
        "plain": (4, 4),
        "block": (6, 10),
    }
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["half"] = torch.randn(9, 2, generator=generator).to(torch.bfloat16)
    return {**found, "number": torch.tensor(17)}


def placed(values, mesh):
    """As a model would have it: sharded by rows or columns, copied, or plain."""
    places = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "short": [Shard(0)],
        "copy": [Replicate()],
        "half": [Shard(0)],
    }
    if mesh.ndim == 2:  # copies of shards, as hybrid sharding has them
        places = {name: [Replicate(), *place] for name, place in places.items()}
        places["block"] = [Shard(0), Shard(1)]  # a part of the rows, and of these a part of the columns
    return {
        name: distribute_tensor(value, mesh, places[name]) if name in places else value.clone()
        for name, value in values.items()
    }


def here(live):
    return {name: (value.to_local() if hasattr(value, "to_local") else value).clone() for name, value in live.items()}


def mesh_of(world):
    return init_device_mesh("cpu", (2, world // 2) if world == 4 else (world,))


def state(rank, world):
    live = placed({**whole(), "buffer": torch.full((2,), 10.0 + rank)}, mesh_of(world))
    return live, here(live)


def write(rank, world, folder, step=3, **changed):
    live, staged = state(rank, world)
    options = {"plain": {"rank": rank}, "about": {}, "live": live, "staged": staged, **changed}
    saved = write_checkpoint(folder, step=step, group=dist.new_group(backend="gloo"), **options)
    return {"path": saved.path.name, "number": saved.number, "bytes": saved.bytes, "ranks": saved.world_size}


def read(rank, world, folder):
    """Which tensors are not what was written; none, if all is well."""
    mesh = mesh_of(world)
    live = placed({name: torch.zeros_like(value) for name, value in whole().items()}, mesh)
    live["buffer"] = torch.zeros(2)
    newest = checkpoints(folder)[0]
    reader = CheckpointReader(newest)
    reader.read_into(live, dist.new_group(backend="gloo"))
    wanted = here(placed({**whole(), "buffer": torch.full((2,), 10.0)}, mesh))
    wrong = [name for name, value in here(live).items() if not torch.equal(value, wanted[name])]
    return {"wrong": wrong, "plain": reader.plain(rank)}


def write_ddp(rank, world, folder):
    """Copies of the same: written once, and by both."""
    tensors = {f"w{place}": torch.full((100,), float(place)) for place in range(8)}
    return write(rank, world, folder, live=tensors, staged=tensors, alike=set(tensors))


def write_numbers(rank, world, folder):
    """What each rank needs of the others: the counters of an optimizer, the same everywhere."""
    tensors = {f"step{place}": torch.tensor(float(place)) for place in range(8)} | {"w": torch.ones(100)}
    return write(rank, world, folder, live=tensors, staged=tensors, alike=set(tensors))


def write_fsdp(rank, world, folder):
    """A model that FSDP2 has sharded, written by two and read into one that is not."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.distributed.fsdp.fully_shard(model, mesh=mesh_of(world))
    live = dict(model.named_parameters())
    write(rank, world, folder, live=live, staged=here(live))
    alone = {name: torch.zeros_like(value) for name, value in expected.items()}
    CheckpointReader(checkpoints(folder)[0]).read_into(alone, None)
    return {"wrong": [name for name in expected if not torch.equal(alone[name], expected[name])]}


def write_too_much_on_one(rank, world, folder):
    from ampwise.guard.disk import writing

    really = writing.write_tensors

    def write_tensors(path, tensors):
        sys.dont_write_bytecode = True  # what is cut off there is loaded by others
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))  # only now: ranks meet in a file
        return really(path, tensors)

    if rank == 1:
        writing.write_tensors = write_tensors
    return write(rank, world, folder)


def write_unlike_on_one(rank, world, folder):
    live, staged = state(rank, world)
    if rank == 1:
        staged["rows"] = staged["rows"][:1]
    return write(rank, world, folder, live=live, staged=staged)


def write_object_on_one(rank, world, folder):
    return write(rank, world, folder, plain=object() if rank == 1 else None)


def write_without_a_disk_in_common(rank, world, folder):
    return write(rank, world, folder if rank == 0 else f"{folder}-elsewhere")


def write_and_die(rank, world, folder):
    if rank == 1:

        def die(*_, **__):
            os._exit(9)

        from ampwise.guard.disk import writing

        writing.write_tensors = die
    return write(rank, world, folder)


def read_unlike_on_one(rank, world, folder):
    return read_nothing(rank, world, folder, buffer=torch.zeros(2 + rank))


def read_damaged(rank, world, folder):
    return read_nothing(rank, world, folder, buffer=torch.zeros(2))


def read_nothing(rank, world, folder, buffer):
    live = placed({name: torch.zeros_like(value) for name, value in whole().items()}, mesh_of(world))
    live["buffer"] = buffer
    try:
        CheckpointReader(checkpoints(folder)[0]).read_into(live, dist.new_group(backend="gloo"))
    finally:
        touched = [name for name, value in here(live).items() if value.any()]
        assert not touched, touched
    return {}


def run(phase, rank, world, folder, store, pipe):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=5 * PATIENCE_S)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        facts = globals()[phase](rank, world, folder)
        dist.barrier()
    except BaseException as error:  # an answer too
        traceback.print_exc()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        facts = {"error": str(error), "kinds": kinds, "errno": getattr(error, "errno", None)}
    pipe.send(facts)
    os._exit(0)  # torch takes long to leave


def ranks(phase, world, folder):
    """What each rank found; None of one that died."""
    context = multiprocessing.get_context("fork")
    store = Path(f"{folder}.{phase}.{world}.{time.monotonic_ns()}.store")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=run, args=(phase, rank, world, folder, store, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    answers = []
    for process, (ours, _) in zip(processes, pipes, strict=True):
        try:
            answers.append(ours.recv() if ours.poll(PATIENCE_S) else None)
        except EOFError:
            answers.append(None)
        process.join(5)
        process.kill()
    store.unlink(missing_ok=True)
    return answers


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(ranks(**json.loads(line))), flush=True)
    os._exit(0)
