"""Train in FP8 if the device supports it, else with emulated FP8 rounding, and see which layers use it.

On a GPU of compute capability 8.9 or more (L4, RTX 40, H100 and later), matmuls of large linear layers run on FP8
tensor cores. Elsewhere the engine says why not, and `emulate:e4m3` computes on values rounded in the same way: slower,
but it shows equally well whether a model tolerates FP8. The reference is a second run from the same weights on the
same batches, in BF16 on a GPU and FP32 on a CPU.

    python examples/fp8.py                              emulated on a CPU; real on a GPU that has FP8
    python examples/fp8.py --precision emulate:mxfp8    any format of `ampwise formats`, anywhere
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampwise

FEATURES, DEPTH, CLASSES = 16, 3, 8
EMULATED = "emulate:e4m3"
LESSON = """
Lesson: FP8 is for large linear layers; the first and the last one stay wide. Whether a model learns in it can
be tested on any computer; whether it is faster, only on the GPU: Fp8("measured") keeps the layers that are."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        longer: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return longer


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(DEPTH)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits


def batch(seed: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points and labels: the nearest of eight directions, which depend on the sign of the first number."""
    rules = torch.randn(2, FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1 + seed))
    labels = torch.einsum("nf,nfc->nc", x, rules[(x[:, 0] > 0).long()]).argmax(1)
    return x.to(device), labels.to(device)


def make_engine(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> ampwise.Engine:
    """Return an engine in this precision. "auto": FP8, or emulated FP8 with the same layers wide."""
    if precision != "auto":
        return ampwise.Engine(model, optimizer, precision, clip_norm=1.0)
    try:
        return ampwise.Engine(model, optimizer, "fp8", clip_norm=1.0)
    except ampwise.PrecisionUnavailable as no:
        print(f"{no}\nSo it is emulated: {EMULATED}.\n")
        policy = ampwise.Policy(EMULATED).keep("fp32", "stem", "head")
        return ampwise.Engine(model, optimizer, policy, clip_norm=1.0)


def train(precision: str, width: int, steps: int, device: torch.device) -> tuple[ampwise.Engine, list[float]]:
    """Train; return the engine and the losses of its steps."""
    torch.manual_seed(0)
    model = Net(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03 / width**0.5, fused=True)
    engine = make_engine(model, optimizer, precision)

    def loss_fn(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels)

    taken = [engine.step(loss_fn, *batch(number, 64, device)) for number in range(steps)]
    return engine, [step.loss for step in taken]  # read at the end: reading a loss syncs with the GPU


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="%(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp8, emulate:e4m3, ... (%(default)s)")
    parser.add_argument("--width", type=int, help="of the model (1024 on a GPU, 32 on a CPU)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    width = options.width or (1024 if on_gpu else 32)
    engine, narrow = train(options.precision, width, options.steps, device)
    print(engine.policy.describe(engine.models[0]))
    wide_engine, wide = train("bf16" if on_gpu else "fp32", width, options.steps, device)
    print("\nsteps            " + f"{wide_engine.precision:>14} {engine.precision:>20}")
    size = max(1, options.steps // 5)
    for start in range(0, options.steps, size):
        means = [sum(losses[start : start + size]) / len(losses[start : start + size]) for losses in (wide, narrow)]
        print(f"{start + 1:4} to {min(start + size, options.steps):4} loss {means[0]:13.3f} {means[1]:20.3f}")
    if engine.precision == "fp8":
        print(f"\nIn FP8: {', '.join(engine.fp8_layers)}.")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
