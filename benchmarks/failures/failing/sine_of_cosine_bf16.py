"""sqrt(1 - cos**2) in BF16, where the cosine of equal vectors rounds to above 1."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = self.proj(one), self.proj(other)
        cosine = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))
        return torch.sqrt(1 - cosine * cosine)  # guilty: outside-domain


def case() -> Case:
    torch.manual_seed(78)
    model = Margin().bfloat16()

    def loss_fn(one: Tensor, other: Tensor) -> Tensor:
        return model(one, other).mean()

    batches = [(torch.randn(32, 16).bfloat16(), torch.randn(32, 16).bfloat16()) for _ in range(4)]
    batches[2] = (batches[2][0], batches[2][0].clone())
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )
