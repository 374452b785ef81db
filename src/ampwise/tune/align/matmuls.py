"""The matmuls of a training step: their sizes, which of them are misaligned, and what that costs.

Tensor cores load words of 16 bytes: 8 elements of 16 bits, 4 of 32, 16 of 8. Rows of a matrix that start at word
boundaries are loaded whole. That affects only speed, except in FP8, whose matmul (``torch._scaled_mm``) requires it.
What matters are the sizes along which matrices are stored. Others, such as the batch rows of a linear layer, are
unrestricted: they only affect how full the last tile of a result is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ampwise.errors import BadInput, UnknownName

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # per element
WORD = 16  # bytes that tensor cores load at once
LINE = 128  # bytes of a cache line, which an A100 prefers: 64 elements of 16 bits
GROWTH = 0.01  # growth that is acceptable to reach a whole cache line
TILE = 128  # rows and columns that a thread block computes at once; libraries use other sizes too
LEAST = 1e9  # FLOPs per step: with less work, launches take longer
NOTABLE = 0.05  # of the matmul work, if not measured
NOTABLE_TIME = 0.01  # of the step time, if measured
ROWS = "rows"
ROOT = "(the model)"
FILLED = 0.8  # of its tiles: matmuls that fill less get a remark


def multiple_for(precision: str, to: int | None = None) -> int:
    """Return what sizes must be multiples of: the elements in a word, or ``to`` if that is compatible.

    >>> multiple_for("bf16"), multiple_for("fp8"), multiple_for("tf32"), multiple_for("bf16", 64)
    (8, 16, 4, 64)
    """
    if precision not in BYTES:
        raise UnknownName("precision", precision, BYTES, listing=f"The precisions are {', '.join(BYTES)}.")
    needed = WORD // BYTES[precision]
    if to is None:
        return needed
    if isinstance(to, bool) or not isinstance(to, int) or to < 1 or to % needed:
        raise BadInput(
            f"to={to!r} is not a multiple of {needed}, which {precision} needs; use {needed}, {2 * needed}, 64 or 128."
        )
    return to


def better_size(size: int, precision: str, to: int | None = None) -> int:
    """Return the next aligned size, or the size itself: whole cache lines where that adds almost nothing.

    >>> better_size(50257, "bf16"), better_size(1001, "bf16"), better_size(1000, "bf16"), better_size(1000, "bf16", 64)
    (50304, 1008, 1000, 1024)
    """
    multiple = multiple_for(precision, to)
    if size % multiple == 0:
        return size
    in_lines = round_up(size, LINE // BYTES[precision])
    return in_lines if to is None and in_lines <= size * (1 + GROWTH) else round_up(size, multiple)


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple, or the size itself if it is one."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSize:
    """A dimension of a matmul, and its role in the layer."""

    role: str  # "rows", "inputs", "outputs", "input channels", "head size"; "size" if unknown
    size: int
    row: int | None = None  # row stride of a matrix stored along it, in elements; None: no matrix is, any size is fine


class MisalignedSize(NamedTuple):
    """A misaligned size, its role in the layer, and a better one: the same, if only its start is misaligned."""

    role: str
    size: int
    better: int

    def __str__(self) -> str:
        if self.better == self.size:
            return f"{self.role} {self.size}: start between two words"
        return f"{self.role} {self.size} → {self.better}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingTiming:
    """Milliseconds of a matmul as it is and padded, alternating on the device."""

    ms: float
    padded_ms: float
    spread_ms: float  # variation of those times: smaller differences are noise

    @property
    def saved_ms(self) -> float:
        """Milliseconds that padding saves (or costs, if negative); 0 within the noise."""
        saved = self.ms - self.padded_ms
        return saved if abs(saved) > self.spread_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMatmul:
    """A matmul of m×k and k×n matrices, or an equivalent operation, and how often it runs in a step."""

    layer: str  # path of the module, or of the one that owns the weight
    kind: str  # "linear", "convolution", "attention", or "product" for anything else
    op: str  # "mm"
    backward: bool
    precision: str
    m: MatmulSize
    n: MatmulSize
    k: MatmulSize
    batches: int = 1
    stored: tuple[str, ...] = ()  # the dimensions along which its matrices are stored: left, right, result
    flops: float = 0.0  # of all runs
    count: int = 1
    timing: PaddingTiming | None = None

    @property
    def sizes(self) -> tuple[MatmulSize, MatmulSize, MatmulSize]:
        return self.m, self.n, self.k

    @property
    def shape(self) -> str:
        """Text such as ``16384×50257×768``, with the batch count in front if there are several."""
        batches = f"{self.batches} × " if self.batches > 1 else ""
        return batches + "×".join(str(each.size) for each in self.sizes)

    def off(self, to: int | None = None) -> tuple[MisalignedSize, ...]:
        """Return the misaligned sizes."""
        if self.precision not in BYTES:
            return ()
        multiple = multiple_for(self.precision, to)
        # torch chooses the layout of a linear layer's gradients; along rows, they matter only in FP8.
        any_rows = self.kind == "linear" and self.backward and self.precision != "fp8"
        sizes = (each for each in self.sizes if not (any_rows and each.role == ROWS))
        bad = (each for each in sizes if each.row is not None and each.row % multiple)
        return tuple(MisalignedSize(each.role, each.size, better_size(each.size, self.precision, to)) for each in bad)

    def padded(self, to: int | None = None) -> StepMatmul:
        """Return the same matmul with aligned sizes."""
        wanted = {(each.role, each.size): each.better for each in self.off(to)}
        m, n, k = (replace(each, size=wanted.get((each.role, each.size), each.size)) for each in self.sizes)
        return replace(self, m=m, n=n, k=k)

    @property
    def filled(self) -> float:
        """Fraction of its result tiles that is used.

        >>> shape = {"m": 130, "n": 512, "k": 64}
        >>> sizes = {letter: MatmulSize(role=letter, size=size) for letter, size in shape.items()}
        >>> round(StepMatmul(layer="", kind="linear", op="mm", backward=False, precision="bf16", **sizes).filled, 3)
        0.508
        """
        return self.m.size * self.n.size / (round_up(self.m.size, TILE) * round_up(self.n.size, TILE))

    @property
    def tiles(self) -> int:
        """Number of tiles of its results."""
        return self.batches * round_up(self.m.size, TILE) * round_up(self.n.size, TILE) // TILE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMatmuls:
    """The matmuls of a layer, forward and backward, or of several layers that are alike in name and size."""

    name: str  # "blocks.*.expand"
    names: tuple[str, ...]
    products: tuple[StepMatmul, ...]
    off: tuple[MisalignedSize, ...]

    @property
    def product(self) -> StepMatmul:
        """Matmul of the forward pass, if it was seen."""
        return next((each for each in self.products if not each.backward), self.products[0])

    @property
    def kind(self) -> str:
        return self.product.kind

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.products)

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds per step that aligned sizes would save; None if not measured."""
        timed = [each for each in self.products if each.timing is not None]
        return sum(each.count * each.timing.saved_ms for each in timed if each.timing) if timed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMatmuls:
    """The matmuls of one training step."""

    name: str
    precision: str
    device: str  # "cuda" or "cpu", whichever it ran on
    gpu: str | None = None  # the GPU that the sizes should suit
    processors: int | None = None  # multiprocessors, each computing one tile at a time
    to: int | None = None
    rows: int | None = None  # of the batch
    tokens: int | None = None
    products: tuple[StepMatmul, ...] = ()
    step_ms: float | None = None  # of forward and backward pass, if measured

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def layers(self) -> tuple[LayerMatmuls, ...]:
        """All layers, most costly first."""
        grouped: dict[object, list[StepMatmul]] = {}
        forwards = {(each.layer, each.kind): each for each in reversed(self.products) if not each.backward}
        for product in self.products:
            # Layers are alike if their sizes are, by role, as are all weightless matmuls of a module.
            forward = forwards.get((product.layer, product.kind), product)
            sizes = tuple(sorted((each.role, each.size) for each in forward.sizes if product.kind != "product"))
            key = _pattern(product.layer), product.kind, product.precision, sizes
            grouped.setdefault(key, []).append(product)
        found = []
        for products in grouped.values():
            names = tuple(dict.fromkeys(product.layer for product in products))
            off = dict.fromkeys(each for product in products for each in product.off(self.to))
            name = _pattern(names[0]) if len(names) > 1 else names[0] or ROOT
            found.append(LayerMatmuls(name=name, names=names, products=tuple(products), off=tuple(off)))
        found.sort(key=lambda layer: (layer.saved_ms or 0.0, self.off_share(layer), layer.flops), reverse=True)
        return tuple(found)

    def share(self, layer: LayerMatmuls) -> float:
        """Return the layer's fraction of the matmul work."""
        return layer.flops / self.flops if self.flops else 0.0

    def off_share(self, layer: LayerMatmuls) -> float:
        """Return the fraction of the matmul work in the layer's misaligned matmuls."""
        off = sum(product.flops for product in layer.products if product.off(self.to))
        return off / self.flops if self.flops else 0.0

    def time_share(self, layer: LayerMatmuls) -> float | None:
        """Return the fraction of the step time that aligned sizes would save; None if not measured."""
        return None if layer.saved_ms is None or not self.step_ms else layer.saved_ms / self.step_ms

    def is_worth(self, layer: LayerMatmuls) -> bool:
        """Return whether it is worth fixing: by its time if known, else by its work; always if FP8 requires it."""
        if not layer.off or layer.product.precision == "fp8":
            return bool(layer.off)
        share = self.time_share(layer)
        if share is not None:
            return share >= NOTABLE_TIME
        return self.flops >= LEAST and self.off_share(layer) >= NOTABLE

    def cost(self, layer: LayerMatmuls) -> str:
        """Return what it costs, and how that is known."""
        share = self.time_share(layer)
        if share is not None and layer.saved_ms is not None:
            return f"{layer.saved_ms:.3g} ms of {self.step_ms:.3g} ms per step, measured here"
        return f"{self.off_share(layer):.1%} of the matmul work, derived"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, layers ordered by cost."""
        return {
            "name": self.name,
            "precision": self.precision,
            "device": self.device,
            "gpu": self.gpu,
            "processors": self.processors,
            "to": self.to,
            "rows": self.rows,
            "tokens": self.tokens,
            "matrix_flops": self.flops,
            "step_ms": self.step_ms,
            "layers": [
                {
                    "name": layer.name,
                    "modules": list(layer.names),
                    "kind": layer.kind,
                    "precision": layer.product.precision,
                    "product": {
                        "m": layer.product.m.size,
                        "n": layer.product.n.size,
                        "k": layer.product.k.size,
                        "batches": layer.product.batches,
                    },
                    "off": [each._asdict() for each in layer.off],
                    "share": self.share(layer),
                    "off_share": self.off_share(layer),
                    "saved_ms": layer.saved_ms,
                    "worth_fixing": self.is_worth(layer),
                }
                for layer in self.layers
            ],
        }


def tile_remarks(products: StepMatmuls) -> tuple[str, ...]:
    """Return remarks about results that barely start a new tile, or wave of tiles, in layers that matter."""
    remarks: list[str] = []
    if products.flops < LEAST:
        return ()
    for layer in products.layers:
        if layer.kind not in ("linear", "product") or products.share(layer) < NOTABLE:
            continue
        product = layer.product
        processors = products.processors or product.tiles
        waves = math.ceil(product.tiles / processors)
        busy = product.tiles / processors / waves
        result = f"{layer.name}: results of {product.m.size}×{product.n.size}"
        if product.filled < FILLED:
            remarks.append(
                f"{result} fill {product.filled:.0%} of their {TILE}×{TILE} tiles; full tiles cost about the same "
                "(derived)"
            )
        elif busy < FILLED:
            remarks.append(
                f"{result} are {product.tiles} tiles of {TILE}×{TILE}, which keep {processors} processors "
                f"{busy:.0%} busy; {waves * processors} tiles cost about the same (derived)"
            )
    return tuple(remarks)


def _pattern(name: str) -> str:
    """Return the name with its numbers replaced by wildcards.

    >>> _pattern("blocks.11.expand")
    'blocks.*.expand'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
