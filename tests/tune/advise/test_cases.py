"""What guides decide by tables, asked row by row: the substance of each answer, and nothing of what they get wrong.

A case is a question in words, what `ampwise advise` is told of it, and what the answer has to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ampwise.tune.advise import advise
from ampwise.tune.advise.claims import IDEAS
from ampwise.tune.advise.symptoms import SYMPTOMS

from ...for_each import for_each

V100, T4, RTX2080, P100 = "v100-sxm2-16", "t4", "rtx2080ti", "p100-sxm2"
A100, RTX3090, RTX4090, H100, H200 = "a100-sxm-80", "rtx3090", "rtx4090", "h100-sxm", "h200"

# What guides say and what is not so; no answer may say it.
WRONG = (
    r"multiples? of 16 (for|in) BF16",
    r"BF16[^.;]{0,20}(needs|wants) multiples of 16",
    r"5\.96e-0?8",
    r"at most 2\*\*16|max(imum)? 2\^?16",
    r"doubles (on|with|after) (every|each) (good|clean|successful) step",
    r"_found_inf_per_device",
    r"2[-–]3 ?[x×]",
    r"halves (the )?memory(?!\")",
    r"50% (memory|less)",
    r"3,?958",
    r"3090 has no BF16",
    r"scales? (can|may) differ",
    r"exp[^.]{0,30}above 88 in FP16",
    r"torch\.cuda\.amp\.(autocast|GradScaler)",
    r"clip\w* [^.]{0,30}does nothing",
    r"TF32 is on by default(?! for cuDNN|\")",
    r"FP16 is (slightly )?faster than BF16",
    r"validation needs autocast",
    r"5% [^.\"]{0,40}imminent",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question, what is told of it, and the answer."""

    question: str
    told: dict[str, object] = field(default_factory=dict)
    precision: str | None = None  # None: whatever
    refused: bool | None = None
    says: tuple[str, ...] = ()  # regular expressions, all of which are in the answer
    codes: tuple[str, ...] = ()  # rules that are among the findings
    silent: tuple[str, ...] = ()  # and rules that are not


def case(question: str, **rest: object) -> Case:
    parts = {name: rest.pop(name) for name in ("precision", "refused", "says", "codes", "silent") if name in rest}
    for name in ("says", "codes", "silent"):
        if isinstance(parts.get(name), str):
            parts[name] = (parts[name],)
    return Case(question=question, told=rest, **parts)  # type: ignore[arg-type]


UNDER_PRESSURE = [
    case(
        "There are NaNs, the deadline is tonight: what is quickest, turning autocast off?",
        gpu=V100,
        symptom="nan",
        ideas="autocast-off",
        refused=True,
        precision="fp16",
        codes="AMP705",
        says=(
            r"First \(the loss is NaN or inf\):",
            r"1\. ampwise check train\.py",
            r"replay capsules/step-\d+ train.py:make --precision fp32",
            r"finite again at a lower\s+scale, that is normal",
            r"NaN there,? too",
        ),
    ),
    case(
        "A senior engineer says BF16 always, FP16 is outdated; the GPUs are V100s. Switch?",
        gpu=V100,
        want="bf16",
        ideas=("senior-says", "bf16-is-newer"),
        refused=True,
        precision="fp16",
        codes=("AMP701", "AMP706"),
        says=(
            r"compute capability 7\.0\) has no BF16 tensor cores",
            r"emulate",
            r"including_emulation=False",
            r"GradScaler",
            r"newer is not better",
            r"bench train.py:make --precisions fp32,fp16,bf16",
        ),
    ),
    case(
        "The GradScaler is complicated: may the loss be multiplied by 1000 instead?",
        gpu=V100,
        scaling="manual:1000",
        ideas="manual-scale",
        refused=True,
        precision="fp16",
        codes="AMP308",
        says=(
            r"above 65\.5 become inf and are\s+applied",
            r"below 3\.0e-11",
            r"65536: 4\.5e-13",
            r"does not adapt",
            r"four lines",
            r"scaler\.unscale_\(optimizer\)",
        ),
    ),
]

