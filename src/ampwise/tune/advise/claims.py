"""What people say about mixed precision, and what is true: one row per claim.

To add one, add a row; tests check that its rule and its command exist. A row without a ``fact`` is answered by
``check_choice`` of its rule, which computes it from the device and the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampwise.finding import Finding
from ampwise.finding.registry import find_rule, run_checks
from ampwise.numbers.formats import find_scalar_format

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

# Text with fields such as {choice.make} and {want}, or a function of the choice; "" or None for no text.
Text = str | Callable[["PrecisionChoice"], str | None]
Condition = Callable[["PrecisionChoice"], object]

HALVES = ("fp16", "bf16")
CHECK, RUN = "ampwise check train.py", "ampwise run train.py"
COMPARE = "ampwise bench {choice.make}"
DIGITS = {
    "16-bit": "2 or 3 decimal digits",
    "TF32": "3 decimal digits in matmuls",
    "FP32": "7 digits, without the speed of tensor cores",
}
COMPARE_TF32 = (f"{COMPARE} --precisions fp32,tf32", "how far apart the losses are")
GUESSING = {"guessing": "days, and the bug stays", "checking": "a second for the source, minutes for the run"}
SIZES = {
    "odd sizes": "correct results from slower kernels or padded copies",
    "multiples of 8": "50257 tokens become 50264 or, better, 50304; a few unused rows",
    "multiples of 64": "preferred on an A100; more padding, seldom more speed",
}
OF_SIZES = "tensor cores load 16 bytes at a time: 8 elements of FP16 or BF16, 16 of FP8"
ALIGN = "ampwise align {choice.make}{choice.elsewhere}"
MISALIGNED = "which layers are misaligned at run time, and what each costs"
LOSS_COSTS = {
    "as it is": "inf from exp, then NaN, on the first batch with a large score",
    "the whole loss in FP32": "little: the loss is a small part of a step",
    "only the exp in FP32": "more lines, and the next operation that overflows is missed",
    "cross_entropy, log_softmax, logsumexp": "nothing: they already subtract the maximum",
}
KEEP_LOSS = 'Put @ampwise.keep("fp32") on the loss function: it casts the inputs and disables autocast inside.'
UNSTABLE = "the expressions that overflow or cancel (AMP401), each with the function to use instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row: what is said, under the names of its ideas, and the answer."""

    said: Mapping[str, str] = field(default_factory=dict)  # slogans by idea; without any, ``when`` decides alone
    rule: str
    answer: Text = "no"  # or "careful": possible, at a price
    when: Condition | None = None  # where the answer holds for these ideas, if not everywhere
    also: Condition | None = None  # where it holds although none of the ideas was named
    fact: Text = ""
    costs: Mapping[str, Text] = field(default_factory=dict)  # by option
    show: tuple[Text, Text] = ("", "")  # a command, and what it shows
    do: Text = ""  # what to do instead; the rule's fix by default
    refuses: bool = False  # a no is a no to the precision that is wanted

    def finding(self, choice: PrecisionChoice) -> Finding | None:
        """Return the answer; None if nothing was asked that this row answers."""
        named = (not self.said or choice.proposes(*self.said)) and (self.when is None or self.when(choice))
        if not self.fact or not (named or (self.also is not None and self.also(choice))):
            return None

        def filled(text: Text) -> str:
            if isinstance(text, str):
                return text.format(choice=choice, want=(choice.want or "").upper())
            return text(choice) or ""

        answer = filled(self.answer)
        return choice.finding(
            answer,
            _rule(self.rule),
            filled(self.fact),
            costs={filled(option): filled(cost) for option, cost in self.costs.items()},
            show=(filled(self.show[0]), filled(self.show[1])),
            do=filled(self.do) or None,
            refuses=choice.want if self.refuses and answer == "no" and choice.want != "fp32" else None,
        )


_rule = functools.cache(find_rule)


def objections(choice: PrecisionChoice) -> list[Finding]:
    """Return everything that speaks against what is planned or proposed: by the rules' own checks, and the claims."""
    return run_checks(choice) + [found for claim in CLAIMS if (found := claim.finding(choice)) is not None]


def _with_loss_scale(choice: PrecisionChoice) -> bool:
    return choice.want != "bf16"


