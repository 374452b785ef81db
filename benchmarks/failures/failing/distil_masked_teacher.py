"""Distillation with log_target=True from a teacher whose vocabulary is masked with -inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(73)
    student, teacher = nn.Linear(4, 5), nn.Linear(4, 5).requires_grad_(False)

    def loss_fn(x: Tensor, banned: Tensor) -> Tensor:
        target = F.log_softmax(teacher(x).masked_fill(banned, float("-inf")), -1)
        log_p = F.log_softmax(student(x), -1)
        return F.kl_div(log_p, target, log_target=True)  # guilty: cancelled-infinities

    batches = [(torch.randn(3, 4), torch.zeros(5, dtype=torch.bool)) for _ in range(4)]
    batches[1][1][4] = True
    return Case(
        model=student,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(student.parameters()),
        precision="fp32",
        direct=True,
    )
