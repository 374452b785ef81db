"""The model computes its own loss and returns an object; its z-loss takes exp of large logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.embed(input_ids)).float()
        z = torch.exp(logits).sum(-1)  # guilty: overflow
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-4 * torch.log(z).square().mean()
        return Output(loss=loss, logits=logits)


def case() -> Case:
    torch.manual_seed(67)
    model = LanguageModel()
    with torch.no_grad():
        model.embed.weight[7] *= 2000

    batches = [({"input_ids": torch.randint(7, (2, 4)), "labels": torch.randint(10, (2, 4))},) for _ in range(4)]
    batches[2][0]["input_ids"][1, 1] = 7
    return Case(
        model=model,
        loss_fn=lambda batch: model(**batch).loss,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        precision="fp32",
        direct=True,
    )
