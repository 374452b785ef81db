"""What was looked for and found in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampwise.evidence.conduct import Conduct
from ampwise.evidence.health import Health
from ampwise.record.rows import Seen

__all__ = ["what_was_fine"]

# Rules, the event whose happening they need, and what to say if none of them found anything.
CLAIMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("AMP101",), "Clip", "Gradients were clipped in true units ({n} times)."),
    (("AMP108", "AMP301", "AMP308"), "Backward", "Losses were scaled as their precision needs ({n} backward passes)."),
    (("AMP111",), "Backward", "Backward passes ran outside of autocast."),
    (("AMP103", "AMP104", "AMP105", "AMP106", "AMP107"), "Update", "The scaler was driven in order ({n} updates)."),
    (("AMP109", "AMP110"), "ScalerStep", "Every step went through the scaler ({n} steps)."),
    (("AMP114",), "Scheduled", "The schedule stood still on skipped steps, or none was skipped."),
    (("AMP205", "AMP206"), "Accumulation", "Losses were divided where gradients add up ({n} steps)."),
)
HEALTH = ("AMP601", "AMP602", "AMP603", "AMP604", "AMP605", "AMP606")


def what_was_fine(
    run: Conduct, kinds: Mapping[str, int], seen: Sequence[Seen], healths: Mapping[int, Health]
) -> list[str]:
    """Sentences, only on what did happen and was judged."""
    found = {each.finding.rule.code for each in seen}
    sentences = [
        words.format(n=kinds[kind])
        for codes, kind, words in CLAIMS
        if kinds.get(kind) and run.steps and not found.intersection(codes)
    ]
    if any(save.scaler for save in run.saves):
        sentences.append("Checkpoints have the scaler's state.")
    if any(not forward.training for forward in run.forwards) and "AMP501" not in found:
        sentences.append("Evaluation ran in the precision of training.")
    if healths and run.steps and not found.intersection(HEALTH):
        sentences.append("Gradients stayed within what their format holds.")
    return sentences
