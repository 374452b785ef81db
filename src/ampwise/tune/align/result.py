"""Result of ``align``: the misaligned layers, what to do about each, and what the costs rest on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampwise.finding import Finding
from ampwise.finding.terminal import printable, shortened
from ampwise.report.result_view import Line, Part, ResultTable, ShownResult
from ampwise.tune.align.matmuls import ROWS, LayerMatmuls, StepMatmuls, multiple_for, tile_remarks
from ampwise.tune.align.padding_plan import Padding

HEADINGS = ("layer", "product M×N×K", "off → better", "cost")
MANUAL_ADVICE = {
    "convolution": "give it {better} channels: pad_ does not pad convolutions",
    "attention": "choose the number of heads so that the head size is {better}",
    "product": "pad or crop these tensors: your code sets length and batch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment(ShownResult):
    """Result of ``align``; ``print`` shows it."""

    products: StepMatmuls
    findings: tuple[Finding, ...]
    padding: Padding  # what pad_ would do
    basis: str  # where the costs come from
    head: str | None = None  # argument to pass to pad_
    notes: tuple[str, ...] = ()

    @property
    def off(self) -> tuple[LayerMatmuls, ...]:
        """The misaligned layers, most expensive first."""
        return tuple(layer for layer in self.products.layers if layer.off)

    def advice(self, layer: LayerMatmuls) -> str:
        """Return what to do about a layer."""
        if not self.products.is_worth(layer):
            return "leave it: " + ("it would save nothing" if layer.saved_ms is not None else "there is little to save")
        if layer.kind != "linear":
            return MANUAL_ADVICE[layer.kind].format(better=_listed(each.better for each in layer.off))
        rest = [each.better for each in layer.off if each.role != ROWS]
        rows = [f"use {each.better} rows, by batch and length" for each in layer.off if each.role == ROWS]
        return "; ".join([self._padding_of(layer, rest), *rows] if rest else rows)

    def _padding_of(self, layer: LayerMatmuls, sizes: list[int]) -> str:
        """Return the call of ``pad_`` for a layer, or why it does not pad it."""
        step = next((step for step in self.padding.padded if set(step.names) & set(layer.names)), None)
        if step is None:
            why = next((f": pad_ leaves it: {each.why}" for each in self.padding.left if each.name in layer.names), "")
            return f"make it {_listed(sizes)} where it is defined{why}"
        arguments = ["model"]
        if self.products.to is not None:
            arguments.append(f"to={self.products.to}")
        if multiple_for(self.products.precision) != multiple_for("bf16"):
            arguments.append(f"precision={self.products.precision!r}")
        if self.head in step.names and step.tied_by_code:
            arguments.append(f"head={self.head!r}")
        return f"ampwise.pad_({', '.join(arguments)})"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table under HEADINGS, as text."""
        for layer in self.off:
            times = f" ({len(layer.names)} times)" if len(layer.names) > 1 else ""
            if layer.saved_ms is None:
                cost = f"{self.products.off_share(layer):.1%} of the work"
            else:
                share = self.products.time_share(layer) or 0.0
                cost = f"{layer.saved_ms:.3g} ms, {share:.1%}" if layer.saved_ms else "noise"
            yield printable(layer.name) + times, layer.product.shape, ", ".join(map(str, layer.off)), cost

    def to_do(self) -> Iterator[str]:
        """Yield a line for each action, with its layers."""
        layers: dict[str, list[str]] = {}
        for layer in self.off:
            layers.setdefault(self.advice(layer), []).append(layer.name)
        yield from (printable(f"{', '.join(names)}: {advice}") for advice, names in layers.items())

    @property
    def head_line(self) -> str:
        """What was run, and where the costs come from."""
        made = self.products
        size = f", {made.rows} rows" if made.rows else ""
        tokens = f" ({made.tokens:,} tokens)" if made.tokens else ""
        step = f", a step takes {made.step_ms:.3g} ms" if made.step_ms else ""
        return f"{printable(made.name)} in {made.precision}{size}{tokens}{step}; costs are {self.basis}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes, and remarks on partly used tiles."""
        return (*self.notes, *tile_remarks(self.products))

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        count = len(self.products.layers)
        if not self.off:
            return f"every matmul is aligned (layers checked: {count})"
        if not self.findings:
            return f"misaligned: {len(self.off)} of {count} layers; worth fixing: none"
        rules = ", ".join(dict.fromkeys(finding.rule.code for finding in self.findings))
        return f"worth fixing: {len(self.findings)} of {count} layers (ampwise explain {rules})"

    def __repr__(self) -> str:
        return shortened(f"<Alignment: {self.verdict}>")

    def _parts(self) -> Iterator[Part]:
        """Yield what was run, the misaligned layers, what to do, and the verdict."""
        yield Line(self.head_line)
        if self.off:
            yield ResultTable(headings=HEADINGS, rows=list(self.rows()), left=range(len(HEADINGS)), wraps=(2,))
        yield from map(Line, (*self.to_do(), *(f"remark: {remark}" for remark in self.remarks), self.verdict))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
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
