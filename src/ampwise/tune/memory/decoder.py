"""A decoder transformer of given sizes, for predictions without a model's code.

It has the common architecture: embeddings, blocks of attention and a gated MLP after RMSNorm, rotary positions, an
untied head, cross-entropy over the vocabulary. It is built of fake tensors and treated like a user's own model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.tune.memory.decoder_shapes import DecoderShape
from ampwise.tune.train_case import CaseFactory, make_factory

__all__ = ["Decoder", "decoder_factory"]


class DecoderBlock(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, narrow = shape.hidden, shape.kv_heads * shape.head
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, narrow, bias=False)
        self.value, self.output = nn.Linear(hidden, narrow, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, shape.ffn, bias=False), nn.Linear(hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x), cosine, sine)
        inner = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.shape.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        groups = self.shape.heads // self.shape.kv_heads
        if groups > 1:
            key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Decoder transformer; its forward pass returns the loss."""

    angles: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.register_buffer("angles", torch.zeros(shape.seq, shape.head), persistent=False)

    def forward(self, tokens: Tensor, nexts: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosine, sine = self.angles.cos(), self.angles.sin()
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), nexts.flatten())


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cosine.to(x.dtype) + torch.cat((-right, left), -1) * sine.to(x.dtype)


def decoder_factory(shape: DecoderShape) -> CaseFactory:
    """Return a factory of the decoder with a batch of sequences; by default one sequence."""

    def make(batch: int = 1) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        tokens, nexts = (torch.zeros(batch, shape.seq, dtype=torch.long) for _ in range(2))
        return Decoder(shape), (tokens, nexts)

    return make_factory(make, "a decoder transformer")
