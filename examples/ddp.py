"""Data-parallel training with accumulation: gradients are reduced once per step, and all ranks skip the same steps.

DDP averages gradients over the ranks before they are checked, so an infinity on one rank appears on all of them. Here
the second rank gets a broken row. At the end the ranks are compared: the steps they skipped, their loss scales, and
their weights, bit for bit.

    python examples/ddp.py                              two ranks on a CPU, which it starts by itself
    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node gpu examples/ddp.py --precision auto         a rank for each GPU
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ampwise

FEATURES, WIDTH, CLASSES, BATCH, ACCUMULATE = 8, 16, 4, 16, 2
BROKEN = 5  # windows before the broken one
LESSON = """
Lesson: what one rank skips, all skip, since all check the same averaged gradients. These are reduced once for
each step of several micro-batches: the engine calls model.no_sync() for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Report of one rank."""

    precision: str
    skipped: tuple[int, ...]
    scale: float
    weights: str
    exchanges: int
    loss: float


def make_data(ranks: int, steps: int) -> TensorDataset:
    """Return points, one of them broken, and the nearest of four directions for each; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps * ACCUMULATE * BATCH * ranks, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    broken = min(BROKEN, steps - 1) * ACCUMULATE * BATCH * ranks
    x[broken + 1] = torch.inf  # rows go to the ranks in turn: this one to the second
    return TensorDataset(x, y)


def train(precision: str, steps: int, device: torch.device) -> Told:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    exchanges = 0

    def counted(group, bucket):  # type: ignore[no-untyped-def] # torch reads the annotations, and not as text
        nonlocal exchanges
        exchanges += bucket.is_last()
        return allreduce_hook(group, bucket)

    model.register_comm_hook(dist.group.WORLD, counted)  # only to count: not needed in your script
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0, accumulate=ACCUMULATE)
    data = make_data(dist.get_world_size(), steps)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), y)

    done = []
    for x, y in engine.batches(DataLoader(data, BATCH, sampler=sampler)):
        step = engine.step(loss_fn, x.to(device), y.to(device))
        if step.closed:
            done.append(step)
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    return Told(
        precision=engine.precision,
        skipped=tuple(each.number for each in done if each.skipped),
        scale=done[-1].scale,
        weights=hashlib.sha256(weights).hexdigest()[:12],
        exchanges=exchanges,
        loss=done[-1].loss,
    )


def run(precision: str, steps: int) -> None:
    """Train on one rank; the first rank prints the table."""
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= here else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mine = train(precision, steps, device)
    told: list[Told | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    if dist.get_rank() == 0:
        print(f"{mine.precision}, {len(told)} ranks on {device.type}, {steps} steps of {ACCUMULATE} micro-batches\n")
        print("rank   steps skipped   loss scale   exchanges   weights          last loss")
        for rank, each in enumerate(told):
            assert each is not None
            skipped = ", ".join(map(str, each.skipped)) or "none"
            print(f"{rank:4} {skipped:>15} {each.scale:12.0f} {each.exchanges:11}   {each.weights:15} {each.loss:.3f}")
        print(LESSON)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="%(default)s")
    parser.add_argument("--precision", default="fp16", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="to start, where torchrun has not (%(default)s)")
    options = parser.parse_args(argv)
    if "LOCAL_RANK" in os.environ:
        run(options.precision, options.steps)
        return 0
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked = sys.argv[1:] if argv is None else argv
    torchrun(["--standalone", "--nproc-per-node", str(options.ranks), __file__, *asked])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
