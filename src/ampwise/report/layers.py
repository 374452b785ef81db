"""The gradients of each layer over a run, and the share that FP16 lost, worst first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampwise.errors import UnknownName
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import NO_UNDERFLOW, Underflow, scale_exponent, underflow
from ampwise.numbers.formats import Format, find_scalar_format
from ampwise.report.formatting import format_percent, format_scale
from ampwise.report.run_facts import optimizer_names
from ampwise.runs.reader import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients:
    """The gradients of a parameter over the sampled steps, and how well the run's format represents them."""

    name: str
    optimizer: int
    owner: str  # name of the optimizer
    census: Census  # of the unscaled gradients, over all samples
    steps: int  # number of sampled steps
    share: float  # of all gradients of the run
    fmt: Format
    scale: float | None  # the current loss scale
    underflow: Underflow | None  # in FP16 at the current scale; None for a run in another format
    moved: float | None = None  # share of its weights that an update changes, if most updates are lost

    @property
    def exponent(self) -> int:
        """Exponent of the loss scale as a power of two, rounded down so that no loss is hidden."""
        return scale_exponent(self.scale)

    @property
    def norm(self) -> float:
        """Gradient norm of one step: the root mean square over the sampled steps."""
        return self.census.norm / math.sqrt(max(1, self.steps))

    @property
    def lost(self) -> float | None:
        """Share of the values that FP16 flushed to zero (at least: the remaining values do not contain them)."""
        return None if self.underflow is None else self.underflow.lost_share

    @property
    def subnormal(self) -> float | None:
        """Share of the values that are subnormal in FP16, with fewer bits."""
        return None if self.underflow is None else self.underflow.subnormal_share

    @property
    def dead(self) -> bool:
        """Whether all gradients are zero at every sampled step."""
        return bool(self.census.count) and self.census.zeros == self.census.count

    @property
    def doublings_left(self) -> int | None:
        """How often the scale could double before the largest gradient overflows; None if all gradients are zero."""
        if not self.census.amax:
            return None
        return math.floor(math.log2(self.fmt.max) - math.log2(self.census.amax)) - self.exponent

    @property
    def notes(self) -> list[str]:
        """Anomalies of the layer, in a word or two each."""
        left = self.doublings_left
        notes = {
            f"{self.census.nans:,} NaN": bool(self.census.nans),
            f"{self.census.infs:,} inf": bool(self.census.infs),
            "dead": self.dead,
            "would overflow": left is not None and left < 0,
            f"updates change {format_percent(self.moved or 0.0)} of it": self.moved is not None,
        }
        return [note for note, holds in notes.items() if holds]

    @property
    def cells(self) -> list[str]:
        """Table row under ``headings``."""
        lost = [format_percent(share) for share in (self.lost, self.subnormal) if share is not None]
        return [format_percent(self.share), f"{self.norm:.3g}", f"{self.census.amax:.3g}", *lost]

    @property
    def name_and_owner(self) -> str:
        """Name with the optimizer, for a table of several optimizers' layers."""
        return f"{self.name} ({self.owner})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
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


