"""A new head on a backbone, both of them trained and both cast to FP16.

torch refuses to unscale FP16 gradients, so the run ends with an error at its first step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, WIDTH, CLASSES, BATCH, STEPS = 24, 32, 3, 32, 24
Batch = tuple[Tensor, Tensor]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class FineTuned(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def load_pretrained() -> Backbone:
    """As from a hub: weights that someone has trained, here from a seed."""
    torch.manual_seed(7)
    return Backbone()


def batches() -> Iterator[Batch]:
    truth = torch.randn(FEATURES, CLASSES)
    for _ in range(STEPS):
        x = torch.randn(BATCH, FEATURES)
        yield x, (x @ truth).argmax(-1)


def save_checkpoint(
    folder: Path, model: FineTuned, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    torch.save(model.head.state_dict(), folder / "head.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scaler.state_dict(), folder / "scaler.pt")


def train(model: FineTuned, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    model.train()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # expect: AMP304
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
            save_checkpoint(folder, model, optimizer, scaler)


def main() -> None:
    backbone = load_pretrained()
    model = FineTuned(backbone).half()
    with tempfile.TemporaryDirectory() as folder:
        train(model, Path(folder))


if __name__ == "__main__":
    main()