EDGES = [
    case(
        "With accumulation, is update() called with every micro-batch or with every step?",
        gpu=V100,
        ideas="update-every-microbatch",
        refused=True,
        codes="AMP106",
        says=(r"must use one scale", r"loss / n", r"unscale_, clip, step, update once"),
    ),
    case(
        "DDP on eight GPUs: one GradScaler for all, or one each? May their scales differ?",
        gpu=A100,
        want="fp16",
        ideas="one-scaler-for-all-ranks",
        refused=True,
        codes="AMP203",
        says=(
            r"each process has its own GradScaler",
            r"same scale",
            r"drift apart",
            r"averaged at different scales",
        ),
    ),
    case(
        "A loss of mine takes exp and overflows: autocast off for all of it, or for the exp alone?",
        gpu=A100,
        want="fp16",
        ideas="exp-in-loss",
        codes="AMP401",
        says=(
            r"from 11\.09 up",
            r"88\.7",
            r"exp, log, sum and softmax in FP32",
            r"logsumexp",
            r'@ampwise\.keep\("fp32"\)',
        ),
    ),
    case(
        "Is a decorator that switches autocast off enough for such a loss?",
        gpu=V100,
        ideas="autocast-off-for-loss",
        refused=True,
        codes="AMP406",
        says=(
            r"does not cast anything",
            r"\.float\(\)",
            r"deprecated and CUDA only",
            r'torch\.autocast\("cuda", enabled=False\)',
        ),
    ),
    case(
        "Do activation checkpointing and autocast go together?",
        gpu=A100,
        ideas="no-checkpointing",
        refused=True,
        codes="AMP721",
        says=(r"works with autocast", r"use_reentrant=False"),
    ),
    case(
        "An autograd.Function of mine under autocast: anything to do?",
        gpu=A100,
        ideas="custom-function",
        refused=False,
        codes="AMP405",
        says=(r'torch\.amp\.custom_fwd\(device_type="cuda"\)', r"custom_bwd", r"cast_inputs=torch\.float32"),
    ),
    case(
        "Clipping, accumulation and ranks at once, please, not the toy loop",
        gpu=V100,
        ideas="simple-loop",
        refused=True,
        codes="AMP715",
        says=(r"accumulate=4|Engine", r"unscale_"),
    ),
]

EXCUSES = [
    case("They are in a hurry", symptom="nan", ideas="autocast-off", gpu=A100, refused=True, codes="AMP705"),
    case(
        "Somebody important recommends BF16 for the V100",
        gpu=V100,
        want="bf16",
        ideas="senior-says",
        refused=True,
        precision="fp16",
        codes=("AMP701", "AMP706"),
    ),
    case("The scaler looks complicated", gpu=T4, ideas="manual-scale", refused=True, codes="AMP308"),
    case("They want something simple", gpu=T4, ideas="simple-loop", refused=True, codes="AMP715"),
    case(
        "First idea while debugging: autocast off",
        gpu=V100,
        symptom="nan",
        ideas="autocast-off",
        refused=True,
        says=(r"off for one run, as a test", r"which operation went bad first"),
    ),
    case(
        "BF16 is newer (on a card without it)",
        gpu=T4,
        ideas="bf16-is-newer",
        refused=True,
        precision="fp16",
        says=(r"T4 \(compute capability 7\.5\) has FP16 tensor cores but none for BF16",),
    ),
    case(
        "BF16 is newer (on a card with it)",
        gpu=A100,
        ideas="bf16-is-newer",
        refused=True,
        precision="bf16",
        says=(r"same rate, 312 TFLOP/s", r"significant bits \(11 and 8\)", r"for its range"),
    ),
    case(
        "Perhaps mixed precision is to blame: out with it",
        gpu=A100,
        ideas="drop-mixed-precision",
        refused=True,
        codes="AMP705",
        says=(r"learning rate or the loss remains",),
    ),
    case("No time to profile", gpu=A100, ideas="skip-measuring", refused=True, codes="AMP713", says=r"five minutes"),
    case(
        "The loss is custom: write it anew",
        gpu=A100,
        ideas="rewrite-loss",
        refused=True,
        codes="AMP401",
        says=(r"need not be rewritten", r'@ampwise\.keep\("fp32"\)'),
    ),
    case(
        "We have a GradScaler already, so it is not that",
        gpu=V100,
        ideas="tried-already",
        refused=True,
        codes="AMP714",
        says=(r"ampwise check train\.py", r"done right"),
    ),
]

