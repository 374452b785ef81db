"""Measurements of a module run by itself, which explain why a format is too narrow for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.measure import census
from ampwise.tune.search.sensitivity import UnitRun
from ampwise.tune.search.units import SearchUnit

__all__ = ["FormatEffect", "UnitFacts", "measure_facts", "singular_range"]

MOST_VALUES = 2**22  # counted per tensor
LARGEST_MATRIX = 1024  # whose singular values are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEffect:
    """What a format changed."""

    moved: float  # root mean square change of an output
    flipped: float  # share of rows in which another output is the largest
    length: float  # of the gradient it passes back, projected on FP32's: 1 equals FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """Measurements of a module in FP32, and in each format."""

    operands: Mapping[str, Census]  # inputs, weight, gradient
    largest_output: float
    cancellation: float | None  # how many times larger its sums would be with terms of random sign
    into_softmax: bool
    formats: Mapping[str, FormatEffect]


def measure_facts(unit: SearchUnit, wide: UnitRun, narrow: Mapping[str, UnitRun], into_softmax: bool) -> UnitFacts:
    """Measure the first call of a unit."""
    weight = _weight(unit)
    operands = {
        "inputs": wide.inputs[:1],
        "weight": () if weight is None else (weight,),
        "gradient": wide.out_grads[:1],
    }
    output = wide.outputs[0]
    return UnitFacts(
        operands={role: census(_some(each)) for role, found in operands.items() for each in found},
        largest_output=float(output.abs().amax()) if output.numel() else 0.0,
        cancellation=_cancellation(unit, wide, weight),
        into_softmax=into_softmax,
        formats={name: _in_format(wide, ran) for name, ran in narrow.items()},
    )


def singular_range(unit: SearchUnit) -> tuple[float, float] | None:
    """Return the largest and the smallest singular value of its weight; None without a weight, or for a large one."""
    weight = _weight(unit)
    if weight is None or min(weight.flatten(1).shape) > LARGEST_MATRIX or not weight.isfinite().all():
        return None
    values = torch.linalg.svdvals(weight.flatten(1).float().cpu())
    return float(values[0]), float(values[-1])


def _weight(unit: SearchUnit) -> Tensor | None:
    weight = getattr(unit.module, "weight", None)
    return weight.detach() if isinstance(weight, Parameter) and weight.ndim > 1 else None


def _some(tensor: Tensor) -> Tensor:
    """Return a sample of its values."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST_VALUES)] if flat.numel() > MOST_VALUES else flat


def _cancellation(unit: SearchUnit, wide: UnitRun, weight: Tensor | None) -> float | None:
    """Compare the sums with those of random signs, where squares of terms add up, input by input."""
    is_known = isinstance(unit.module, nn.Linear | _ConvNd) and not isinstance(unit.module, _ConvTransposeNd)
    if weight is None or not wide.inputs or not is_known:
        return None
    output, given, channels = wide.outputs[0], wide.inputs[0].float(), 1 - weight.ndim
    bias = getattr(unit.module, "bias", None)
    if isinstance(bias, Tensor):
        output = output - bias.detach().reshape(-1, *[1] * (weight.ndim - 2))
    inputs = given.square().movedim(channels, 0).flatten(1).mean(1)
    weights = weight.float().square().reshape(*weight.shape[:2], -1).sum(2)
    groups = len(inputs) // weights.shape[1]  # of a convolution, each with its own inputs
    terms = weights.reshape(groups, -1, weights.shape[1]) * inputs.reshape(groups, 1, -1)
    actual, random = float(output.square().mean()), float(terms.sum(2).mean())
    return math.sqrt(random / actual) if actual > 0 and math.isfinite(random / actual) else None


def _in_format(wide: UnitRun, narrow: UnitRun) -> FormatEffect:
    output, other = wide.outputs[0], narrow.outputs[0]
    flipped = (output.argmax(-1) != other.argmax(-1)).float().mean() if output.ndim else torch.zeros(())
    pairs = [
        pair for groups in zip(wide.gradients, narrow.gradients, strict=True) for pair in zip(*groups, strict=True)
    ]
    along = sum(float((one * two).sum(dtype=torch.float32)) for one, two in pairs)
    whole = sum(float(one.square().sum(dtype=torch.float32)) for one, _ in pairs)
    return FormatEffect(
        moved=float((other - output).square().mean().sqrt()),
        flipped=float(flipped),
        length=along / whole if whole else 1.0,
    )
