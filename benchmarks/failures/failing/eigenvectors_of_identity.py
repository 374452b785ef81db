"""Backward through eigenvectors of a matrix with equal eigenvalues."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Whiten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        covariance = self.root @ self.root.T
        values, vectors = torch.linalg.eigh(covariance)  # guilty: infinite-derivative
        return x @ vectors * values.rsqrt()


def case() -> Case:
    torch.manual_seed(23)
    model = Whiten()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(5, 4), torch.randn(5, 4)) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )
