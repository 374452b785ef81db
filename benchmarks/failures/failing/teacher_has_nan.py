"""Distillation: the teacher, which the engine does not train, was loaded with NaN in a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(14)
    student, teacher = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        teacher[2].weight[0, 0] = float("nan")
    teacher.requires_grad_(False)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)  # guilty: bad-weights
        return F.cross_entropy(student(x), wanted)

    batches = [(torch.randn(4, 6),) for _ in range(2)]
    return Case(
        model=student,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(student.parameters()),
        precision="fp32",
        direct=True,
    )
