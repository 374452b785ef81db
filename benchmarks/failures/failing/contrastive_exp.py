"""InfoNCE written out: exp of a similarity over a temperature of 0.07 is above 65504 for a pair that is alike."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case

TEMPERATURE = 0.07


class Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return features / features.norm(dim=-1, keepdim=True)


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    similarity = first @ second.t()
    scores = torch.exp(similarity / TEMPERATURE)  # guilty: unstable-loss
    return -(scores.diagonal() / scores.sum(1)).log().mean()


def case() -> Case:
    torch.manual_seed(22)
    model = Projector()

    def loss_fn(one: Tensor, other: Tensor) -> Tensor:
        return contrastive_loss(model(one), model(other))

    clean = torch.randn(5, 6, 64)
    batches = [(x, x + (0.01 if step == 3 else 3.0) * torch.randn(6, 64)) for step, x in enumerate(clean)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
