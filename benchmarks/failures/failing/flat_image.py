"""Images are stretched to [0, 1] in the model; one of a single grey has no contrast (pytorch_GAN_zoo#89)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Stretch(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        darkest = image.amin((1, 2), keepdim=True)
        brightest = image.amax((1, 2), keepdim=True)
        return (image - darkest) / (brightest - darkest)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(45)
    model = nn.Sequential(Stretch(), nn.Flatten(), nn.Linear(16, 3))

    def loss_fn(image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(image), label)

    batches = [(torch.rand(4, 4, 4), torch.randint(3, (4,))) for _ in range(5)]
    batches[2][0][0] = 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="bf16")