RED_FLAGS = [
    case("Remove autocast against NaN", gpu=H100, symptom="nan", ideas="autocast-off", refused=True, codes="AMP705"),
    case(
        "All this is too complex", gpu=H100, ideas="too-complex", refused=True, codes="AMP711", says=r"one `with` block"
    ),
    case("Clip after backward", gpu=V100, ideas="clip-after-backward", refused=True, codes="AMP101", says=r"1/65536"),
    case("BF16 is always better", gpu=RTX2080, ideas="bf16-is-newer", refused=True, precision="fp16", codes="AMP706"),
    case(
        "A GradScaler is optional",
        gpu=V100,
        scaling="none",
        refused=True,
        codes="AMP301",
        says=r"2⁻²⁵ \(3e-8\) and below to zero",
    ),
    case(
        "Without a scaler in BF16: that is fine",
        gpu=A100,
        want="bf16",
        scaling="none",
        refused=False,
        silent="AMP301",
        says=r"no loss scale is right in BF16",
    ),
    case("It should just work", gpu=V100, ideas="just-works", refused=True, codes="AMP714", says=r"raise no error"),
    case(
        "Scaling by hand is simpler",
        gpu=V100,
        scaling="manual:1024",
        refused=True,
        codes="AMP308",
        says=r"factor of 1024",
    ),
    case(
        "Little speed-up: a bug of PyTorch",
        gpu=A100,
        symptom="slow",
        ideas="torch-bug",
        refused=True,
        codes="AMP714",
        says=(r"seldom a torch bug", r"multiples? of 8", r"ampwise align"),
    ),
    case(
        "Mixed precision for every model we have",
        gpu=A100,
        params="3M",
        arch="mlp",
        ideas="always-helps",
        refused=True,
        precision="tf32",
        codes="AMP713",
        says=(r"0\.8–1\.1×", r"1\.0–1\.1×", r"too small to gain"),
    ),
    case("They are rushed: skip the diagnosis", gpu=V100, symptom="nan", ideas="autocast-off", refused=True),
    case("An authority recommends it", gpu=T4, want="bf16", ideas="senior-says", refused=True, precision="fp16"),
    case("Skip profiling to save time", gpu=T4, ideas="skip-measuring", refused=True, codes="AMP713"),
    case("Spare them the GradScaler", gpu=T4, want="fp16", scaling="none", refused=True, codes="AMP301"),
    case(
        "BF16 is always better, on a V100", gpu=V100, want="bf16", ideas="bf16-is-newer", refused=True, precision="fp16"
    ),
    case("Suggest to take it out", gpu=V100, ideas="drop-mixed-precision", refused=True, codes="AMP705"),
]

