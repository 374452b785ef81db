"""Distillation with probabilities instead of their logs: the student's are zero where the teacher's are not."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), dim=-1)


def kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    log_teacher = teacher.log()
    log_student = student.log()  # guilty: unstable-loss
    return (teacher * (log_teacher - log_student)).sum(-1).mean()


def case() -> Case:
    torch.manual_seed(28)
    model = Student()

    def loss_fn(x: Tensor, teacher: Tensor) -> Tensor:
        return kl_divergence(teacher, model(x).float())

    batches = [
        (torch.randn(4, 8) * (400 if step == 1 else 1), torch.softmax(torch.randn(4, 5), -1)) for step in range(4)
    ]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