def layers_of(run: Run) -> list[LayerGradients]:
    """Return every parameter of every optimizer, worst first; equally bad ones in the order of the model."""
    owners = optimizer_names(run)
    try:
        fmt = find_scalar_format(str(run.facts.get("precision")))
        fmt = fmt if fmt.name in ("fp16", "bf16") else find_scalar_format("fp32")
    except (UnknownName, ValueError):  # a killed run has not recorded it; a loss scale means FP16
        scaled = any(bucket.scale.known for bucket in run.steps) or any(one.scale is not None for one in run.layers)
        fmt = find_scalar_format("fp16" if scaled else "fp32")
    moved = _lost_updates(run)
    optimizers = sorted({sample.optimizer for sample in run.layers})
    totals = {optimizer: run.total_layers(optimizer) for optimizer in optimizers}
    everything = sum(census.count for layers in totals.values() for census in layers.values())
    found = []
    for optimizer, layers in totals.items():
        samples = [sample for sample in run.layers if sample.optimizer == optimizer]
        known = [bucket.scale.mean for bucket in run.rows(optimizer) if bucket.scale.mean is not None]
        known = known or [sample.scale for sample in samples if sample.scale is not None]
        scale = known[-1] if known else None
        steps: Counter[str] = Counter()
        last: dict[str, tuple[Census, float | None]] = {}  # the last finite sample of each layer, and its scale
        for sample in samples:
            steps.update(dict.fromkeys(sample.layers, sample.steps))
            last |= {name: (census, sample.scale) for name, census in sample.layers.items() if census.finite}
        for name, census in layers.items():
            lost = None
            if fmt.name == "fp16":
                lost = _underflow_now(*last[name], scale) if name in last else NO_UNDERFLOW
            layer = LayerGradients(
                name=name,
                optimizer=optimizer,
                owner=owners.get(optimizer, f"optimizer {optimizer}"),
                census=census,
                steps=steps[name],
                share=census.count / max(1, everything),
                fmt=fmt,
                scale=scale,
                underflow=lost,
                moved=moved.get((optimizer, name)),
            )
            found.append(layer)

    def badness(layer: LayerGradients) -> tuple[object, ...]:
        # Rounded to a thousandth: a finer order would be noise, and would shuffle the layers of a healthy model. Being
        # near overflow is not bad: a growing scale ends there in the best of runs.
        shares = (-round(layer.lost or 0.0, 3), -round(layer.subnormal or 0.0, 3))
        return (layer.census.finite, not layer.dead, 1.0 if layer.moved is None else layer.moved, *shares)

    return sorted(found, key=badness)


def _lost_updates(run: Run) -> dict[tuple[int, str], float]:
    """Return the share of the weights that an update changes, by optimizer and layer, where most updates are lost."""
    found: dict[tuple[int, str], float] = {}
    for one in run.merged_findings():
        for each in (one, *one.consequences):
            facts = each.finding.evidence.get("lost_updates")
            if not isinstance(facts, dict) or not isinstance(moved := facts.get("moved"), dict):
                continue  # none, or a record is damaged
            number = facts["optimizer"] if isinstance(facts.get("optimizer"), int) else 0
            shares = {str(name): share for name, share in moved.items() if isinstance(share, int | float)}
            found |= {(number, name): float(share) for name, share in shares.items()}
    return found


def layers_title(layers: Sequence[LayerGradients]) -> str:
    """Return the title of the table, which is in the order of the model if no layer has anomalies."""
    odd = any(layer.lost or layer.subnormal or layer.notes for layer in layers)
    return "Layers, worst first" if odd and len(layers) > 1 else "Layers"


def layers_headings(layers: Sequence[LayerGradients]) -> list[str]:
    """Return the headings of ``Layer.cells``; losses are known only for a run in FP16."""
    return ["share", "norm", "largest", *(["lost, min.", "subnormal"] if layers[0].underflow is not None else [])]


def describe_layers(layers: Sequence[LayerGradients]) -> str:
    """Describe what the numbers of the table measure, and over which steps.

    The share lost is relative to the nonzero values: exact zeros of unused rows lose nothing.
    """
    steps = max(layer.steps for layer in layers)
    over = f"Unscaled gradients over {steps:,} sampled step{'' if steps == 1 else 's'}"
    if layers[0].underflow is None:
        return over
    scales = {layer.scale for layer in layers}
    scale = layers[0].scale
    if len(scales) > 1:
        at = "at each optimizer's last loss scale"
    else:
        at = "without a loss scale" if scale is None else f"at the last loss scale, {format_scale(scale)}"
    # What is lost now: an average over earlier scales would not say what to do.
    which = "" if steps == 1 else "in the last finite one, "
    return f"{over}; lost and subnormal in FP16 {which}{at}"


def _underflow_now(census: Census, then: float | None, now: float | None) -> Underflow:
    """Return the underflow of a sample at the current scale.

    If the scale has grown since the sample, the loss is that of the sample: lost values cannot be recovered. If it has
    shrunk, the values that are now too small are counted, too.
    """
    found, k = underflow(census, then), scale_exponent(now)
    if not found.nonzero or k >= scale_exponent(then):
        return found
    gone = census.flushed("fp16", k)
    return Underflow(found.nonzero - gone, census.subnormal("fp16", k).low, found.lost + gone)
