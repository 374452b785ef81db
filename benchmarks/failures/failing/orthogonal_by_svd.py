"""A matrix is made orthogonal with an SVD: two singular values that are equal have an infinite derivative."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Procrustes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.map.weight)

    def forward(self, points: Tensor) -> Tensor:
        covariance = self.map(points).transpose(1, 2) @ points
        u, _, vh = torch.linalg.svd(covariance)  # guilty: infinite-derivative
        return u @ vh


def case() -> Case:
    torch.manual_seed(76)
    model = Procrustes()

    def loss_fn(points: Tensor, rotation: Tensor) -> Tensor:
        return (model(points) - rotation).square().mean()

    batches = [(torch.randn(2, 6, 3), torch.linalg.qr(torch.randn(2, 3, 3))[0]) for _ in range(4)]
    batches[2][0][1] = torch.eye(3).repeat(2, 1)  # a cube's corners
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)
