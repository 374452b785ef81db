"""Guard a plain PyTorch loop: bad batches are left out, and a killed run continues where it was.

The loop is as one finds it, with autocast, backward pass, clipping, step and scheduler; the lines marked "guard" are
added. Batches 40 to 44 of each epoch contain NaN, like a broken data shard: their steps change nothing, the run goes
back to its last good snapshot, and continues without them.

    python examples/guarded_loop.py                     checkpoints in build/guarded_loop
    python examples/guarded_loop.py --epochs 200        long enough to be killed (kill -9) and started again
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import ampwise

ROWS, WIDTH, BATCH = 1024, 16, 16


def train(directory: str, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = torch.randn(ROWS, WIDTH)
    targets = torch.tanh(rows.sum(1, keepdim=True) / 4)
    rows[640:720] = torch.nan
    loader = DataLoader(TensorDataset(rows, targets), BATCH)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))

    guard = ampwise.Guard(  # guard
        directory, model=model, optimizer=optimizer, scheduler=scheduler, every="50 steps", snapshot_every=20
    )
    with guard:  # guard
        for x, y in guard.batches(loader, epochs=epochs):  # guard
            with torch.autocast(device.type, torch.bfloat16):  # noqa: AMP303 (of a loop as one finds it)
                loss = F.mse_loss(model(x.to(device)).float(), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step = guard.end_step(loss)  # guard
            if step.applied:
                scheduler.step()
            if step.number % 50 == 0:
                print(f"epoch {guard.epoch + 1}, step {step.number}: loss {step.loss:.4f}")
        print(f"passed over: {len(guard.passed_over)} batches; events: {len(guard.events)}")
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="build/guarded_loop", help="for checkpoints (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="%(default)s")
    options = parser.parse_args(arguments)
    model = train(options.directory, options.epochs)
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    print(f"weights: {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
