"""A format asked for that the device has no matrix units for."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.hardware.format_without_matrix_units import RULE

__all__ = ["RULE", "check"]

# Where each begins on NVIDIA, as people know the generations.
SINCE = {
    "fp16": "Volta (7.0)",
    "bf16": "Ampere (8.0)",
    "tf32": "Ampere (8.0)",
    "fp8": "Ada (8.9) and Hopper (9.0)",
    "mxfp8": "Blackwell (10.0)",
    "mxfp4": "Blackwell (10.0)",
    "nvfp4": "Blackwell (10.0)",
}


def check(choice: Choice) -> Iterator[Finding]:
    target, want = choice.target, choice.want
    if want is None or want == "fp32" or (want == "bf16" and target.emulates_bf16):
        return
    has = target.has(want)
    if want == "tf32" and target.kind not in ("cuda", None):
        has = False  # torch switches it on CUDA devices alone
    if has is False:
        yield no(
            RULE,
            choice,
            _fact(choice, want),
            costs=_costs(choice, want),
            know=_know(choice),
            refuses=want,
            do=_do(choice),
        )
    elif has is None:
        yield careful(
            RULE,
            choice,
            f"whether {target.name} has matrix units for {want.upper()} is not known; NVIDIA has them since "
            f"{SINCE[want]}",
            costs={
                f"{want.upper()} without units": "emulated or refused: slower than FP32",
                "looking first": "a second",
            },
            know=ToKnow("ampwise gpu", "what the matrix units of the machine at hand take"),
            do="Ask the device first; Engine(precision='auto') does.",
        )


def _fact(choice: Choice, want: str) -> str:
    target = choice.target
    if target.kind == "cpu":
        return f"{target.name} has no instructions that multiply {want.upper()} matrices"
    if target.has(want):
        return f"torch has a switch for {want.upper()} on CUDA devices alone: it changes nothing on {target.name}"
    since = f"; on NVIDIA they begin with {SINCE[want]}" if target.capability is not None else ""
    return f"{target.title} has no {want.upper()} matrix units{since}"


def _costs(choice: Choice, want: str) -> dict[str, str]:
    target = choice.target
    costs = {f"{want.upper()} here": "its kernels refuse to run, or it is emulated: slower than what is there"}
    if target.kind == "cpu":
        costs[f"{want.upper()} here"] = "no faster than FP32, as a rule slower"
    if want == "fp16" and not target.formats and target.kind != "cpu":
        costs["FP16 here"] = "half the memory for activations, and a GradScaler; no matrix units to gain by"
    if target.half is not None:
        costs[target.half.upper()] = _price(choice, target.half)
    costs["FP32"] = "nothing to look after, and nothing gained"
    return costs


def _price(choice: Choice, half: str) -> str:
    gain = choice.gain(half)
    faster = "" if gain is None else f"; {gain.text} {gain.over.upper()} to be expected (derived)"
    return ("no loss scale, 8 significant bits" if half == "bf16" else "a GradScaler") + faster


def _know(choice: Choice) -> ToKnow:
    if choice.target.gpu is not None:
        return ToKnow(f"ampwise gpu {choice.target.gpu.id}", "what its matrix units take, and at what rate")
    return ToKnow("ampwise gpu", "what the matrix units here take")


def _do(choice: Choice) -> str:
    half = choice.half
    if half is None:
        return "Train in FP32."
    return f"Train in {half.upper()}{' with a GradScaler' if half == 'fp16' else ''}."
