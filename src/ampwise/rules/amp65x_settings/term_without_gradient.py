from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP655",
    name="term-without-gradient",
    severity=Severity.WARNING,
    summary="A term of the loss has no gradient, or not for all it depends on: its values were copied or drawn.",
    why=(
        "`torch.tensor(values)` makes a new tensor of numbers. If the values were computed from the parameters, as "
        "log-probabilities or losses of single samples, what leads back to the parameters is lost. The other terms of "
        "the loss have gradients, so there is no error; this one is reported with the loss, and trains nothing. The "
        "same holds for a loss whose input and target are computed from one and the same values: it is always 0. And "
        "`sample()` of a distribution cuts the graph, where `rsample()` keeps it: the encoder of a VAE is then trained "
        "by the divergence alone, and learns to ignore its input."
    ),
    fix="Join the tensors themselves: `torch.stack(values)`, or `torch.cat(values)`.",
    bad="loss = value_loss - (torch.tensor(log_probs) * advantages).sum()",
    good="loss = value_loss - (torch.stack(log_probs) * advantages).sum()",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.flat_penalties.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                "`autograd.grad` without `create_graph=True` gives gradients without a graph: a term of the loss that "
                "is computed from them, such as a penalty, is a constant, and trains nothing",
                fix="Pass `create_graph=True`.",
                evidence={"times": calls.times},
            )
    for site, calls in facts.drawn_without_graph.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                "`sample()` draws without a gradient: what is computed from the sample does not train the "
                "distribution, which only another term of the loss does",
                fix="Use `rsample()`.",
                evidence={"times": calls.times},
            )
    for site, is_constant in facts.self_compared.items():
        same = "the input and the target of this loss are computed from the same values: it is "
        yield RULE.at(
            site.place,
            same + ("their entropy, which has no gradient" if is_constant else "0, whatever these are"),
            fix="Compute the input from the output of the model that is trained.",
        )
    for site, passes in facts.cut_terms.items():
        if passes.times >= TIMES:
            yield RULE.at(
                site.place.but(step=passes.step),
                f"`{passes.what}` copies values that were computed from the parameters, and the term of the loss that "
                "is made of them has no gradient",
                evidence={"times": passes.times},
            )
