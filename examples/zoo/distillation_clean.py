"""A large network teaches a small one: two trainings in FP16, each with an optimizer and a scaler of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES, BATCH, STEPS, TEMPERATURE = 16, 5, 32, 20, 2.0
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def make_data(seed: int) -> list[tuple[Tensor, Tensor]]:
    truth = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(STEPS, BATCH, FEATURES, generator=generator)
    return [(x, (x @ truth).argmax(-1)) for x in points]


def fit(name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]], loss_of: Loss) -> None:
    """Train a model from the start."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    model.train()
    for step, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(x).float(), x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"{name}, step {step}: loss {loss.item():.3f}")


@torch.no_grad()
def accuracy(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right = 0
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.float16):
            right += int((model(x).argmax(-1) == y).sum())
    return right / (len(data) * BATCH)


def main() -> None:
    torch.manual_seed(0)
    teacher, student = Network(width=64), Network(width=16)

    def plain(logits: Tensor, _x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def distilled(logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = F.softmax(teacher(x).float() / TEMPERATURE, dim=-1)
        towards_teacher = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=-1), soft, reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * TEMPERATURE**2 * towards_teacher

    fit("teacher", teacher, make_data(seed=1), plain)
    teacher.eval().requires_grad_(False)
    fit("student", student, make_data(seed=2), distilled)
    test = make_data(seed=3)
    print(f"accuracy of the teacher {accuracy(teacher, test):.2f}, of the student {accuracy(student, test):.2f}")


if __name__ == "__main__":
    main()
