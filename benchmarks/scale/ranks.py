"""Gloo ranks of this machine that train, keep a record and save: what they exchange and write, counted one by one.

    python -m benchmarks.scale.ranks RANKS FOLDER

prints what each rank saw, as JSON. Torch is loaded once, and the ranks are forked from it. What the law of
``counts`` says of the same cases is held against it in ``tests/tools/test_scale.py``.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampwise import Engine, Fp8, Guard
from ampwise.guard.disk import reading
from ampwise.guard.disk.manifest import MANIFEST
from ampwise.runs.files import write_atomically
from ampwise.runs.writer import RecordWriter
from ampwise.train.float8.delayed_scaling import DelayedScales
from ampwise.train.scaler.grad_stats import RankReduction
from ampwise.watch.watch import Watch
from benchmarks.scale.recorders import Exchanges, Meetings, Operations, Reads, Seen

__all__ = ["LAYERS", "model", "seen"]

LAYERS = 5  # that FP8 has scales of
LIMIT_S = 120  # for all cases


# --- cases ---------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    """Of 8 ranks, some have no share of its tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))


def sharded() -> nn.Module:
    whole = model()
    fully_shard(whole)
    return whole


def engine_of(trained: nn.Module, **options: Any) -> Engine:
    return Engine(trained, torch.optim.AdamW(trained.parameters(), 0.01), "bf16", clip_norm=1.0, **options)


def batch() -> Tensor:
    return torch.ones(4, 8)


