"""Train a small model through bad batches and kills, with checkpoints on disk.

Batches 40 to 44 of each epoch contain NaN, like a broken data shard. The guard skips these steps, goes back to its last
good snapshot, leaves the batches out, and continues. Kill it at any time (Ctrl-C, or kill -9) and start it again: it
resumes where it was, and the final weights are the same, bit for bit.

    python examples/guarded.py                          checkpoints in build/guarded; a GPU is used if there is one
    python examples/guarded.py --epochs 200             long enough to be killed
    python examples/guarded.py --precision fp16         or bf16, fp32; "auto" takes what the device has tensor cores for
    ampwise checkpoints build/guarded --show
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ampwise

ROWS, WIDTH, BATCH = 2048, 16, 16
BROKEN = range(640, 720)  # rows that are NaN: five batches of an epoch that is not shuffled
LESSON = """
Lesson: a run survives bad data and kills if state, random numbers and the position in the data are saved
together, and it only goes back to snapshots that were followed by healthy steps."""


class Table(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are generated when they are read, as from a file."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(ROWS, WIDTH, generator=generator)
        self.targets = torch.tanh(self.rows @ torch.randn(WIDTH, 1, generator=generator))
        self.rows[BROKEN.start : BROKEN.stop] = torch.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.rows[row], self.targets[row]


def train(directory: str, epochs: int, every: str, precision: str) -> nn.Module:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0)

    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        error: Tensor = model(rows) - targets
        return error.square().mean()

    with ampwise.Guard(engine, directory, every=every, snapshot_every=20) as guard:
        for rows, targets in guard.batches(DataLoader(Table(), BATCH), epochs=epochs):
            step = guard.step(loss_fn, rows.to(device), targets.to(device))
            if step.number % 100 == 0:
                print(f"epoch {guard.epoch + 1}, step {step.number}: loss {step.loss:.4f}")
        print(f"passed over: {len(guard.passed_over)} batches; events: {len(guard.events)}")
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="build/guarded", help="for checkpoints (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="%(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp16, bf16, tf32, fp32 (%(default)s)")
    parser.add_argument("--every", default="50 steps", help="between checkpoints (%(default)s)")
    options = parser.parse_args(arguments)
    model = train(options.directory, options.epochs, options.every, options.precision)
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    print(f"weights: {hashlib.sha256(weights).hexdigest()[:16]}")
    print(LESSON)


if __name__ == "__main__":
    main()
