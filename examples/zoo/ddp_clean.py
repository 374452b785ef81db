"""Data-parallel training on several ranks, in FP16, with micro-batches whose gradients are exchanged once a step.

torchrun --standalone --nproc-per-node 2 examples/zoo/ddp_clean.py
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, WIDTH, CLASSES, BATCH, EPOCHS, ACCUMULATE = 16, 32, 4, 16, 3, 2
Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(F.relu(self.hidden(x)))
        return logits


def make_dataset() -> TensorDataset:
    """The same on every rank: batches of points, labelled by a random layer."""
    x = torch.randn(24, BATCH, FEATURES)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES)).argmax(-1))


def train_one_epoch(
    model: DistributedDataParallel, loader: Loader, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> float:
    model.train()
    total = 0.0
    for index, (x, y) in enumerate(loader, start=1):
        last = index % ACCUMULATE == 0
        with nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x).float(), y) / ACCUMULATE
            scaler.scale(loss).backward()
        total += loss.item()
        if last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return total * ACCUMULATE / len(loader)


def save(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, path)


def main() -> None:
    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    dataset = make_dataset()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    loader: Loader = DataLoader(dataset, batch_size=None, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            loss = train_one_epoch(model, loader, optimizer, scaler)
            print(f"epoch {epoch}, rank {rank} (local {local_rank}): loss {loss:.3f}", flush=True)
            if rank == 0:
                save(Path(folder) / "last.pt", model, optimizer, scaler)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
