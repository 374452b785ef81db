"""A typical training script with four mistakes: it runs, and the loss goes down.

    ampwise run examples/broken_gpt.py --steps 40      names them, with line and evidence
    ampwise check examples/broken_gpt.py               what can be seen without running it

The model is that of char_gpt.py, whose training loop uses the Engine and has none of these mistakes.
"""

from __future__ import annotations

import argparse
import io

import torch
import torch.nn.functional as F
from char_gpt import TEXT, Batch, CharGPT, batches  # type: ignore[import-not-found] # beside this script
from torch import Tensor, nn

LEARNING_RATE, WARMUP_STEPS, MAX_NORM = 2e-3, 20, 1.0


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    letters, nexts = batch
    return F.cross_entropy(model(letters).float().flatten(0, 1), nexts.flatten())


def evaluate(model: nn.Module, batch: Batch) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, batch)
    model.train()
    return loss.item()


def train(model: nn.Module, data: list[Batch], held_out: Batch) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=WARMUP_STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for step, batch in enumerate(data, start=1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % 20 == 0 or step == len(data):
            print(f"step {step}: loss {loss.item():.3f}, held out {evaluate(model, held_out):.3f}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="%(default)s")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text = TEXT.read_text(encoding="utf-8")
    stream = batches(text)
    train(CharGPT(len(set(text))), [next(stream) for _ in range(steps)], next(stream))


if __name__ == "__main__":
    main()
