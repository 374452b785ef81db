"""scaled_dot_product_attention gives zeros for a row that is masked throughout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def case() -> Case:
    torch.manual_seed(1)
    model = Attention()

    def loss_fn(x: Tensor, keep: Tensor) -> Tensor:
        return model(x, keep).square().mean()

    batches = [(torch.randn(2, 4, 8), torch.ones(2, 4, 4, dtype=torch.bool)) for _ in range(4)]
    batches[2][1][1, 2] = False
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )
