"""Why this precision: sentences in the order of the decision, each with what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampwise.hardware.cpu import FEATURES
from ampwise.rules.dispatch import run_checks
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.gain import MEASURED
from ampwise.rules.evidence.choice.ideas import IDEAS
from ampwise.rules.evidence.choice.memory import BYTES_A_PARAMETER, gib_text, state_bytes
from ampwise.rules.evidence.speed_verdict import DEFINITELY, OPTIONAL, USE, SpeedVerdict, verdict_of
from ampwise.tune.advise.advice import (
    DATASHEET,
    DERIVED,
    MEASURED_BY_USER,
    MEASURED_ELSEWHERE,
    READ_HERE,
    RULE,
    AdviceReason,
)

__all__ = ["reasons"]

TFLOPS = 1e12
OF_THE_FORMAT = {
    "bf16": "BF16 has FP32's exponent range, so it needs no loss scale; it has 8 significant bits",
    "fp16": "FP16 has 11 significant bits, ends at 65504 and flushes values up to 2⁻²⁵: it needs a loss scale",
    "tf32": "TF32 keeps FP32's range and 10 of its mantissa bits; nothing else in the script changes",
    "fp32": "FP32 needs no loss scale and no casts",
    "fp8": "FP8 has 3 or 4 significant bits and a scale for each tensor; all but its matmuls stays in BF16 and FP32",
    "auto": "BF16 if the device has tensor cores for it (NVIDIA since Ampere), else FP16 with a loss scale, else FP32",
}
VERDICTS = {
    SpeedVerdict.STAY: f"not worth it: below {OPTIONAL}",
    SpeedVerdict.OPTIONAL: f"optional: between {OPTIONAL} and {USE}, if losses agree",
    SpeedVerdict.USE: f"use it: between {USE} and {DEFINITELY}",
    SpeedVerdict.DEFINITELY: f"definitely: above {DEFINITELY}",
}


def reasons(choice: PrecisionChoice, precision: str) -> Iterator[AdviceReason]:
    """Yield reasons from the device, its memory, the model, the format, and measurements."""
    yield _of_device(choice, precision)
    if choice.target.kind == "cpu" and choice.target.has("bf16") is False:
        yield AdviceReason("a CPU without 16-bit instructions is slower in 16 bits", RULE)
    yield from _of_memory(choice)
    yield from _of_model(choice, precision)
    yield AdviceReason(OF_THE_FORMAT[precision], RULE)
    yield from _measured(choice, precision)
    yield from _unopposed(choice, precision)


def _of_device(choice: PrecisionChoice, precision: str) -> AdviceReason:
    target = choice.target
    if not target.known:
        return AdviceReason(f"the device decides, and it is unknown: {target.remark}", RULE)
    remark = f" ({target.remark})" if target.remark else ""
    if target.cpu is not None:
        return AdviceReason(f"{target.name}{remark}: {_instructions(choice)}", READ_HERE)
    peak, wide = target.peak(precision), target.peak("fp32")
    if precision not in ("fp32", "auto") and peak is not None and wide is not None:
        rates = f"{peak.show(TFLOPS, 0)} TFLOP/s dense in {precision.upper()}, {wide.show(TFLOPS, 1)} in FP32"
        return AdviceReason(f"{target.title}{remark}: {rates}", DATASHEET)
    units = ", ".join(fmt.upper() for fmt in target.formats)
    basis = DATASHEET if target.gpu is not None else DERIVED
    if not units and target.has("fp16") is None:
        return AdviceReason(f"which tensor cores {target.title} has is unknown{remark}", basis)
    return AdviceReason(
        f"{target.title}{remark}: tensor cores for {units or 'none of the formats for training'}", basis
    )


def _instructions(choice: PrecisionChoice) -> str:
    cpu = choice.target.cpu
    if cpu is None or cpu.features is None:
        return "whether it has BF16 instructions is unknown"
    if not choice.target.has("bf16"):
        return "no BF16 instructions"
    feature = next(feature for feature in cpu.features if feature in FEATURES)
    return f"{feature} ({FEATURES[feature]})"


def _of_memory(choice: PrecisionChoice) -> Iterator[AdviceReason]:
    memory, state = choice.target.memory, state_bytes(choice)
    if memory is not None and state is not None and state > 0.1 * memory.value:
        yield AdviceReason(
            f"model and optimizer take {gib_text(state)} of its "
            f"{'~' if memory.approximate else ''}{gib_text(memory.value)}, "
            f"in every precision ({BYTES_A_PARAMETER} bytes per parameter with Adam)",
            DERIVED,
        )


def _of_model(choice: PrecisionChoice, precision: str) -> Iterator[AdviceReason]:
    model = choice.model
    guess = " (a guess, from its modules)" if model.guessed else ""
    if model.small:
        yield AdviceReason(f"{model.title}{guess}: too small to gain much from 16 bits", DERIVED)
    elif model.kind == "cnn" and choice.target.has("tf32") and choice.target.kind == "cuda":
        yield AdviceReason(f"{model.title}{guess}: its convolutions already run in TF32, so 16 bits gain less", RULE)
    elif model.kind is not None:
        fits = {"fp16": "; no layer may exceed 65504", "bf16": "; it benefits most from FP32's range"}
        extra = fits.get(precision, "") if model.kind in ("transformer", "moe", "diffusion") else ""
        yield AdviceReason(f"{model.title}{guess}{extra}", RULE)


def _measured(choice: PrecisionChoice, precision: str) -> Iterator[AdviceReason]:
    if choice.measured is not None:
        yield AdviceReason(
            f"{choice.measured:.2f}x as fast as FP32: {VERDICTS[verdict_of(choice.measured)]}", MEASURED_BY_USER
        )
    gpu = choice.target.gpu
    if gpu is not None and gpu.id == "h200" and precision in MEASURED and precision != "fp32":
        ratio = MEASURED[precision] / MEASURED["fp32"]
        yield AdviceReason(
            f"GPT-2 124 M, 16×1024 tokens: {ratio:.1f}x as fast as FP32 ({MEASURED[precision] / 1e3:.0f} k tokens/s)",
            MEASURED_ELSEWHERE,
        )


def _unopposed(choice: PrecisionChoice, precision: str) -> Iterator[AdviceReason]:
    """What was proposed and no rule objects to is to be answered, too."""
    without = run_checks(replace(choice, ideas=()), "choice")
    for idea in choice.ideas:
        if run_checks(replace(choice, ideas=(idea,)), "choice") == without:
            yield AdviceReason(f'"{IDEAS[idea]}": nothing speaks against it here', RULE)
    kind = None if choice.scaling is None else choice.scaling.kind
    if kind == "none" and precision not in ("fp16", "auto"):
        yield AdviceReason(f"no loss scale is right in {precision.upper()}", RULE)
    elif kind == "dynamic":
        right = (
            "is what FP16 needs" if precision in ("fp16", "auto") else f"is for FP16; {precision.upper()} needs none"
        )
        yield AdviceReason(f"a GradScaler {right}", RULE)
