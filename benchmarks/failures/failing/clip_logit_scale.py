"""A learnt logit scale that nobody clips: its exp times a similarity leaves FP16's range (CLIP PR#530)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(8, 16, bias=False)
        self.text = nn.Linear(6, 16, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        seen = F.normalize(self.image(image), dim=-1)
        read = F.normalize(self.text(text), dim=-1)
        scale = self.logit_scale.exp().to(seen.dtype)  # guilty: half-overflow
        return scale * seen @ read.t()


def case() -> Case:
    torch.manual_seed(77)
    model = TwoTowers()

    def loss_fn(image: Tensor, text: Tensor) -> Tensor:
        logits = model(image, text)
        return F.cross_entropy(logits, torch.arange(len(image)))

    batches = [(torch.randn(4, 8), torch.randn(4, 6)) for _ in range(4)]
    with torch.no_grad():
        model.logit_scale.fill_(11.5)  # as it came from a long run
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer)