PITFALLS = [
    case(
        "1: clipping before unscale_",
        gpu=V100,
        ideas="clip-after-backward",
        refused=True,
        codes="AMP101",
        says=(r"unscaled norm of 1/65536", r"stalls without an error", r"scaler\.unscale_\(optimizer\) first"),
    ),
    case("2: FP16 without a scaler", gpu=V100, ideas="no-scaler", refused=True, codes="AMP301", says=r"stop learning"),
    case("3: BF16 before Ampere", gpu=T4, want="bf16", refused=True, precision="fp16", codes="AMP701"),
    case("4: a fixed loss scale", gpu=V100, scaling="manual:1024", refused=True, codes="AMP308"),
    case("5: exp and log in a custom loss", gpu=V100, ideas="exp-in-loss", codes="AMP401", says=r"cross_entropy"),
    case(
        "6: sizes such as 127 and 253",
        gpu=A100,
        ideas="odd-sizes",
        refused=False,
        codes="AMP503",
        says=(r"8 elements of FP16 or BF16, 16 of FP8", r"ampwise align", r"with the same results"),
    ),
    case(
        "6b: does BF16 want multiples of 16?",
        gpu=A100,
        ideas="multiples-of-16",
        refused=True,
        codes="AMP503",
        says=(r"only FP8 matmuls require it",),
    ),
    case(
        "7: norms before unscale_", gpu=V100, ideas="norms-after-backward", refused=True, codes="AMP102", says=r"jumps"
    ),
    case(
        "8: the scheduler steps though the step was skipped",
        gpu=V100,
        ideas="scheduler-every-iteration",
        refused=True,
        codes="AMP114",
        says=(r"scaler\.skipped", r"warm-up"),
    ),
    case(
        "9: mixed precision for a tiny model",
        gpu=A100,
        params="2M",
        arch="mlp",
        want="bf16",
        refused=False,
        precision="bf16",
        codes="AMP708",
        says=(r"0\.8–1\.0×", r"below 1\.1x stay in FP32"),
    ),
    case(
        "10: no autocast in validation: is that wrong?",
        gpu=A100,
        ideas="eval-in-fp32",
        refused=False,
        codes="AMP501",
        says=(r"not wrong", r"no GradScaler"),
    ),
    case("11: update() too often", gpu=V100, ideas="update-every-microbatch", refused=True, codes="AMP106"),
    case(
        "12: one scaler shared by processes", gpu=V100, ideas="one-scaler-for-all-ranks", refused=True, codes="AMP203"
    ),
    case(
        "13: FP16 here, BF16 there", gpu=A100, ideas="mix-halves", refused=True, codes="AMP307", says=r"range of FP16"
    ),
    case("14: it always helps", gpu=A100, ideas="always-helps", refused=True, codes="AMP713"),
    case(
        "15: BF16 without a look at the GPU",
        gpu="7.5",
        want="bf16",
        refused=True,
        codes="AMP701",
        says=(r"compute capability 7\.5", r"emulate"),
    ),
]

