from __future__ import annotations

import linecache
import re
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
        "is to be large."
    ),
    fix="Minimise the cross entropy itself, or the negative of the log-probabilities.",
    bad="loss = logits.log_softmax(1).gather(1, y[:, None]).mean()",
    good="loss = -logits.log_softmax(1).gather(1, y[:, None]).mean()",
)

TIMES = 4
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
