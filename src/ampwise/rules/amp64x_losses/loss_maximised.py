from __future__ import annotations

import linecache
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.finding.call_site import CallSite
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP646",
    name="loss-maximised",
    severity=Severity.WARNING,
    summary="The loss, or a term of it, has the wrong sign.",
    why=(
        "`cross_entropy` and `nll_loss` are negative log-likelihoods, which a step makes smaller. With a minus in "
        "front, or as the mean of the log-probabilities themselves, the loss falls without bound while the model gets "
        "worse. Judged by the graph, if the loss is nothing else, and no pass has the other sign. In any loss the "
        "divergence of a VAE is known by its parts; and so is the entropy of a policy beside a policy gradient, which "
        "is to be large. Weights of the terms that are trained, as in a self-adaptive PINN, are to grow where the "
        "error is large: an optimizer that minimises the same loss makes them 0."
    ),
    fix="Minimise the cross entropy itself, or the negative of the log-probabilities.",
    bad="loss = logits.log_softmax(1).gather(1, y[:, None]).mean()",
    good="loss = -logits.log_softmax(1).gather(1, y[:, None]).mean()",
)

TIMES = 4
LEAST_SIZES = 6
ENTROPY = re.compile(r"entropy|(?<![a-z])ent(?![a-z])", re.IGNORECASE)


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.wrong_terms.items():
        if calls.times >= TIMES and _is_meant(calls.at or site, calls.what):
            yield RULE.at(
                (calls.at or site).place.but(step=calls.step),
                f"a term of this loss is {calls.what}: it has the wrong sign",
                fix="Change the sign of the term.",
                evidence={"times": calls.times},
            )
    for use in facts.optimizers:
        sizes = use.term_weights
        if len(sizes) >= LEAST_SIZES and all(later < one for one, later in pairwise(sizes)):
            yield RULE.at(
                use.made_at.place,
                f"`{use.name}` minimises the weights of the loss's own terms: they shrink towards 0 (on average from "
                f"{sizes[0]:.4g} to {sizes[-1]:.4g} so far), and the terms with them",
                fix="Pass `maximize=True` to the optimizer of the weights, or leave them constant.",
            )
    if facts.minimised:  # it plays a game
        return
    for site, calls in facts.maximised.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"this loss is {calls.what}: each step makes the right classes less likely",
                evidence={"times": calls.times},
            )


def _is_meant(site: CallSite, what: str) -> bool:
    """Whether a term is meant to be what it is taken for: log-probabilities may also be those of recorded actions."""
    return (
        not what.startswith("the log-probability")
        or ENTROPY.search(linecache.getline(site.file or "", site.line or 0)) is not None
    )
