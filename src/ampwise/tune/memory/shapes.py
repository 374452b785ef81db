"""The sizes of a decoder transformer: as given, or typical of a number of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ampwise.errors import BadInput

__all__ = ["TYPICAL", "Shape", "count_text", "parse_count", "shape_for"]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
CLOSE = 0.1  # how far from the number asked for the parameters may be, as a share
HEAD = 128  # the width of a head where nothing else is said
FFN_STEP = 256  # gated MLPs are 8/3 of the hidden size, rounded up to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder with gated MLPs and a head of its own.

    >>> f"{Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008).parameters / 1e9:.2f} B"
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
        """The width of one."""
        return self.hidden // self.heads

    @property
    def block(self) -> int:
        """The parameters of a layer."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def outside(self) -> int:
        """The parameters of what is not a layer."""
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


def _typical(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None) -> Shape:
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, ffn=ffn)


# As published models have them: Llama's where it has the size, GPT-3's with gated MLPs of as many parameters elsewhere.
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
    """A number of parameters.

    >>> parse_count("7B"), parse_count("1.3b"), parse_count("124M"), parse_count(2e6)
    (7000000000, 1300000000, 124000000, 2000000)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", str(text).strip().lower().replace("_", ""))
    try:
        count = float(match[1]) * UNITS[match[2]] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e15:
        raise BadInput(f"--params {text}: expected is a number of parameters, such as 124M, 7B or 1.3e9.")
    return round(count)


def count_text(count: int) -> str:
    """
    >>> count_text(6_738_415_616), count_text(124_000_000), count_text(512)
    ('6.74 B', '124 M', '512')
    """
    for unit, size in reversed(UNITS.items()):
        if unit and count >= size:
            return f"{count / size:.3g} {unit.upper()}"
    return str(count)


def shape_for(params: int | None, given: Mapping[str, int]) -> Shape:
    """The sizes that are given, completed by what is typical; with ``params``, of about so many parameters."""
    _check(given)
    if params is None:
        missing = [f"--{name}" for name in ("layers", "hidden") if name not in given]
        if missing:
            raise BadInput(f"a model's size is not known without {' and '.join(missing)}: give it, or --params.")
        return _checked(_completed(TYPICAL[-1], given))
    base = min(TYPICAL, key=lambda shape: abs(math.log(shape.parameters / params)))
    shape = _completed(base, given)
    if not _is_close(shape, params) and "layers" not in given:
        shape = replace(shape, layers=max(1, round((params - shape.outside) / shape.block)))
    shape = _checked(shape)
    if not _is_close(shape, params):
        raise BadInput(
            f"--params {count_text(params)}: {shape} are {count_text(shape.parameters)} parameters. "
            "Leave --params out to have those sizes, or give other sizes."
        )
    return shape


def _is_close(shape: Shape, params: int) -> bool:
    return abs(shape.parameters / params - 1) <= CLOSE


def _completed(base: Shape, given: Mapping[str, int]) -> Shape:
    """Of what is not given, what depends on the hidden size goes with it."""
    hidden = given.get("hidden", base.hidden)
    if hidden == base.hidden and "heads" not in given:
        return replace(base, **given)
    heads = given.get("heads") or max(1, hidden // HEAD)
    ffn = -(-hidden * 8 // 3 // FFN_STEP) * FFN_STEP
    return replace(base, **{"heads": heads, "kv_heads": heads, "ffn": ffn, **given})


def _check(given: Mapping[str, int]) -> None:
    names = {field.name for field in fields(Shape)}
    for name, size in given.items():
        if name in names and size < 1:
            raise BadInput(f"--{name.replace('_', '-')} {size}: a size is at least 1.")


def _checked(shape: Shape) -> Shape:
    if shape.hidden % shape.heads:
        raise BadInput(
            f"--hidden {shape.hidden} --heads {shape.heads}: the hidden size is not divisible by the number of heads."
        )
    if shape.heads % shape.kv_heads:
        raise BadInput(
            f"--heads {shape.heads} --kv-heads {shape.kv_heads}: the heads cannot be shared out evenly among those of "
            "keys and values."
        )
    if shape.head % 2:
        raise BadInput(
            f"--hidden {shape.hidden} --heads {shape.heads}: a head would be {shape.head} wide, and rotary positions "
            "need an even number."
        )
    return shape