# When which format: devices and models as guides list them.
WHICH_FORMAT = [
    case("A CNN on a V100", gpu=V100, params="25M", arch="cnn", precision="fp16", refused=False),
    case("Anything on a T4", gpu=T4, precision="fp16", refused=False),
    case("Anything on an RTX 2080 Ti", gpu=RTX2080, precision="fp16", refused=False),
    case(
        "The most speed on old hardware",
        gpu=V100,
        params="110M",
        arch="transformer",
        precision="fp16",
        says=(r"1\.4–5\.2× FP32", r"125 TFLOP/s dense in FP16, 15\.7 in FP32"),
    ),
    case(
        "A CNN on an A100, in FP16 as guides say",
        gpu=A100,
        params="25M",
        arch="cnn",
        want="fp16",
        precision="fp16",
        refused=False,
        silent="AMP716",
        says=(r"convolutions already run in TF32", r"1\.2–1\.9× TF32"),
    ),
    case(
        "BERT or GPT on an A100",
        gpu=A100,
        params="110M",
        arch="transformer",
        precision="bf16",
        refused=False,
        says=(r"without a loss scale", r"no loss scale; it has 8 significant bits"),
    ),
    case(
        "NaN in FP16 despite the GradScaler, on an A100",
        gpu=A100,
        want="fp16",
        symptom="nan",
        refused=False,
        codes="AMP716",
        says=(r"many places overflow: BF16", r"BF16 runs at the same rate here"),
    ),
    case("Is there BF16 on an RTX 3090?", gpu=RTX3090, want="bf16", precision="bf16", refused=False, silent="AMP702"),
    case("And on an RTX 4090?", gpu=RTX4090, want="bf16", precision="bf16", refused=False),
    case("A model with large activations", gpu=A100, symptom="nan", precision="bf16", says=r"range|exponent"),
    case(
        "Simple code, no scaler",
        gpu=A100,
        want="bf16",
        precision="bf16",
        says=(r"scale     none", r"torch\.bfloat16"),
    ),
    case(
        "A GradScaler for BF16, for consistency?",
        gpu=A100,
        want="bf16",
        scaling="dynamic",
        refused=True,
        codes="AMP302",
    ),
    case(
        "The same, as an idea",
        gpu=A100,
        ideas="scaler-with-bf16",
        refused=True,
        codes="AMP302",
        says=r"has no effect",
    ),
    case(
        "FP16 or BF16: which is faster on an A100?",
        gpu=A100,
        ideas="bf16-is-newer",
        says=(r"FP16 and BF16 at the same rate",),
    ),
    case(
        "Three opposed scores: BF16",
        gpu=A100,
        arch="scorer",
        want="bf16",
        codes="AMP717",
        says=r"difference of their scores",
    ),
    case(
        "Three opposed scores: TF32",
        gpu=A100,
        arch="scorer",
        want="tf32",
        precision="tf32",
        refused=False,
        silent="AMP717",
    ),
    case(
        "Three opposed scores: FP16", gpu=A100, arch="scorer", want="fp16", codes="AMP717", says=r"11 significant bits"
    ),
    case("Routers of a mixture of experts", gpu=A100, params="8B", arch="moe", says=r'keep\("fp32", "\*\.router"\)'),
    case(
        "A contrastive loss at temperature 0.07", gpu=V100, arch="contrastive", says=(r"temperature", r"cross_entropy")
    ),
    case("A U-Net that takes away noise, in FP16", gpu=V100, arch="diffusion", says=r"autoencoder"),
    case("A GAN with a gradient penalty", gpu=V100, arch="gan", says=(r"engine\.grad", r"once after both")),
    case("Weights from BF16, run in FP16", gpu=V100, ideas="bf16-checkpoint", codes="AMP716", says=r"65504"),
]

# Who has units for what: the tables of hardware, with their mistakes fixed.
HARDWARE = [
    (gpu, fmt, has)
    for gpu, formats in {
        P100: "",
        V100: "fp16",
        T4: "fp16",
        RTX2080: "fp16",
        A100: "fp16 bf16 tf32",
        "a10": "fp16 bf16 tf32",
        RTX3090: "fp16 bf16",  # and TF32, which is no faster there
        RTX4090: "fp16 bf16 fp8",
        "l40s": "fp16 bf16 tf32 fp8",
        H100: "fp16 bf16 tf32 fp8",
        H200: "fp16 bf16 tf32 fp8",
        "tpu-v4": "bf16",
        "7.0": "fp16",
        "8.0": "fp16 bf16 tf32",
        "8.6": "fp16 bf16 tf32",
        "8.9": "fp16 bf16 tf32 fp8",
        "9.0": "fp16 bf16 tf32 fp8",
    }.items()
    for fmt in ("fp16", "bf16", "tf32", "fp8")
    for has in (fmt in formats.split(),)
]

# Expected speed-ups by size, as the usual table has its classes; ranges are derived from peaks.
SIZES = [
    ("5M", V100, 0.8, 1.7),
    ("5M", H200, 0.8, 0.9),
    ("30M", V100, 1.0, 4.6),
    ("30M", A100, 0.9, 5.3),
    ("124M", V100, 1.5, 5.3),
    ("124M", A100, 1.3, 7.4),
    ("1.3B", V100, 4.0, 6.0),
    ("1.3B", A100, 5.1, 9.5),
    ("124M", RTX3090, 1.0, 1.8),  # where BF16 peaks at twice FP32
]

