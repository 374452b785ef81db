"""Models of 124 M to 1 T parameters as a checkpoint sees them: tensors by name, cut into pieces of ranks.

They are those of ``ampwise memory --params``. FSDP2 cuts each tensor along its first dimension into as many equal
pieces as there are ranks; where that has fewer rows, some ranks have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from ampwise.guard.disk.manifest import tensors_file
from ampwise.tune.advise.model import parse_count
from ampwise.tune.memory.decoder import DecoderShape, decoder_shape

__all__ = ["MODELS", "Model", "model_of", "piece_rows"]

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, each like its parameter
COUNTER = "step"  # a number, which all ranks have
SIZES = ("124M", "7B", "70B", "405B", "1T")
BLOCK = ("before_attention", "before_mlp", "query", "key", "value", "output", "gate", "up", "down")

Dimensions = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """Parameters by name, in the order of the model."""

    tensors: tuple[tuple[str, Dimensions], ...]
    linear: int = 0  # layers that may have FP8 scales

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    def state(self) -> Iterator[tuple[str, Dimensions]]:
        """What a guard saves of it with AdamW, and what it is called there."""
        for name, shape in self.tensors:
            yield f"model.{name}", shape
            yield from ((f"optimizer.0.state.model.{name}.{moment}", shape) for moment in MOMENTS)
            yield f"optimizer.0.state.model.{name}.{COUNTER}", ()

    @cached_property
    def _alike(self) -> dict[Dimensions, tuple[int, int]]:
        """Of each shape in the state, how many there are, and how long their names are together."""
        names: dict[Dimensions, list[int]] = {}
        for name, shape in self.state():
            names.setdefault(shape, []).append(len(name))
        return {shape: (len(lengths), sum(lengths)) for shape, lengths in names.items()}

    def bytes(self) -> int:
        """Of all tensors in a checkpoint: FP32."""
        return 4 * sum(count * math.prod(shape) for shape, (count, _) in self._alike.items())

    def pieces(self, shards: int) -> int:
        """Into which the ranks' files have them cut: an entry of the manifest each."""
        return sum(count * _pieces(shape, shards) for shape, (count, _) in self._alike.items())

    def items(self, shards: int, ranks: int) -> int:
        """What the ranks bring to the first one to be planned: those of copies too, which are dropped there."""
        cut, whole = self.pieces(shards) - len(self.tensors), len(self.tensors)
        return cut * (ranks // shards) + whole * ranks

    def manifest_bytes(self, shards: int) -> int:
        """Of the part of the manifest that says where each tensor lies; a name is in it, and in each piece."""
        total = len("{}") - len(", ")
        for shape, (count, names) in self._alike.items():
            total += count * (len('"": ') + _tensor_text(shape, shards) + len(", "))
            total += names * (1 + _pieces(shape, shards))
        return total


def model_of(shape: DecoderShape) -> Model:
    """As ``ampwise.tune.memory.decoder`` builds it."""
    hidden, narrow = shape.hidden, shape.kv_heads * shape.head
    wide: dict[str, Dimensions] = {
        "before_attention": (hidden,),
        "before_mlp": (hidden,),
        "query": (hidden, hidden),
        "key": (narrow, hidden),
        "value": (narrow, hidden),
        "output": (hidden, hidden),
        "gate": (shape.ffn, hidden),
        "up": (shape.ffn, hidden),
        "down": (hidden, shape.ffn),
    }
    blocks = [(f"blocks.{place}.{part}.weight", wide[part]) for place in range(shape.layers) for part in BLOCK]
    ends: list[tuple[str, Dimensions]] = [("norm.weight", (hidden,)), ("head.weight", (shape.vocab, hidden))]
    tensors = [("embedding.weight", (shape.vocab, hidden)), *blocks, *ends]
    return Model(tuple(tensors), linear=7 * shape.layers + 1)


def piece_rows(rows: int, shards: int) -> Iterator[tuple[int, int]]:
    """Where each rank's share of a dimension begins, and how long it is; empty ones are left out.

    >>> list(piece_rows(5, 4))
    [(0, 2), (2, 2), (4, 1)]
    """
    each = -(-rows // shards)
    return ((first, min(each, rows - first)) for first in range(0, rows, each))


def _pieces(shape: Dimensions, shards: int) -> int:
    return -(-shape[0] // -(-shape[0] // shards)) if shape else 1


@cache
def _tensor_text(shape: Dimensions, shards: int) -> int:
    """The length of a tensor's entry, without its name, which is in each piece."""
    count = _pieces(shape, shards)
    empty = len(json.dumps({"dtype": "F32", "shape": shape, "pieces": []}))
    if count == 1:
        return empty + len(_piece_text("", ["0"] * len(shape), [str(size) for size in shape]))
    rest, each = shape[1:], -(-shape[0] // shards)
    place = "".join(f", 0:{size}" for size in rest)
    # Where the numbers of rows stand, of which each piece has others.
    one = len(_piece_text(f" [:{place}]", ["", *("0" for _ in rest)], ["", *map(str, rest)]))
    begins, last = _digits(0, each, count), shape[0] - each * (count - 1)
    ends = _digits(each, each, count - 1) + len(str(shape[0]))
    sizes = (count - 1) * len(str(each)) + len(str(last))
    return empty + count * one + len(", ") * (count - 1) + 2 * begins + ends + sizes


def _piece_text(place: str, offsets: list[str], sizes: list[str]) -> str:
    listed = ", ".join(offsets), ", ".join(sizes)
    return f'{{"file": "{tensors_file(0)}", "key": "{place}", "offsets": [{listed[0]}], "sizes": [{listed[1]}]}}'


def _digits(first: int, step: int, count: int) -> int:
    """Of so many numbers, each by a step larger than the one before, written down.

    >>> _digits(0, 5, 4) == len("0" "5" "10" "15")
    True
    """
    total, power = count, 10
    while count and first + step * (count - 1) >= power:
        total += count - max(0, -(-(power - first) // step))
        power *= 10
    return total


MODELS = {size: model_of(decoder_shape(parse_count(size), {})) for size in SIZES}
