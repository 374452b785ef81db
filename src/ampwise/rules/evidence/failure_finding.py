"""Findings about a failed step: the place, the sentence, the fix, and the evidence as data.

A rule about operations supplies its own part, what happened; ``told`` adds the inputs, how the value propagated to the
loss or the gradients, and the fixes that were tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ampwise.finding import Finding, Place, Rule
from ampwise.rules.evidence.failure import (
    BadTensor,
    Failure,
    FixTrial,
    OptimizerFacts,
    Origin,
    RoundedLiteral,
    TensorSummary,
    known_as_json,
)
from ampwise.rules.evidence.failure_text import (
    NAMED,
    format_title,
    join_items,
    line_text,
    operand_texts,
    result_text,
    value_text,
)
from ampwise.rules.evidence.number_text import number_text
from ampwise.rules.evidence.remedy import remedies_for

__all__ = ["failure_evidence", "failure_finding", "failure_place", "fix_text", "inputs_text", "propagation_text"]

ABSURD = 1e6  # times larger than a plausible loss
NAMED_GRADIENTS = 10  # names in the evidence; there is also a count
INDENT = "    "  # marks code for the printers


def failure_finding(rule: Rule, incident: Failure, what: str, *, advice: str = "") -> Finding:
    """Build the finding from ``what`` happened.

    ``advice`` replaces the rule's general fix in this case.
    """
    parts = (what, inputs_text(incident.birth), propagation_text(incident)) if not incident.not_reproduced else (what,)
    return rule.at(
        failure_place(incident),
        _one_line("; ".join(part for part in parts if part)),
        evidence=failure_evidence(incident),
        fix=fix_text(incident, advice or rule.fix),
    )


def failure_place(incident: Failure) -> Place:
    """Return the place, as far as it is known."""
    site, culprit, source = incident.site, incident.culprit, incident.source
    line = site.line if site.file and site.line and site.line > 0 else None
    is_parameter = source is not None and source.what == "parameter"
    return Place(
        file=site.file or None,
        line=line,
        module=(culprit.module or None) if culprit is not None else None,
        parameter=(source.name or None) if source is not None and is_parameter else None,
        step=incident.step,
        rank=incident.rank if incident.ranks > 1 else None,
    )


# The sentence


def inputs_text(birth: Origin | None) -> str:
    """Return the inputs of the failing operation."""
    if birth is None:
        return ""
    literals = [_literal(literal) for literal in birth.literals[:NAMED]]
    inputs = operand_texts(birth)
    return "; ".join([*literals, *([f"it received {join_items(inputs)}"] if inputs else [])])


def _literal(literal: RoundedLiteral) -> str:
    return f"{number_text(literal.value)} is {number_text(literal.becomes)} in {format_title(literal.dtype)}"


def propagation_text(incident: Failure) -> str:
    """Return how the value propagated: "inf here → NaN at train.py:31 (softmax) → the loss"."""
    ends = _reached(incident)
    if incident.birth is not None:
        begin = f"{result_text(incident.birth)} here"
    elif incident.source is not None and incident.source.name:
        begin = f"`{incident.source.name}`"
    else:
        return ""
    between = incident.nan_birth
    passed = [] if between is None else [f"NaN at {line_text(between.site)} ({between.name})"]
    return " → ".join([begin, *passed, *ends]) if passed or ends else ""


def _reached(incident: Failure) -> list[str]:
    if incident.swallowed:
        return ["finite but wrong values"]
    reached = {"loss": ["the loss"], "result": ["the result"]}.get(incident.symptom, [])
    bad = len(incident.bad_gradients)
    if bad:
        of = f"{bad:,} of {incident.gradients:,} gradients" if incident.gradients >= bad else f"{bad:,} gradients"
        reached = [*reached, of]
    return reached


def _one_line(text: str) -> str:
    """Join lines: names come from user code and may contain any characters."""
    return " ".join(text.splitlines())


# The fix


def fix_text(incident: Failure, advice: str) -> str:
    """Return a fix that was tried and helped, as code; else one that might; and the general advice."""
    helped = next((trial for trial in incident.trials if trial.finite), None)
    failed = [trial for trial in incident.trials if not trial.finite]
    if helped is not None:
        verdict = "Tried in the replay" if _is_absurd(incident, helped) else "Tried in the replay, and it works"
        head = f"{verdict}: {helped.what} ({_outcome(incident, helped)})."
        return "\n".join(
            [_one_line(head), *_code(helped.code), *_failed_trials(incident, failed), f"In general: {advice}"]
        )
    if failed:
        return "\n".join([advice, *_failed_trials(incident, failed)])
    return "\n".join([advice, *_untried(incident)])


def _failed_trials(incident: Failure, failed: Sequence[FixTrial]) -> list[str]:
    if not failed:
        return []
    outcomes = join_items([f"{trial.what} ({_outcome(incident, trial)})" for trial in failed])
    return [_one_line(f"Tried in the replay, but did not help: {outcomes}.")]


def _outcome(incident: Failure, trial: FixTrial) -> str:
    """Return the result before and after."""
    if trial.finite and trial.loss is not None and _is_absurd(incident, trial):
        return f"finite, but the loss is {number_text(trial.loss)}"
    losses = [number_text(loss) for loss in (incident.loss, trial.loss) if loss is not None]
    same = len(losses) == 2 and losses[0] == losses[1]
    loss = [] if not losses or trial.loss is None else [f"loss {' → '.join(losses[:1] if same else losses)}"]
    if trial.finite:
        return ", ".join([*loss, "gradients finite"])
    bad = f"{trial.bad_gradients:,} gradient{'s' if trial.bad_gradients != 1 else ''} not finite"
    return ", ".join([*loss, *([bad] if trial.bad_gradients else [])]) or "still not finite"


def _is_absurd(incident: Failure, trial: FixTrial) -> bool:
    """Return whether the loss is finite but useless: the clamped number is still far too large."""
    before = abs(incident.loss) if incident.loss is not None and math.isfinite(incident.loss) else 1.0
    return trial.loss is not None and abs(trial.loss) > ABSURD * max(before, 1.0)


def _untried(incident: Failure) -> list[str]:
    # A swallowed infinity has the same fix as one that was not, but a replay cannot show that it helps: the step is
    # finite without it.
    remedies = remedies_for(incident.but(swallowed=False))
    if not remedies:
        return []
    return [_one_line(f"Possible fix, not tried: {remedies[0].what}."), *_code(remedies[0].code)]


def _code(code: str) -> list[str]:
    return [f"{INDENT}{line}" for line in code.splitlines()]


# The evidence


def failure_evidence(incident: Failure) -> dict[str, Any]:
    """Return everything known as plain data: ``trace`` for machines, the other keys for people."""
    culprit = incident.culprit
    shown = {"op": None if culprit is None else culprit.op, "note": " ".join(incident.remarks)}
    return {**known_as_json(shown), "trace": _traced(incident)}


def _traced(incident: Failure) -> dict[str, Any]:
    culprit = incident.culprit
    return known_as_json(
        {
            **({} if culprit is None else _operation_data(culprit)),
            "nan_birth": _nan_birth(incident.nan_birth),
            "source": _source(incident.source),
            "optimizer": _optimizer(incident.optimizer),
            "symptom": incident.symptom,
            "loss": incident.loss,
            "precision": incident.precision,
            "scale": incident.scale,
            "fitting_scale": incident.fitting_scale,
            "bad_gradients": incident.bad_gradients[:NAMED_GRADIENTS],
            "bad_gradient_count": len(incident.bad_gradients) or None,
            "gradients": incident.gradients or None,
            "trials": [_trial(incident, trial) for trial in incident.trials],
            "remarks": incident.remarks,
        }
    )


def _operation_data(birth: Origin) -> dict[str, Any]:
    return {
        "op": birth.op,
        "made": value_text(birth.made),
        "dtype": birth.dtype,
        "module": birth.module,
        "module_class": birth.module_class,
        "phase": birth.phase,
        "derivative_of": birth.derivative_of,
        "called_from": birth.site.called_from,
        "through": birth.site.through,
        "inputs": _all_values(birth.inputs),
        "output": None if birth.output is None else birth.output.as_dict(),
        "exact": birth.exact,
        "exact_largest": birth.exact_largest,
        "zero_divisors": birth.zero_divisors or None,
        "outside_domain": birth.outside_domain or None,
        "masked_rows": birth.masked_rows or None,
        "literals": [
            {"value": each.value, "becomes": each.becomes, "dtype": each.dtype, "place": line_text(each.site)}
            for each in birth.literals
        ],
    }


def _all_values(inputs: Iterable[TensorSummary]) -> list[dict[str, Any]]:
    return [values.as_dict() for values in inputs]


def _nan_birth(birth: Origin | None) -> dict[str, Any] | None:
    if birth is None:
        return None
    return {"op": birth.op, "place": str(birth.site), "module": birth.module, "inputs": _all_values(birth.inputs)}


def _source(source: BadTensor | None) -> dict[str, Any] | None:
    if source is None:
        return None
    values = None if source.values is None else source.values.as_dict()
    return known_as_json(
        {
            "what": source.what,
            "name": source.name,
            "module_class": source.module_class,
            "values": values,
            "samples": source.rows,
            "bad_samples": source.bad_rows or None,
        }
    )


def _optimizer(facts: OptimizerFacts | None) -> dict[str, Any] | None:
    if facts is None:
        return None
    return known_as_json(
        {
            "name": facts.name,
            "eps": facts.eps,
            "eps_becomes": facts.eps_becomes,
            "dtype": facts.dtype,
            "lr": facts.lr,
            "steps": facts.steps,
            "zero_denominators": facts.zero_denominators,
            "bad_weights": facts.bad_weights,
        }
    )


def _trial(incident: Failure, trial: FixTrial) -> dict[str, Any]:
    return {
        "what": trial.what,
        "code": trial.code,
        "change": trial.change,
        "argument": trial.argument,
        "finite": trial.finite,
        "loss_before": incident.loss,
        "loss_after": trial.loss,
        "bad_gradients_before": len(incident.bad_gradients),
        "bad_gradients_after": trial.bad_gradients,
    }
