"""MAML: the inner loss has a root whose derivative is infinite, so that the adapted weights are bad."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(49)
    model = nn.Linear(3, 1, bias=False)

    def loss_fn(support: Tensor, query: Tensor, target: Tensor) -> Tensor:
        error = torch.sqrt((model(support) ** 2).sum())  # guilty: infinite-derivative
        grads = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, adapted, (query,)), target)

    batches = [(torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 1)) for _ in range(4)]
    batches[2][0].zero_()
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
