"""A mixture of experts weighs each expert's tokens by their number; an expert that got none divides by zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.router(x).argmax(-1), len(self.experts)).float()
        load = chosen.sum(0)
        share = chosen / load  # guilty: division-by-zero
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (share.unsqueeze(-1) * outputs).sum(1)


def case() -> Case:
    torch.manual_seed(43)
    experts = Experts(6, 3)
    model = nn.Sequential(experts, nn.Linear(6, 2))
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:, :3] = torch.eye(3)
        experts.router.bias.zero_()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    def sample(experts_used: list[int]) -> tuple[Tensor, Tensor]:
        x = 0.1 * torch.randn(len(experts_used), 6)
        x[range(len(experts_used)), experts_used] += 5
        return x, torch.randint(2, (len(experts_used),))

    batches = [sample(used) for used in ([0, 1, 2, 1], [2, 2, 0, 1], [0, 1, 1, 0], [1, 2, 0, 0])]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
