from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.guard.events import WeightsNotFinite

RULE = Rule(
    code="AMP811",
    name="weights-not-finite",
    severity=Severity.ERROR,
    summary="The model or optimizer state contains inf or NaN; it was not saved as a good state.",
    why=(
        "Weights that are not finite stay that way, and saving them would replace a good checkpoint: a run resumed "
        "from it is lost from the first step. They come from an update that was too large for the weights' format, or "
        "from code other than the engine that writes to them; an update from bad gradients would have been skipped."
    ),
    fix=(
        "If the loss is not finite either, the guard rolls back to the last good state. Lower the learning rate, and "
        "check what else writes to the reported tensors. A single huge batch can corrupt BatchNorm statistics."
    ),
    bad='torch.save(model.state_dict(), "last.pt")  # whatever is in it',
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
    consequence_of=("AMP9", "AMP612", "AMP613"),
)


def check_guard(weights: WeightsNotFinite) -> Findings:
    only = weights.names[0] if weights.count == len(weights.names) == 1 else None
    yield RULE.at(
        Place(step=weights.step, parameter=only), weights.message, evidence=weights.fields, fix=weights.advice
    )
