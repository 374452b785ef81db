"""Autocast, or all of mixed precision, taken out because something goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP705",
    name="autocast-off-as-a-cure",
    severity=Severity.WARNING,
    summary="Autocast is turned off for good because of a NaN, before anybody knows where it comes from.",
    why=(
        "A NaN comes from the batch, from a learning rate, from a loss that takes the log of zero, or from one "
        "operation that leaves the range of FP16. Only the last has to do with precision, and it needs one module in "
        "FP32, not all. Turned off, the speed is gone and the cause is not known; where it was another one, the NaN "
        "comes back."
    ),
    fix="Run the bad step again in FP32. Finite there: keep the module it names in FP32. NaN there too: look "
    "elsewhere.",
    bad="# with torch.autocast(device):  # NaN, so turned off\nloss = loss_fn(model(x), y)",
    good=(
        "$ ampwise run --capsule capsules train.py\n"
        "$ ampwise replay capsules/step-000012 --build train.py:make --precision fp32"
    ),
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("autocast-off", "drop-mixed-precision"):
        yield no(
            RULE,
            choice,
            "turning autocast off hides what is wrong: a NaN of the data, the learning rate or the loss stays, and "
            "one of FP16 needs one module in FP32, not all of them",
            costs={
                "off for good": f"the speed of 16 bits{_speed(choice)}, and the cause is not known",
                "off for one run, as a test": "two minutes; NaN there too means that it is not the precision",
                "the bad step replayed": "about ten steps' time; it names the operation, its line, and what mends it",
            },
            know=ToKnow(
                "ampwise run --capsule capsules train.py, then ampwise replay capsules/step-000012 --build "
                "train.py:make --precision fp32",
                "whether the same step is finite in FP32, and which operation went bad first",
            ),
        )


def _speed(choice: Choice) -> str:
    gain = None if choice.half is None else choice.gain(choice.half)
    return "" if gain is None else f" ({gain.text} {gain.over.upper()}, derived)"
