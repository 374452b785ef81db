"""What the FP8 layers of a model lose: a census of their operands in one step, and delayed scaling's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.measure import census
from ampwise.train.float8.block_cast import BLOCK, block_scales, spread_blocks
from ampwise.train.float8.delayed_scaling import OPERANDS, DelayedScales
from ampwise.train.float8.fp8_cast import E4M3, E5M2, TOPS, scales_of
from ampwise.train.float8.layer_forward import Fp8Forward
from ampwise.train.float8.layer_stats import Float8LayerStats, Float8OperandStats
from ampwise.train.float8.recipe import BLOCK_RECIPE, Fp8

__all__ = ["CountingForward", "OperandCensuses", "report_layers"]

# Which parts of an operand have a scale of their own, in each matmul that it is part of.
WHOLE, ROWS, COLUMNS, ROW_BLOCKS, COLUMN_BLOCKS, TILES = (
    "whole",
    "rows",
    "columns",
    "row blocks",
    "column blocks",
    "tiles",
)
SIZES = {  # of what has a scale: rows and columns; None: all of them
    ROWS: (1, None),
    COLUMNS: (None, 1),
    ROW_BLOCKS: (1, BLOCK),
    COLUMN_BLOCKS: (BLOCK, 1),
    TILES: (BLOCK, BLOCK),
}
IN_STRIPS = (ROW_BLOCKS, COLUMN_BLOCKS)
WITH_SCALES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "rowwise": dict.fromkeys(OPERANDS, (ROWS, COLUMNS)),
    "rowwise+hp-weight-grad": {"input": (ROWS,), "weight": (ROWS, WHOLE), "gradient": (ROWS,)},
    BLOCK_RECIPE: {"input": IN_STRIPS, "weight": (TILES,), "gradient": IN_STRIPS},
}

OperandCensuses = dict[tuple[str, str], Census]  # by operand and part; all but WHOLE are counted after scaling


class CountingForward:
    """A layer's forward that also counts its operands. Syncs with the device, so it is used for one step only."""

    def __init__(self, how: Fp8Forward, fp8: Fp8, sample: OperandCensuses) -> None:
        self._how, self._sample = how, sample
        self._with_scales = _with_scales(fp8)
        self.attributes = getattr(how, "attributes", {})

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
                counted = tensor.detach()
                if part != WHOLE and counted.numel():  # torchao's scales are powers of two as well
                    matrix = counted.reshape(-1, counted.shape[-1]).float()
                    height, width = (size or whole for size, whole in zip(SIZES[part], matrix.shape, strict=True))
                    counted = matrix * spread_blocks(block_scales(matrix, height, width), height, width, matrix.shape)
                found = census(counted)
            known = self._sample.get((operand, part))
            # A weight is the same in all micro-batches of a step.
            self._sample[operand, part] = found if known is None or operand == "weight" else known + found


def _with_scales(fp8: Fp8) -> Mapping[str, tuple[str, ...]]:
    return WITH_SCALES.get(fp8.recipe, dict.fromkeys(OPERANDS, (WHOLE,)))


def report_layers(
    layers: Mapping[str, Fp8], samples: Mapping[str, OperandCensuses], scales: DelayedScales | None, step: int
) -> Float8LayerStats:
    """Report what is known about these layers, by name. Syncs with the device if there are scales to read."""
    delayed: dict[tuple[str, str], dict[str, Any]] = {}
    if scales is not None:
        values, history, cut_off = scales.values.tolist(), scales.history.tolist(), scales.cut_off.tolist()
        for layer, name in enumerate(scales.names):
            for place, operand in enumerate(OPERANDS):
                cut_off_steps, cut_off_values = cut_off[layer][place]
                delayed[name, operand] = {
                    "scale": values[layer][place],
                    "amaxes": tuple(each for each in history[layer][place] if each > 0),
                    "steps": scales.steps,
                    "cut_off_steps": round(cut_off_steps),
                    "cut_off_values": round(cut_off_values),
                }
    operands = []
    for name, fp8 in layers.items():
        for operand in OPERANDS:
            fmt = fp8.gradient_format if operand == "gradient" else "e4m3"
            stats = Float8OperandStats(layer=name, operand=operand, fmt=fmt, **delayed.get((name, operand), {}))
            operands.append(_add_sample(stats, _with_scales(fp8)[operand], samples.get(name, {})))
    return Float8LayerStats(step=step, operands=tuple(operands))


def _add_sample(stats: Float8OperandStats, parts: tuple[str, ...], sample: OperandCensuses) -> Float8OperandStats:
    """Add what the sampled step shows: the share of non-zero values that become zero, and a scale if none is known."""
    scale, amaxes, share = stats.scale, stats.amaxes, None
    counted = sample.get((stats.operand, WHOLE))
    if counted is not None and counted.finite:
        if scale is None:
            scale = float(scales_of(torch.tensor(counted.amax), TOPS[E5M2 if stats.fmt == "e5m2" else E4M3]))
            amaxes = (counted.amax,)
        if counted.nonzeros:
            exponents = {WHOLE: round(math.log2(scale))}  # other parts are counted after scaling
            share = max(
                sample[stats.operand, part].flushed(stats.fmt, exponents.get(part, 0))
                / sample[stats.operand, part].nonzeros
                for part in parts
            )
    return replace(stats, scale=scale if parts == (WHOLE,) else None, amaxes=amaxes, flushed_share=share)
