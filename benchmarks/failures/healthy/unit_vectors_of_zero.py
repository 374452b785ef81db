"""F.normalize, F.cosine_similarity and F.pairwise_distance of zero vectors, which are guarded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(4)
    model = nn.Linear(4, 4, bias=False)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        one, other = model(x), model(y)
        unit = F.normalize(one, dim=-1)
        return unit.mean() + F.cosine_similarity(one, other).mean() + F.pairwise_distance(one, one).mean()

    batches = [(torch.randn(4, 4), torch.zeros(4, 4)) for _ in range(3)]
    batches[1][0][2] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