MEASURED = [
    (1.05, "stay", "tf32"),
    (1.09, "stay", "tf32"),
    (1.1, "optional", "bf16"),
    (1.3, "optional", "bf16"),
    (1.5, "use", "bf16"),
    (2.0, "use", "bf16"),
    (2.5, "use", "bf16"),
    (3.1, "definitely", "bf16"),
]

MEMORY = [
    case(
        "Does mixed precision halve the memory?",
        gpu=A100,
        params="7B",
        arch="transformer",
        ideas="halves-memory",
        refused=True,
        codes=("AMP709", "AMP710"),
        says=(
            r"16 bytes per parameter under\s+autocast: 104 GiB for 7 B",
            r"only saved\s+activations shrink",
            r"ampwise memory",
        ),
    ),
    case(
        "Or save a quarter, with 12 bytes a parameter?",
        gpu=H100,
        params="100M",
        symptom="memory",
        codes="AMP709",
        says=(r"1\.5 GiB for 100 M", r"up to 2 bytes per parameter for casted copies"),
    ),
    case(
        "model.half() saves the other half",
        gpu=A100,
        ideas="half-weights",
        refused=True,
        codes="AMP306",
        says=r"1/512 of the weight",
    ),
    case(
        "The same on a V100",
        gpu=V100,
        ideas="half-weights",
        refused=True,
        codes="AMP304",
        says=(r"1/2048", r"Attempting to unscale FP16 gradients"),
    ),
    case(
        "7 B on one A100 of 40 GB", gpu="a100-40", params="7B", codes="AMP710", says=(r"FSDP over 4 or more", r"40 GiB")
    ),
    case("7 B on one H200", gpu=H200, params="7B", silent="AMP710", says=r"104 GiB of its 141 GiB"),
]

NOT_AT_ALL = [
    case(
        "Fewer than 10 M parameters",
        gpu=A100,
        params="8M",
        arch="transformer",
        precision="tf32",
        says=r"too small to gain",
    ),
    case("The same on a V100, which has no TF32", gpu=V100, params="8M", precision="fp32"),
    case(
        "Numbers must be right to many digits",
        gpu=A100,
        want="bf16",
        ideas="exact-numbers",
        refused=True,
        precision="fp32",
        codes="AMP718",
        says=r"cudnn\.allow_tf32 = False",
    ),
    case("Complex numbers", gpu=A100, ideas="complex-numbers", refused=True, precision="fp32", codes="AMP718"),
    case("No GPU with tensor cores", gpu=P100, precision="fp32"),
    case("FP16 on a P100, for speed", gpu=P100, want="fp16", refused=True, precision="fp32", codes="AMP702"),
]

