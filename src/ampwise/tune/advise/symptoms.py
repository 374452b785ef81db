"""What goes wrong, and what to do about it, in order: each step takes minutes and tells which way to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

CHECK, RUN = "ampwise check train.py", "ampwise run train.py"
CAPSULE = "ampwise run --capsule capsules train.py"
REPLAY = "ampwise replay capsules/step-000012 train.py:make --precision fp32"
COMPARE = "ampwise bench {choice.make}{precisions}"

SYMPTOMS: dict[str, str] = {
    "nan": "the loss is NaN or inf",
    "scale-collapse": "the loss scale keeps falling",
    "skipped": "the scaler skips steps",
    "underflow": "the loss stops improving, gradients vanish",
    "spikes": "the loss jumps",
    "worse": "it trains, but ends up worse than FP32",
    "mismatch": "an error about Half and Float, or about unscaling FP16 gradients",
    "slow": "little or no speedup",
    "memory": "out of memory, or no memory saved",
}

# By symptom: (command or None, what it tells or what to do), with fields as in ``triage``.
STEPS: dict[str, tuple[tuple[str | None, str], ...]] = {
    "nan": (
        (CHECK, "mistakes that cause NaN: masks and eps beyond FP16, BCELoss, a step past the scaler; takes seconds"),
        (
            CAPSULE,
            "is the loss not finite, or only gradients at too high a scale? If they are finite again at a lower "
            "scale, that is normal: leave it",
        ),
        (REPLAY, "finite there: it is the precision. NaN there, too: the batch, the learning rate or the loss"),
        (None, "{keep}"),
    ),
    "scale-collapse": (
        (
            CAPSULE,
            "loss finite, and gradients finite again at a lower scale: normal. Loss NaN, or NaN at scale 1: a bug. "
            "torch's scale has no floor: after 165 overflows in a row it is 0, and the next step ruins the weights",
        ),
        (REPLAY, "the operation that is not finite at any scale, its line, and the fix"),
        (None, "from ampwise import GradScaler: it stops at a floor, names the layers, and protects the weights"),
        (None, "another init_scale fixes nothing: starting at 1024 saves at most six skipped steps"),
    ),
    "skipped": (
        (RUN, "how many, and when: a few at the start, and one after each growth, are normal; one in 20 is not"),
        (CHECK, "whether the scheduler steps on skipped steps (AMP114), and whether the scaler is updated (AMP105)"),
        (REPLAY, "with --capsule above: which operation makes a bad step that a lower scale does not fix"),
    ),
    "underflow": (
        (CHECK, "clipped scaled gradients (AMP101) or FP16 without a scaler (AMP301): training stalls, silently"),
        (
            RUN,
            "the share that FP16 flushes at the current scale, by layer (AMP601, AMP602). Zeros alone mean nothing: a "
            "healthy FP32 run had 65% of them",
        ),
        (None, "weights in BF16 or FP16: updates are rounded away (AMP611); keep weights in FP32"),
        (None, "if the loss plateaus in FP32, too, it is not the precision; check the learning rate"),
    ),
    "spikes": (
        (RUN, "what came first: the gradient norm, a skipped step, or the loss alone (AMP610)"),
        (COMPARE, "do losses agree within rounding? Then it is the data or the learning rate, not the precision"),
        (None, 'ampwise.Guard(engine, "checkpoints", ladder=ampwise.Ladder(on_spike="rollback")) rolls back'),
    ),
    "worse": (
        (CHECK, "mistakes that silently train worse: the order of clip and unscale_, accumulation, the scheduler"),
        (RUN, "lost gradients (AMP601), updates that change no weight (AMP611), formats of each module"),
        ("ampwise report FP32_RUN HALF_RUN", "where two recorded runs diverge, side by side"),
        (None, "validate under the same autocast, or you compare two different models (AMP501)"),
    ),
    "mismatch": (
        (
            CHECK,
            "model.half() beside a scaler (AMP304: Attempting to unscale FP16 gradients), autocast off without "
            ".float() (AMP406), functions without custom_fwd (--select AMP405)",
        ),
        (None, "leave model and inputs in FP32: no .half(), no .to(torch.float16); autocast casts what it needs"),
        (RUN, "each module with its input and output formats: where they stop matching"),
    ),
    "slow": (
        (
            COMPARE,
            "whole steps, and the reason if slow: below 1.1 stay, to 1.5 optional, above use it. torch's own speed is "
            "seldom the reason",
        ),
        (RUN, "share of matmuls in 16 bits (AMP504), casts (AMP505), syncs (AMP502), waiting for data (AMP506)"),
        (
            "ampwise align {choice.make}{choice.elsewhere}",
            "sizes that are not multiples of 8 for 16 bits, of 16 for FP8, and what each costs",
        ),
        ("ampwise gpu", "whether it has tensor cores for the format, and whether TF32 was on before"),
        (None, "a larger batch, then torch.compile: small models are bound by launches"),
    ),
    "memory": (
        ("{choice.memory_command}", "state, activations, cast copies, by precision; the largest batch that fits"),
        (None, "state is 16 bytes per parameter in FP32 and under autocast alike; only saved activations shrink"),
        (None, "large activations: checkpointing (use_reentrant=False), a smaller batch with accumulation"),
        (None, "large state: an 8-bit optimizer, FSDP; not model.half(), whose updates are lost"),
    ),
}


class TriageStep(NamedTuple):
    """One thing to do about a symptom: a command where there is one, and what it tells."""

    command: str | None
    tells: str


def triage(choice: PrecisionChoice, precision: str) -> tuple[TriageStep, ...]:
    """Return the steps for the symptom. ``precision`` is the one that was decided, whatever was wanted."""
    half = "bf16" if precision == "fp8" else precision
    if precision in ("fp32", "tf32"):
        keep = f"{precision.upper()}, as advised, has the range: any NaN comes from batch, learning rate or loss"
    else:
        wider = choice.target.has("bf16") and half != "bf16"
        last = "if many places overflow: BF16, which has the range" if wider else "the rest stays in 16 bits"
        keep = f'keep what the replay names in FP32: Policy("{half}").keep("fp32", name); {last}'
    precisions = f" --precisions fp32,{precision}" if precision in ("fp16", "bf16") else ""
    fields = {"choice": choice, "keep": keep, "precisions": precisions}
    steps = STEPS[choice.symptom] if choice.symptom else ()
    return tuple(TriageStep(command and command.format(**fields), tells.format(**fields)) for command, tells in steps)
