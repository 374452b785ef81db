"""A CRF whose forbidden transitions are -inf: a tag that cannot be reached has logsumexp over nothing."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Crf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(4, 3)
        self.transitions = nn.Parameter(torch.randn(3, 3) * 0.1)
        self.register_buffer("forbidden", torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 1]], dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.emit(x)
        moves = self.transitions.masked_fill(self.forbidden, float("-inf"))
        alpha = scores[:, 0]
        for step in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + moves, 1) + scores[:, step]  # guilty: cancelled-infinities
        return torch.logsumexp(alpha, 1)


def case() -> Case:
    torch.manual_seed(74)
    model = Crf()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).mean()

    batches = [(torch.randn(2, 4, 4),) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
