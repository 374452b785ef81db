"""An embedding with sparse gradients, through the length of a vector that is zero."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)

    def forward(self, word: Tensor) -> Tensor:
        return self.table(word).square().sum(-1).sqrt()  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(117)
    model = Words()
    with torch.no_grad():
        model.table.weight[0] = 0

    def loss_fn(word: Tensor) -> Tensor:
        return model(word).mean()

    batches = [(torch.tensor(words),) for words in ([1, 2], [3, 4], [0, 5], [1, 1])]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
    )
