"""What the FP8 layers of a model lose: one step looked at closely, and what delayed scaling has counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ampwise.census.algebra import Census
from ampwise.census.measure import census
from ampwise.evidence.narrow import NarrowLayers, NarrowOperand
from ampwise.finding import Finding
from ampwise.float8.casting import E4M3, E5M2, TOPS, scales_of
from ampwise.float8.layer import How
from ampwise.float8.recipe import Fp8
from ampwise.float8.scales import OPERANDS, Scales
from ampwise.rules import rules_about

__all__ = ["Sample", "Sampled", "findings_of", "narrow_layers"]

ROOM = "float8"

# What has a scale of its own in an operand, in each product that it is part of.
WHOLE, ROWS, COLUMNS = "whole", "rows", "columns"
ALONG = {ROWS: 1, COLUMNS: 0}  # the dimension that is looked through for a scale
WITH_SCALES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "rowwise": dict.fromkeys(OPERANDS, (ROWS, COLUMNS)),
    "rowwise+hp-weight-grad": {"input": (ROWS,), "weight": (ROWS, WHOLE), "gradient": (ROWS,)},
}

Sample = dict[tuple[str, str], Census]  # by operand, and by what has a scale; parts with theirs multiplied


class Sampled:
    """A layer as it runs, whose operands are counted. Waits for the device: it is for one step."""

    def __init__(self, how: How, fp8: Fp8, sample: Sample) -> None:
        self._how, self._sample = how, sample
        self._with_scales = _with_scales(fp8)
        for name in ("put_on", "take_off"):
            if hasattr(how, name):
                setattr(self, name, getattr(how, name))

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        out = self._how(module, x)
        if torch.is_grad_enabled():
            self._count("input", x)
            self._count("weight", module.weight)
            if out.requires_grad:
                out.register_hook(partial(self._count, "gradient"))
        return out

    def _count(self, operand: str, tensor: Tensor) -> None:
        for part in {WHOLE, *self._with_scales[operand]}:
            with torch.no_grad():
                found = census(_scaled(tensor.detach(), part))
            known = self._sample.get((operand, part))
            # A weight is the same in all micro-batches of a step.
            self._sample[operand, part] = found if known is None or operand == "weight" else known + found


def _with_scales(fp8: Fp8) -> Mapping[str, tuple[str, ...]]:
    return WITH_SCALES.get(fp8.recipe, dict.fromkeys(OPERANDS, (WHOLE,)))


def _scaled(tensor: Tensor, part: str) -> Tensor:
    """Each row or column by the scale that torchao gives it, a power of two; a whole tensor as it is."""
    if part == WHOLE or not tensor.numel():
        return tensor
    matrix = tensor.reshape(-1, tensor.shape[-1]).float()
    amax = matrix.abs().amax(ALONG[part], keepdim=True)
    return matrix * scales_of(amax, TOPS[E4M3])


def narrow_layers(
    layers: Mapping[str, Fp8], samples: Mapping[str, Sample], scales: Scales | None, step: int
) -> NarrowLayers:
    """What is known of these layers, by name. Waits for the device where there are scales to read."""
    delayed = {} if scales is None else dict(_counted(scales))
    return NarrowLayers(
        step=step,
        operands=tuple(
            _operand(name, operand, fp8, samples.get(name, {}), delayed.get((name, operand)))
            for name, fp8 in layers.items()
            for operand in OPERANDS
        ),
    )


def findings_of(layers: NarrowLayers) -> list[Finding]:
    """What the rules say about them."""
    return [finding for module in rules_about(ROOM) for finding in module.check(layers)]


def _counted(scales: Scales) -> Iterator[tuple[tuple[str, str], tuple[float, list[float], list[float], int]]]:
    values, history, cut_off = scales.values.tolist(), scales.history.tolist(), scales.cut_off.tolist()
    for layer, name in enumerate(scales.names):
        for place, operand in enumerate(OPERANDS):
            amaxes = [each for each in history[layer][place] if each > 0]
            yield (name, operand), (values[layer][place], amaxes, cut_off[layer][place], scales.steps)


def _operand(
    name: str,
    operand: str,
    fp8: Fp8,
    sample: Sample,
    delayed: tuple[float, list[float], list[float], int] | None,
) -> NarrowOperand:
    fmt = fp8.gradient_format if operand == "gradient" else "e4m3"
    scale, amaxes, (steps_cut_off, values_cut_off), steps = delayed or (None, [], (0.0, 0.0), 0)
    counted, parts = sample.get((operand, WHOLE)), _with_scales(fp8)[operand]
    if counted is not None and counted.finite and scale is None:
        scale = float(scales_of(torch.tensor(counted.amax), TOPS[E5M2 if fmt == "e5m2" else E4M3]))
        amaxes = [counted.amax]
    share = None
    if counted is not None and counted.finite and counted.nonzeros and scale is not None:
        scales = {WHOLE: scale}  # parts are counted with theirs
        share = max(_share(sample[operand, part], fmt, scales.get(part, 1.0)) for part in parts)
    return NarrowOperand(
        layer=name,
        operand=operand,
        fmt=fmt,
        scale=scale if parts == (WHOLE,) else None,
        amaxes=tuple(amaxes),
        steps=steps,
        cut_off_steps=round(steps_cut_off),
        cut_off_values=round(values_cut_off),
        flushed_share=share,
    )


def _share(counted: Census, fmt: str, scale: float) -> float:
    """Of the values that are not zero, those that become zero at this scale."""
    return counted.flushed(fmt, round(math.log2(scale))) / counted.nonzeros
