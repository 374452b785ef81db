"""EmbeddingBag with empty bags."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(16)
    model = nn.EmbeddingBag(6, 4, mode="mean")

    def loss_fn(words: Tensor, starts: Tensor) -> Tensor:
        return model(words, starts).square().mean()

    batches = [(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 2, 3])) for _ in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