def _speed_given_up(choice: PrecisionChoice) -> str:
    gain = None if choice.half is None else choice.gain(choice.half)
    expected = "" if gain is None else f" ({gain.text} {gain.over.upper()}, derived)"
    return f"the speed of 16-bit{expected}, and the cause stays unknown"


def _reputation(choice: PrecisionChoice) -> str:
    target = choice.target
    peak, other = target.peak("bf16"), target.peak("fp16")
    if target.emulates_bf16:
        old = {
            True: "has FP16 tensor cores but none for BF16",
            False: "has tensor cores for neither FP16 nor BF16",
            None: "has no BF16 tensor cores",
        }
        return f"newer is not better: {target.title} {old[target.has('fp16')]}"
    if target.has("bf16") and peak is not None and other is not None and peak.value == other.value:
        return (
            f"newer is not faster: {target.title} runs FP16 and BF16 at the same rate, {peak.show(1e12, 0)} TFLOP/s "
            "dense; they differ in range (65504 and 3.4e38) and significant bits (11 and 8)"
        )
    if target.has("bf16"):
        return (
            f"being newer is no reason, but {target.title} has BF16 tensor cores, which is one; it costs 3 of FP16's "
            "11 bits"
        )
    return "being newer is no reason: the device decides, and NVIDIA has had BF16 tensor cores since Ampere (8.0)"


def _instead_of_reputation(choice: PrecisionChoice) -> str:
    if choice.half is None:
        return ""
    if choice.target.half == "bf16":
        return "Use BF16 here for its range; where precision matters more, FP16 with a GradScaler is just as fast."
    return "Use FP16 with a GradScaler here: that is what the tensor cores support."


def _one_half(choice: PrecisionChoice) -> str:
    if choice.half is not None:
        return f"Use one 16-bit dtype: {choice.half.upper()}{' with a GradScaler' if choice.half == 'fp16' else ''}."
    return "Use neither here." if choice.target.known or choice.stays_wide else ""


def _assumed_gain(choice: PrecisionChoice) -> str:
    gain = choice.gain(choice.half or "bf16")
    expected = "" if gain is None else f" ({gain.text} expected here, derived)"
    return (
        f"it does not always help{expected}: small models, slow data loaders and misaligned sizes gain nothing, and "
        "measuring takes five minutes"
    )


def _small_gain(choice: PrecisionChoice) -> str:
    want = choice.want or ""
    gain = choice.gain(want)
    expected = f"{'little' if gain is None else f'{gain.text} at best'} from {want.upper()}"
    return f"{choice.model.title} gains {expected}: its time goes into kernel launches, not matmuls"


def _manual_scale(choice: PrecisionChoice) -> str:
    factor = choice.factor
    if choice.want == "bf16":
        return (
            f"BF16 has the range of FP32: multiplying the loss by {factor:g} gains nothing, and nothing divides it "
            "out again"
        )
    fp16 = find_scalar_format("fp16")
    flushed = 2.0 ** (fp16.flush_exponent or 0)
    limit = fp16.max / factor
    return (
        f"a fixed factor of {factor:g} does not adapt: gradients above {limit:{',.0f' if limit >= 1000 else '.4g'}} "
        f"become inf and are applied, and gradients below {flushed / factor:.1e} become zero (a GradScaler starts at "
        f"65536: {flushed / 65536:.1e})"
    )


def _instead_of_manual_scale(choice: PrecisionChoice) -> str:
    if choice.half == "bf16":
        return "Drop the scale: neither BF16 nor FP32 needs one; a GradScaler is for FP16."
    if choice.half is None and choice.target.known:
        return "Drop the scale: FP32 needs none."
    return "In FP16 use torch.amp.GradScaler or ampwise.GradScaler; FP32 needs no scale."


def _tf32_gain(choice: PrecisionChoice) -> str:
    ratio = choice.target.ratio("tf32", "fp32")
    faster = "" if ratio is None else f"; {ratio.show(digits=1)}× the FP32 peak, for matmuls that stay in FP32"
    return f"10 mantissa bits instead of 23{faster}"


