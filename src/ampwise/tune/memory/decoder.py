"""A decoder transformer of given sizes, or typical ones, for predictions without a model's code.

It has the common architecture: embeddings, blocks of attention and a gated MLP after RMSNorm, rotary positions, an
untied head, cross-entropy over the vocabulary. It is built of fake tensors and treated like a user's own model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.errors import BadInput
from ampwise.numbers.number_text import count_text
from ampwise.tune.train_case import CaseFactory, make_factory

CLOSE = 0.1  # allowed relative difference from the requested number of parameters
HEAD = 128  # default width of a head
FFN_STEP = 256  # gated MLPs are 8/3 of the hidden size, rounded up to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder with gated MLPs and an untied head.

    >>> f"{DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008).parameters / 1e9:.2f} B"
    '6.74 B'
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 32_000
    seq: int = 2_048

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        return 2 * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.outside

    def __str__(self) -> str:
        grouped = "" if self.kv_heads == self.heads else f" ({self.kv_heads} for keys and values)"
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads{grouped}, ffn {self.ffn}, "
            f"vocabulary {self.vocab}, sequence {self.seq}"
        )


def _typical(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None) -> DecoderShape:
    return DecoderShape(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, ffn=ffn)


# Sizes of published models: Llama's where it has the size, elsewhere GPT-3's with gated MLPs of as many parameters.
TYPICAL = (
    _typical(4, 256, 4, 768),
    _typical(6, 512, 8, 1536),
    _typical(12, 768, 12, 2048),
    _typical(24, 1024, 16, 2816),
    _typical(24, 1536, 16, 4096),
    _typical(24, 2048, 16, 5504),
    _typical(32, 2560, 32, 6912),
    _typical(32, 4096, 32, 11008),
    _typical(40, 5120, 40, 13824),
    _typical(60, 6656, 52, 17920),
    _typical(80, 8192, 64, 28672, 8),
    _typical(96, 12288, 96, 32768),
    _typical(126, 16384, 128, 53248, 8),
)


def decoder_shape(params: int | None, given: Mapping[str, int]) -> DecoderShape:
    """Complete the given sizes by typical ones; with ``params``, to about so many parameters."""
    names = {field.name for field in fields(DecoderShape)}
    for name, size in given.items():
        if name in names and size < 1:
            raise BadInput(f"--{name.replace('_', '-')} {size}: expected at least 1.")
    if params is None:
        missing = [f"--{name}" for name in ("layers", "hidden") if name not in given]
        if missing:
            raise BadInput(f"the size of the model is unknown: give {' and '.join(missing)}, or --params.")
        return _checked(_completed(TYPICAL[-1], given))
    base = min(TYPICAL, key=lambda shape: abs(math.log(shape.parameters / params)))
    shape = _completed(base, given)
    if abs(shape.parameters / params - 1) > CLOSE and "layers" not in given:
        shape = replace(shape, layers=max(1, round((params - shape.outside) / shape.block)))
    if abs(_checked(shape).parameters / params - 1) > CLOSE:
        raise BadInput(
            f"--params {count_text(params)}: {shape} make {count_text(shape.parameters)} parameters. "
            "Leave out --params to use these sizes, or give other sizes."
        )
    return shape


def _completed(base: DecoderShape, given: Mapping[str, int]) -> DecoderShape:
    """Fill in sizes; those that depend on the hidden size follow it."""
    hidden = given.get("hidden", base.hidden)
    if hidden == base.hidden and "heads" not in given:
        return replace(base, **given)
    heads = given.get("heads") or max(1, hidden // HEAD)
    ffn = -(-hidden * 8 // 3 // FFN_STEP) * FFN_STEP
    return replace(base, **{"heads": heads, "kv_heads": heads, "ffn": ffn, **given})


def _checked(shape: DecoderShape) -> DecoderShape:
    if shape.hidden % shape.heads:
        raise BadInput(
            f"--hidden {shape.hidden} --heads {shape.heads}: the hidden size is not divisible by the number of heads."
        )
    if shape.heads % shape.kv_heads:
        raise BadInput(
            f"--heads {shape.heads} --kv-heads {shape.kv_heads}: the number of heads is not divisible by that of "
            "key-value heads."
        )
    if shape.head % 2:
        raise BadInput(
            f"--hidden {shape.hidden} --heads {shape.heads}: each head would have width {shape.head}, and rotary "
            "positions need an even width."
        )
    return shape


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
