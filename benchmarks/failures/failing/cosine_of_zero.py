"""A cosine without an epsilon: an embedding whose every unit is off has length zero (sentence-transformers#589)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(38)
    layer = nn.Linear(6, 8)
    model = nn.Sequential(layer, nn.ReLU())

    def loss_fn(query: Tensor, document: Tensor) -> Tensor:
        one, other = model(query), model(document)
        lengths = one.norm(dim=-1) * other.norm(dim=-1)
        cosine = (one * other).sum(-1) / lengths  # guilty: division-by-zero
        return (1 - cosine).mean()

    batches = [(torch.rand(4, 6), torch.rand(4, 6)) for _ in range(4)]
    with torch.no_grad():
        layer.weight.abs_()
        layer.bias.zero_()
    batches[2][1][1] = -3.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)
