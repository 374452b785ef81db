"""The gradients of each layer over a run, and what FP16 lost of them; worst first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.census.algebra import Census
from ampwise.errors import UnknownName
from ampwise.evidence.underflow import Underflow, scale_exponent, underflow
from ampwise.formats import Format, find_scalar_format
from ampwise.report.facts import optimizer_names
from ampwise.report.wording import percent, scale_words

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import LayerSample

__all__ = ["Layer", "about_layers", "headings", "layers_of", "title"]

NOTHING = Underflow(0, 0, 0.0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the gradients of a parameter held over the sampled steps, and what the format of the run makes of them."""

    name: str
    optimizer: int
    owner: str  # the optimizer in words
    census: Census  # in true units, over all samples
    steps: int  # that were sampled
    share: float  # of all gradients of the run
    fmt: Format
    scale: float | None  # at present
    underflow: Underflow | None  # in FP16, at present; None for a run in another format, which loses nothing there

    @property
    def exponent(self) -> int:
        """The power of two of the scale; one that lies between two counts as the lower, so that no loss is hidden."""
        return scale_exponent(self.scale)

    @property
    def norm(self) -> float:
        """Of one step's gradients: the root of the mean of squares over the sampled ones."""
        return self.census.norm / math.sqrt(max(1, self.steps))

    @property
    def lost(self) -> float | None:
        """The share of the values that FP16 turned to zero: those that are left hold none of them."""
        return None if self.underflow is None else self.underflow.lost_share

    @property
    def subnormal(self) -> float | None:
        """The share of the values that FP16 keeps with fewer bits."""
        return None if self.underflow is None else self.underflow.subnormal_share

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
        }
        return [note for note, holds in told.items() if holds]

    @property
    def cells(self) -> list[str]:
        """A row under ``headings``."""
        lost = [percent(share) for share in (self.lost, self.subnormal) if share is not None]
        return [percent(self.share), f"{self.norm:.3g}", f"{self.census.amax:.3g}", *lost]

    @property
    def name_and_owner(self) -> str:
        """For a table of the layers of several optimizers."""
        return f"{self.name} ({self.owner})"

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
    fmt, owners = _format(run), optimizer_names(run)
    optimizers = sorted({sample.optimizer for sample in run.layers})
    totals = {optimizer: run.total_layers(optimizer) for optimizer in optimizers}
    everything = sum(census.count for layers in totals.values() for census in layers.values())
    found = []
    for optimizer, layers in totals.items():
        samples = [sample for sample in run.layers if sample.optimizer == optimizer]
        scale = _present_scale(run, samples, optimizer)
        steps, lost = _sampled(samples), _underflows(samples, scale) if fmt.name == "fp16" else None
        found += [
            Layer(
                name=name,
                optimizer=optimizer,
                owner=owners.get(optimizer, f"optimizer {optimizer}"),
                census=census,
                steps=steps[name],
                share=census.count / max(1, everything),
                fmt=fmt,
                scale=scale,
                underflow=None if lost is None else lost.get(name, NOTHING),
            )
            for name, census in layers.items()
        ]
    return sorted(found, key=_badness)


def title(layers: Sequence[Layer]) -> str:
    """What stands above the table: where nothing is worse than the rest, it is in the order of the model."""
    odd = any(layer.lost or layer.subnormal or layer.notes for layer in layers)
    return "Layers, worst first" if odd and len(layers) > 1 else "Layers"


def headings(layers: Sequence[Layer]) -> list[str]:
    """Of the numbers; what is lost is known only of a run in FP16."""
    return ["share", "norm", "largest", *(["lost, est.", "subnormal"] if layers[0].underflow is not None else [])]


def about_layers(layers: Sequence[Layer]) -> str:
    """What the numbers of the table are about, and of which steps.

    The share lost is of values that are not zero: exact zeros of rows that were not used lose nothing.
    """
    steps = max(layer.steps for layer in layers)
    over = f"Gradients in true units, over {steps:,} sampled step{'' if steps == 1 else 's'}"
    if layers[0].underflow is None:
        return over
    # What is lost now: an average over scales that are gone would say nothing of what is to be done.
    which = "" if steps == 1 else "in the last finite one, "
    return f"{over}; lost and subnormal in FP16 {which}{_at_scale(layers)}"


def _at_scale(layers: Sequence[Layer]) -> str:
    scales = {layer.scale for layer in layers}
    if len(scales) > 1:
        return "at each optimizer's last loss scale"
    (scale,) = scales
    return "without a loss scale" if scale is None else f"at the last loss scale, {scale_words(scale)}"


def _badness(layer: Layer) -> tuple[object, ...]:
    # Shares of a thousandth: a finer order would be noise, and would mix up the layers of a healthy model. To be near
    # overflow is no fault: there a scale that grows ends in the best of runs.
    shares = (-round(layer.lost or 0.0, 3), -round(layer.subnormal or 0.0, 3))
    return (layer.census.finite, not layer.dead, *shares)


def _format(run: Run) -> Format:
    """That the run computed in. One that was killed has not said so: only FP16 needs a loss scale."""
    try:
        found = find_scalar_format(str(run.facts.get("precision")))
    except (UnknownName, ValueError):
        scaled = any(bucket.scale.known for bucket in run.steps) or any(one.scale is not None for one in run.layers)
        return find_scalar_format("fp16" if scaled else "fp32")
    return found if found.name in ("fp16", "bf16") else find_scalar_format("fp32")


def _sampled(samples: Iterable[LayerSample]) -> Counter[str]:
    """Over how many steps each layer was measured."""
    steps: Counter[str] = Counter()
    for sample in samples:
        steps.update(dict.fromkeys(sample.layers, sample.steps))
    return steps


def _underflows(samples: Sequence[LayerSample], scale: float | None) -> dict[str, Underflow]:
    """What FP16 lost of each layer, by the last sample in which it was finite: what the rules look at, too."""
    last = {name: (census, at.scale) for at in samples for name, census in at.layers.items() if census.finite}
    return {name: _at_present(census, then, scale) for name, (census, then) in last.items()}


def _at_present(census: Census, then: float | None, now: float | None) -> Underflow:
    """At the scale that there is now; where it has grown since the sample, at that of the sample: what is gone is gone.

    Where it has shrunk, those that were small go, too, and they are counted.
    """
    found, k = underflow(census, then), scale_exponent(now)
    if not found.nonzero or k >= scale_exponent(then):
        return found
    gone = census.flushed("fp16", k)
    return Underflow(found.nonzero - gone, census.subnormal("fp16", k).low, found.lost + gone, None)


def _present_scale(run: Run, samples: Sequence[LayerSample], optimizer: int) -> float | None:
    for bucket in reversed(run.steps):
        if bucket.optimizer == optimizer and bucket.scale.mean is not None:
            return bucket.scale.mean
    return next((sample.scale for sample in reversed(samples) if sample.scale is not None), None)
