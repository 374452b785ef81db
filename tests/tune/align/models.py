"""Models to pad, small, with sizes that are off unless they are given others."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "CodeTied", "Gated", "LanguageModel", "Statements", "integers_", "mlp", "own", "padding_of"]


def mlp(sizes=(13, 21, 7), act=nn.ReLU):
    layers = [part for wide, to in pairwise(sizes) for part in (nn.Linear(wide, to), act())]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    def __init__(self, width=12, hidden=21):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.contract(F.gelu(self.expand(self.norm(x)), approximate="tanh"))


class Statements(nn.Module):
    def __init__(self, width=13, hidden=21):
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(width, hidden),
            nn.SiLU(),
            nn.Dropout(0),
            nn.Linear(hidden, 5),
        )

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop(x)
        x = self.fc2(x)
        return x  # noqa: RET504


class Gated(nn.Module):
    def __init__(self, width=13, hidden=21):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate = F.silu(self.gate(x))
        return self.down(gate * self.up(x))


class LanguageModel(nn.Module):
    """Logits by a layer, which has its weight from the embedding, or one of its own."""

    def __init__(self, vocabulary=101, width=16, tied=True, bias=False):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.block = Block(width, 21)
        self.lm_head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        return self.lm_head(self.block(self.wte(tokens)))


class CodeTied(nn.Module):
    """Logits by the embedding's weight, without a layer of their own."""

    def __init__(self, vocabulary=101, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.block = Block(width, 21)

    def forward(self, tokens):
        return F.linear(self.block(self.wte(tokens)), self.wte.weight)


def integers_(model, most=3):
    """Give all parameters whole numbers, whose sums are exact in any order."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-most, most + 1, parameter.shape))
    return model


def own(tensor, like):
    """The part of a padded tensor that is not padding."""
    return tensor[tuple(slice(size) for size in like.shape)]


def padding_of(tensor, like):
    """The part that is, with zeros in place of the rest."""
    rest = tensor.detach().clone()
    own(rest, like).zero_()
    return rest
