"""What stays in FP32 inside a 16-bit model: what autocast keeps by itself, and what has to be told."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.model import listed
from ampwise.tune.advise.advice import Kept

__all__ = ["kept_in_fp32", "patterns_of"]

HALF_INSIDE = ("fp16", "bf16", "fp8", "auto")
KEEP_FUNCTION = '@ampwise.keep("fp32") on the function'

# Parts that a policy keeps, by the kind of part: what they are called, and why.
BY_POLICY: dict[str, tuple[str, str]] = {
    "router": ("routers", "a choice among experts turns on small differences of logits, and 8 or 11 bits flip it"),
    "rotary": (
        "rotary embeddings",
        "BF16 does not hold every whole number above 256, FP16 none above 65504: positions merge",
    ),
    "norm by hand": ("norms of your own", "x * x, mean and sqrt run in 16 bits: a square is inf above 256 in FP16"),
}
# Parts that CUDA autocast runs in FP32.
IN_FP32_ON_CUDA = ("norm", "softmax", "loss")
# Where the model was not read: which kinds of model have such parts.
OF_KIND: dict[str, tuple[str, ...]] = {"moe": ("router",)}


def kept_in_fp32(choice: Choice, precision: str) -> tuple[Kept, ...]:
    """Nothing for FP32 and TF32, which are FP32 throughout."""
    return tuple(_kept(choice, precision)) if precision in HALF_INSIDE else ()


def patterns_of(kept: tuple[Kept, ...]) -> tuple[str, ...]:
    """What a policy is to be told."""
    return tuple(pattern for each in kept for pattern in each.patterns)


def _kept(choice: Choice, precision: str) -> Iterator[Kept]:
    yield from _by_itself(choice)
    yield from _by_policy(choice)
    yield from _by_kind(choice, precision)
    yield from _losses(choice)


def _by_itself(choice: Choice) -> Iterator[Kept]:
    kind = choice.target.kind
    if kind in ("cuda", None):
        yield Kept(
            what="softmax, exp, log, sum, torch's losses, layer, group and RMS norm",
            why=f"CUDA autocast runs them in FP32; mean, sigmoid and sqrt it does not{_here(choice)}",
            by_itself=True,
            modules=_found(choice, *IN_FP32_ON_CUDA),
        )
    elif kind == "cpu":
        yield Kept(
            what="cross_entropy, mse_loss, binary_cross_entropy_with_logits",
            why="autocast on a CPU runs them in FP32; LayerNorm, softmax, exp, log and sum it leaves in BF16",
            by_itself=True,
            modules=_found(choice, "loss"),
        )
        yield from _norms_on_a_cpu(choice)
    if choice.model.part("batch norm") is not None or choice.model.kind == "cnn":
        yield Kept(
            what="BatchNorm",
            why="it is on no list of autocast; its weights and statistics are FP32, and it takes 16-bit input",
            by_itself=True,
            modules=_found(choice, "batch norm"),
        )


def _norms_on_a_cpu(choice: Choice) -> Iterator[Kept]:
    norms = choice.model.part("norm")
    if norms is not None:
        yield Kept(
            what=f"norms: {listed(norms.modules)}",
            why="they run in BF16 on a CPU; keep them if the loss is worse than in FP32",
            how=f'if need be: Policy(…).keep("fp32", "{norms.patterns[0]}")',
            modules=norms.modules,
        )


def _found(choice: Choice, *kinds: str) -> tuple[str, ...]:
    parts = (choice.model.part(kind) for kind in kinds)
    return tuple(name for part in parts if part is not None for name in part.modules)


def _here(choice: Choice) -> str:
    """How many modules of a model that was read are such."""
    parts = [choice.model.part(kind) for kind in IN_FP32_ON_CUDA]
    counts = [f"{len(part.modules)} × {'/'.join(part.classes)}" for part in parts if part is not None]
    return f"; here {', '.join(counts)}" if counts else ""


def _by_policy(choice: Choice) -> Iterator[Kept]:
    model = choice.model
    for kind, (what, why) in BY_POLICY.items():
        part = model.part(kind)
        if part is not None:
            what = f"{what}: {listed(part.modules)}"
            yield Kept(what=what, why=why, how="by the policy", patterns=part.patterns, modules=part.modules)
        elif not model.read and kind in OF_KIND.get(model.kind or "", ()):
            yield Kept(what=what, why=why, how=f'Policy(…).keep("fp32", "*.{kind}")')


def _by_kind(choice: Choice, precision: str) -> Iterator[Kept]:
    model = choice.model
    if model.kind == "contrastive" or model.part("temperature") is not None:
        part = model.part("temperature")
        yield Kept(
            what="the temperature" if part is None else f"the temperature: {listed(part.modules)}",
            why="scores times a learned scale pass 65504 in FP16, and round to steps of 0.25 near 50 in BF16",
            how="multiply after .float(), and give the product to cross_entropy",
            modules=() if part is None else part.modules,
        )
    if model.kind == "scorer":
        yield Kept(
            what="the last layer of each head, and the difference of their scores",
            why="what two scores have in common cancels, and rounding is left",
            how='Policy(…).keep("fp32", head, other_head)',
        )
    if model.kind == "diffusion" and precision == "fp16":
        yield Kept(
            what="an autoencoder beside the network, and the schedule of time steps",
            why="its activations are known to pass 65504, and the schedule takes products of many factors",
            how='Policy("fp16").keep("fp32", "vae")',
        )
    if model.kind == "gan":
        yield Kept(
            what="a penalty on gradients",
            why="gradients that are taken on the way are scaled, too",
            how="engine.grad gives them in true units; one scaler, updated once after both optimizers",
        )


def _losses(choice: Choice) -> Iterator[Kept]:
    logits = choice.model.part("logits")
    if logits is not None:
        yield Kept(
            what=f"not the head: {listed(logits.modules)}",
            why="its products may run in 16 bits: cross_entropy takes the logits up to FP32",
            how="leave it, unless a replay names it",
            modules=logits.modules,
        )
    bce = choice.model.part("bce")
    if bce is not None:
        yield Kept(
            what=f"BCELoss: {listed(bce.modules)}",
            why="CUDA autocast refuses it, as the sigmoid before it is exactly 0 or 1",
            how="BCEWithLogitsLoss, without the sigmoid",
            modules=bce.modules,
        )
    yield Kept(
        what="a loss of your own with exp, log, sqrt or squares",
        why="what autocast has no entry for runs in the type it is given",
        how=KEEP_FUNCTION,
    )
