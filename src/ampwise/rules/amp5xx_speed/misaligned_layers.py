"""Findings about layers with misaligned sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule

if TYPE_CHECKING:  # a rule about source code imports this file
    from ampwise.tune.align.matmuls import StepMatmuls


def misaligned_layers(rule: Rule, step: StepMatmuls, kind: str, fix: str | None = None) -> Findings:
    """Report each layer of this kind whose misaligned sizes are worth fixing."""
    for layer in step.layers:
        fp8_linear = layer.product.precision == "fp8" and kind == "linear"  # fp8-misaligned reports it
        if layer.kind == kind and step.is_worth(layer) and not fp8_linear:
            product = f"{layer.product.op} of {layer.product.shape}: " if kind == "product" else ""
            message = f"{product}{', '.join(map(str, layer.off))}: {step.cost(layer)}"
            evidence = {"product": layer.product.shape, "layers": len(layer.names), "share": step.off_share(layer)}
            yield rule.at(Place(module=layer.name), message, evidence=evidence, fix=fix)
