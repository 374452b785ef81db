"""What stays in FP32 inside a 16-bit model: what autocast keeps by itself, and what has to be told."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.model import list_names
from ampwise.tune.advise.advice import KeptPart

__all__ = ["kept_in_fp32", "patterns_of"]

HALF_INSIDE = ("fp16", "bf16", "fp8", "auto")
KEEP_FUNCTION = '@ampwise.keep("fp32") on the function'

# Parts that a policy keeps, by the kind of part: what they are called, and why.
BY_POLICY: dict[str, tuple[str, str]] = {
    "router": ("routers", "choosing an expert depends on small differences of logits, and 8 or 11 bits flip it"),
    "rotary": (
        "rotary embeddings",
        "BF16 cannot hold every integer above 256, and FP16 ends at 65504: positions merge",
    ),
    "norm by hand": ("custom norms", "x * x, mean and sqrt run in 16 bits: a square is inf above 256 in FP16"),
}
# Parts that CUDA autocast runs in FP32.
IN_FP32_ON_CUDA = ("norm", "softmax", "loss")
# Where the model was not read: which kinds of model have such parts.
OF_KIND: dict[str, tuple[str, ...]] = {"moe": ("router",)}


def kept_in_fp32(choice: PrecisionChoice, precision: str) -> tuple[KeptPart, ...]:
    """Nothing for FP32 and TF32, which are FP32 throughout."""
    return tuple(_kept(choice, precision)) if precision in HALF_INSIDE else ()


def patterns_of(kept: tuple[KeptPart, ...]) -> tuple[str, ...]:
    """What a policy is to be told."""
    return tuple(pattern for each in kept for pattern in each.patterns)


def _kept(choice: PrecisionChoice, precision: str) -> Iterator[KeptPart]:
    yield from _by_itself(choice)
    yield from _by_policy(choice)
    yield from _by_kind(choice, precision)
    yield from _losses(choice)


def _by_itself(choice: PrecisionChoice) -> Iterator[KeptPart]:
    kind = choice.target.kind
    if kind in ("cuda", None):
        yield KeptPart(
            what="softmax, exp, log, sum, torch's losses, layer, group and RMS norm",
            why=f"CUDA autocast runs them in FP32, but not mean, sigmoid and sqrt{_here(choice)}",
            by_itself=True,
            modules=_found(choice, *IN_FP32_ON_CUDA),
        )
    elif kind == "cpu":
        yield KeptPart(
            what="cross_entropy, mse_loss, binary_cross_entropy_with_logits",
            why="autocast on a CPU runs them in FP32, but LayerNorm, softmax, exp, log and sum in BF16",
            by_itself=True,
            modules=_found(choice, "loss"),
        )
        yield from _norms_on_a_cpu(choice)
    if choice.model.part("batch norm") is not None or choice.model.kind == "cnn":
        yield KeptPart(
            what="BatchNorm",
            why="it is on no list of autocast; its weights and statistics are FP32, and it takes 16-bit input",
            by_itself=True,
            modules=_found(choice, "batch norm"),
        )


def _norms_on_a_cpu(choice: PrecisionChoice) -> Iterator[KeptPart]:
    norms = choice.model.part("norm")
    if norms is not None:
        yield KeptPart(
            what=f"norms: {list_names(norms.modules)}",
            why="they run in BF16 on a CPU; keep them if the loss is worse than in FP32",
            how=f'if necessary: Policy(…).keep("fp32", "{norms.patterns[0]}")',
            modules=norms.modules,
        )


def _found(choice: PrecisionChoice, *kinds: str) -> tuple[str, ...]:
    parts = (choice.model.part(kind) for kind in kinds)
    return tuple(name for part in parts if part is not None for name in part.modules)


def _here(choice: PrecisionChoice) -> str:
    """How many modules of a model that was read are such."""
    parts = [choice.model.part(kind) for kind in IN_FP32_ON_CUDA]
    counts = [f"{len(part.modules)} × {'/'.join(part.classes)}" for part in parts if part is not None]
    return f"; here {', '.join(counts)}" if counts else ""


def _by_policy(choice: PrecisionChoice) -> Iterator[KeptPart]:
    model = choice.model
    for kind, (what, why) in BY_POLICY.items():
        part = model.part(kind)
        if part is not None:
            what = f"{what}: {list_names(part.modules)}"
            yield KeptPart(what=what, why=why, how="by the policy", patterns=part.patterns, modules=part.modules)
        elif not model.read and kind in OF_KIND.get(model.kind or "", ()):
            yield KeptPart(what=what, why=why, how=f'Policy(…).keep("fp32", "*.{kind}")')


def _by_kind(choice: PrecisionChoice, precision: str) -> Iterator[KeptPart]:
    model = choice.model
    if model.kind == "contrastive" or model.part("temperature") is not None:
        part = model.part("temperature")
        yield KeptPart(
            what="the temperature" if part is None else f"the temperature: {list_names(part.modules)}",
            why="scores times a learned scale pass 65504 in FP16, and round to steps of 0.25 near 50 in BF16",
            how="multiply after .float(), and pass the product to cross_entropy",
            modules=() if part is None else part.modules,
        )
    if model.kind == "scorer":
        yield KeptPart(
            what="the last layer of each head, and the difference of their scores",
            why="the common part of two scores cancels, and rounding errors remain",
            how='Policy(…).keep("fp32", head, other_head)',
        )
    if model.kind == "diffusion" and precision == "fp16":
        yield KeptPart(
            what="an autoencoder beside the network, and the schedule of time steps",
            why="its activations can exceed 65504, and the schedule multiplies many factors",
            how='Policy("fp16").keep("fp32", "vae")',
        )
    if model.kind == "gan":
        yield KeptPart(
            what="a gradient penalty",
            why="gradients computed with torch.autograd.grad are scaled, too",
            how="engine.grad returns them unscaled; use one scaler, updated once after both optimizers",
        )


def _losses(choice: PrecisionChoice) -> Iterator[KeptPart]:
    logits = choice.model.part("logits")
    if logits is not None:
        yield KeptPart(
            what=f"not the head: {list_names(logits.modules)}",
            why="its matmuls may run in 16 bits: cross_entropy casts the logits to FP32",
            how="leave it, unless a replay names it",
            modules=logits.modules,
        )
    bce = choice.model.part("bce")
    if bce is not None:
        yield KeptPart(
            what=f"BCELoss: {list_names(bce.modules)}",
            why="CUDA autocast refuses it, as the sigmoid before it can round to exactly 0 or 1",
            how="BCEWithLogitsLoss, without the sigmoid",
            modules=bce.modules,
        )
    yield KeptPart(
        what="a custom loss with exp, log, sqrt or squares",
        why="operations that autocast does not list run in the dtype of their inputs",
        how=KEEP_FUNCTION,
    )
