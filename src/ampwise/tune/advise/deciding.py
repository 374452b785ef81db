"""The decision: the device first, then the model, then what goes wrong, then what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampwise.evidence.choice.answers import is_no, refused
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.speed_verdict import Verdict, verdict_of
from ampwise.finding import Finding
from ampwise.rules.judging import judged
from ampwise.tune.advise.advice import Advice, LossScale
from ampwise.tune.advise.around import changes, compiling, speed_words, switches
from ampwise.tune.advise.keeping import kept_in_fp32
from ampwise.tune.advise.reasons import reasons
from ampwise.tune.advise.snippets import by_hand, with_engine
from ampwise.tune.advise.triage import triage

__all__ = ["decide", "precision_for"]

EXACT = ("exact-numbers", "complex-numbers")
# What speaks about the device comes first: there is no arguing with it.
HARDWARE = ("AMP701", "AMP702")


def decide(choice: Choice) -> Advice:
    """The advice for a question."""
    findings = tuple(sorted(judged(choice, "choice"), key=_weight))
    precision = precision_for(choice, findings)
    kept = kept_in_fp32(choice, precision)
    gain = choice.gain(precision)
    return Advice(
        choice=choice,
        precision=precision,
        reasons=tuple(reasons(choice, precision)),
        loss_scale=LossScale() if precision in ("fp16", "auto") else None,
        kept=kept,
        tf32=switches(choice, precision),
        compile=compiling(choice, precision),
        speedup=gain,
        speedup_why=speed_words(choice, precision, gain),
        triage=triage(choice),
        changes=tuple(changes(choice, precision)),
        findings=findings,
        by_hand=by_hand(choice, precision, kept),
        with_engine=with_engine(choice, precision, kept),
    )


def precision_for(choice: Choice, findings: Sequence[Finding]) -> str:
    """What to train in: the precision that is wanted unless a rule says no to it, else the best there is."""
    if choice.proposes(*EXACT):
        return "fp32"
    if choice.want is not None and choice.want not in {refused(finding) for finding in findings}:
        return choice.want
    return next(_best(choice))


def _best(choice: Choice) -> Iterator[str]:
    """The first that applies."""
    target = choice.target
    if not target.known:
        yield "auto"
    if target.half is None:
        yield target.wide
    for_memory = choice.symptom == "memory"  # activations shrink, whatever the speed
    if choice.measured is not None and not for_memory:
        yield target.wide if verdict_of(choice.measured) is Verdict.STAY else target.half or target.wide
    if choice.model.small and not for_memory:
        yield target.wide
    yield target.half or target.wide


def _weight(finding: Finding) -> tuple[bool, bool, int, str]:
    code = finding.rule.code
    return (not is_no(finding), code not in HARDWARE, finding.severity.rank, code)
