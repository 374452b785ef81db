"""A TransformerEncoder with a sample that is all padding: torch's attention gives zeros for it."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss_fn(x: Tensor, padding: Tensor) -> Tensor:
        return model(x, src_key_padding_mask=padding).square().mean()

    batches = [(torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)) for _ in range(4)]
    batches[2][1][1] = True
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))