NARROWER = [
    case(
        "FP8 on an A100",
        gpu=A100,
        want="fp8",
        params="7B",
        refused=True,
        precision="bf16",
        codes="AMP702",
        says=r"Ada \(8\.9\)",
    ),
    case(
        "FP8 on an H100 is four times as fast and saves 75% of memory",
        gpu=H100,
        want="fp8",
        params="7B",
        arch="transformer",
        ideas="fp8-doubles",
        refused=True,
        precision="fp8",
        codes="AMP707",
        says=(r"1\.13x to 1\.39x at width 4096", r"0\.9–1\.4× BF16", r"ceiling 2×", r"1979 TFLOP/s dense in FP8"),
    ),
    case(
        "FP8 trains 4x faster",
        gpu=H100,
        ideas="fp8-trains-4x",
        refused=True,
        codes="AMP707",
        says=(r"4x counts sparsity", r"0\.95x to 1\.27x"),
    ),
    case(
        "FP8 saves 75 % of memory",
        gpu=H100,
        ideas="fp8-memory",
        refused=True,
        codes="AMP709",
        says=r"stay in 16 or 32 bits",
    ),
    case(
        "Delayed scaling for an LLM",
        gpu=H100,
        ideas="delayed-scaling",
        refused=False,
        codes="AMP706",
        says=r"current scales\s+read\s+each",
    ),
    case(
        "TF32 is 10x as fast as FP32",
        gpu=A100,
        ideas="tf32-ten-times",
        refused=True,
        codes="AMP713",
        says=(r"156 TFLOP/s in TF32 and 19\.5 in FP32, which is 8x", r"differ by 8\.0x"),
    ),
    case("The loss in FP16", gpu=V100, ideas="loss-in-fp16", refused=True, codes="AMP409", says=r"65536 is inf"),
    case("FP8 for GPT-2 124 M", gpu=H200, want="fp8", params="124M", refused=True, precision="bf16", codes="AMP707"),
    case("FP8 for a ResNet", gpu=H200, want="fp8", arch="cnn", refused=True, codes="AMP707", says=r"linear layers"),
    case("FP8 for 7 B on an H200", gpu=H200, want="fp8", params="7B", refused=False, precision="fp8", codes="AMP707"),
    case("MXFP8 on a B200", gpu="b200", want="mxfp8", refused=True, precision="bf16", codes="AMP722"),
    case("MXFP8 on an H100", gpu=H100, want="mxfp8", refused=True, precision="bf16", codes="AMP702"),
    case(
        "TF32 comes by itself on an A100",
        gpu=A100,
        ideas="tf32-is-on",
        refused=True,
        codes="AMP703",
        says=("off for matmuls", r"8\.0× the FP32 peak", r'set_float32_matmul_precision\("high"\)'),
    ),
    case(
        "TF32 on an RTX 3090", gpu=RTX3090, want="tf32", refused=True, precision="bf16", codes="AMP712", says=r"35\.6"
    ),
    case("TF32 on a V100", gpu=V100, want="tf32", refused=True, precision="fp16", codes="AMP702"),
]

SEEN = [
    case(
        "NaN after a few steps: a lower init_scale?",
        gpu=V100,
        ideas="tune-the-scale",
        refused=True,
        codes="AMP719",
        says=r"six",
    ),
    case(
        "init_scale=131072, backoff_factor=0.75",
        gpu=V100,
        ideas="tune-the-scale",
        says=r"131072 is reached after 2000 clean",
    ),
    case(
        "The scale keeps falling to 1",
        gpu=V100,
        symptom="scale-collapse",
        says=(r"no floor", r"165 overflows in\s+a row", r"Loss NaN, or NaN at scale 1: a bug"),
    ),
    case(
        "Steps are skipped", gpu=V100, symptom="skipped", says=(r"a few at the start", r"one in 20 is not", r"AMP114")
    ),
    case("How is a skip told?", gpu=V100, ideas="scheduler-every-iteration", says=r"if not scaler\.skipped"),
    case(
        "More than 5% of gradients are zero",
        gpu=V100,
        ideas="zeros-mean-underflow",
        refused=True,
        codes="AMP720",
        says=(r"65%", r"at the current scale, and its trend"),
    ),
    case(
        "The loss stands still", gpu=V100, symptom="underflow", says=(r"AMP101", r"AMP601", r"Zeros alone mean nothing")
    ),
    case("The loss jumps", gpu=A100, symptom="spikes", says=(r"gradient norm", r"rollback")),
    case("Worse than in FP32", gpu=A100, symptom="worse", says=(r"AMP611", r"AMP501")),
    case("expected scalar type Half but found Float", gpu=V100, symptom="mismatch", says=(r"no \.half\(\)", r"AMP406")),
    case(
        "Slower than FP32",
        gpu=A100,
        symptom="slow",
        says=(
            r"1\. ampwise bench train.py:make --precisions fp32,bf16",
            r"AMP504",
            r"ampwise align train.py:make",
            r"below 1\.1\s+stay",
            r"larger batch",
        ),
    ),
    case(
        "Out of memory",
        gpu=A100,
        symptom="memory",
        says=(r"ampwise memory", r"16 bytes per parameter", r"checkpointing"),
    ),
    case("backward() inside the block", gpu=A100, ideas="backward-in-autocast", refused=True, codes="AMP111"),
]

