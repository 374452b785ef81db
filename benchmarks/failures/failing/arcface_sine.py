"""ArcFace: the sine of an angle of 0 is sqrt(0)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.eye(4)[:3])

    def forward(self, x: Tensor) -> Tensor:
        cosine = F.normalize(x, dim=-1) @ F.normalize(self.centres, dim=-1).T
        sine = torch.sqrt((1.0 - cosine.square()).clamp(0, 1))  # guilty: infinite-derivative
        return cosine * 0.9 - sine * 0.1


def case() -> Case:
    torch.manual_seed(106)
    model = ArcFace()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x) * 10, label)

    batches = [(torch.randn(4, 4), torch.randint(3, (4,))) for _ in range(3)]
    batches[0][0][0] = torch.eye(4)[1]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )
