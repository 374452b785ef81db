"""What the FP8 layers of a model lose: a census of their operands in one step, and delayed scaling's statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ampwise.finding import Finding
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.measure import census
from ampwise.rules import run_checks
from ampwise.train.float8.delayed_scaling import OPERANDS, DelayedScales
from ampwise.train.float8.fp8_cast import E4M3, E5M2, TOPS, scales_of
from ampwise.train.float8.layer_forward import Fp8Forward
from ampwise.train.float8.layer_stats import Float8LayerStats, Float8OperandStats
from ampwise.train.float8.recipe import Fp8

__all__ = ["CountingForward", "OperandCensuses", "fp8_findings", "report_layers"]

# Which parts of an operand have a scale of their own, in each matmul that it is part of.
WHOLE, ROWS, COLUMNS = "whole", "rows", "columns"
ALONG = {ROWS: 1, COLUMNS: 0}  # the dimension that is reduced for a scale
WITH_SCALES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "rowwise": dict.fromkeys(OPERANDS, (ROWS, COLUMNS)),
    "rowwise+hp-weight-grad": {"input": (ROWS,), "weight": (ROWS, WHOLE), "gradient": (ROWS,)},
}

OperandCensuses = dict[tuple[str, str], Census]  # by operand and part; rows and columns are counted after scaling


class CountingForward:
    """A layer's forward that also counts its operands. Syncs with the device, so it is used for one step only."""

    def __init__(self, how: Fp8Forward, fp8: Fp8, sample: OperandCensuses) -> None:
        self._how, self._sample = how, sample
        self._with_scales = _with_scales(fp8)
        for name in ("install", "uninstall"):
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
    """Scale each row or column by torchao's scale for it, a power of two; return a whole tensor as it is."""
    if part == WHOLE or not tensor.numel():
        return tensor
    matrix = tensor.reshape(-1, tensor.shape[-1]).float()
    amax = matrix.abs().amax(ALONG[part], keepdim=True)
    return matrix * scales_of(amax, TOPS[E4M3])


def report_layers(
    layers: Mapping[str, Fp8], samples: Mapping[str, OperandCensuses], scales: DelayedScales | None, step: int
) -> Float8LayerStats:
    """Report what is known about these layers, by name. Syncs with the device if there are scales to read."""
    delayed = {} if scales is None else dict(_counted(scales))
    return Float8LayerStats(
        step=step,
        operands=tuple(
            _operand(name, operand, fp8, samples.get(name, {}), delayed.get((name, operand)))
            for name, fp8 in layers.items()
            for operand in OPERANDS
        ),
    )


def fp8_findings(layers: Float8LayerStats) -> list[Finding]:
    """Return the findings of the FP8 rules about these layers."""
    return run_checks(layers)


def _counted(scales: DelayedScales) -> Iterator[tuple[tuple[str, str], tuple[float, list[float], list[float], int]]]:
    values, history, cut_off = scales.values.tolist(), scales.history.tolist(), scales.cut_off.tolist()
    for layer, name in enumerate(scales.names):
        for place, operand in enumerate(OPERANDS):
            amaxes = [each for each in history[layer][place] if each > 0]
            yield (name, operand), (values[layer][place], amaxes, cut_off[layer][place], scales.steps)


def _operand(
    name: str,
    operand: str,
    fp8: Fp8,
    sample: OperandCensuses,
    delayed: tuple[float, list[float], list[float], int] | None,
) -> Float8OperandStats:
    fmt = fp8.gradient_format if operand == "gradient" else "e4m3"
    scale, amaxes, (steps_cut_off, values_cut_off), steps = delayed or (None, [], (0.0, 0.0), 0)
    counted, parts = sample.get((operand, WHOLE)), _with_scales(fp8)[operand]
    if counted is not None and counted.finite and scale is None:
        scale = float(scales_of(torch.tensor(counted.amax), TOPS[E5M2 if fmt == "e5m2" else E4M3]))
        amaxes = [counted.amax]
    share = None
    if counted is not None and counted.finite and counted.nonzeros and scale is not None:
        scales = {WHOLE: scale}  # rows and columns are counted after scaling
        share = max(_share(sample[operand, part], fmt, scales.get(part, 1.0)) for part in parts)
    return Float8OperandStats(
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
    """Return the share of non-zero values that become zero at this scale."""
    return counted.flushed(fmt, round(math.log2(scale))) / counted.nonzeros
