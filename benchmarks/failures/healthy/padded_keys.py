"""nn.MultiheadAttention with padding that leaves each sample a key, down to a single one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding)
        return self.head(mixed[:, 0])


def case() -> Case:
    torch.manual_seed(4)
    model = Model()

    def loss_fn(x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x, torch.arange(5) >= lengths.unsqueeze(1)), label)

    batches = [(torch.randn(3, 5, 8), torch.randint(1, 6, (3,)), torch.randint(2, (3,))) for _ in range(5)]
    batches[2][1].fill_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)
