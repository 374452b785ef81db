"""The matrix products of a training step: their sizes, which of those lie badly in memory, and what that costs.

What matters are the sizes that matrices are stored along. Others, such as the rows of a batch in a linear layer, may be
anything: they only fill the last tile of a result more or less.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ampwise.evidence.alignment import BYTES, better, multiple_for, up_to

__all__ = ["ROWS", "Layer", "Off", "Product", "Products", "Size", "Timing", "tile_remarks"]

TILE = 128  # rows and columns that a block of a GPU computes at once; libraries choose others, too

LEAST = 1e9  # FLOPs a step, below which launches take longer than the work
NOTABLE = 0.05  # of the matrix work, where nothing was measured
NOTABLE_TIME = 0.01  # of the time of a step, where it was
ROWS = "rows"
ROOT = "(the model)"
FILLED = 0.8  # of its tiles: a product that fills less is remarked upon


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One of the three sizes of a product, and what it is in the layer."""

    role: str  # "rows", "inputs", "outputs", "input channels", "head size"; "size" where that is not known
    size: int
    row: int | None = None  # elements from row to row of a matrix stored along it; None: none is, so it may be anything


class Off(NamedTuple):
    """A size that lies badly, what it is in the layer, and a better one: the same, where only its start is off."""

    role: str
    size: int
    better: int

    def __str__(self) -> str:
        if self.better == self.size:
            return f"{self.role} {self.size}: begin between two words"
        return f"{self.role} {self.size} → {self.better}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of a product as it is, and padded, by turns on the device."""

    ms: float
    padded_ms: float
    spread_ms: float  # of those times among themselves: less than this is noise

    @property
    def saved_ms(self) -> float:
        """What padding saves, or costs; nothing where that drowns in noise."""
        saved = self.ms - self.padded_ms
        return saved if abs(saved) > self.spread_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrices of m×k and k×n multiplied, or what amounts to it, and how often in a step."""

    layer: str  # the path of the module, or of the one that has the weight
    kind: str  # "linear", "convolution", "attention", or "product" of anything else
    op: str  # "mm"
    backward: bool
    precision: str
    m: Size
    n: Size
    k: Size
    batches: int = 1
    stored: tuple[str, ...] = ()  # the letters along which its matrices are stored: left, right, result
    flops: float = 0.0  # of all of them
    count: int = 1
    timing: Timing | None = None

    @property
    def sizes(self) -> tuple[Size, Size, Size]:
        return self.m, self.n, self.k

    @property
    def shape(self) -> str:
        """``16384×50257×768``, with the number of such products in front where there are several."""
        batches = f"{self.batches} × " if self.batches > 1 else ""
        return batches + "×".join(str(each.size) for each in self.sizes)

    def off(self, to: int | None = None) -> tuple[Off, ...]:
        """The sizes that lie badly."""
        if self.precision not in BYTES:
            return ()
        multiple = multiple_for(self.precision, to)
        # How the gradients of a linear layer lie is for torch to say; along rows, they count in FP8 alone.
        any_rows = self.kind == "linear" and self.backward and self.precision != "fp8"
        sizes = (each for each in self.sizes if not (any_rows and each.role == ROWS))
        bad = (each for each in sizes if each.row is not None and each.row % multiple)
        return tuple(Off(each.role, each.size, better(each.size, self.precision, to)) for each in bad)

    def padded(self, to: int | None = None) -> Product:
        """The same product with better sizes."""
        wanted = {(each.role, each.size): each.better for each in self.off(to)}
        m, n, k = (replace(each, size=wanted.get((each.role, each.size), each.size)) for each in self.sizes)
        return replace(self, m=m, n=n, k=k)

    @property
    def filled(self) -> float:
        """How much of the tiles of its result is not empty.

        >>> sizes = {letter: Size(role=letter, size=size) for letter, size in {"m": 130, "n": 512, "k": 64}.items()}
        >>> round(Product(layer="", kind="linear", op="mm", backward=False, precision="bf16", **sizes).filled, 3)
        0.508
        """
        return self.m.size * self.n.size / (up_to(self.m.size, TILE) * up_to(self.n.size, TILE))

    @property
    def tiles(self) -> int:
        """How many tiles its results have."""
        return self.batches * up_to(self.m.size, TILE) * up_to(self.n.size, TILE) // TILE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The products of a layer, forward and backward; of several layers, where they are alike in name and size."""

    name: str  # "blocks.*.expand"
    names: tuple[str, ...]
    products: tuple[Product, ...]
    off: tuple[Off, ...]

    @property
    def product(self) -> Product:
        """The one of the forward pass, if it was seen."""
        return next((each for each in self.products if not each.backward), self.products[0])

    @property
    def kind(self) -> str:
        return self.product.kind

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.products)

    @property
    def saved_ms(self) -> float | None:
        """What better sizes would save in a step; None where that was not measured."""
        timed = [each for each in self.products if each.timing is not None]
        return sum(each.count * each.timing.saved_ms for each in timed if each.timing) if timed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The matrix products of one training step."""

    subject: str
    precision: str
    device: str  # "cuda" where it was run on one, else "cpu"
    gpu: str | None = None  # whose sizes these are to fit
    processors: int | None = None  # that it has, each for a tile at a time
    to: int | None = None
    rows: int | None = None  # of the batch
    tokens: int | None = None
    products: tuple[Product, ...] = ()
    step_ms: float | None = None  # of forward and backward pass, where that was measured

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, those first that cost most."""
        grouped: dict[object, list[Product]] = {}
        forwards = {(each.layer, each.kind): each for each in reversed(self.products) if not each.backward}
        for product in self.products:
            forward = forwards.get((product.layer, product.kind), product)
            key = _pattern(product.layer), product.kind, product.precision, _key(product, forward)
            grouped.setdefault(key, []).append(product)
        found = [self._layer(products) for products in grouped.values()]
        return tuple(sorted(found, key=lambda layer: self._rank(layer), reverse=True))

    def _layer(self, products: list[Product]) -> Layer:
        names = tuple(dict.fromkeys(product.layer for product in products))
        off = dict.fromkeys(each for product in products for each in product.off(self.to))
        name = _pattern(names[0]) if len(names) > 1 else names[0] or ROOT
        return Layer(name=name, names=names, products=tuple(products), off=tuple(off))

    def _rank(self, layer: Layer) -> tuple[float, float, float]:
        return layer.saved_ms or 0.0, self.off_share(layer), layer.flops

    def share(self, layer: Layer) -> float:
        """Of the matrix work."""
        return layer.flops / self.flops if self.flops else 0.0

    def off_share(self, layer: Layer) -> float:
        """Of the matrix work, that of the layer's products which lie badly."""
        off = sum(product.flops for product in layer.products if product.off(self.to))
        return off / self.flops if self.flops else 0.0

    def time_share(self, layer: Layer) -> float | None:
        """Of the time of a step, what better sizes would save; None where that was not measured."""
        return None if layer.saved_ms is None or not self.step_ms else layer.saved_ms / self.step_ms

    def is_worth(self, layer: Layer) -> bool:
        """Whether it is worth mending: by its time where that is known, else by its work; always where it must be."""
        if not layer.off or layer.product.precision == "fp8":
            return bool(layer.off)
        share = self.time_share(layer)
        if share is not None:
            return share >= NOTABLE_TIME
        return self.flops >= LEAST and self.off_share(layer) >= NOTABLE

    def cost(self, layer: Layer) -> str:
        """What it costs, and how that is known."""
        share = self.time_share(layer)
        if share is not None and layer.saved_ms is not None:
            return f"{layer.saved_ms:.3g} ms of {self.step_ms:.3g} ms a step, measured here"
        return f"{self.off_share(layer):.1%} of the matrix work, derived"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the layers in the order of what they cost."""
        return {
            "subject": self.subject,
            "precision": self.precision,
            "device": self.device,
            "gpu": self.gpu,
            "processors": self.processors,
            "to": self.to,
            "rows": self.rows,
            "tokens": self.tokens,
            "matrix_flops": self.flops,
            "step_ms": self.step_ms,
            "layers": [self._layer_dict(layer) for layer in self.layers],
        }

    def _layer_dict(self, layer: Layer) -> dict[str, Any]:
        product = layer.product
        return {
            "name": layer.name,
            "modules": list(layer.names),
            "kind": layer.kind,
            "precision": product.precision,
            "product": {"m": product.m.size, "n": product.n.size, "k": product.k.size, "batches": product.batches},
            "off": [each._asdict() for each in layer.off],
            "share": self.share(layer),
            "off_share": self.off_share(layer),
            "saved_ms": layer.saved_ms,
            "worth_mending": self.is_worth(layer),
        }


def tile_remarks(products: Products) -> tuple[str, ...]:
    """About results that end just after the beginning of a tile, or of a wave of them, in layers that matter."""
    if products.flops < LEAST:
        return ()
    shown = (layer for layer in products.layers if layer.kind in ("linear", "product"))
    notable = [layer for layer in shown if products.share(layer) >= NOTABLE]
    return tuple(remark for layer in notable if (remark := _tile_remark(layer, products)))


def _tile_remark(layer: Layer, products: Products) -> str | None:
    product = layer.product
    waves = product.tiles / (products.processors or product.tiles)
    full = waves / math.ceil(waves)
    result = f"{layer.name}: results of {product.m.size}×{product.n.size}"
    if product.filled < FILLED:
        return f"{result} fill {product.filled:.0%} of tiles of {TILE}×{TILE}; whole ones cost about the same (derived)"
    if full < FILLED:
        return (
            f"{result} are {product.tiles} tiles of {TILE}×{TILE}, which keep {products.processors} processors "
            f"{full:.0%} busy; {math.ceil(waves) * (products.processors or 0)} tiles cost about the same (derived)"
        )
    return None


def _key(product: Product, forward: Product) -> object:
    """Alike are layers whose sizes are, by role; and all of a module's products that have no weight."""
    if product.kind == "product":
        return None
    return tuple(sorted((each.role, each.size) for each in forward.sizes))


def _pattern(name: str) -> str:
    """The name with its numbers left open.

    >>> _pattern("blocks.11.expand")
    'blocks.*.expand'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
