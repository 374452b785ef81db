from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP643",
    name="mixed-samples",
    severity=Severity.WARNING,
    summary="A softmax, an RNN or attention runs along the samples of the batch.",
    why=(
        "The samples of a batch have nothing to do with each other. `softmax(dim=0)` on (samples, classes) makes them "
        "compete for a class; an RNN or attention with the wrong `batch_first` reads the samples as the steps of a "
        "sequence, and each step as a sample. The shapes fit, the loss falls, and predictions depend on what else is "
        "in the batch. Judged by the graph: the axis of the samples is followed from the loss, a convolution or an RNN."
    ),
    fix="Normalise along the classes, `dim=-1`; set `batch_first` as the axes are, or transpose the input.",
    bad="nn.LSTM(32, 64)(embedding(tokens))  # (samples, steps, features)",
    good="nn.LSTM(32, 64, batch_first=True)(embedding(tokens))",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for (_, site), calls in facts.mixed.items():
        if calls.times < TIMES:
            continue
        if calls.what.endswith("Softmax"):
            message = "this softmax normalises over the samples of the batch"
            fix = "Normalise over the classes, or over the positions of each sample."
        else:
            message = f"the {calls.what} takes the samples of the batch for the steps of a sequence"
            fix = "Set `batch_first` as the axes of the input are, or transpose it."
        yield RULE.at((calls.at or site).place.but(step=calls.step), message, fix=fix, evidence={"times": calls.times})
