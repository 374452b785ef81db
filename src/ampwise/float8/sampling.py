"""What the FP8 layers of a model lose: one step looked at closely, and what delayed scaling has counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ampwise.census.algebra import Census
from ampwise.census.measure import census
from ampwise.evidence.narrow import NarrowLayers, NarrowOperand
from ampwise.finding import Finding
from ampwise.float8.casting import E4M3, E5M2, TOPS, scales_of
from ampwise.float8.layer import How
from ampwise.float8.scales import OPERANDS, Scales
from ampwise.rules import rules_about

__all__ = ["Sample", "Sampled", "findings_of", "narrow_layers"]

ROOM = "float8"
Sample = dict[str, Census]  # by operand


class Sampled:
    """A layer as it runs, whose operands are counted. Waits for the device: it is for one step."""

    def __init__(self, how: How, sample: Sample) -> None:
        self._how, self._sample = how, sample
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
        with torch.no_grad():
            found = census(tensor.detach())
        known = self._sample.get(operand)
        # A weight is the same in all micro-batches of a step.
        self._sample[operand] = found if known is None or operand == "weight" else known + found


def narrow_layers(
    names: Sequence[str], samples: Mapping[str, Sample], scales: Scales | None, step: int, *, e5m2: bool
) -> NarrowLayers:
    """What is known of these layers. Waits for the device where there are scales to read."""
    delayed = {} if scales is None else dict(_counted(scales))
    return NarrowLayers(
        step=step,
        operands=tuple(
            _operand(name, operand, samples.get(name, {}).get(operand), delayed.get((name, operand)), e5m2)
            for name in names
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
    counted: Census | None,
    delayed: tuple[float, list[float], list[float], int] | None,
    e5m2: bool,
) -> NarrowOperand:
    dtype = E5M2 if operand == "gradient" and e5m2 else E4M3
    fmt = "e5m2" if dtype is E5M2 else "e4m3"
    scale, amaxes, (steps_cut_off, values_cut_off), steps = delayed or (None, [], (0.0, 0.0), 0)
    if counted is not None and counted.finite and scale is None:
        scale = float(scales_of(torch.tensor(counted.amax), TOPS[dtype]))
        amaxes = [counted.amax]
    share = None
    if counted is not None and counted.finite and counted.nonzeros and scale is not None:
        share = counted.flushed(fmt, round(math.log2(scale))) / counted.nonzeros
    return NarrowOperand(
        layer=name,
        operand=operand,
        fmt=fmt,
        scale=scale,
        amaxes=tuple(amaxes),
        steps=steps,
        cut_off_steps=round(steps_cut_off),
        cut_off_values=round(values_cut_off),
        flushed_share=share,
    )
