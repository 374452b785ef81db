"""Local attention with its window as a buffer of 0 and -inf; a query beyond the last key sees nothing."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class LocalAttention(nn.Module):
    def __init__(self, queries: int, keys: int, reach: int) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        far = (torch.arange(queries)[:, None] - torch.arange(keys)[None]).abs() > reach
        self.register_buffer("bias", torch.zeros(queries, keys).masked_fill(far, float("-inf")))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.proj(x) @ memory.mT
        scores = scores + self.bias[: x.shape[1], : memory.shape[1]]
        shares = scores.softmax(-1)  # guilty: fully-masked-row
        return shares @ memory


def case() -> Case:
    torch.manual_seed(10)
    model = LocalAttention(8, 8, 1)

    def loss_fn(x: Tensor, memory: Tensor) -> Tensor:
        return model(x, memory).square().mean()

    batches = [(torch.randn(2, 4, 8), torch.randn(2, keys, 8)) for keys in (4, 4, 2, 4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))
