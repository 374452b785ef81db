from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP648",
    name="target-with-graph",
    severity=Severity.WARNING,
    summary="Gradients flow through a target, or an advantage, that is meant to be fixed.",
    why=(
        "`reward + gamma * q(next_state)` is what a value is to become. If it keeps its graph, the loss also falls by "
        "moving the later value towards the earlier one, and values drift. An advantage, returns minus a value, "
        "weights the log-probabilities of a policy: with its graph, the policy's loss also trains the value, to be "
        "large where actions are unlikely, against the loss that fits it to the returns."
    ),
    fix="Take the graph away: `target.detach()`, or compute it under `torch.no_grad()`.",
    bad=(
        "target = reward + gamma * q(next_state).max(1)[0]\nloss = F.mse_loss(q(state).gather(1, action)[:, 0], target)"
    ),
    good=(
        "with torch.no_grad():\n"
        "    target = reward + gamma * q(next_state).max(1)[0]\n"
        "loss = F.mse_loss(q(state).gather(1, action)[:, 0], target)"
    ),
)

TIMES = 3
MESSAGES = {
    "value": "this target, made of rewards and a later value of the same layers, has a graph: the loss moves it, too",
    "advantage": "this advantage has the graph of the value, which the loss of the policy trains as well",
}


def check_learning(facts: Learning) -> Findings:
    for (site, what), calls in facts.target_graphs.items():
        if calls.times >= TIMES:
            place = (calls.at or site).place.but(step=calls.step)
            yield RULE.at(place, MESSAGES[what], evidence={"times": calls.times})
