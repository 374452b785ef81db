"""Two towers that learn to agree, in the manner of CLIP: one optimizer, one scaler.

One tower runs in FP16 and the other in BF16, and the optimizer steps past the scaler: Adam hides that its gradients are
still scaled.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXELS, TOKENS, LENGTH, WIDTH, BATCH, STEPS = 24, 20, 5, 16, 16, 24


class ImageTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.layers(pixels).float(), dim=-1)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.project(self.tokens(tokens).mean(1)).float(), dim=-1)


def clip_loss(image: Tensor, text: Tensor, temperature: float = 0.2) -> Tensor:
    logits = image @ text.T / temperature
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def make_batch(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Captions of random tokens, and images that are the sum of what each token looks like."""
    tokens = torch.randint(TOKENS, (BATCH, LENGTH))
    return pictures[tokens].mean(1) + 0.05 * torch.randn(BATCH, PIXELS), tokens


def main() -> None:
    torch.manual_seed(0)
    pictures = torch.randn(TOKENS, PIXELS)
    image_tower, text_tower = ImageTower(), TextTower()
    parameters = list(itertools.chain(image_tower.parameters(), text_tower.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    for step in range(STEPS):
        pixels, tokens = make_batch(pictures)
        with torch.autocast("cpu", dtype=torch.float16):
            image = image_tower(pixels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            text = text_tower(tokens)  # expect: AMP307
        loss = clip_loss(image, text)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()  # expect: AMP109
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
