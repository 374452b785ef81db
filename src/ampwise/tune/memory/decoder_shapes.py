"""Sizes of a decoder transformer: as given, or typical for a number of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ampwise.errors import BadInput

__all__ = ["TYPICAL", "DecoderShape", "count_text", "decoder_shape", "parse_count"]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
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


def parse_count(text: str | float) -> int:
    """Parse a number of parameters.

    >>> parse_count("7B"), parse_count("1.3b"), parse_count("124M"), parse_count(2e6)
    (7000000000, 1300000000, 124000000, 2000000)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", str(text).strip().lower().replace("_", ""))
    try:
        count = float(match[1]) * UNITS[match[2]] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e15:
        raise BadInput(f"--params {text}: expected a number of parameters, such as 124M, 7B or 1.3e9.")
    return round(count)


def count_text(count: int) -> str:
    """Format a number of parameters.

    >>> count_text(6_738_415_616), count_text(124_000_000), count_text(512)
    ('6.74 B', '124 M', '512')
    """
    for unit, size in reversed(UNITS.items()):
        if unit and count >= size:
            return f"{count / size:.3g} {unit.upper()}"
    return str(count)


def decoder_shape(params: int | None, given: Mapping[str, int]) -> DecoderShape:
    """Complete the given sizes by typical ones; with ``params``, to about so many parameters."""
    _check(given)
    if params is None:
        missing = [f"--{name}" for name in ("layers", "hidden") if name not in given]
        if missing:
            raise BadInput(f"the size of the model is unknown: give {' and '.join(missing)}, or --params.")
        return _checked(_completed(TYPICAL[-1], given))
    base = min(TYPICAL, key=lambda shape: abs(math.log(shape.parameters / params)))
    shape = _completed(base, given)
    if not _is_close(shape, params) and "layers" not in given:
        shape = replace(shape, layers=max(1, round((params - shape.outside) / shape.block)))
    shape = _checked(shape)
    if not _is_close(shape, params):
        raise BadInput(
            f"--params {count_text(params)}: {shape} make {count_text(shape.parameters)} parameters. "
            "Leave out --params to use these sizes, or give other sizes."
        )
    return shape


def _is_close(shape: DecoderShape, params: int) -> bool:
    return abs(shape.parameters / params - 1) <= CLOSE


def _completed(base: DecoderShape, given: Mapping[str, int]) -> DecoderShape:
    """Fill in sizes; those that depend on the hidden size follow it."""
    hidden = given.get("hidden", base.hidden)
    if hidden == base.hidden and "heads" not in given:
        return replace(base, **given)
    heads = given.get("heads") or max(1, hidden // HEAD)
    ffn = -(-hidden * 8 // 3 // FFN_STEP) * FFN_STEP
    return replace(base, **{"heads": heads, "kv_heads": heads, "ffn": ffn, **given})


def _check(given: Mapping[str, int]) -> None:
    names = {field.name for field in fields(DecoderShape)}
    for name, size in given.items():
        if name in names and size < 1:
            raise BadInput(f"--{name.replace('_', '-')} {size}: expected at least 1.")


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
