"""Train a small image classifier in any precision: the script to start with.

The whole training step is one call, `engine.step`: autocast, loss scale, backward pass, clipping, optimizer, schedule,
in the right order. One image of the training set is broken: it is full of infinities. A step with this image changes
nothing, not even BatchNorm's statistics or the learning rate.

    python examples/classifier.py                       a few seconds on a CPU; a GPU is used if there is one
    python examples/classifier.py --precision bf16      or fp16, fp32; "auto" takes what the device has tensor cores for
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ampwise

SIZE, CLASSES, IMAGES, BATCH, BROKEN = 12, 4, 1024, 32, 7
LESSON = """
Lesson: a skipped step changes nothing. Weights, BatchNorm's statistics and the schedule stay as they were, so
one bad image costs one step, not the run."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        )
        self.head = nn.Linear(16 * 2 * 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).flatten(1))
        return logits


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of discs, rings, crosses and stripes, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shift = torch.rand(count, 2, 1, 1, generator=generator) * 3 - 1.5
    rows, columns = torch.meshgrid(*[torch.arange(SIZE) - (SIZE - 1) / 2] * 2, indexing="ij")
    y, x = rows - shift[:, 0], columns - shift[:, 1]
    radius = (x.square() + y.square()).sqrt()
    near = radius < 4
    shapes = [near, (radius - 3.5).abs() < 0.8, near & (torch.minimum(x.abs(), y.abs()) < 1), near & (y % 3 < 1.5)]
    drawn = torch.stack(shapes, 1)[torch.arange(count), labels].float()
    return (drawn + 0.4 * torch.randn(drawn.shape, generator=generator)).unsqueeze(1), labels


def train(model: nn.Module, precision: str, steps: int, device: torch.device) -> ampwise.Engine:
    images, labels = pictures(IMAGES, seed=1)
    images[BROKEN] = torch.inf
    data = TensorDataset(images, labels)
    sampler = RandomSampler(data, replacement=True, num_samples=steps * BATCH)
    loader = DataLoader(data, BATCH, sampler=sampler, pin_memory=device.type == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0, scheduler=scheduler)

    def loss_fn(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels)  # on a CPU, autocast would leave the loss in 16 bits

    print("step    loss    norm     lr    loss scale")
    for images, labels in loader:
        step = engine.step(loss_fn, images.to(device, non_blocking=True), labels.to(device, non_blocking=True))
        if step.number % max(1, steps // 8) == 0:
            told = "skipped" if step.skipped else f"{step.loss:7.4f} {step.grad_norm:7.3f}"
            print(f"{step.number:4} {told:>15} {step.lr:.4f} {step.scale:9.0f}")
    return engine


@torch.no_grad()
def accuracy(model: nn.Module, engine: ampwise.Engine, device: torch.device) -> float:
    """Return the accuracy on unseen images, in the precision of the training."""
    images, labels = pictures(512, seed=2)
    model.eval()
    with engine.autocast():
        guesses = model(images.to(device)).argmax(1)
    return float((guesses == labels.to(device)).float().mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="%(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    engine = train(model, options.precision, options.steps, device)
    print(
        f"\n{engine.precision} on {device}: {accuracy(model, engine, device):.1%} of 512 new images are named rightly."
    )
    print(f"Steps applied: {engine.applied_steps}, skipped: {engine.skipped_steps}.")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
