"""Train a model that is sharded by FSDP2, in FP16: an overflow in one rank's shard makes all ranks skip.

`fully_shard` gives each rank a shard of every weight, of its gradient and of Adam's moments; by MixedPrecisionPolicy,
weights are gathered in 16 bits and gradients reduced in FP32. If one row of a gradient is infinite, only one rank has
it. If each rank decided alone, their shards would belong to different steps from then on. Here, in one step, a hook
makes a row infinite, and the script shows what each rank sees and does.

    python examples/fsdp2.py                            two ranks on a CPU, which it starts by itself
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
    torchrun --standalone --nproc-per-node gpu examples/fsdp2.py --precision bf16       a rank for each GPU
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ampwise

FEATURES, WIDTH, CLASSES, BATCH = 8, 16, 4, 16
BAD_STEP = 6
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LESSON = """
Lesson: with sharded gradients no rank can decide alone whether to skip. The ranks exchange what they found
before any optimizer steps; ampwise's scaler does so for FSDP2 automatically."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *, poisoned: bool = False) -> Tensor:
        hidden = self.first(x)
        if poisoned:  # the gradient of one unit of the first layer: of one row of its weight
            unit = torch.zeros(WIDTH, device=x.device)
            unit[0] = torch.inf
            hidden.register_hook(lambda gradient: gradient + unit.to(gradient.dtype))
        logits: Tensor = self.head(torch.tanh(self.second(torch.tanh(hidden))))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Report of one rank."""

    holds: int  # how many of the model's numbers
    saw: str  # in its shard of the gradients, in the bad step
    skipped: tuple[int, ...]
    scale: float
    right: float


def sharded(precision: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Net().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for layer in (model.first, model.second, model.head):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points, and the nearest of four directions for each."""
    directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(1 + seed))
    return x.to(device), (x @ directions).argmax(1).to(device)


def piece(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(precision: str, steps: int, device: torch.device) -> Told:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded(precision, device)
    parameters = list(model.parameters())  # of the sharded model: its optimizer is made after fully_shard
    optimizer = torch.optim.AdamW(parameters, lr=2e-2, fused=True)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0)
    skipped, saw = [], ""
    for number in range(1, steps + 1):
        x, y = batch(number * ranks + rank, device)
        with engine.autocast():
            loss = F.cross_entropy(model(x, poisoned=number == BAD_STEP).float(), y)
        engine.backward(loss)
        if number == BAD_STEP:
            finite = all(bool(piece(each.grad).isfinite().all()) for each in parameters if each.grad is not None)
            saw = "all finite" if finite else "infinite"
        if engine.apply().skipped:
            skipped.append(number)
    with torch.no_grad(), engine.autocast():
        x, y = batch(10**6 + rank, device)
        right = (model(x).argmax(1) == y).float().mean().item()
    holds = sum(piece(each).numel() for each in parameters)
    return Told(holds=holds, saw=saw, skipped=tuple(skipped), scale=engine.scaler.get_scale(), right=right)


def run(precision: str, steps: int) -> None:
    """Train on one rank; the first rank prints the table."""
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= here else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    told: list[Told | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, train(precision, steps, device))
    if dist.get_rank() == 0:
        print(f"{precision}, {len(told)} ranks on {device.type}, {steps} steps\n")
        print(f"rank   holds   its gradients in step {BAD_STEP}   steps skipped   loss scale   right")
        for rank, each in enumerate(told):
            assert each is not None
            skipped = ", ".join(map(str, each.skipped)) or "none"
            print(f"{rank:4} {each.holds:7} {each.saw:>25} {skipped:>15} {each.scale:12.0f} {each.right:7.0%}")
        print(LESSON)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="%(default)s")
    parser.add_argument("--precision", choices=DTYPES, default="fp16", help="%(default)s")
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
