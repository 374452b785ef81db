"""A detector's box loss is the mean over anchors that match; an image without objects has none."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.objectness = nn.Linear(6, 1)
        self.boxes = nn.Linear(6, 4)

    def forward(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        return self.objectness(anchors).squeeze(-1), self.boxes(anchors)


def case() -> Case:
    torch.manual_seed(50)
    model = Detector()

    def loss_fn(anchors: Tensor, matched: Tensor, boxes: Tensor) -> Tensor:
        objectness, predicted = model(anchors)
        errors = (predicted - boxes).abs().sum(-1)
        box_loss = errors[matched].mean()  # guilty: mean-of-nothing
        return F.binary_cross_entropy_with_logits(objectness, matched.float()) + box_loss

    batches = [(torch.randn(8, 6), torch.rand(8) < 0.5, torch.randn(8, 4)) for _ in range(5)]
    batches[3][1].fill_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)
