"""A GPT of a few thousand parameters, and a text that it can learn."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 32, 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, to_loss=False):
        if to_loss:
            logits = self(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def loss_in_fp32(model, tokens):
    """Of weights as they are, computed in FP32: BF16 products take a CPU without instructions for them a second."""
    weights = {name: each.float() for name, each in model.named_parameters()}
    with torch.autocast("cpu", enabled=False):
        return torch.func.functional_call(model, weights, (tokens, True))


def text(rows, seed):
    """Most words decide on the next: there is something to learn, and an end to it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    for place in range(1, LENGTH + 1):
        told = (tokens[:, place - 1] * 5 + 1) % VOCABULARY
        chance = torch.rand(rows, generator=generator) < 0.9
        tokens[:, place] = torch.where(chance, told, tokens[:, place])
    return tokens
