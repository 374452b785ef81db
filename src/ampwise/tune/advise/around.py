"""What goes with a precision: switches for FP32 products, torch.compile, the speed to expect, what would change it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.gain import MEASURED, MEASURED_COMPILED, ExpectedGain
from ampwise.tune.advise.advice import Compile, Switch

__all__ = ["changes", "compiling", "speed_words", "switches"]

HIGH = 'torch.set_float32_matmul_precision("high")'
FULL = ('torch.set_float32_matmul_precision("highest")', "torch.backends.cudnn.allow_tf32 = False")
BY_DEFAULT = "off by default for matmuls, on for cuDNN's convolutions"
# While one of these is not explained, what runs is to be as simple as it can be.
UNEXPLAINED = ("nan", "scale-collapse", "skipped", "spikes", "worse", "mismatch")
WORTH_FP8 = 1_000_000_000  # parameters
TFLOPS = 1e12


def switches(choice: PrecisionChoice, precision: str) -> Switch:
    """What FP32 products are to run in."""
    target = choice.target
    full = precision == "fp32" and (choice.want == "fp32" or choice.exact)
    if full and target.kind == "cuda" and target.has("tf32") is not False:
        return Switch(FULL, "full FP32 was requested: TF32 is on for cuDNN's convolutions unless switched off")
    if target.tf32_gains or precision == "tf32":
        ratio = target.ratio("tf32", "fp32")
        faster = "" if ratio is None else f"; up to {ratio.show(digits=1)}× the FP32 peak (datasheet)"
        what = "for everything" if precision == "tf32" else "for what stays in FP32"
        return Switch((HIGH,), f"{what}: {BY_DEFAULT}{faster}")
    if target.has("tf32") and target.kind == "cuda":
        peak = target.peak("tf32")
        rate = "" if peak is None else f", {peak.show(TFLOPS, 1)} TFLOP/s"
        return Switch((), f"TF32 is no faster than FP32 here{rate} (datasheet): leave the switch as it is")
    if not target.known:
        return Switch((), f"from Ampere on: {HIGH}; {BY_DEFAULT}")
    return Switch((), "this device has no TF32 tensor cores")


def compiling(choice: PrecisionChoice, precision: str) -> Compile:
    """Whether torch.compile is worth it now."""
    target = choice.target
    if choice.symptom in UNEXPLAINED:
        return Compile(False, "not while something is wrong: a replay inspects eager operations")
    if target.compiles is False:
        return Compile(False, f"it needs compute capability 7.0, and this device has {target.capability_text}")
    if target.compiles is None:
        return Compile(None, "whether torch.compile supports this device is unknown")
    if precision in ("fp16", "auto"):
        return Compile(
            True,
            "once eager runs clean: the compiled backward pass inherits autocast and can overflow in FP16 where "
            "eager does not (pytorch#153044, #177287)",
        )
    if target.kind == "cpu":
        return Compile(None, "on a CPU it depends on the model: measure it, ampwise compare --compile")
    if choice.model.small:
        return Compile(True, "a small model is bound by kernel launches; or use Engine(graph=True)")
    again = MEASURED_COMPILED / MEASURED["bf16"]
    return Compile(True, f"after a clean start; GPT-2 124 M in BF16 became another {again:.1f}x faster on one H200")


def speed_words(choice: PrecisionChoice, precision: str, gain: ExpectedGain | None) -> str:
    """What the range rests on, or why there is none."""
    if gain is None:
        return _without_range(choice, precision)
    if gain.measured:
        ceiling = f"ceiling {gain.ceiling:.0f}× (datasheet)"
        return f"measured on one H200 at 1.3 B and at width 4096, torchao, compiled; {ceiling}"
    parts = f"ceiling {gain.ceiling:.1f}× by dense peaks (datasheet)"
    if choice.model.parameters is None:
        return f"derived: {parts}; the range is wide because the size is unknown"
    if gain.over == "tf32":
        parts += ", over TF32 in which convolutions run by default"
    return f"derived: {parts}, times the share of matmuls at this size; eager"


def _without_range(choice: PrecisionChoice, precision: str) -> str:
    if precision == "fp32":
        return "FP32 is the baseline"
    if not choice.target.known:
        return "unknown, as the device is unknown"
    return f"no range: the peaks of {choice.target.name} are unknown; measure it: ampwise compare {choice.subject}"


def changes(choice: PrecisionChoice, precision: str) -> Iterator[str]:
    """What would make it another answer."""
    target, model = choice.target, choice.model
    if not target.known:
        yield "The device: name it with --gpu, or run this on it."
    if precision == "fp16" and not target.has("bf16"):
        yield "A device with BF16 tensor cores (NVIDIA since Ampere, 8.0): BF16, without a loss scale."
    if precision == "bf16" and target.has("fp16"):
        yield "Results worse than in FP32: FP16 has three more bits, and a GradScaler."
    if precision in ("bf16", "fp16") and choice.measured is None:
        yield f"`ampwise compare {choice.subject}` below 1.1: stay in {target.wide.upper()}."
    if precision in ("fp32", "tf32") and not choice.exact:
        yield from _for_16_bits(choice)
    if precision == "bf16" and target.kind == "cuda" and target.has("fp8") and (model.parameters or 0) >= WORTH_FP8:
        yield "FP8 measured faster than compiled BF16 on this model: FP8."
    if model.parameters is None or model.kind is None:
        yield "Size and kind of the model: give --params 7B --arch transformer, or module:callable."
    if precision in ("fp16", "auto"):
        wider = "" if target.has("bf16") is False else ", or BF16 where it has tensor cores"
        yield f"NaN that a replay in FP32 does not reproduce: keep the module it names in FP32{wider}."


def _for_16_bits(choice: PrecisionChoice) -> Iterator[str]:
    """What would speak for them after all."""
    if choice.target.half is None and choice.target.known:
        yield "A device with 16-bit tensor cores: name it with --gpu."
    elif choice.half is not None:
        half = choice.half.upper()
        yield f"`ampwise compare {choice.subject}` above 1.1, or activations that do not fit: {half}."
    elif choice.stays_wide:
        yield "Activations that do not fit: 16 bits, only to save memory."
