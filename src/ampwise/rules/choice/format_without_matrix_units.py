"""Proposal: use a format that the device has no tensor cores for."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.hardware.format_without_matrix_units import RULE

__all__ = ["RULE", "check"]

# The first NVIDIA generation with each format.
SINCE = {
    "fp16": "Volta (7.0)",
    "bf16": "Ampere (8.0)",
    "tf32": "Ampere (8.0)",
    "fp8": "Ada (8.9) and Hopper (9.0)",
    "mxfp8": "Blackwell (10.0)",
    "mxfp4": "Blackwell (10.0)",
    "nvfp4": "Blackwell (10.0)",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    target, want = choice.target, choice.want
    if want is None or want == "fp32" or (want == "bf16" and target.emulates_bf16):
        return
    has = target.has(want)
    if want == "tf32" and target.kind not in ("cuda", None):
        has = False  # torch has this switch on CUDA devices only
    if has is False:
        yield advise_against(
            RULE,
            choice,
            _fact(choice, want),
            costs=_costs(choice, want),
            know=_know(choice),
            refuses=want,
            do=_do(choice),
        )
    elif has is None:
        yield caution(
            RULE,
            choice,
            f"it is unknown whether {target.name} has {want.upper()} tensor cores; NVIDIA has had them since "
            f"{SINCE[want]}",
            costs={
                f"{want.upper()} without tensor cores": "emulated (slower than FP32) or not supported",
                "checking first": "a second",
            },
            know=SuggestedCommand("ampwise gpu", "the formats that this machine's tensor cores support"),
            do="Check the device first; Engine(precision='auto') does.",
        )


def _fact(choice: PrecisionChoice, want: str) -> str:
    target = choice.target
    if target.kind == "cpu":
        return f"{target.name} has no instructions that multiply {want.upper()} matrices"
    if target.has(want):
        return f"torch has a switch for {want.upper()} on CUDA devices only: it changes nothing on {target.name}"
    since = f"; on NVIDIA they start with {SINCE[want]}" if target.capability is not None else ""
    return f"{target.title} has no {want.upper()} tensor cores{since}"


def _costs(choice: PrecisionChoice, want: str) -> dict[str, str]:
    target = choice.target
    costs = {f"{want.upper()} here": "its kernels do not run, or it is emulated and slower"}
    if target.kind == "cpu":
        costs[f"{want.upper()} here"] = "no faster than FP32, usually slower"
    if want == "fp16" and not target.formats and target.kind != "cpu":
        costs["FP16 here"] = "half the activation memory, but a GradScaler and no tensor cores to speed it up"
    if target.half is not None:
        costs[target.half.upper()] = _price(choice, target.half)
    costs["FP32"] = "no extra code, no speedup"
    return costs


def _price(choice: PrecisionChoice, half: str) -> str:
    gain = choice.gain(half)
    faster = "" if gain is None else f"; {gain.text} {gain.over.upper()} expected (derived)"
    return ("no loss scale, 8 significant bits" if half == "bf16" else "a GradScaler") + faster


def _know(choice: PrecisionChoice) -> SuggestedCommand:
    if choice.target.gpu is not None:
        return SuggestedCommand(
            f"ampwise gpu {choice.target.gpu.id}", "the formats its tensor cores support, and their rates"
        )
    return SuggestedCommand("ampwise gpu", "the formats that the tensor cores here support")


def _do(choice: PrecisionChoice) -> str:
    half = choice.half
    if half is None:
        return "Train in FP32."
    return f"Train in {half.upper()}{' with a GradScaler' if half == 'fp16' else ''}."
