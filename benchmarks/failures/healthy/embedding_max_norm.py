"""Embeddings renormalised in place as they are read, spectral norm and dropout, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(21)
    model = nn.Sequential(
        nn.Embedding(10, 6, max_norm=0.5),
        spectral_norm(nn.Linear(6, 6)),
        nn.Dropout(0.3),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )

    def loss_fn(word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(word), label)

    batches = [(torch.randint(10, (8,)), torch.randint(3, (8,))) for _ in range(14)]
    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
    )
