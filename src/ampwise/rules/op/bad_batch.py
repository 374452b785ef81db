"""What the step was given had inf or NaN in it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Incident, Source
from ampwise.evidence.incident_words import bad_values, operation
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP901",
    name="bad-batch",
    severity=Severity.ERROR,
    summary="The batch had NaN or inf in it before the model saw it.",
    why=(
        "One NaN in a sample is enough: a matrix product spreads it over the sample, the mean over the batch makes the "
        "loss NaN, and the backward pass makes every gradient NaN. No operation is at fault, and no precision or loss "
        "scale helps. Usual sources are a division or logarithm in the preprocessing (the standard deviation of a "
        "constant channel), missing values read as NaN, a broken file, and inputs cast to FP16 above 65504."
    ),
    fix=(
        "Look at the samples named, and mend or leave them out where they are made: in the dataset, or in the "
        "collate function. `torch.nan_to_num` on the batch hides the cause, and the model learns from zeros."
    ),
    bad="x = (image - image.mean()) / image.std()",
    good="x = (image - image.mean()) / image.std().clamp_min(1e-6)\nassert x.isfinite().all(), path",
)


NUMBER = (
    "Look where the number is computed, before this line: a loss that was NaN once and is averaged or carried on, a "
    "mean of nothing, a learning rate or a weight read as NaN. `math.isfinite` tells where it is made."
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name and incident.source is not None:
        yield told(RULE, incident, _what(incident.source), advice=NUMBER if incident.source.what == "number" else "")


def _what(source: Source) -> str:
    if source.what == "number" and source.first_use is not None:
        return f"{operation(source.first_use)} was given a number that is NaN: one of Python's, computed before"
    came = "was given to the step" if source.what == "batch" else "is used by the step and comes from outside of it"
    first = f", and was read first by {operation(source.first_use)}" if source.first_use is not None else ""
    name = f"`{source.name}`" if source.name else "a tensor"
    return f"{name} {came} with {bad_values(source.values)}{_samples(source)}{first}"


def _samples(source: Source) -> str:
    """Which: ", in 40 samples (5, 17, …, counted from 0)"."""
    count = max(source.bad_rows, len(source.rows))
    if not count:
        return ""
    if count == len(source.rows) == 1:
        return f", in sample {source.rows[0]}, counted from 0"
    more = ["…"] if count > len(source.rows) else []
    which = f" ({', '.join([*map(str, source.rows), *more, 'counted from 0'])})" if source.rows else ""
    return f", in {count:,} sample{'s' if count != 1 else ''}{which}"
