from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP627",
    name="part-without-gradients",
    severity=Severity.WARNING,
    summary="The first modules of a model never get gradients, although the optimizer has their parameters.",
    why=(
        "They ran with gradients enabled, and what follows them gets gradients: between the two the graph is cut, by "
        "`detach()`, `.data`, a new tensor, or a round trip through NumPy. The rest trains on features that stay "
        "random."
    ),
    fix="Pass the output of the modules on as it is. To keep them fixed, set `requires_grad_(False)`.",
    bad="features = self.encoder(x).detach()\nreturn self.head(features)",
    good="features = self.encoder(x)\nreturn self.head(features)",
    consequence_of=(
        "AMP621",
        "AMP622",
    ),
)

SAMPLES = 5
STEPS = 10


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.cut_checkpoints.items():
        if calls.times >= SAMPLES:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"the parameters of {calls.what} get no gradient: no input of this checkpoint needs one, and with "
                "`use_reentrant=True` only inputs lead the backward pass into it",
                fix="Pass `use_reentrant=False`, or let the input need gradients: `x.requires_grad_()`.",
                evidence={"times": calls.times},
            )
    for use in facts.optimizers:
        if not use.cut_off or use.sampled < SAMPLES or use.followed < STEPS or not facts.ended:
            continue
        names = [name for name in use.ungraded if name.startswith(use.cut_off)]
        last = use.cut_off[-1]
        modules = f"`{last}`" if len(use.cut_off) == 1 else f"`{use.cut_off[0]}` to `{last}`"
        yield RULE.at(
            (use.cut_at or use.made_at).place.but(parameter=names[0]),
            f"{listed(names)} got no gradient in any of {use.sampled} steps that were looked at, although {modules} "
            f"ran and the modules after {'it' if len(use.cut_off) == 1 else 'them'} got gradients: the graph is cut "
            f"after `{last}`",
            evidence={"parameters": len(names), "of": use.trainable, "last": last},
        )
