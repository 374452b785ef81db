"""Small models for these tests, some with a layer that does not stand narrow formats."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Two products of its own, between modules that have one each."""

    def __init__(self, width=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value))


class Net(nn.Module):
    """A product in the model itself, too: the weights of the embedding are the head's."""

    def __init__(self, width=16, words=32):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens, wanted):
        x = self.words(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.body(x)
        return F.cross_entropy(F.linear(x, self.words.weight).flatten(0, 1).float(), wanted.flatten())


def net(batches=3):
    torch.manual_seed(0)
    model = Net()
    return model, [(torch.randint(32, (4, 8)), torch.randint(32, (4, 8))) for _ in range(batches)]


class Deep(nn.Module):
    """Layers in a row, some of which subtract what is nearly equal."""

    def __init__(self, layers, cancelling=(), width=16, left=1e-2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        half = width // 2
        for place in cancelling:
            with torch.no_grad():
                weight = self.layers[place].weight
                weight[:, half:] = -weight[:, :half] * (1 + left * torch.randn(width, half))
        self.half = half

    def forward(self, x):
        for layer in self.layers:
            given = F.layer_norm(x, x.shape[-1:])[..., : self.half]
            x = x + 0.1 * torch.tanh(F.layer_norm(layer(torch.cat([given, given], -1)), x.shape[-1:]))
        return x


def deep(layers, cancelling=(), batches=2, rows=32):
    """The model, its loss, and batches."""
    torch.manual_seed(0)
    model = Deep(layers, cancelling)
    return model, lambda x: F.mse_loss(model(x), x.roll(1, -1)), [(torch.randn(rows, 16),) for _ in range(batches)]
