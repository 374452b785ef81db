"""The loop of timm's train.py, on random data. Added: one line after the loss scaler is created."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ampwise import GradScaler


class NativeScaler:
    """What stands in where timm is not installed: it is called in the same way."""

    def __init__(self, device: str = "cuda") -> None:
        self._scaler: torch.amp.GradScaler = torch.amp.GradScaler(device)

    def __call__(self, loss: Tensor, optimizer: Any, clip_grad: float | None = None, parameters: Any = None) -> None:
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


with suppress(ImportError):
    from timm.utils import NativeScaler  # type: ignore[no-redef,import-not-found]


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).to(device)
    images, target = torch.randn(16, 8, 3, 16, 16, device=device), torch.randint(4, (16, 8), device=device)
    model(images[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_scaler = NativeScaler(device=device.type)
    loss_scaler._scaler = scaler = GradScaler(device.type)  # the added line
    num_updates = 0
    for input, labels in zip(images, target, strict=True):
        with torch.autocast(device.type, torch.float16):
            loss = nn.functional.cross_entropy(model(input), labels)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        num_updates += not scaler.skipped  # was: += 1. What lr_scheduler.step_update() and the EMA go by
    print(f"loss {loss.item():.3f}, updates {num_updates}, skipped {scaler.skipped_steps}")


if __name__ == "__main__":
    main()
