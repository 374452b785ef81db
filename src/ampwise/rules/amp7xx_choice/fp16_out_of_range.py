from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

RULE = Rule(
    code="AMP716",
    name="fp16-out-of-range",
    severity=Severity.WARNING,
    summary="FP16 is chosen where values above 65504 are likely: large transformers, weights trained in BF16.",
    why=(
        "BF16 reaches 3.4e38; FP16 ends at 65504. A model trained in BF16 never learned to stay below that, and the "
        "activations of deep transformers grow: the first overflow is an inf in a feed-forward layer, followed by "
        "NaN. Loss scaling does not help, because the overflow is in the forward pass. From Ampere on, BF16 runs at "
        "the same rate."
    ),
    fix=(
        "Use BF16 where the device has tensor cores for it. Otherwise keep the overflowing layers, which a replay "
        "reports, in FP32."
    ),
    bad='model = AutoModel.from_pretrained("trained-in-bf16")\nengine = ampwise.Engine(model, optimizer, "fp16")',
    good='engine = ampwise.Engine(model, optimizer, "bf16")',
)


def check_choice(choice: PrecisionChoice) -> Findings:
    bf16 = bool(choice.target.has("bf16"))
    if choice.half != "fp16":
        return
    if choice.proposes("bf16-checkpoint"):
        reason = "weights trained in BF16 never learned to stay within the range of FP16"
    elif choice.want == "fp16" and bf16 and choice.symptom in ("nan", "scale-collapse", "skipped"):
        reason = "inf and NaN in FP16 are usually a range problem"
    elif choice.want == "fp16" and bf16 and choice.model.kind in ("transformer", "moe", "diffusion"):
        reason = f"the activations of {choice.model.title} grow with depth"
    else:
        return
    yield choice.finding(
        "careful",
        RULE,
        f"{reason}; FP16 ends at 65504, and loss scaling does not help the forward pass"
        + ("; BF16 runs at the same rate here, without a scale" if bf16 else ""),
        costs={
            "FP16": "a GradScaler, and modules that a replay reports kept in FP32",
            **({"BF16": "3 of 11 significant bits"} if bf16 else {}),
            "FP32": "the speed of 16-bit",
        },
        show=("ampwise run train.py", "how close the run gets to 65504, and where (--activations)"),
        do=None
        if bf16
        else 'Keep what overflows in FP32: Policy("fp16").keep("fp32", name); the replay reports the name.',
    )
