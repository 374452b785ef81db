"""The decision: the device first, then the model, then what goes wrong, then what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampwise.finding import Finding
from ampwise.hardware.cpu import FEATURES
from ampwise.tune.advise.advice import Advice, AdviceReason, Compile, LossScale, Switch
from ampwise.tune.advise.choice import MEASURED, MEASURED_COMPILED, ExpectedGain, PrecisionChoice
from ampwise.tune.advise.claims import HALVES, IDEAS, objections
from ampwise.tune.advise.kept import kept_in_fp32
from ampwise.tune.advise.snippets import snippets
from ampwise.tune.advise.symptoms import triage
from ampwise.tune.bench.verdict import DEFINITELY, OPTIONAL, USE, SpeedVerdict, verdict_of

# What speaks about the device comes first: there is no arguing with it.
HARDWARE = ("AMP701", "AMP702")
TFLOPS = 1e12
HIGH = 'torch.set_float32_matmul_precision("high")'
FULL = ('torch.set_float32_matmul_precision("highest")', "torch.backends.cudnn.allow_tf32 = False")
BY_DEFAULT = "off by default for matmuls, on for cuDNN's convolutions"
# While one of these is not explained, what runs is to be as simple as it can be.
UNEXPLAINED = ("nan", "scale-collapse", "skipped", "spikes", "worse", "mismatch")
WORTH_FP8 = 1_000_000_000  # parameters
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


def decide(asked: PrecisionChoice) -> Advice:
    """Return the advice for a question."""
    target, findings = asked.target, objections(asked)
    small = asked.model.small and asked.measured is None and asked.symptom != "memory"
    if asked.exact:
        precision = "fp32"
    elif asked.want is not None and asked.want not in {finding.evidence.get("refuses") for finding in findings}:
        precision = asked.want
    elif not target.known and not asked.stays_wide:
        precision = "auto"
    else:
        precision = target.wide if asked.stays_wide or small else target.half or target.wide
    # Once a 16-bit format that was wanted got a no, the rest of the answer is about what was decided.
    choice = asked
    if asked.want in HALVES and asked.want != precision:
        choice = replace(asked, want=precision if precision in HALVES else None)
        findings = [finding for finding in findings if "refuses" in finding.evidence]
        messages = {finding.message for finding in findings}
        findings += [finding for finding in objections(choice) if finding.message not in messages]

    def order(finding: Finding) -> tuple[bool, bool, int, str]:
        code = finding.rule.code
        return (finding.evidence["answer"] != "no", code not in HARDWARE, finding.severity.rank, code)

    kept = kept_in_fp32(choice, precision)
    tf32 = _tf32(choice, precision)
    by_hand, with_engine = snippets(choice, precision, kept, tf32.lines)
    gain = choice.gain(precision)
    return Advice(
        choice=asked,
        precision=precision,
        reasons=tuple(_reasons(choice, precision)),
        loss_scale=LossScale() if precision in ("fp16", "auto") else None,
        kept=kept,
        tf32=tf32,
        compile=_compile(choice, precision),
        speedup=gain,
        speedup_why=_speedup_why(choice, precision, gain),
        triage=triage(choice, precision),
        changes=tuple(_changes(choice, precision)),
        findings=tuple(sorted(findings, key=order)),
        by_hand=by_hand,
        with_engine=with_engine,
    )


def _reasons(choice: PrecisionChoice, precision: str) -> Iterator[AdviceReason]:
    """Yield reasons from the device, its memory, the model, the format, measurements, and what was planned."""
    target, model = choice.target, choice.model
    yield _of_device(choice, precision)
    if target.kind == "cpu" and target.has("bf16") is False:
        yield AdviceReason("a CPU without 16-bit instructions is slower in 16 bits", "rule")
    if target.memory is not None and (model.state_bytes or 0) > 0.1 * target.memory.value:
        share = f"model and optimizer take {model.state} of its {target.memory_text}"
        yield AdviceReason(f"{share}, in every precision (16 bytes per parameter with Adam)", "derived")
    title = model.title + (" (a guess, from its modules)" if model.guessed else "")
    if model.small:
        yield AdviceReason(f"{title}: too small to gain much from 16 bits", "derived")
    elif model.kind == "cnn" and target.has("tf32") and target.kind == "cuda":
        yield AdviceReason(f"{title}: its convolutions already run in TF32, so 16 bits gain less", "rule")
    elif model.kind is not None:
        fits = {"fp16": "; no layer may exceed 65504", "bf16": "; it benefits most from FP32's range"}
        extra = fits.get(precision, "") if model.kind in ("transformer", "moe", "diffusion") else ""
        yield AdviceReason(title + extra, "rule")
    yield AdviceReason(OF_THE_FORMAT[precision], "rule")
    if choice.measured is not None:
        verdict = VERDICTS[verdict_of(choice.measured)]
        yield AdviceReason(f"{choice.measured:.2f}x as fast as FP32: {verdict}", "measured by you")
    rate = MEASURED.get(precision, 0.0)
    if target.gpu is not None and target.gpu.id == "h200" and rate > MEASURED["fp32"]:
        speed = f"{rate / MEASURED['fp32']:.1f}x as fast as FP32 ({rate / 1e3:.0f} k tokens/s)"
        yield AdviceReason(f"GPT-2 124 M, 16×1024 tokens: {speed}", "measured on one H200")
    without = objections(replace(choice, ideas=())) if choice.ideas else []
    for idea in choice.ideas:  # one without objections is to be answered, too
        if objections(replace(choice, ideas=(idea,))) == without:
            yield AdviceReason(f'"{IDEAS[idea]}": nothing speaks against it here', "rule")
    scaled = precision in ("fp16", "auto")
    if choice.scales("none") and not scaled:
        yield AdviceReason(f"no loss scale is right in {precision.upper()}", "rule")
    elif choice.scales("dynamic"):
        right = "is what FP16 needs" if scaled else f"is for FP16; {precision.upper()} needs none"
        yield AdviceReason(f"a GradScaler {right}", "rule")


def _of_device(choice: PrecisionChoice, precision: str) -> AdviceReason:
    target = choice.target
    if not target.known:
        return AdviceReason(f"the device decides, and it is unknown: {target.remark}", "rule")
    remark = f" ({target.remark})" if target.remark else ""
    if target.cpu is not None:
        features = target.cpu.features
        if features is None:
            instructions = "whether it has BF16 instructions is unknown"
        elif not target.has("bf16"):
            instructions = "no BF16 instructions"
        else:
            feature = next(feature for feature in features if feature in FEATURES)
            instructions = f"{feature} ({FEATURES[feature]})"
        return AdviceReason(f"{target.name}{remark}: {instructions}", "read here")
    peak, wide = target.peak(precision), target.peak("fp32")
    if precision not in ("fp32", "auto") and peak is not None and wide is not None:
        rates = f"{peak.show(TFLOPS, 0)} TFLOP/s dense in {precision.upper()}, {wide.show(TFLOPS, 1)} in FP32"
        return AdviceReason(f"{target.title}{remark}: {rates}", "datasheet")
    units = ", ".join(fmt.upper() for fmt in target.formats)
    basis = "datasheet" if target.gpu is not None else "derived"
    if not units and target.has("fp16") is None:
        return AdviceReason(f"which tensor cores {target.title} has is unknown{remark}", basis)
    units = units or "none of the formats for training"
    return AdviceReason(f"{target.title}{remark}: tensor cores for {units}", basis)


def _tf32(choice: PrecisionChoice, precision: str) -> Switch:
    """Return what FP32 matmuls are to run in."""
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


def _compile(choice: PrecisionChoice, precision: str) -> Compile:
    """Return whether torch.compile is worth it now."""
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
        return Compile(None, "on a CPU it depends on the model: measure it, ampwise bench --compile")
    if choice.model.small:
        return Compile(True, "a small model is bound by kernel launches; or use Engine(graph=True)")
    again = MEASURED_COMPILED / MEASURED["bf16"]
    return Compile(True, f"after a clean start; GPT-2 124 M in BF16 became another {again:.1f}x faster on one H200")


def _speedup_why(choice: PrecisionChoice, precision: str, gain: ExpectedGain | None) -> str:
    """Return what the range rests on, or why there is none."""
    if gain is None and precision == "fp32":
        return "FP32 is the baseline"
    if gain is None and not choice.target.known:
        return "unknown, as the device is unknown"
    if gain is None:
        return f"no range: the peaks of {choice.target.name} are unknown; measure it: ampwise bench {choice.make}"
    if gain.measured:
        ceiling = f"ceiling {gain.ceiling:.0f}× (datasheet)"
        return f"measured on one H200 at 1.3 B and at width 4096, compiled; {ceiling}"
    ceiling = f"derived: ceiling {gain.ceiling:.1f}× by dense peaks (datasheet)"
    if choice.model.parameters is None:
        return f"{ceiling}; the range is wide because the size is unknown"
    tf32 = ", over TF32 in which convolutions run by default" if gain.over == "tf32" else ""
    return f"{ceiling}{tf32}, and the gain of GPTs of this size on one H200, from 1,024 tokens a step to 8,192; eager"


def _changes(choice: PrecisionChoice, precision: str) -> Iterator[str]:
    """Yield what would make it another answer."""
    target, model = choice.target, choice.model
    if not target.known:
        yield "The device: name it with --gpu, or run this on it."
    if precision == "fp16" and not target.has("bf16"):
        yield "A device with BF16 tensor cores (NVIDIA since Ampere, 8.0): BF16, without a loss scale."
    if precision == "bf16" and target.has("fp16"):
        yield "Results worse than in FP32: FP16 has three more bits, and a GradScaler."
    if precision in HALVES and choice.measured is None:
        yield f"Measure with `ampwise bench {choice.make}`; below 1.1x stay in {target.wide.upper()}."
    if precision in ("fp32", "tf32") and not choice.exact:  # what would make it 16 bits
        if target.half is None and target.known:
            yield "A device with 16-bit tensor cores: name it with --gpu."
        elif choice.half is not None:
            half = choice.half.upper()
            yield f"Measure with `ampwise bench {choice.make}`; above 1.1x, or if activations do not fit, use {half}."
        elif choice.stays_wide:
            yield "Activations that do not fit: 16 bits, only to save memory."
    if precision == "bf16" and target.kind == "cuda" and target.has("fp8") and (model.parameters or 0) >= WORTH_FP8:
        yield "FP8 measured faster than compiled BF16 on this model: FP8."
    if model.parameters is None or model.kind is None:
        yield "Size and kind of the model: give --params 7B --arch transformer, or train.py:make."
    if precision in ("fp16", "auto"):
        wider = "" if target.has("bf16") is False else ", or BF16 where it has tensor cores"
        yield f"NaN that a replay in FP32 does not reproduce: keep the module it names in FP32{wider}."