TABLES = {
    "pressure": UNDER_PRESSURE,
    "edge": EDGES,
    "excuse": EXCUSES,
    "red flag": RED_FLAGS,
    "pitfall": PITFALLS,
    "format": WHICH_FORMAT,
    "memory": MEMORY,
    "not at all": NOT_AT_ALL,
    "narrower": NARROWER,
    "seen": SEEN,
}
ALL = [row for rows in TABLES.values() for row in rows]


def answer_to(told):
    advice = advise(**told)
    return advice, str(advice)


def test_the_rows():
    assert len(ALL) > 100
    for row in ALL:
        advice, text = answer_to(row.told)
        asked = f"{row.question}\n{text}"
        codes = {finding.rule.code for finding in advice.findings}
        assert row.precision in (None, advice.precision), asked
        assert row.refused in (None, advice.refused), asked
        assert set(row.codes) <= codes, asked
        assert not set(row.silent) & codes, asked
        flat = re.sub(r"\s+", " ", text)
        for pattern in row.says:
            assert re.search(pattern, text) or re.search(pattern, flat), f"{pattern}\n{asked}"
        assert_it_has_none_of_what_guides_get_wrong(advice, text)
        assert_a_no_comes_first(advice, text)


def assert_it_has_none_of_what_guides_get_wrong(advice, text):
    everything = " ".join([text, str(advice.as_dict())])
    found = [pattern for pattern in WRONG if re.search(pattern, everything, re.IGNORECASE)]
    assert not found, text


def assert_a_no_comes_first(advice, text):
    first, second = text.split("\n", 1)
    assert first.startswith("NO: ") == advice.refused
    assert re.search(r"^Train ", text, re.MULTILINE)
    assert second


def test_every_idea_and_symptom_has_its_row():
    asked = [row.told for row in ALL]
    ideas = {idea for told in asked for idea in _listed(told.get("ideas", ()))}
    assert ideas == set(IDEAS)
    assert {told.get("symptom") for told in asked} - {None} == set(SYMPTOMS)


def _listed(ideas):
    return [ideas] if isinstance(ideas, str) else list(ideas)


def test_units():
    for gpu, fmt, has in HARDWARE:
        advice, text = answer_to({"gpu": gpu, "want": fmt, "params": "7B", "arch": "transformer"})
        assert advice.refused == (not has), text
        assert (advice.precision == fmt) == has, text


@for_each(("params", "gpu", "low", "high"), SIZES)
def test_speed_up_by_size(params, gpu, low, high):
    advice = advise(gpu=gpu, params=params, arch="transformer", want="fp16" if gpu == V100 else "bf16")
    assert advice.speedup is not None
    assert (round(advice.speedup.low, 1), round(advice.speedup.high, 1)) == (low, high)
    assert advice.speedup_why.startswith("derived: ceiling")


@for_each(("speedup", "verdict", "precision"), MEASURED)
def test_the_matrix_of_measured_speed_ups(speedup, verdict, precision):
    advice = advise(gpu=A100, params="124M", arch="transformer", measured=speedup)
    assert advice.precision == precision
    (reason,) = [reason for reason in advice.reasons if reason.basis == "measured by you"]
    expected = {"stay": "not worth it", "optional": "optional", "use": "use it", "definitely": "definitely"}[verdict]
    assert expected in reason.text
    wanted = advise(gpu=A100, params="124M", want="bf16", measured=speedup)
    assert wanted.refused == (verdict == "stay")
