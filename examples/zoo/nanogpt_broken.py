"""A small GPT in the manner of nanoGPT: micro-batches added up, clipping, a cosine by hand, a checkpoint dictionary.

The loss is not divided by the number of micro-batches, the checkpoint lacks the scaler, and the function that logs the
norm unscales gradients that the clip has unscaled: torch raises there, so the run ends with an error.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

vocab_size, block_size, n_layer, n_head, n_embd = 32, 16, 2, 2, 16
batch_size, gradient_accumulation_steps = 4, 2
learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 3, 12
eval_interval, eval_iters, log_interval, norm_interval = 6, 2, 4, 10
grad_clip = 1.0

ctx = torch.autocast(device_type="cpu", dtype=torch.float16)
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_out = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        out: Tensor = self.c_out(F.relu(self.c_fc(self.ln_2(x))))
        return x + out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x)).float()
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_data() -> Tensor:
    """A text in which each letter follows from the one before, most of the time."""
    noise = torch.rand(4096) < 0.1
    letters = (torch.arange(4096) * 7) % vocab_size
    return torch.where(noise, torch.randint(vocab_size, (4096,)), letters)


def get_batch(data: Tensor) -> Batch:
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix.tolist()])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix.tolist()])
    return x, y


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model: nn.Module, data: Tensor) -> float:
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        x, y = get_batch(data)
        with ctx:
            _, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean().item()


def log_norm(iter_num: int, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.unscale_(optimizer)  # expect: AMP103
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    print(f"iter {iter_num}: grad norm {norm:.4f}")


def main() -> None:
    torch.manual_seed(1337)
    data = make_data()
    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    x, y = get_batch(data)
    out_dir = tempfile.TemporaryDirectory()
    best_val_loss = 1e9

    for iter_num in range(max_iters):
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr

        if iter_num % eval_interval == 0:
            val_loss = estimate_loss(model, data)
            print(f"step {iter_num}: val loss {val_loss:.4f}")
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                checkpoint: dict[str, Any] = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, Path(out_dir.name) / "ckpt.pt")  # expect: AMP204

        for _ in range(gradient_accumulation_steps):
            with ctx:
                _, loss = model(x, y)
            x, y = get_batch(data)
            scaler.scale(loss).backward()  # expect: AMP205
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        if iter_num and iter_num % norm_interval == 0:
            log_norm(iter_num, model, optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        if iter_num % log_interval == 0:
            print(f"iter {iter_num}: loss {loss.item():.4f}, lr {lr:.2e}")
    out_dir.cleanup()


if __name__ == "__main__":
    main()
