"""FP16 where values beyond its range are to be expected."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP716",
    name="fp16-out-of-range",
    severity=Severity.WARNING,
    summary="FP16 is chosen where values beyond 65504 are to be expected: large transformers, weights trained in BF16.",
    why=(
        "BF16 goes to 3.4e38 and FP16 ends at 65504. A model that was trained in BF16 never learned to stay below, "
        "and the activations of deep transformers grow: their first overflow is an inf in a feed-forward layer, and "
        "then NaN. No loss scale helps, since it is the forward pass. From Ampere on BF16 runs at the same rate."
    ),
    fix="Take BF16 where there are units for it; else keep the layers that overflow in FP32, which a replay names.",
    bad='model = AutoModel.from_pretrained("trained-in-bf16")\nengine = ampwise.Engine(model, optimizer, "fp16")',
    good='engine = ampwise.Engine(model, optimizer, "bf16")',
)
RANGE = ("nan", "scale-collapse", "skipped")
GROWING = ("transformer", "moe", "diffusion")


def check(choice: Choice) -> Iterator[Finding]:
    reason = _reason(choice)
    if reason is None:
        return
    bf16 = bool(choice.target.has("bf16"))
    yield careful(
        RULE,
        choice,
        f"{reason}; FP16 ends at 65504, and no loss scale helps a forward pass"
        + ("; BF16 runs at the same rate here, without a scale" if bf16 else ""),
        costs={
            "FP16": "a GradScaler, and modules to keep in FP32 where a replay names them",
            **({"BF16": "3 of 11 significant bits"} if bf16 else {}),
            "FP32": "the speed of 16 bits",
        },
        know=ToKnow("ampwise run train.py", "how near to 65504 the run comes, and where (--activations)"),
        do=None if bf16 else 'Keep what overflows in FP32: Policy("fp16").keep("fp32", name); the replay names it.',
    )


def _reason(choice: Choice) -> str | None:
    if choice.half != "fp16":
        return None
    if choice.proposes("bf16-checkpoint"):
        return "weights that were trained in BF16 never learned to stay in the range of FP16"
    if choice.want == "fp16" and choice.target.has("bf16"):
        if choice.symptom in RANGE:
            return "inf and NaN in FP16 are first of all a matter of range"
        if choice.model.kind in GROWING:
            return f"the activations of {choice.model.title} grow with depth"
    return None
