"""Proposal: drop autocast, or mixed precision altogether, because of a NaN."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP705",
    name="autocast-off-as-a-cure",
    severity=Severity.WARNING,
    summary="Autocast is turned off permanently because of a NaN whose cause is unknown.",
    why=(
        "A NaN can come from the batch, the learning rate, a loss that takes the log of zero, or an operation that "
        "exceeds the range of FP16. Only the last is a precision problem, and it takes one module in FP32 to fix, not "
        "the whole model. Turning autocast off gives up the speed and leaves the cause unknown; if the cause was a "
        "different one, the NaN comes back."
    ),
    fix="Rerun the bad step in FP32. If it is finite there, keep the reported module in FP32; if it is still NaN, "
    "precision is not the cause.",
    bad="# with torch.autocast(device):  # NaN, so turned off\nloss = loss_fn(model(x), y)",
    good=(
        "$ ampwise run --capsule capsules train.py\n"
        "$ ampwise replay capsules/step-000012 --build train.py:make --precision fp32"
    ),
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("autocast-off", "drop-mixed-precision"):
        yield advise_against(
            RULE,
            choice,
            "turning autocast off hides the cause: a NaN from the data, the learning rate or the loss remains, and a "
            "NaN from FP16 needs one module in FP32, not all of them",
            costs={
                "off permanently": f"the speed of 16-bit{_speed(choice)}, and the cause stays unknown",
                "off for one run, as a test": "two minutes; if it is still NaN, precision is not the cause",
                "replaying the bad step": "the time of about ten steps; reports the operation, its line and the fix",
            },
            know=SuggestedCommand(
                "ampwise run --capsule capsules train.py, then ampwise replay capsules/step-000012 --build "
                "train.py:make --precision fp32",
                "whether the same step is finite in FP32, and which operation went bad first",
            ),
        )


def _speed(choice: PrecisionChoice) -> str:
    gain = None if choice.half is None else choice.gain(choice.half)
    return "" if gain is None else f" ({gain.text} {gain.over.upper()}, derived)"
