"""Per-sample gradients by vmap and grad, each divided by its norm; one sample has no gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(50)
    model = nn.Linear(3, 1, bias=False)

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        each = vmap(grad(one), in_dims=(None, 0, 0))(params, x, y)["weight"].flatten(1)
        unit = each / each.norm(dim=1, keepdim=True)  # guilty: division-by-zero
        return F.mse_loss(model(x), y) + unit.mean(0).square().sum()

    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
