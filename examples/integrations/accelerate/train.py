"""Accelerate's quick tour, on random data. Changed: the line that creates the accelerator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise.integrations.accelerate import fix


def main() -> None:
    torch.manual_seed(0)
    accelerator = fix(Accelerator(mixed_precision="fp16"))  # was: Accelerator(mixed_precision="fp16")
    x = torch.randn(16, 32, 16)
    y = (x @ torch.randn(16, 4)).argmax(-1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), batch_size=None), scheduler
    )
    for inputs, targets in training_dataloader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    accelerator.print(f"loss {loss.item():.3f}, skipped {accelerator.scaler.skipped_steps}")


if __name__ == "__main__":
    main()
