from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP650",
    name="freeze-without-effect",
    severity=Severity.WARNING,
    summary="A line is to freeze parameters, and they are trained all the same.",
    why=(
        "A parameter is frozen by its own `requires_grad`. Torch accepts the attribute on a module "
        "(`layer.requires_grad = False`), a misspelled one, or one that is set on a detached copy, and ignores it; "
        "`eval()` only changes the mode; a condition on names may hold for none. There is no error, and the "
        "pretrained weights are overwritten. An optimizer that has a frozen parameter goes on changing it by momentum "
        "and weight decay as long as that has a gradient, if only of zeros."
    ),
    fix="Call `module.requires_grad_(False)` before the optimizer is made, and give it the other parameters only.",
    bad="model.encoder.requires_grad = False",
    good="model.encoder.requires_grad_(False)",
)


def check_learning(facts: Learning) -> Findings:
    for site, freeze in facts.idle_freezes.items():
        names = list(freeze.parameters)
        one = len(names) == 1
        if freeze.is_for_some:
            said = f"none of {len(names)} parameters that get gradients ({listed(names)}) is frozen"
        elif freeze.are_frozen:
            said = f"{listed(names)} {'is' if one else 'are'} frozen, and still changed by the steps"
        else:
            said = f"{listed(names)} {'gets' if one else 'get'} gradients, and {'is' if one else 'are'} not frozen"
        yield RULE.at(
            site.place.but(parameter=names[0]),
            f"{said}: {freeze.why}",
            evidence={"parameters": len(names)},
        )
