"""Weights that would have been saved with NaN in them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, named
from ampwise.evidence.faults import WeightsNotFinite
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP811",
    name="weights-not-finite",
    severity=Severity.ERROR,
    summary="The model or the optimizer has inf or NaN in its state; it was not kept as a good one.",
    why=(
        "Weights that are not finite stay so, and a checkpoint of them replaces a good one: a run that resumes from "
        "it is lost from its first step. They come from an update that was too large for the format of the weights, "
        "or from code beside the engine that writes into them; an update from bad gradients would have been "
        "skipped."
    ),
    fix=(
        "If the loss is not finite either, the guard goes back to the last good state. Lower the learning rate, and "
        "look at what else writes to the tensors named; statistics of BatchNorm are spoilt by one huge batch."
    ),
    bad='torch.save(model.state_dict(), "last.pt")  # whatever is in it',
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)


def check(weights: WeightsNotFinite) -> Iterator[Finding]:
    tensors = "1 tensor is" if weights.count == 1 else f"{weights.count:,} tensors are"
    which = f": {named(weights.names, weights.count)}" if weights.names else ""
    yield RULE.at(
        Place(step=weights.step, parameter=weights.names[0] if weights.count == len(weights.names) == 1 else None),
        f"{tensors} not finite, so the {weights.where} was not kept{which}",
        evidence=evidence_of(weights),
    )
