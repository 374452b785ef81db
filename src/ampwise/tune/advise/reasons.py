"""Why this precision: sentences in the order of the decision, each with what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.gain import MEASURED
from ampwise.evidence.choice.ideas import IDEAS
from ampwise.evidence.choice.memory import BYTES_A_PARAMETER, gib, state_bytes
from ampwise.evidence.speed_verdict import DEFINITELY, OPTIONAL, USE, Verdict, verdict_of
from ampwise.hardware.cpu import FEATURES
from ampwise.rules.judging import judged
from ampwise.tune.advise.advice import DATASHEET, DERIVED, MEASURED_BY_USER, MEASURED_ELSEWHERE, READ_HERE, RULE, Reason

__all__ = ["reasons"]

TFLOPS = 1e12
OF_THE_FORMAT = {
    "bf16": "BF16 has the exponents of FP32, so that it needs no loss scale; it has 8 significant bits",
    "fp16": "FP16 has 11 significant bits, ends at 65504 and loses what is at or below 2⁻²⁵: it needs a loss scale",
    "tf32": "TF32 keeps FP32's range and 10 of its mantissa bits; nothing else in the script changes",
    "fp32": "FP32 needs nothing: no loss scale, no casts",
    "fp8": "FP8 has 3 or 4 significant bits and a scale for each tensor; all but its products stays in BF16 and FP32",
    "auto": "BF16 where there are matrix units for it (NVIDIA since Ampere, 8.0), else FP16 with a loss scale, else "
    "FP32",
}
VERDICTS = {
    Verdict.STAY: f"no gain worth its price: below {OPTIONAL}",
    Verdict.OPTIONAL: f"optional: between {OPTIONAL} and {USE}, if losses agree",
    Verdict.USE: f"use it: between {USE} and {DEFINITELY}",
    Verdict.DEFINITELY: f"definitely: above {DEFINITELY}",
}


def reasons(choice: Choice, precision: str) -> Iterator[Reason]:
    """Of the device, of its memory, of the model, of the format, of what was measured."""
    yield _of_device(choice, precision)
    if choice.target.kind == "cpu" and choice.target.has("bf16") is False:
        yield Reason("without instructions for them 16 bits are slower on a CPU", RULE)
    yield from _of_memory(choice)
    yield from _of_model(choice, precision)
    yield Reason(OF_THE_FORMAT[precision], RULE)
    yield from _measured(choice, precision)
    yield from _unopposed(choice, precision)


def _of_device(choice: Choice, precision: str) -> Reason:
    target = choice.target
    if not target.known:
        return Reason(f"the device decides, and it is not known: {target.remark}", RULE)
    remark = f" ({target.remark})" if target.remark else ""
    if target.cpu is not None:
        return Reason(f"{target.name}{remark}: {_instructions(choice)}", READ_HERE)
    peak, wide = target.peak(precision), target.peak("fp32")
    if precision not in ("fp32", "auto") and peak is not None and wide is not None:
        rates = f"{peak.show(TFLOPS, 0)} TFLOP/s dense in {precision.upper()}, {wide.show(TFLOPS, 1)} in FP32"
        return Reason(f"{target.title}{remark}: {rates}", DATASHEET)
    units = ", ".join(fmt.upper() for fmt in target.formats)
    basis = DATASHEET if target.gpu is not None else DERIVED
    if not units and target.has("fp16") is None:
        return Reason(f"what matrix units {target.title} has is not known{remark}", basis)
    return Reason(f"{target.title}{remark}: matrix units for {units or 'none of the formats for training'}", basis)


def _instructions(choice: Choice) -> str:
    cpu = choice.target.cpu
    if cpu is None or cpu.features is None:
        return "which instructions it has for BF16 is not known"
    if not choice.target.has("bf16"):
        return "no instructions for BF16"
    feature = next(feature for feature in cpu.features if feature in FEATURES)
    return f"{feature} ({FEATURES[feature]})"


def _of_memory(choice: Choice) -> Iterator[Reason]:
    memory, state = choice.target.memory, state_bytes(choice)
    if memory is not None and state is not None and state > 0.1 * memory.value:
        yield Reason(
            f"state is {gib(state)} of its {'~' if memory.approximate else ''}{gib(memory.value)}, in every precision "
            f"({BYTES_A_PARAMETER} bytes a parameter with Adam)",
            DERIVED,
        )


def _of_model(choice: Choice, precision: str) -> Iterator[Reason]:
    model = choice.model
    guess = " (a guess, from its modules)" if model.guessed else ""
    if model.small:
        yield Reason(f"{model.title}{guess}: too small to gain much by 16 bits", DERIVED)
    elif model.kind == "cnn" and choice.target.has("tf32") and choice.target.kind == "cuda":
        yield Reason(f"{model.title}{guess}: its convolutions run in TF32 already, so that 16 bits gain less", RULE)
    elif model.kind is not None:
        fits = {"fp16": "; no layer may pass 65504", "bf16": "; the range of FP32 is what it needs most"}
        extra = fits.get(precision, "") if model.kind in ("transformer", "moe", "diffusion") else ""
        yield Reason(f"{model.title}{guess}{extra}", RULE)


def _measured(choice: Choice, precision: str) -> Iterator[Reason]:
    if choice.measured is not None:
        yield Reason(
            f"{choice.measured:.2f} times as fast as FP32: {VERDICTS[verdict_of(choice.measured)]}", MEASURED_BY_USER
        )
    gpu = choice.target.gpu
    if gpu is not None and gpu.id == "h200" and precision in MEASURED and precision != "fp32":
        ratio = MEASURED[precision] / MEASURED["fp32"]
        yield Reason(
            f"GPT-2 124 M, 16×1024 tokens: {ratio:.1f} times FP32 ({MEASURED[precision] / 1e3:.0f} k tokens/s)",
            MEASURED_ELSEWHERE,
        )


def _unopposed(choice: Choice, precision: str) -> Iterator[Reason]:
    """What was proposed and no rule objects to is to be answered, too."""
    without = judged(replace(choice, ideas=()), "choice")
    for idea in choice.ideas:
        if judged(replace(choice, ideas=(idea,)), "choice") == without:
            yield Reason(f'"{IDEAS[idea]}": nothing speaks against it here', RULE)
    kind = None if choice.scaling is None else choice.scaling.kind
    if kind == "none" and precision not in ("fp16", "auto"):
        yield Reason(f"no loss scale is right in {precision.upper()}", RULE)
    elif kind == "dynamic":
        right = (
            "is what FP16 needs" if precision in ("fp16", "auto") else f"is for FP16; {precision.upper()} needs none"
        )
        yield Reason(f"a GradScaler {right}", RULE)
