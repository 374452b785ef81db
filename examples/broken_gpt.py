"""Train a small GPT on letters, in FP16, on a CPU. It runs, the loss falls, and it has four mistakes.

ampwise run examples/broken_gpt.py      names them: the line, what it did, the fix
ampwise check examples/broken_gpt.py    what can be seen of them without running the script
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# On ARM CPUs, oneDNN takes 20 times as long for an FP16 matmul as torch itself.
torch.backends.mkldnn.enabled = False

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 2, 8
text = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text]).unfold(0, CONTEXT + 1, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))

    def forward(self, x, y):
        logits = self.head(self.norm(self.blocks(self.token(x) + self.position.weight)))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum") / BATCH


def get_batch():
    windows = data[torch.randint(len(data), (BATCH,))]
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = model(*get_batch())
    model.train()
    return loss.item() / CONTEXT


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(1, args.steps + 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(*get_batch())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: loss {loss.item() / CONTEXT:.2f}, evaluated {evaluate(model):.2f}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
