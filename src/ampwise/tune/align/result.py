"""What was found about the sizes of a step: the layers, what to do about each, and how that is known."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampwise.evidence.alignment import multiple_for
from ampwise.evidence.products import ROWS, Layer, Off, Products, tile_remarks
from ampwise.finding import Finding
from ampwise.printers.terminal import printable
from ampwise.tune.align.plan import Padding, Step

__all__ = ["HEADINGS", "Alignment"]

HEADINGS = ("layer", "product M×N×K", "off → better", "cost")
BY_HAND = {
    "convolution": "give it {better} channels: pad_ leaves convolutions",
    "attention": "choose the number of heads such that each has a size of {better}",
    "product": "pad or cut these tensors: length and batch are yours",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The answer of ``align``; ``print`` shows it."""

    products: Products
    findings: tuple[Finding, ...]
    padding: Padding  # what pad_ would do
    basis: str  # what the costs rest on
    head: str | None = None  # what pad_ is to be told besides
    notes: tuple[str, ...] = ()

    @property
    def off(self) -> tuple[Layer, ...]:
        """The layers that miss their alignment, those first that cost most."""
        return tuple(layer for layer in self.products.layers if layer.off)

    def advice(self, layer: Layer) -> str:
        """What to do about one of them."""
        if not self.products.is_worth(layer):
            return "leave it: " + ("it would save nothing" if layer.saved_ms is not None else "there is little to save")
        if layer.kind != "linear":
            return BY_HAND[layer.kind].format(better=_listed(each.better for each in layer.off))
        rows = [f"have {each.better} rows, by batch and length" for each in layer.off if each.role == ROWS]
        rest = [each for each in layer.off if each.role != ROWS]
        return "; ".join([*([self._padded(layer, rest)] if rest else []), *rows])

    def _padded(self, layer: Layer, sizes: list[Off]) -> str:
        step = next((step for step in self.padding.padded if set(step.names) & set(layer.names)), None)
        if step is not None:
            return f"ampwise.pad_({', '.join(['model', *self._options(step)])})"
        why = next((f": pad_ leaves it, {each.why}" for each in self.padding.left if each.name in layer.names), "")
        return f"make it {_listed(each.better for each in sizes)} where it is made{why}"

    def _options(self, step: Step) -> Iterator[str]:
        """What pad_ is to be told."""
        made = self.products
        if made.to is not None:
            yield f"to={made.to}"
        if multiple_for(made.precision) != multiple_for("bf16"):
            yield f"precision={made.precision!r}"
        if self.head in step.names and step.tied_by_code:
            yield f"head={self.head!r}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table under HEADINGS, as text."""
        for layer in self.off:
            times = f" ({len(layer.names)} times)" if len(layer.names) > 1 else ""
            yield (
                printable(layer.name) + times,
                layer.product.shape,
                ", ".join(map(str, layer.off)),
                self._cost(layer),
            )

    def to_do(self) -> Iterator[str]:
        """What to do, a line each, with the layers that it is for."""
        layers: dict[str, list[str]] = {}
        for layer in self.off:
            layers.setdefault(self.advice(layer), []).append(layer.name)
        yield from (printable(f"{', '.join(names)}: {advice}") for advice, names in layers.items())

    def _cost(self, layer: Layer) -> str:
        if layer.saved_ms is None:
            return f"{self.products.off_share(layer):.1%} of the work"
        share = self.products.time_share(layer) or 0.0
        return f"{layer.saved_ms:.3g} ms, {share:.1%}" if layer.saved_ms else "noise"

    @property
    def head_line(self) -> str:
        """What was looked at, and how costs are known."""
        made = self.products
        size = f", {made.rows} rows" if made.rows else ""
        tokens = f" ({made.tokens:,} tokens)" if made.tokens else ""
        step = f", a step takes {made.step_ms:.3g} ms" if made.step_ms else ""
        return f"{printable(made.subject)} in {made.precision}{size}{tokens}{step}; costs are {self.basis}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is to be said besides."""
        return (*self.notes, *tile_remarks(self.products))

    @property
    def verdict(self) -> str:
        """In one line."""
        count = len(self.products.layers)
        if not self.off:
            return f"every product lies well (layers looked at: {count})"
        if not self.findings:
            return f"off: {len(self.off)} of {count} layers; worth mending: none"
        rules = ", ".join(dict.fromkeys(finding.rule.code for finding in self.findings))
        return f"worth mending: {len(self.findings)} of {count} layers (ampwise explain {rules})"

    def __str__(self) -> str:
        table = [HEADINGS, *self.rows()] if self.off else []
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))] if table else []
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        told = [*(line.rstrip() for line in lines), *self.to_do(), *self.remarks]
        return "\n".join([self.head_line, *told, self.verdict])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = self.products.as_dict()
        advice = {layer.name: self.advice(layer) for layer in self.off}
        layers = [layer | {"advice": advice.get(layer["name"])} for layer in plain.pop("layers")]
        return plain | {
            "basis": self.basis,
            "layers": layers,
            "padding": self.padding.as_dict(),
            "remarks": list(self.remarks),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sizes))
