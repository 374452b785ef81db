"""A router keeps the best two of five experts and fills the others with -inf before the softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class TopTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 5)
        self.experts = nn.Parameter(torch.randn(5, 6, 6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        kept, places = logits.topk(2, dim=-1)
        only = torch.full_like(logits, float("-inf")).scatter(-1, places, kept)
        return torch.einsum("be,bi,eij->bj", only.softmax(-1), x, self.experts)


def case() -> Case:
    torch.manual_seed(11)
    model = nn.Sequential(TopTwo(), nn.Linear(6, 3))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)
