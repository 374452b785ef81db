"""An incident told: its place, the parts of the sentence that all kinds share, the way out, and the evidence as data.

A rule about operations brings the part that is its own, what happened; ``told`` adds what went in, how it went on from
there to the loss or the gradients, and what was tried against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ampwise.evidence.incident import Birth, Incident, Literal, OptimizerFacts, Source, Trial, Values, plain
from ampwise.evidence.incident_words import NAMED, listed, made_of, operands, result_of, spot, title
from ampwise.evidence.remedy import remedies_for
from ampwise.evidence.wording import number
from ampwise.finding import Finding, Place, Rule

__all__ = ["cascade", "evidence_of", "fix_of", "given", "place_of", "told"]

ABSURD = 1e6  # times larger than a loss is
NAMED_GRADIENTS = 10  # in the evidence; the count tells the rest
INDENT = "    "  # of code, by which printers know it


def told(rule: Rule, incident: Incident, what: str, *, advice: str = "") -> Finding:
    """The finding: ``what`` happened, and all else that there is to say.

    ``advice`` is what to do in this very case, where that is more than the rule's own.
    """
    parts = (what, given(incident.birth), cascade(incident)) if not incident.not_reproduced else (what,)
    return rule.at(
        place_of(incident),
        _one_line("; ".join(part for part in parts if part)),
        evidence=evidence_of(incident),
        fix=fix_of(incident, advice or rule.fix),
    )


def place_of(incident: Incident) -> Place:
    """As much of it as is known."""
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


def given(birth: Birth | None) -> str:
    """What went into the guilty operation."""
    if birth is None:
        return ""
    literals = [_literal(literal) for literal in birth.literals[:NAMED]]
    inputs = operands(birth)
    return "; ".join([*literals, *([f"it was given {listed(inputs)}"] if inputs else [])])


def _literal(literal: Literal) -> str:
    return f"{number(literal.value)} is {number(literal.becomes)} in {title(literal.dtype)}"


def cascade(incident: Incident) -> str:
    """How it went on: "inf here → NaN at train.py:31 (softmax) → the loss"."""
    ends = _reached(incident)
    if incident.birth is not None:
        begin = f"{result_of(incident.birth)} here"
    elif incident.source is not None and incident.source.name:
        begin = f"`{incident.source.name}`"
    else:
        return ""
    between = incident.nan_birth
    passed = [] if between is None else [f"NaN at {spot(between.site)} ({between.name})"]
    return " → ".join([begin, *passed, *ends]) if passed or ends else ""


def _reached(incident: Incident) -> list[str]:
    if incident.swallowed:
        return ["values that are finite, and wrong"]
    reached = {"loss": ["the loss"], "result": ["the result"]}.get(incident.symptom, [])
    bad = len(incident.bad_gradients)
    if bad:
        of = f"{bad:,} of {incident.gradients:,} gradients" if incident.gradients >= bad else f"{bad:,} gradients"
        reached = [*reached, of]
    return reached


def _one_line(text: str) -> str:
    """Names come from other people's code, and may have any characters."""
    return " ".join(text.splitlines())


# The way out


def fix_of(incident: Incident, advice: str) -> str:
    """What was tried and helps, as code; else what might; and the general advice."""
    helped = next((trial for trial in incident.trials if trial.finite), None)
    failed = [trial for trial in incident.trials if not trial.finite]
    if helped is not None:
        verdict = "Tried in the replay" if _is_absurd(incident, helped) else "Tried in the replay, and it helps"
        head = f"{verdict}: {helped.what} ({_outcome(incident, helped)})."
        return "\n".join(
            [_one_line(head), *_code(helped.code), *_without_help(incident, failed), f"In general: {advice}"]
        )
    if failed:
        return "\n".join([advice, *_without_help(incident, failed)])
    return "\n".join([advice, *_untried(incident)])


def _without_help(incident: Incident, failed: Sequence[Trial]) -> list[str]:
    if not failed:
        return []
    outcomes = listed([f"{trial.what} ({_outcome(incident, trial)})" for trial in failed])
    return [_one_line(f"Tried in the replay, and of no help: {outcomes}.")]


def _outcome(incident: Incident, trial: Trial) -> str:
    """Before and after."""
    if trial.finite and trial.loss is not None and _is_absurd(incident, trial):
        return f"finite, but the loss is {number(trial.loss)}"
    losses = [number(loss) for loss in (incident.loss, trial.loss) if loss is not None]
    same = len(losses) == 2 and losses[0] == losses[1]
    loss = [] if not losses or trial.loss is None else [f"loss {' → '.join(losses[:1] if same else losses)}"]
    if trial.finite:
        return ", ".join([*loss, "gradients finite"])
    bad = f"{trial.bad_gradients:,} gradient{'s' if trial.bad_gradients != 1 else ''} not finite"
    return ", ".join([*loss, *([bad] if trial.bad_gradients else [])]) or "still not finite"


def _is_absurd(incident: Incident, trial: Trial) -> bool:
    """Finite, and nothing to learn from: the number that was clamped is still far too large."""
    before = abs(incident.loss) if incident.loss is not None and math.isfinite(incident.loss) else 1.0
    return trial.loss is not None and abs(trial.loss) > ABSURD * max(before, 1.0)


def _untried(incident: Incident) -> list[str]:
    # What mends an infinity that was swallowed is what would mend it had it not been: in the replay nothing could show
    # whether it helps, for the step is finite without it.
    remedies = remedies_for(incident.but(swallowed=False))
    if not remedies:
        return []
    return [_one_line(f"For one, not tried: {remedies[0].what}."), *_code(remedies[0].code)]


def _code(code: str) -> list[str]:
    return [f"{INDENT}{line}" for line in code.splitlines()]


# The evidence


def evidence_of(incident: Incident) -> dict[str, Any]:
    """All that is known, as plain data: in ``trace`` what is for machines, beside it what people are shown."""
    culprit = incident.culprit
    shown = {"op": None if culprit is None else culprit.op, "note": " ".join(incident.remarks)}
    return {**plain(shown), "trace": _traced(incident)}


def _traced(incident: Incident) -> dict[str, Any]:
    culprit = incident.culprit
    return plain(
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


def _operation_data(birth: Birth) -> dict[str, Any]:
    return {
        "op": birth.op,
        "made": made_of(birth.made),
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
            {"value": each.value, "becomes": each.becomes, "dtype": each.dtype, "place": spot(each.site)}
            for each in birth.literals
        ],
    }


def _all_values(inputs: Iterable[Values]) -> list[dict[str, Any]]:
    return [values.as_dict() for values in inputs]


def _nan_birth(birth: Birth | None) -> dict[str, Any] | None:
    if birth is None:
        return None
    return {"op": birth.op, "place": str(birth.site), "module": birth.module, "inputs": _all_values(birth.inputs)}


def _source(source: Source | None) -> dict[str, Any] | None:
    if source is None:
        return None
    values = None if source.values is None else source.values.as_dict()
    return plain(
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
    return plain(
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


def _trial(incident: Incident, trial: Trial) -> dict[str, Any]:
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