def _tf32_peaks(choice: PrecisionChoice) -> str:
    ratio = choice.target.ratio("tf32", "fp32")
    here = "" if ratio is None else f"; on {choice.target.title} they differ by {ratio.show(digits=1)}x"
    return f"an A100's dense peaks are 156 TFLOP/s in TF32 and 19.5 in FP32, which is 8x, for matmuls only{here}"


def _memory(choice: PrecisionChoice) -> str:
    state = f": {choice.model.state} for {choice.model.size}" if choice.model.size else ""
    return (
        f"weights, gradients and Adam's moments stay at 16 bytes per parameter under autocast{state}; only saved "
        "activations shrink"
    )


CLAIMS: tuple[Claim, ...] = (
    # remedies
    Claim(
        said={
            "autocast-off": "there are NaNs: just turn autocast off",
            "drop-mixed-precision": "it may be the precision: drop mixed precision",
        },
        rule="autocast-off-as-a-cure",
        fact="turning autocast off hides the cause: a NaN from the data, the learning rate or the loss remains, and a "
        "NaN from FP16 needs one module in FP32, not all of them",
        costs={
            "off permanently": _speed_given_up,
            "off for one run, as a test": "two minutes; if it is still NaN, precision is not the cause",
            "replaying the bad step": "the time of about ten steps; reports the operation, its line and the fix",
        },
        show=(
            "ampwise run --capsule capsules train.py, then ampwise replay capsules/step-000012 "
            "train.py:make --precision fp32",
            "whether the same step is finite in FP32, and which operation went bad first",
        ),
    ),
    Claim(
        said={"tried-already": "we tried that, so it is not that"},
        rule="cause-guessed",
        fact="having tried it does not mean it was done right: a scaler that never updates, or clipping before "
        "unscale_, fails too",
        costs=GUESSING,
        show=(CHECK, "whether it was done right, without running anything"),
    ),
    Claim(
        said={"torch-bug": "there is no speedup: it must be a PyTorch bug"},
        rule="cause-guessed",
        fact="a missing speedup is seldom a torch bug: small models, sizes that are not multiples of 8, casts, waiting "
        "for data, or TF32 that was already on",
        costs=GUESSING,
        show=(COMPARE, "the speedup, where the time goes, and why"),
    ),
    Claim(
        said={"just-works": "it should just work, there is nothing to check"},
        rule="cause-guessed",
        fact="most mixed-precision mistakes raise no error: clipped scaled gradients, lost updates and underflowed "
        "gradients only make training worse",
        costs=GUESSING,
        show=(RUN, "skipped steps, lost gradients, loss scale and gradient norms of the run as it is"),
    ),
    Claim(
        said={"tune-the-scale": "another init_scale or backoff_factor will fix it"},
        rule="scale-tuned-blind",
        fact=lambda choice: (
            "BF16 has no loss scale to tune"
            if choice.want == "bf16"
            else "the scale adapts by itself: starting at 1024 instead of 65536 saves at most six skipped steps, "
            "131072 is reached after 2000 clean steps anyway, and a NaN from the forward pass is the same at every "
            "scale"
        ),
        costs={
            "other settings, by guesswork": "skipped steps or lost gradients, and the cause remains",
            "settings that a run suggests": "one run of a few hundred steps",
        },
        show=("ampwise run -o RUN train.py, then ampwise report RUN", "whether other settings would help, and which"),
    ),
    Claim(
        said={"zeros-mean-underflow": "more than 5% of the gradients are zero, so they underflow"},
        rule="zeros-taken-for-underflow",
        fact="zero gradients are normal (65% in a healthy FP32 run, 98.7% in embedding rows): what matters is what "
        "FP16 loses at the current scale, and its trend",
        costs={
            "an alarm on zeros": "false alarms on every model with an embedding or ReLU",
            "the fraction that is lost": "one pass over the gradients",
        },
        show=(RUN, "the fraction lost per layer, and whether it rises (AMP601, AMP602)"),
    ),
    # which precision
    Claim(
        said={"bf16-is-newer": "BF16 is newer, so it is better", "senior-says": "an expert recommended it"},
        rule="precision-by-reputation",
        fact=_reputation,
        costs={
            "BF16": lambda choice: (
                "8 significant bits, no loss scale" + ("; emulated here" if choice.target.emulates_bf16 else "")
            ),
            "FP16": "11 significant bits, a GradScaler, overflow at 65504",
            "checking": "a second for the device, five minutes for both",
        },
        show=(COMPARE + " --precisions fp32,fp16,bf16", "which is faster, and whether the losses agree"),
        do=_instead_of_reputation,
    ),
    Claim(said={"bf16-checkpoint": "weights trained in BF16 will work in FP16"}, rule="fp16-out-of-range"),
    Claim(
        said={"fp8-doubles": "FP8 is twice as fast as BF16", "fp8-trains-4x": "FP8 trains 4x faster"},
        rule="fp8-gains-little",
    ),
    Claim(
        said={"fp8-memory": "FP8 saves 75 % of memory"},
        rule="memory-wont-halve",
        fact="weights, gradients and optimizer state stay in 16 or 32 bits; only saved inputs shrink",
        costs={
            "FP8": "8 % less memory for a GPT of width 4096, measured on one H200",
            "an 8-bit optimizer": "saves 6 of Adam's 8 bytes per parameter",
            "FSDP over n ranks": "divides the state by n",
        },
        show=("{choice.memory_command}", "state, activations and casted copies, in every precision"),
    ),
    Claim(
        said={"delayed-scaling": "delayed scaling is recommended for LLMs"},
        rule="precision-by-reputation",
        answer="careful",
        fact="delayed scales lag: what grows suddenly saturates; current scales read each tensor first",
        costs={
            "delayed": "a history to save and restore, and saturation after a jump",
            "current": "one read of each tensor before it is cast",
        },
        show=(COMPARE, "speed and loss"),
        do="Start with current scales.",
    ),
    Claim(
        said={"tf32-ten-times": "TF32 is 10x FP32 on an A100"},
        rule="gain-not-measured",
        fact=_tf32_peaks,
        costs={"quoting peaks": "a promise that no step keeps", "measuring": "five minutes"},
        show=(COMPARE, "the speedup of whole steps"),
        do="Quote a measured step.",
    ),
    Claim(
        said={"tf32-is-on": "TF32 is on by default"},
        rule="tf32-disabled-on-device",
        fact="TF32 is on by default for cuDNN convolutions but off for matmuls: a transformer does not benefit from it",
        costs={
            "the default": "full FP32 matmuls on the regular cores",
            'set_float32_matmul_precision("high")': _tf32_gain,
        },
        show=("ampwise gpu", "the current settings, and what the device supports"),
        do=lambda choice: (
            f"{choice.target.title} has no TF32 tensor cores: nothing to switch on."
            if choice.target.has("tf32") is False
            else ""
        ),
    ),
    Claim(
        said={"mix-halves": "FP16 in one part, BF16 in another"},
        rule="mixed-half-dtypes",
        fact="a step that mixes FP16 and BF16 has the range of FP16 and the precision of BF16, and still needs a "
        "GradScaler",
        costs={
            "both": "a cast at each boundary, overflow at 65504, and 8 significant bits",
            "one of them, and FP32 where needed": "Policy(…).keep('fp32', name) for the module that needs more",
        },
        show=(RUN, "the input and output formats of each module"),
        do=_one_half,
    ),
    Claim(
        said={"exact-numbers": "the numbers must be accurate to many digits"},
        rule="half-for-exact-work",
        fact="BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits, which is not exact",
        costs=DIGITS,
        show=COMPARE_TF32,
        refuses=True,
    ),
    Claim(
        said={"complex-numbers": "the model computes with complex numbers"},
        rule="half-for-exact-work",
        fact="autocast does not convert complex tensors: where they do the work there is no speedup",
        costs=DIGITS,
        show=COMPARE_TF32,
        refuses=True,
    ),
    Claim(
        rule="format-not-ready",
        when=lambda choice: (
            (
                choice.want in ("mxfp8", "mxfp4", "nvfp4")
                or (choice.want == "fp8" and choice.target.kind not in ("cuda", None))
            )
            and choice.target.has(choice.want) is not False
        ),
        fact="training in {want} on {choice.target.name} is only a prototype in torch's libraries, or needs the "
        "vendor's own",
        costs={"{want}": "weeks of experiments", "BF16": "none"},
        show=("ampwise formats {choice.want}", "the range and precision of the format, next to the others"),
        refuses=True,
    ),
    Claim(
        rule="bf16-cancels",
        answer="careful",
        when=lambda choice: choice.model.kind == "scorer" and choice.half and choice.want in (None, *HALVES),
        fact=lambda choice: (
            f"opposed scores are subtracted: with {8 if choice.half == 'bf16' else 11} significant bits, a small "
            "difference of large scores is rounding error"
        ),
        costs={
            "heads in FP32": "almost nothing: they are the last and smallest layers",
            "all in TF32": "one line, and part of the speed",
            "as it is": "noisy gradients where the scores nearly agree",
        },
        show=(COMPARE + " --precisions fp32,{choice.half}", "whether the losses agree within rounding"),
    ),
    # whether to use mixed precision
    Claim(
        said={
            "always-helps": "mixed precision makes everything faster",
            "skip-measuring": "no time to measure: assume that it helps",
        },
        rule="gain-not-measured",
        fact=_assumed_gain,
        costs={"assuming": "code to maintain, for a speedup that may not exist", "measuring": "five minutes"},
        show=(
            lambda choice: f"ampwise bench {choice.make} --precisions fp32,{choice.half or 'bf16'}",
            "the speedup, and the reason when it is low",
        ),
    ),
    Claim(
        rule="no-gain-measured",
        answer=lambda choice: "careful" if choice.symptom == "memory" else "no",
        when=lambda choice: choice.want in HALVES and choice.no_gain_measured,
        fact=lambda choice: (
            f"the measured {choice.measured:.2f}x over FP32 is no gain"
            + ("; what remains is the activation memory saved" if choice.symptom == "memory" else "")
        ),
        costs={
            "{want}": lambda choice: f"rounding, casts{', a loss scale' if choice.want == 'fp16' else ''}",
            "FP32": "nothing",
        },
        show=(COMPARE, "the cause: a small model, misaligned sizes, casts, waiting for data"),
        refuses=True,
    ),
    Claim(
        rule="model-too-small-to-gain",
        answer="careful",
        when=lambda choice: choice.want in HALVES and choice.model.small and choice.measured is None,
        fact=_small_gain,
        costs={
            "{want}": lambda choice: f"casts{' and a GradScaler' if choice.want == 'fp16' else ''}; may even be slower",
            "FP32": "nothing",
            "a larger batch, torch.compile, a CUDA graph": "what speeds up small models",
        },
        show=(COMPARE + " --precisions fp32,{choice.want}", "the speedup: below 1.1x stay in FP32"),
    ),
    Claim(
        said={"halves-memory": "mixed precision halves the memory"},
        rule="memory-wont-halve",
        answer=lambda choice: "no" if choice.proposes("halves-memory") else "careful",
        also=lambda choice: choice.symptom == "memory",
        fact=_memory,
        costs={
            "autocast": "saves 0 to half of the activations, depending on model and batch; adds up to 2 bytes per "
            "parameter for casted copies",
            "activation checkpointing": "saves most activations, for one more forward pass",
            "bf16-pure": "saves 6 of 16 bytes per parameter; every update has BF16 precision, with stochastic rounding",
            "an 8-bit optimizer": "saves 6 of Adam's 8 bytes per parameter",
            "FSDP over n ranks": "divides the state by n, for communication between ranks",
        },
        show=("{choice.memory_command}", "state, activations and casted copies, in every precision"),
    ),
    Claim(
        said={"half-weights": "model.half() or model.bfloat16(), for the memory"},
        rule="half-params-with-scaler",
        when=lambda choice: choice.half != "bf16",
        fact="FP16 weights lose every update below about 1/2048 of the weight, Adam's eps of 1e-8 is zero in FP16, and "
        "a GradScaler rejects them: Attempting to unscale FP16 gradients",
        costs={
            "model.half()": "weights that stop changing, or NaN after one Adam step; half the memory for weights and "
            "gradients",
            "autocast over FP32 weights": "4 bytes per weight; the matmuls are just as fast",
        },
        show=(CHECK, "whether an FP16 model is used with a scaler or Adam (AMP304, AMP305)"),
        do=lambda choice: "" if choice.half == "fp16" else "Leave the model in FP32; autocast casts what it needs.",
    ),
    Claim(
        said={"half-weights": "model.half() or model.bfloat16(), for the memory"},
        rule="pure-bf16-plain-optimizer",
        when=lambda choice: choice.half == "bf16",
        fact="BF16 weights have 8 significant bits: an update below about 1/512 of the weight is rounded away, and "
        "most updates are that small",
        costs={
            "model.bfloat16()": "2 bytes per weight, and training that stalls without an error",
            "autocast over FP32 weights": "4 bytes per weight; the matmuls are just as fast",
            "stochastic rounding": "ampwise.Engine(precision='bf16-pure'), or torchao's, make BF16 weights work",
        },
        show=(RUN, "the fraction of updates that change no weight (AMP611)"),
    ),
    Claim(said={"too-complex": "mixed precision is too complex"}, rule="tensor-cores-left-idle"),
    Claim(
        said={"odd-sizes": "sizes such as 127 or 50257 do not matter"},
        rule="misaligned-dims",
        answer="careful",
        fact=f"{OF_SIZES}; other sizes run slower, with the same results",
        costs=SIZES,
        show=(ALIGN, MISALIGNED),
    ),
    Claim(
        said={"multiples-of-16": "BF16 needs sizes that are multiples of 16"},
        rule="misaligned-dims",
        fact=f"{OF_SIZES}; only FP8 matmuls require it, for 16-bit types it is only a matter of speed",
        costs=SIZES,
        show=(ALIGN, MISALIGNED),
    ),
    # the step
    Claim(
        said={"manual-scale": "the GradScaler is complicated: multiply the loss by 1000"},
        rule="manual-loss-scale",
        also=lambda choice: choice.scales("manual"),
        fact=_manual_scale,
        costs={
            "fixed factor of {choice.factor:g}": "one overflow puts NaN into the weights; clipping needs a division "
            "first, which is easy to forget",
            "GradScaler": "four lines; a few of the first steps are skipped, later about one in 2000",
            "BF16, where supported": "no scale at all",
        },
        show=(RUN, "the fraction of gradients lost in FP16 at their current scale"),
        do=_instead_of_manual_scale,
    ),
    Claim(
        said={"no-scaler": "FP16 works without a GradScaler"},
        rule="fp16-no-scaler",
        when=_with_loss_scale,
        also=lambda choice: choice.scales("none") and choice.half == "fp16",
        fact="FP16 rounds values of 2⁻²⁵ (3e-8) and below to zero, and many gradients are that small: layers stop "
        "learning while the loss still looks reasonable",
        costs={
            "FP16 without a scaler": "no error and no NaN, but learning stops layer by layer",
            "FP16 with a scaler": "four lines, and a few skipped steps at the start",
            "BF16": lambda choice: (
                "no scaler, 8 significant bits instead of 11"
                + ("; emulated on this device" if choice.target.emulates_bf16 else "")
            ),
        },
        show=(RUN, "the fraction of gradients lost in FP16, per layer"),
        do=lambda choice: (
            "In FP16 scale the loss with `torch.amp.GradScaler`."
            if choice.target.has("bf16") is False or choice.stays_wide
            else ""
        ),
    ),
    Claim(
        said={"scaler-with-bf16": "a GradScaler for BF16, to be safe"},
        rule="scaler-with-bf16",
        also=lambda choice: choice.scales("dynamic") and choice.want == "bf16",
        fact="BF16 has the exponent range of FP32: nothing underflows that FP32 would keep, so loss scaling has no "
        "effect",
        costs={
            "BF16 with a GradScaler": "a pass over all gradients per step, state to save and restore, and a NaN that "
            "passes for one more skipped step",
            "BF16 without": "nothing; to guard against NaN, check the gradient norm, as the code below does",
        },
        show=(COMPARE + " --precisions fp32,bf16", "that the losses agree without a loss scale"),
        do=lambda choice: (
            "Use the scaler for FP16 only; in BF16 it has nothing to do." if choice.half == "fp16" else ""
        ),
    ),
    Claim(
        said={"simple-loop": "the short loop is enough: no accumulation, no clipping, no ranks"},
        rule="simplified-step",
        fact="loops break on clipping, accumulation, schedulers and multiple ranks, each without an error; whatever is "
        "left out gets added later, one piece at a time",
        costs={
            "the short loop": "correct until something is added to it",
            "the complete loop": "a dozen lines",
            "Engine": "three lines, everything included",
        },
        show=(CHECK, "what the loop is missing"),
    ),
    Claim(
        said={"clip-after-backward": "with a GradScaler, clip right after backward()"},
        rule="clip-scaled-grads",
        when=_with_loss_scale,
        fact="after backward() gradients are still multiplied by the loss scale, initially 65536: clipping to 1.0 "
        "leaves an unscaled norm of 1/65536, and training stalls without an error",
        costs={
            "clip immediately": "updates tens of thousands of times too small",
            "scaler.unscale_(optimizer) first": "one line; scaler.step then does not unscale again",
        },
        show=(CHECK, "every clip of scaled gradients; --fix repairs them"),
    ),
    Claim(
        said={"norms-after-backward": "with a GradScaler, look at gradients right after backward()"},
        rule="grad-inspect-before-unscale",
        when=_with_loss_scale,
        fact="a norm read right after backward() is the unscaled norm times the loss scale, initially 65536, and jumps "
        "whenever the scale changes",
        costs={
            "reading it there": "meaningless numbers, and alarms whenever the scale changes",
            "scaler.unscale_(optimizer) first": "one line per step",
        },
        show=(RUN, "unscaled gradients per parameter, without extra code"),
    ),
    Claim(
        said={"update-every-microbatch": "scaler.update() on every micro-batch"},
        rule="update-per-microbatch",
        when=_with_loss_scale,
        fact="all micro-batches of an accumulation window must use one scale: update() may change it, and the sum then "
        "mixes gradients of different scales, which no division can correct",
        costs={
            "update() with each micro-batch": "wrong gradients whenever the scale changes, or an AssertionError",
            "once per window": "backward on loss / n per micro-batch; unscale_, clip, step, update once",
        },
        show=(CHECK, "AMP104 to AMP106: what is called too often per window"),
    ),
    Claim(
        said={"one-scaler-for-all-ranks": "one GradScaler, or different scales, for the ranks of DDP"},
        rule="shared-scaler",
        when=_with_loss_scale,
        fact="each process has its own GradScaler and all start at the same scale: DDP sums gradients before they are "
        "checked, so every rank sees the same inf and the scales stay equal; ranks that start at 65536 and 32768 "
        "drift apart",
        costs={
            "one scaler passed to all": "copies that diverge, or threads that corrupt its state",
            "different scales": "gradients averaged at different scales: wrong on every rank",
            "one per rank, same initial scale": "nothing; FSDP2 works with the plain torch.amp.GradScaler too",
        },
        show=(
            "ampwise run -o RUN -m torch.distributed.run --nproc-per-node 2 train.py",
            "whether the scales differ (AMP207)",
        ),
    ),
    Claim(
        said={"scheduler-every-iteration": "step the scheduler whatever the scaler did"},
        rule="sched-step-unconditional",
        when=_with_loss_scale,
        fact="a skipped step changes no weight, but the schedule moves on: each skip shortens the warm-up",
        costs={
            "every iteration": "a few warm-up steps where skips are rare, more while the scale is still falling",
            "only on steps taken": "`if not scaler.skipped` with ampwise.GradScaler; comparing get_scale() before and "
            "after syncs with the GPU twice; a per-epoch schedule is not affected",
        },
        show=(RUN, "how many steps were skipped, and whether the schedule moved (AMP114)"),
    ),
    Claim(
        said={"backward-in-autocast": "backward() inside the autocast block"},
        rule="backward-in-autocast",
        fact="each backward operation runs in the dtype of its forward operation: autocast around backward() only adds "
        "casts in custom functions and hooks that were not written for them",
        costs={
            "inside": "wrong dtypes in custom functions and double backward",
            "outside": "one indentation level less",
        },
        show=(CHECK, "every backward() inside the block (AMP111)"),
    ),
    Claim(
        said={"eval-in-fp32": "validate without autocast"},
        rule="eval-no-autocast",
        answer="careful",
        fact="validating in FP32 is not wrong, but it is slower, takes more memory, and measures a different model "
        "from the 16-bit one that will be deployed",
        costs={
            "without autocast": "time and memory, and an FP16 overflow that appears only in deployment",
            "with autocast": "one line around the loop; no GradScaler",
        },
        show=(f"{CHECK} --select AMP501", "the evaluation loops without autocast"),
    ),
    # custom losses and functions
    Claim(
        said={"loss-in-fp16": "compute the loss in FP16"},
        rule="half-logits-loss",
        fact="FP16 has steps of 0.008 near 10, and the loss's gradient is the loss scale: 65536 is inf",
        costs={
            "the loss in FP16": "skipped steps until the scale is 32768, and a coarse loss",
            "scores in FP32": "one cast; autocast does it on CUDA for cross_entropy and most losses",
        },
        show=(CHECK, "losses of 16-bit scores outside of the autocast block (AMP409)"),
    ),
    Claim(
        said={"exp-in-loss": "exp and log in a custom loss under autocast"},
        rule="unstable-op-autocast",
        answer="careful",
        fact=lambda choice: (
            "CPU autocast leaves exp, log, sum and softmax in 16-bit: exp is inf from 11.09 up in FP16 and from 88.7 "
            "up in BF16 and FP32, and the log of a value that rounded to zero is -inf"
            if choice.target.kind == "cpu"
            else "CUDA autocast runs exp, log, sum and softmax in FP32, but sigmoid, sqrt, mean and matmuls in 16-bit; "
            "exp is inf from 88.7 up in FP32 and BF16, and from 11.09 up on FP16 tensors with autocast off"
        ),
        costs=LOSS_COSTS,
        show=(CHECK, UNSTABLE),
        do=KEEP_LOSS,
    ),
    Claim(
        said={"rewrite-loss": "the loss is custom: rewrite all of it"},
        rule="unstable-op-autocast",
        fact="the loss need not be rewritten: one line keeps the function in FP32, and only what overflows in FP32 too "
        "is actually wrong",
        costs={"rewriting it": "an afternoon, and new bugs", **LOSS_COSTS},
        show=(CHECK, UNSTABLE),
        do=KEEP_LOSS,
    ),
    Claim(
        said={"autocast-off-for-loss": "autocast(enabled=False) around the loss is enough"},
        rule="autocast-disabled-without-cast",
        fact="disabling autocast does not cast anything: scores that arrive in 16-bit stay in 16-bit, and exp, log and "
        "sum, which autocast would run in FP32, now run in 16-bit too",
        costs={
            "enabled=False alone": "worse than leaving it on",
            "enabled=False and .float()": 'two lines: `with torch.autocast("{choice.target.device_type}", '
            "enabled=False):` and `scores = scores.float()`; the decorator in torch.cuda.amp is deprecated and CUDA "
            "only",
            '@ampwise.keep("fp32")': "one line that does both",
        },
        show=(CHECK, "blocks without a cast (AMP406), deprecated names (AMP310)"),
    ),
    Claim(
        said={"custom-function": "a custom autograd.Function, unchanged"},
        rule="custom-function-no-custom-fwd",
        answer="careful",
        fact="the forward of an autograd.Function runs under autocast but its backward does not: a matmul there may "
        "combine FP32 weights with 16-bit gradients, which raises an error",
        costs={
            "as it is": "fine for elementwise code; an error, or a second dtype, where it has matmuls",
            "decorated": '`@torch.amp.custom_fwd(device_type="{choice.target.device_type}")` and `custom_bwd`; '
            "`cast_inputs=torch.float32` where it needs FP32",
        },
        show=(f"{CHECK} --select AMP405", "the functions with matmuls that lack the decorators"),
    ),
    Claim(
        said={"no-checkpointing": "activation checkpointing does not work with autocast"},
        rule="checkpointing-avoided",
        fact="checkpointing works with autocast: the recomputation runs under the autocast setting of the first pass",
        costs={
            "without": "all activations are kept",
            "with": "one more forward pass of the checkpointed part",
        },
        show=("{choice.memory_command} --checkpointing", "the memory it saves"),
    ),
)

IDEAS: dict[str, str] = {idea: said for claim in CLAIMS for idea, said in claim.said.items()}
