"""The decision: the device first, then the model, then what goes wrong, then what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampwise.finding import Finding
from ampwise.rules.dispatch import run_checks
from ampwise.rules.evidence.choice.advice import advises_against, refused_precision
from ampwise.rules.evidence.choice.choice import HALVES, PrecisionChoice
from ampwise.tune.advise.advice import Advice, LossScale
from ampwise.tune.advise.around import changes, compiling, speed_words, switches
from ampwise.tune.advise.keeping import kept_in_fp32
from ampwise.tune.advise.reasons import reasons
from ampwise.tune.advise.snippets import by_hand, with_engine
from ampwise.tune.advise.triage import triage

__all__ = ["decide", "precision_for"]

# What speaks about the device comes first: there is no arguing with it.
HARDWARE = ("AMP701", "AMP702")


def decide(choice: PrecisionChoice) -> Advice:
    """The advice for a question."""
    asked = choice
    precision = precision_for(asked, run_checks(asked, "choice"))
    choice = _settled(asked, precision)
    kept = kept_in_fp32(choice, precision)
    gain = choice.gain(precision)
    return Advice(
        choice=asked,
        precision=precision,
        reasons=tuple(reasons(choice, precision)),
        loss_scale=LossScale() if precision in ("fp16", "auto") else None,
        kept=kept,
        tf32=switches(choice, precision),
        compile=compiling(choice, precision),
        speedup=gain,
        speedup_why=speed_words(choice, precision, gain),
        triage=triage(choice, precision),
        changes=tuple(changes(choice, precision)),
        findings=tuple(sorted(_findings(asked, choice), key=_weight)),
        by_hand=by_hand(choice, precision, kept),
        with_engine=with_engine(choice, precision, kept),
    )


def precision_for(choice: PrecisionChoice, findings: Sequence[Finding]) -> str:
    """What to train in: the precision that is wanted unless a rule says no to it, else the best there is."""
    if choice.exact:
        return "fp32"
    if choice.want is not None and choice.want not in {refused_precision(finding) for finding in findings}:
        return choice.want
    return next(_best(choice))


def _settled(choice: PrecisionChoice, precision: str) -> PrecisionChoice:
    """The question once a 16-bit format that was wanted got a no: the rest of the answer is about what was decided."""
    if choice.want not in HALVES or choice.want == precision:
        return choice
    return replace(choice, want=precision if precision in HALVES else None)


def _findings(asked: PrecisionChoice, settled: PrecisionChoice) -> Iterator[Finding]:
    """What refuses what was wanted, and what there is to say about the rest once that is settled."""
    if settled == asked:
        yield from run_checks(asked, "choice")
        return
    told = [finding for finding in run_checks(asked, "choice") if refused_precision(finding)]
    yield from told
    messages = {finding.message for finding in told}
    yield from (finding for finding in run_checks(settled, "choice") if finding.message not in messages)


def _best(choice: PrecisionChoice) -> Iterator[str]:
    """The first that applies."""
    target = choice.target
    if choice.stays_wide:
        yield target.wide
    if not target.known:
        yield "auto"
    if choice.model.small and choice.measured is None and choice.symptom != "memory":
        yield target.wide
    yield target.half or target.wide


def _weight(finding: Finding) -> tuple[bool, bool, int, str]:
    code = finding.rule.code
    return (not advises_against(finding), code not in HARDWARE, finding.severity.rank, code)