def loss_of(trained: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: trained(x).float().square().mean()


def steps(make: Callable[[], nn.Module], exchanges: Exchanges) -> list[Any]:
    """Those of a step in the midst of training."""
    trained = make()
    engine, loss = engine_of(trained), loss_of(trained)
    for _ in range(2):
        exchanges.taken()
        engine.step(loss, batch())
    return exchanges.taken()


def weighed(exchanges: Exchanges) -> list[Any]:
    """A window of two micro-batches that are weighed, after the first, in which a typical weight is agreed upon."""
    trained = sharded()
    engine, loss = engine_of(trained, accumulate=2, weight=len), loss_of(trained)
    for _ in range(2):
        exchanges.taken()
        for _ in range(2):
            engine.step(loss, batch())
    return exchanges.taken()


def scales(exchanges: Exchanges) -> list[Any]:
    """The end of a step of delayed scaling."""
    made = DelayedScales([f"layer{place}" for place in range(LAYERS)], Fp8("delayed"), torch.device("cpu"))
    exchanges.taken()
    made.update(together=True)
    return exchanges.taken()


def explained(exchanges: Exchanges) -> list[Any]:
    """A step whose loss is NaN on every rank is run again by all of them."""
    trained = DistributedDataParallel(model())
    engine, loss = engine_of(trained), loss_of(trained)
    engine.step(loss, batch())
    exchanges.taken()
    engine.step(loss, batch() * float("nan"))
    assert len(engine.findings) == (dist.get_rank() == 0)
    return exchanges.taken()


def guarded(folder: Path, exchanges: Exchanges, operations: Operations, *, timed: bool) -> Seen:
    """From the first step to a checkpoint of a model that is sharded."""
    trained = sharded()
    engine, loss = engine_of(trained), loss_of(trained)
    exchanges.taken()
    guard = Guard(engine, folder, every="1000 steps", patience="1min")
    agreement = guard._agreement
    exchanges.names = {id(agreement.reading): "read", id(agreement.saving): "save", id(agreement._group): "agree"}
    guard.begin()
    found: Seen = {"groups": len(exchanges.names), "begin": exchanges.taken()}
    operations.taken()
    for _ in range(2):
        exchanges.taken()
        guard.step(loss, batch())
    found["step"] = exchanges.taken()
    operations.taken()
    counted = agreement.saving._get_sequence_number_for_group()
    saved = guard.save()
    assert saved is not None
    found |= {"save": exchanges.taken(), "save_operations": operations.taken()}
    # Gloo's own count, which no function of Python's is in between of.
    found["save_by_gloo"] = agreement.saving._get_sequence_number_for_group() - counted
    found["files"] = {path.name: path.stat().st_size for path in saved.path.iterdir()}
    found |= _told(json.loads((saved.path / MANIFEST).read_text()))
    if timed:
        found["agree_us"] = times(lambda: agreement.agree(0.0, due=False, busy=False, ends=False))
        found["save_s"] = min(_save_s(guard, loss) for _ in range(4))
        found["reach_us"] = times(lambda: RankReduction((None,)).reach(torch.zeros(3, dtype=torch.float64)))
    guard.close()
    return found


def resumed(folder: Path) -> Seen:
    """Files of tensors that this rank reads when the run goes on, and how many it reads more than once."""
    engine = engine_of(sharded())
    with Reads(reading) as own:
        guard = Guard(engine, folder, patience="1min")
        guard.begin()
        guard.close()
    return {"read": len(own.found), "again": len(own.found) - len(set(own.found))}


def _save_s(guard: Guard, loss: Callable[[Tensor], Tensor]) -> float:
    guard.step(loss, batch())
    began = time.perf_counter()
    guard.save()
    return time.perf_counter() - began


def _told(manifest: dict[str, Any]) -> Seen:
    """What its manifest says of a checkpoint, and at what length."""
    pieces = [piece for tensor in manifest["tensors"].values() for piece in tensor["pieces"]]
    return {
        "manifest": {key: len(json.dumps(manifest[key])) for key in ("files", "tensors")},
        "pieces": len(pieces),
        "tensor_bytes": sum(4 * math.prod(piece["sizes"]) for piece in pieces),
    }


def watched(folder: Path, exchanges: Exchanges, operations: Operations) -> Seen:
    """A loop of one's own under a watch, with a record: steps, and a sample of layers at each."""
    trained = DistributedDataParallel(model())
    optimizer, loss = torch.optim.AdamW(trained.parameters(), 0.01), loss_of(trained)
    rank, size = dist.get_rank(), dist.get_world_size()
    operations.taken()
    if rank:
        dist.barrier()  # the first rank's manifest tells the others that they may
    record = RecordWriter.create(folder, rank=rank, world_size=size)
    if not rank:
        dist.barrier()
    found: Seen = {"create_operations": operations.taken()}
    exchanges.taken()
    with Watch(record, every=1, timing=False):
        for _ in range(4):
            loss(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    found |= {"exchanges": exchanges.taken(), "operations": operations.taken()}
    found["files"] = {path.name: path.stat().st_size for path in record.folder.iterdir() if path.is_file()}
    return found


def grouped(store: Meetings) -> Seen:
    """What one more gloo group costs before anything is said in it."""
    store.calls.clear()
    store.bytes.clear()
    before = _descriptors()
    dist.new_group(backend="gloo")
    found = {"descriptors": _descriptors() - before, "calls": dict(store.calls), "bytes": dict(store.bytes)}
    dist.barrier()
    return found


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def bare(sizes: Sequence[int]) -> dict[str, float]:
    """Microseconds of an all-reduce of so many bytes, and nothing of ours around it."""
    return {str(size): times(partial(dist.all_reduce, torch.zeros(size // 8, dtype=torch.float64))) for size in sizes}


def times(work: Callable[[], Any], repeats: int = 60) -> float:
    """Microseconds of a call that all ranks make together: a tenth are as fast, when the machine has time for them."""
    found = []
    for turn in range(repeats + 3):
        dist.barrier()
        began = time.perf_counter()
        work()
        if turn >= 3:
            found.append((time.perf_counter() - began) * 1e6)
    return statistics.quantiles(found, n=10)[0]


# --- ranks ---------------------------------------------------------------------------------------------------------


def cases(rank: int, size: int, folder: Path, sizes: Sequence[int]) -> Seen:
    store = Meetings(FileStore(str(folder / "store"), size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found: Seen = {"group": grouped(store)}
    if sizes:
        found["bare_us"] = bare(sizes)
        found["fsync_us"] = times(partial(write_atomically, folder / f"fsync{rank}", [b"some bytes"]))
    operations = Operations(folder)
    with Exchanges() as exchanges:
        found["copied"] = steps(lambda: DistributedDataParallel(model()), exchanges)
        found["sharded"] = steps(sharded, exchanges)
        found["weighed"] = weighed(exchanges)
        found["scales"] = scales(exchanges)
        found["explained"] = explained(exchanges)
        found["guarded"] = guarded(folder / "guard", exchanges, operations, timed=bool(sizes))
        found["resumed"] = resumed(folder / "guard")
        found["watched"] = watched(folder / "record", exchanges, operations)
    dist.barrier()
    return found


def be(rank: int, size: int, folder: Path, sizes: Sequence[int], pipe: Any) -> None:
    torch.set_num_threads(1)
    with _to_file(folder / f"rank{rank}.log"):
        pipe.send(cases(rank, size, folder, sizes))
    os._exit(0)  # at once: torch takes long to leave


@contextmanager
def _to_file(path: Path) -> Iterator[None]:
    with path.open("w") as log:
        os.dup2(log.fileno(), 2)
        yield


def seen(size: int, folder: Path, sizes: Sequence[int] = ()) -> list[Seen]:
    """What each of so many ranks has seen. sizes: of bare all-reduces that are timed."""
    context = multiprocessing.get_context("fork")
    folder.mkdir(parents=True)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=be, args=(rank, size, folder, sizes, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        return [_said(rank, ours, folder) for rank, (ours, _) in enumerate(pipes)]
    finally:
        for process in ranks:
            process.kill()


def _said(rank: int, pipe: Any, folder: Path) -> Seen:
    try:
        said: Seen = pipe.recv() if pipe.poll(LIMIT_S) else {}
    except EOFError:
        said = {}
    if not said:
        raise RuntimeError(f"rank {rank} did not answer: {(folder / f'rank{rank}.log').read_text()[-2000:]}")
    return said


if __name__ == "__main__":
    print(json.dumps(seen(int(sys.argv[1]), Path(sys.argv[2]))))
