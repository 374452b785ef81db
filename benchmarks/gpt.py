"""GPT for the benchmarks: GPT-2's layers, and a forward pass that ends in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "GPT2_124M", "GPT_1M", "GPT_4M", "GPT_ONE_LAYER", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a model, and of the batches it is trained with."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int  # of a sequence, in tokens
    batch: int  # sequences

    @property
    def tokens(self) -> int:
        return self.batch * self.length


GPT2_124M = Shape(name="GPT-2 124M", layers=12, width=768, heads=12, vocabulary=50304, length=1024, batch=16)
GPT_4M = Shape(name="GPT 4M", layers=4, width=256, heads=4, vocabulary=2048, length=128, batch=2)
GPT_1M = Shape(name="GPT 1M", layers=4, width=128, heads=4, vocabulary=1024, length=64, batch=8)
GPT_ONE_LAYER = Shape(name="GPT, one layer", layers=1, width=64, heads=2, vocabulary=256, length=32, batch=4)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.contract(F.gelu(self.expand(self.ln_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Returns the loss, as nanoGPT's does: wrappers that convert a model's outputs have a scalar to convert."""

    places: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.register_buffer("places", torch.arange(shape.length), persistent=False)
        for matrix in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor, nexts: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(self.places)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, nexts)

    def loss(self, x: Tensor, nexts: Tensor) -> Tensor:
        """Of what the blocks leave."""
        logits = F.linear(self.ln_f(x), self.wte.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), nexts.flatten())

    def compile_parts(self) -> None:
        """Each block and the loss: blocks are alike and compiled once, in a tenth of the time that the whole takes."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]
