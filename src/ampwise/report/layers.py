"""The gradients of each layer over a run, worst first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.census.algebra import Census
from ampwise.errors import UnknownName
from ampwise.formats import Format, find_scalar_format

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["Layer", "about_layers", "layers_of", "percent"]

NEAR_OVERFLOW = 1  # doublings of the scale, or of a gradient, that are left before the largest value overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the gradients of a parameter held over the sampled steps, and what a format makes of them."""

    name: str
    optimizer: int
    census: Census  # in true units, over all samples
    steps: int  # that were sampled
    share: float  # of all gradients of the run
    fmt: Format
    scale: float | None  # at present

    @property
    def exponent(self) -> int:
        """The power of two of the scale; one that lies between two counts as the lower, so that no loss is hidden."""
        known = self.scale is not None and 0 < self.scale < math.inf
        return math.frexp(self.scale)[1] - 1 if known and self.scale is not None else 0

    @property
    def norm(self) -> float:
        """Of one step's gradients: the root of the mean of squares over the sampled ones."""
        return self.census.norm / math.sqrt(max(1, self.steps))

    @property
    def lost(self) -> float:
        """The share of the non-zero values that the format rounds to zero at the present scale."""
        return self.census.flushed(self.fmt, self.exponent) / max(1, self.census.nonzeros)

    @property
    def subnormal(self) -> float:
        """The share of the non-zero values that the format keeps with fewer bits at the present scale."""
        return self.census.subnormal(self.fmt, self.exponent) / max(1, self.census.nonzeros)

    @property
    def dead(self) -> bool:
        """Only zeros, at every sampled step."""
        return bool(self.census.count) and self.census.zeros == self.census.count

    @property
    def doublings_left(self) -> int | None:
        """How often the scale could double before the largest gradient overflows; None where there is none."""
        if not self.census.amax:
            return None
        return math.floor(math.log2(self.fmt.max) - math.log2(self.census.amax)) - self.exponent

    @property
    def notes(self) -> list[str]:
        """What is odd about it, in a word or two each."""
        left = self.doublings_left
        told = {
            f"{self.census.nans:,} NaN": bool(self.census.nans),
            f"{self.census.infs:,} inf": bool(self.census.infs),
            "dead": self.dead,
            "would overflow": left is not None and left < 0,
            "near overflow": left is not None and 0 <= left < NEAR_OVERFLOW,
        }
        return [note for note, holds in told.items() if holds]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "optimizer": self.optimizer,
            "steps": self.steps,
            "share": self.share,
            "norm": self.norm,
            "largest": self.census.amax,
            "lost": self.lost,
            "subnormal": self.subnormal,
            "format": self.fmt.name,
            "scale": self.scale,
            "dead": self.dead,
            "doublings_left": self.doublings_left,
            "census": self.census.as_dict(),
        }


def layers_of(run: Run) -> list[Layer]:
    """Every parameter of every optimizer, worst first; of equals, in the order of the model."""
    fmt = _format(run)
    optimizers = sorted({sample.optimizer for sample in run.layers})
    totals = {optimizer: run.total_layers(optimizer) for optimizer in optimizers}
    scales = {optimizer: _present_scale(run, optimizer) for optimizer in optimizers}
    everything = sum(census.count for layers in totals.values() for census in layers.values())
    found = [
        Layer(
            name=name,
            optimizer=optimizer,
            census=census,
            steps=_sampled(run, optimizer, name),
            share=census.count / max(1, everything),
            fmt=fmt,
            scale=scales[optimizer],
        )
        for optimizer, layers in totals.items()
        for name, census in layers.items()
    ]
    return sorted(found, key=_badness)


def about_layers(layers: list[Layer]) -> str:
    """What the numbers of the table are about.

    The share lost is of values that are not zero: exact zeros of rows that were not used lose nothing.
    """
    steps = max(layer.steps for layer in layers)
    scales = {layer.scale for layer in layers if layer.scale is not None}
    scale = f"at the last loss scale, {_written(max(scales))}" if scales else "without a loss scale"
    fmt = layers[0].fmt.title
    return f"Gradients in true units, over {steps:,} sampled step{'' if steps == 1 else 's'}; lost in {fmt} {scale}"


def _written(scale: float) -> str:
    """A scale as one thinks of it: 65,536, but 2^40."""
    mantissa, exponent = math.frexp(scale)
    if scale >= 2**20 and mantissa == 0.5:
        return f"2^{exponent - 1}"
    return f"{scale:,.0f}" if scale.is_integer() and scale < 1e9 else f"{scale:.6g}"


def percent(share: float) -> str:
    """A share that is not zero never reads as zero.

    >>> percent(0.0), percent(0.00001), percent(0.1234), percent(1.0)
    ('0', '<0.1%', '12.3%', '100%')
    """
    if not share:
        return "0"
    if share < 0.001:
        return "<0.1%"
    return "100%" if share >= 1 else ">99.9%" if share > 0.9994 else f"{share:.1%}"


def _badness(layer: Layer) -> tuple[object, ...]:
    left = layer.doublings_left
    # Shares of a thousandth: a finer order would be noise, and would mix up the layers of a healthy model.
    shares = (-round(layer.lost, 3), -round(layer.subnormal, 3))
    # A scale that grows ends near overflow in the best of runs, so that comes last.
    return (layer.census.finite, not layer.dead, *shares, left is None or left >= NEAR_OVERFLOW)


def _format(run: Run) -> Format:
    """That the run computed in; FP16 where it was neither half, since that is the one that loses."""
    try:
        found = find_scalar_format(str(run.facts.get("precision") or "fp16"))
    except (UnknownName, ValueError):
        return find_scalar_format("fp16")
    return found if found.name in ("fp16", "bf16") else find_scalar_format("fp16")


def _sampled(run: Run, optimizer: int, name: str) -> int:
    return sum(sample.steps for sample in run.layers if sample.optimizer == optimizer and name in sample.layers)


def _present_scale(run: Run, optimizer: int) -> float | None:
    for bucket in reversed(run.steps):
        if bucket.optimizer == optimizer and bucket.scale.mean is not None:
            return bucket.scale.mean
    scales = [sample.scale for sample in run.layers if sample.optimizer == optimizer and sample.scale is not None]
    return scales[-1] if scales else None
