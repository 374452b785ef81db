"""Fabric's quick start, on random data. Changed: the line that creates Fabric."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import nn

from ampwise.integrations.lightning import Precision


def main() -> None:
    torch.manual_seed(0)
    fabric = Fabric(devices=1, plugins=[Precision("fp16")])  # was: Fabric(devices=1, precision="16-mixed")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    x = torch.randn(64, 16, device=fabric.device)
    y = (x @ torch.randn(16, 4, device=fabric.device)).argmax(-1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)  # an overflow is skipped
        optimizer.step()
    print(f"loss {loss.item():.3f}, skipped {fabric.strategy.precision.scaler.skipped_steps}")


if __name__ == "__main__":
    main()
