"""An autograd.Function whose backward takes a root's derivative of a zero it has saved."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class SignedRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 0.5 * grad * x.abs() ** -0.5  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(47)
    model = nn.Linear(4, 4, bias=False)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(SignedRoot.apply(model(x)), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]
    batches[1][0][2] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
