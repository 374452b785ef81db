from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP659",
    name="nothing-loaded",
    severity=Severity.WARNING,
    summary="A state is loaded that changes nothing: it has other names, or is the model's own.",
    why=(
        "With `strict=False` entries of other names are passed over, without an error. If all are, as those with the "
        "prefix `module.` of DataParallel or `_orig_mod.` of torch.compile, the model keeps its random weights, and "
        "what should be fine-tuned is trained from scratch. And a target network that loads its own state, in place of "
        "that of the trained one, stays as it was made."
    ),
    fix="Remove the prefix from the names, and look at the `missing_keys` that `load_state_dict` returns.",
    bad="model.load_state_dict(checkpoint, strict=False)",
    good=(
        'state = {name.removeprefix("module."): value for name, value in checkpoint.items()}\n'
        "missing, unexpected = model.load_state_dict(state, strict=False)\nassert not missing"
    ),
)


TIMES = 2  # a model may load its own state once, so that its hooks run


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.loaded_into_itself.items():
        if calls.times >= TIMES and facts.steps > calls.step:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"the {calls.what} loads its own state, which changes nothing",
                fix="Load the state of the model that is to be copied.",
                evidence={"times": calls.times},
            )
    for site, calls in facts.unloaded.items():
        yield RULE.at(
            site.place.but(step=calls.step),
            f"none of the entries was loaded: {calls.what}",
            evidence={"times": calls.times},
        )
