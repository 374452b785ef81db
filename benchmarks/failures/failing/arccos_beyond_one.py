"""The angle of a rotation from its trace: rounding puts the cosine a little above 1 (spatialmath-python PR#86)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class RotationAngle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, rotation: Tensor) -> Tensor:
        cosine = (rotation.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2 * self.scale
        return torch.acos(cosine)  # guilty: outside-domain


def about_z(angle: float) -> Tensor:
    c, s = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    return torch.stack([torch.stack([c, -s, c * 0]), torch.stack([s, c, c * 0]), torch.tensor([0.0, 0.0, 1.0])])


def case() -> Case:
    torch.manual_seed(33)
    model = RotationAngle()

    def loss_fn(rotation: Tensor, angle: Tensor) -> Tensor:
        return (model(rotation) - angle).square().mean()

    angles = [[0.5, 1.0], [0.9, 1.4], [0.7, 0.0], [1.1, 0.8]]
    batches = [(torch.stack([about_z(each) for each in pair]), torch.tensor(pair)) for pair in angles]
    batches[2][0][1, 0, 0] += 2e-6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)
