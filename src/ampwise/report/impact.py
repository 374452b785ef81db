"""What a finding cost this run, in a few words computed from the record: "skipped 12% of steps: +14% time"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ampwise.report.formatting import format_percent, format_scale, read_number
from ampwise.report.run_facts import skip_rate, steps_of
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

SETTLED = 20  # steps without an overflow at the end, from which a loss scale is one that fits


def computed_impact(counted: CountedFinding, run: Run) -> str:
    """Return the impact of a finding as its rule computes it from the record; empty for most rules."""
    name = counted.finding.rule.name
    return BY_RULE[name](counted, run) if name in BY_RULE else ""


def impact_of(counted: CountedFinding, run: Run) -> str:
    """Return the impact of a finding; empty if the record does not say."""
    rule = counted.finding.rule
    known = computed_impact(counted, run) if rule.name in BY_RULE else _from_evidence(counted.finding.evidence)
    if known or rule.names_the_cause:
        return known or _not_finite(counted, run)
    steps = steps_of(run)
    if counted.first_step is None or not 1 < counted.count <= steps:
        return ""
    return "at every step" if counted.count == steps else f"at {counted.count:,} of {steps:,} steps"


def _clip(counted: CountedFinding, run: Run) -> str:
    """The clip compares the norm of scaled gradients with the limit, which is one of limit / scale for real ones."""
    limit = _number(counted.finding.evidence.get("limit"))
    first, last = counted.first_step, counted.last_step
    within = [
        bucket
        for bucket in run.steps
        if (first is None or bucket.last >= first) and (last is None or bucket.first <= last)
    ]
    taken = [bucket for bucket in within if bucket.skipped < bucket.count]  # a skipped step uses no gradients
    scales = [bucket.scale for bucket in taken or within]
    lowest = min((one.low for one in scales if one.low), default=0.0)
    highest = max((one.high for one in scales if one.high), default=0.0)
    if highest <= 1:
        return ""
    texts = [format_scale(highest)] if limit is None else [f"{limit / highest:.2g}"]
    if lowest < highest:
        texts.append(format_scale(lowest) if limit is None else f"{limit / lowest:.2g}")
    if limit is None:
        return f"clips at 1/{' to 1/'.join(texts)} of the limit"
    return f"effective clip {' to '.join(texts)} instead of {limit:g}"


def _off_by_scale(counted: CountedFinding, run: Run, *, off: str) -> str:
    scale = _scale_at(run, counted.last_step)
    return f"gradients {format_scale(scale)} times too {off}" if scale and scale > 1 else ""


def _skips(counted: CountedFinding, run: Run) -> str:
    share = skip_rate(run.steps)
    if not share:
        return ""
    time = f": +{format_percent(share / (1 - share))} time" if share < 1 else ""
    return f"skipped {format_percent(share)} of steps{time}"


def _resume(counted: CountedFinding, run: Run) -> str:
    """A new scaler begins where this one began, and has to find the scale again."""
    scales = [bucket.scale.mean for bucket in run.steps if bucket.scale.mean]
    if not scales or scales[0] == scales[-1] or not _has_settled(run):
        return ""
    if scales[0] > scales[-1]:
        again = round(math.log2(scales[0] / scales[-1]))
        return f"about {_times(again, 'skipped step', 'at each resume')}" if again else ""
    return f"a resume starts at scale {format_scale(scales[0])} instead of {format_scale(scales[-1])}"


def _has_settled(run: Run) -> bool:
    """Whether the loss scale at the end is one that fits: nothing was wrong for a while, and it had not collapsed."""
    if any(seen.finding.rule.name == "scale-collapse" for seen in run.findings):
        return False
    steps = [bucket for bucket in run.steps if bucket.scale.known]
    clean = 0
    for bucket in reversed(steps):
        if bucket.skipped or bucket.scale.low != steps[-1].scale.low or bucket.scale.bad or bucket.loss.bad:
            break
        clean += bucket.count
    return clean >= SETTLED


def _no_scaler(counted: CountedFinding, run: Run) -> str:
    lost = [census.flushed("fp16").low for sample in run.layers for census in sample.layers.values()]
    values = [census.nonzeros for sample in run.layers for census in sample.layers.values()]
    share = sum(lost) / sum(values) if sum(values) else 0.0
    return f"FP16 rounds {format_percent(share)} of the gradients to zero" if share else ""


def _time(counted: CountedFinding, run: Run) -> str:
    share = _number(counted.finding.evidence.get("share"))
    return f"{format_percent(share)} of the time" if share is not None and 0 < share <= 1 else ""


def _collapse(counted: CountedFinding, run: Run) -> str:
    scales = [bucket.scale for bucket in run.steps if bucket.scale.low is not None and bucket.scale.high is not None]
    if not scales:
        return ""
    high, low = max(one.high or 0.0 for one in scales), min(one.low or 0.0 for one in scales)
    return f"loss scale fell from {format_scale(high)} to {format_scale(low)}" if low < high else ""


def _not_finite(counted: CountedFinding, run: Run) -> str:
    bad, taken = sum(bucket.loss.bad for bucket in run.steps), sum(bucket.loss.known for bucket in run.steps)
    words = [f"loss not finite at {bad:,} of {taken:,} steps"] if bad else []
    skipped = sum(bucket.skipped for bucket in run.steps)
    if skipped:
        words.append(_times(skipped, "step", "skipped"))
    return ", ".join(words)


def _times(count: int, what: str, rest: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural} {rest}"


def _from_evidence(evidence: Mapping[str, Any]) -> str:
    """Put the numbers that several rules report into words."""
    shares = {name: share for name in SHARES if (share := _number(evidence.get(name))) is not None and 0 <= share <= 1}
    words = [SHARES[name].format(format_percent(share)) for name, share in shares.items() if share][:1]
    parameters, of = _number(evidence.get("parameters")), _number(evidence.get("of"))
    if parameters is not None and of:
        words.append(f"{parameters:,.0f} of {of:,.0f} layers")
    waits, steps = _number(evidence.get("waits")), _number(evidence.get("steps"))
    if waits is not None and steps:
        words.append(f"{waits / steps:,.3g} syncs per step")
    return ", ".join(words)


def _scale_at(run: Run, step: int | None) -> float | None:
    """Return the loss scale at a step, by default the last one."""
    known = [bucket for bucket in run.steps if bucket.scale.mean is not None and (step is None or bucket.first <= step)]
    return known[-1].scale.mean if known else None


def _number(value: object) -> float | None:
    number = read_number(value)
    return number if number is not None and math.isfinite(number) else None


SHARES = {  # by the name of the evidence
    "lost_share_at_least": "at least {} of the gradient lost",
    "lost_share": "{} lost",
    "subnormal_share": "{} of the gradient with fewer bits",
    "half_share": "{} of matmul work in half precision",
    "moved_share": "only {} of the weights moved",
}
BY_RULE: dict[str, Callable[[CountedFinding, Run], str]] = {
    "clip-scaled-grads": _clip,
    "backward-unscaled": partial(_off_by_scale, off="small"),
    "optimizer-step-bypasses-scaler": partial(_off_by_scale, off="large"),
    "grad-inspect-before-unscale": partial(_off_by_scale, off="large"),
    "sched-step-unconditional": lambda counted, run: _times(counted.count, "scheduler step", "ahead of the optimizer"),
    "scaler-not-checkpointed": _resume,
    "scaler-recreated": _resume,
    "fp16-no-scaler": _no_scaler,
    "eval-no-autocast": lambda counted, run: _times(counted.count, "forward pass", "not as trained", "es"),
    "casts-take-time": _time,
    "data-stall": _time,
    "skip-rate": _skips,
    "scale-oscillation": _skips,
    "scale-collapse": _collapse,
    "non-finite-loss": _not_finite,
    "non-finite-gradients": _not_finite,
}
