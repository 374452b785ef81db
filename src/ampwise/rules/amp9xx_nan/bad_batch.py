from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import bad_values_text, failure_finding, join_items, operation_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure
    from ampwise.trace.failure_facts import BadTensor, DataOrigin

RULE = Rule(
    code="AMP901",
    name="bad-batch",
    severity=Severity.ERROR,
    summary="The batch contained NaN or inf before it reached the model.",
    why=(
        "One NaN in a sample is enough: a matmul spreads it over the sample, the mean over the batch makes the loss "
        "NaN, and the backward pass makes every gradient NaN. No operation is at fault, and no other precision or loss "
        "scale helps. Usual sources are a division or logarithm in the preprocessing (the standard deviation of a "
        "constant channel), missing values read as NaN, a corrupt file, and inputs above 65504 cast to FP16. Samples "
        "of the DataLoader are drawn once more, to name the line that computed the value: by `ampwise run` the bad "
        "ones, with the random numbers that they had; by `trace` and the Engine, for up to 3 s, until one is bad."
    ),
    fix=(
        "Inspect the reported samples, and fix or drop them where they are created: in the dataset or the collate "
        "function. `torch.nan_to_num` on the batch hides the cause, and the model learns from zeros."
    ),
    bad="x = (image - image.mean()) / image.std()",
    good="x = (image - image.mean()) / image.std().clamp_min(1e-6)\nassert x.isfinite().all(), path",
)

NUMBER = (
    "Check where the number is computed, before this line: a NaN loss that is averaged or carried over, a mean of "
    "nothing, a learning rate or weight read as NaN. `math.isfinite` helps to find where it originates."
)


def check_op(failure: Failure) -> Findings:
    source = failure.source
    if failure.kind != RULE.name or source is None:
        return
    first = operation_text(source.first_use) if source.first_use is not None else ""
    if source.what == "number" and first:
        what = f"{first} received a Python number that is NaN, computed earlier"
    else:
        name = f"`{source.name}`" if source.name else "a tensor"
        if source.drawn is not None:
            finding = failure_finding(RULE, failure, _drawn_text(name, source, source.drawn), advice=source.drawn.fix)
            more: dict[str, object] = {"index": ", ".join(source.drawn.indices or (source.drawn.index,))}
            if source.first_use is not None and source.first_use.site.file:
                more["first_read"] = f"{first} at {source.first_use.site.in_text}"
            yield finding.but(evidence={**more, **finding.evidence})
            return
        came = "was passed to the step" if source.what == "batch" else "is used by the step and comes from outside it"
        what = f"{name} {came} with {bad_values_text(source.values)}{_samples(source)}"
        what += f"; {source.made_by} at {source.made_at.in_text}" if source.made_at.file else ""
        what += f", and was first read by {first}" if first else ""
    yield failure_finding(RULE, failure, what, advice=NUMBER if source.what == "number" else source.advice)


def _drawn_text(name: str, source: BadTensor, drawn: DataOrigin) -> str:
    """Return what made the value, found by drawing the batch again: the cause first."""
    kinds = source.values.special if source.values is not None else {}
    bad = join_items([kind for kind in ("NaN", "inf", "-inf") if kinds.get(kind)]) or "not finite"
    what = drawn.cause
    if drawn.how == "computed":
        what = f"in `{drawn.site.function}`, {what}" if drawn.site.function else what
    elif drawn.how == "drawn":
        what = f"`{drawn.site.function}` returns {bad}" if drawn.site.function else "it comes from the dataset"
    of = f"the {drawn.dataset}" if drawn.dataset in ("list", "tuple", "dict") else f"`{drawn.dataset}`"
    where = f"{'such as ' if drawn.is_example else ''}index {drawn.index} of {of}"
    where += f", drawn {drawn.tries} times" if drawn.tries > 1 else ""
    counts = f"{bad_values_text(source.values)}{_samples(source)}"
    return f"{name} was {bad} before the model: {what} ({where}); {counts}"


def _samples(source: BadTensor) -> str:
    """Return which samples are bad: ", in 40 samples (5, 17, …, counted from 0)"."""
    count = max(source.bad_rows, len(source.rows))
    if not count:
        return ""
    if count == len(source.rows) == 1:
        return f", in sample {source.rows[0]}, counted from 0"
    more = ["…"] if count > len(source.rows) else []
    which = f" ({', '.join([*map(str, source.rows), *more, 'counted from 0'])})" if source.rows else ""
    return f", in {count:,} sample{'s' if count != 1 else ''}{which}"
