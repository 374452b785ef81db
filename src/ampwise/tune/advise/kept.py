"""What stays in FP32 inside a 16-bit model: what autocast keeps by itself, and what has to be told."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.tune.advise.advice import KeptPart
from ampwise.tune.advise.choice import PrecisionChoice

# By the part or the kind of a model: what is sensitive, why, and how to keep it; a policy keeps the first three.
SENSITIVE: dict[str, tuple[str, str, str]] = {
    "router": (
        "routers",
        "choosing an expert depends on small differences of logits, and 8 or 11 bits flip it",
        'Policy(…).keep("fp32", "*.router")',
    ),
    "rotary": (
        "rotary embeddings",
        "BF16 cannot hold every integer above 256, and FP16 ends at 65504: positions merge",
        "",
    ),
    "norm by hand": (
        "custom norms",
        "x * x, mean and sqrt run in 16 bits: a square is inf above 256 in FP16",
        "",
    ),
    "temperature": (
        "the temperature",
        "scores times a learned scale pass 65504 in FP16, and round to steps of 0.25 near 50 in BF16",
        "multiply after .float(), and pass the product to cross_entropy",
    ),
    "scorer": (
        "the last layer of each head, and the difference of their scores",
        "the common part of two scores cancels, and rounding errors remain",
        'Policy(…).keep("fp32", head, other_head)',
    ),
    "diffusion": (
        "an autoencoder beside the network, and the schedule of time steps",
        "its activations can exceed 65504, and the schedule multiplies many factors",
        'Policy("fp16").keep("fp32", "vae")',
    ),
    "gan": (
        "a gradient penalty",
        "gradients computed with torch.autograd.grad are scaled, too",
        "engine.grad returns them unscaled; use one scaler, updated once after both optimizers",
    ),
    "logits": (
        "not the head",
        "its matmuls may run in 16 bits: cross_entropy casts the logits to FP32",
        "leave it, unless a replay names it",
    ),
    "bce": (
        "BCELoss",
        "CUDA autocast refuses it, as the sigmoid before it can round to exactly 0 or 1",
        "BCEWithLogitsLoss, without the sigmoid",
    ),
}
BY_POLICY = ("router", "rotary", "norm by hand")
HAS = {"moe": "router", "contrastive": "temperature"}  # what a kind of model has, whatever its modules are called
CUSTOM_LOSS = KeptPart(
    what="a custom loss with exp, log, sqrt or squares",
    why="operations that autocast does not list run in the dtype of their inputs",
    how='@ampwise.keep("fp32") on the function',
)


def kept_in_fp32(choice: PrecisionChoice, precision: str) -> tuple[KeptPart, ...]:
    """Return nothing for FP32 and TF32, which are FP32 throughout."""
    if precision in ("fp32", "tf32"):
        return ()
    model, kept = choice.model, [*_by_autocast(choice)]
    for kind, (what, why, how) in SENSITIVE.items():
        part, by_policy = model.part(kind), kind in BY_POLICY
        if part is not None:
            sensitive = KeptPart(
                what=f"{what}: {part.listed}",
                why=why,
                how="by the policy" if by_policy else how,
                patterns=part.patterns if by_policy else (),
                modules=part.modules,
            )
            kept.append(sensitive)
        elif kind == "router" and model.read:
            continue  # it was looked for, and there is none
        elif kind == HAS.get(model.kind or "", model.kind) and (kind != "diffusion" or precision == "fp16"):
            kept.append(KeptPart(what=what, why=why, how=how))
    return (*kept, CUSTOM_LOSS)


def _by_autocast(choice: PrecisionChoice) -> Iterator[KeptPart]:
    model, kind = choice.model, choice.target.kind
    norms, parts = model.part("norm"), {part.kind: part.modules for part in model.parts}
    if kind in ("cuda", None):
        found = [part for part in map(model.part, ("norm", "softmax", "loss")) if part is not None]
        counts = ", ".join(f"{len(part.modules)} × {'/'.join(part.classes)}" for part in found)
        yield KeptPart(
            what="softmax, exp, log, sum, torch's losses, layer, group and RMS norm",
            why="CUDA autocast runs them in FP32, but not mean, sigmoid and sqrt"
            + (f"; here {counts}" if counts else ""),
            by_itself=True,
            modules=tuple(name for part in found for name in part.modules),
        )
    elif kind == "cpu":
        yield KeptPart(
            what="cross_entropy, mse_loss, binary_cross_entropy_with_logits",
            why="autocast on a CPU runs them in FP32, but LayerNorm, softmax, exp, log and sum in BF16",
            by_itself=True,
            modules=parts.get("loss", ()),
        )
        if norms is not None:
            yield KeptPart(
                what=f"norms: {norms.listed}",
                why="they run in BF16 on a CPU; keep them if the loss is worse than in FP32",
                how=f'if necessary: Policy(…).keep("fp32", "{norms.patterns[0]}")',
                modules=norms.modules,
            )
    if "batch norm" in parts or model.kind == "cnn":
        yield KeptPart(
            what="BatchNorm",
            why="it is on no list of autocast; its weights and statistics are FP32, and it takes 16-bit input",
            by_itself=True,
            modules=parts.get("batch norm", ()),
        )
