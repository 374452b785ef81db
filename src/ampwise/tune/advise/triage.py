"""What to do about a symptom, in order: each step is minutes, and tells which way to go."""

from __future__ import annotations

from collections.abc import Callable

from ampwise.rules.evidence.choice.choice import HALVES, PrecisionChoice
from ampwise.rules.evidence.choice.memory import memory_command
from ampwise.tune.advise.advice import TriageStep

__all__ = ["triage"]

Steps = tuple[TriageStep, ...]

CHECK = "ampwise check train.py"
RUN = "ampwise run train.py"
REPLAY = "ampwise replay capsules/step-000012 --build train.py:make --precision fp32"
CAPSULE = "ampwise run --capsule capsules train.py"


def triage(choice: PrecisionChoice, precision: str) -> Steps:
    """None without a symptom. ``precision`` is the one that was decided, whatever was wanted."""
    return () if choice.symptom is None else BY_SYMPTOM[choice.symptom](choice, precision)


def _nan(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            CHECK, "mistakes that cause NaN: masks and eps beyond FP16, BCELoss, a step past the scaler; takes seconds"
        ),
        TriageStep(
            CAPSULE,
            "is the loss not finite, or only gradients at too high a scale? If they are finite again at a lower "
            "scale, that is normal: leave it",
        ),
        TriageStep(
            REPLAY, "finite there: it is the precision. NaN there, too: the batch, the learning rate or the loss"
        ),
        TriageStep(None, _keep(choice, precision)),
    )


def _keep(choice: PrecisionChoice, precision: str) -> str:
    """Say what to do about an operation that a replay has named."""
    if precision in ("fp32", "tf32"):
        return f"{precision.upper()}, as advised, has the range: any NaN comes from batch, learning rate or loss"
    half = {"fp8": "bf16"}.get(precision, precision)
    bf16 = choice.target.has("bf16") and half != "bf16"
    last = "if many places overflow: BF16, which has the range" if bf16 else "the rest stays in 16 bits"
    return f'keep what the replay names in FP32: Policy("{half}").keep("fp32", name); {last}'


def _compare(choice: PrecisionChoice, precision: str) -> str:
    """Against FP32 where 16 bits were decided on, else all that the device runs."""
    return f"ampwise compare {choice.subject}" + (f" --precisions fp32,{precision}" if precision in HALVES else "")


def _scale_collapse(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            CAPSULE,
            "loss finite, and gradients finite again at a lower scale: normal. Loss NaN, or NaN at scale 1: a bug. "
            "torch's scale has no floor: after 165 overflows in a row it is 0, and the next step ruins the weights",
        ),
        TriageStep(REPLAY, "the operation that is not finite at any scale, its line, and the fix"),
        TriageStep(
            None, "from ampwise import GradScaler: it stops at a floor, names the layers, and protects the weights"
        ),
        TriageStep(None, "another init_scale fixes nothing: starting at 1024 saves at most six skipped steps"),
    )


def _skipped(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            RUN, "how many, and when: a few at the start, and one after each growth, are normal; one in 20 is not"
        ),
        TriageStep(
            CHECK, "whether the scheduler steps on skipped steps (AMP114), and whether the scaler is updated (AMP105)"
        ),
        TriageStep(REPLAY, "with --capsule above: which operation makes a bad step that a lower scale does not fix"),
    )


def _underflow(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            CHECK, "clipped scaled gradients (AMP101) or FP16 without a scaler (AMP301): training stalls, silently"
        ),
        TriageStep(
            RUN,
            "the share that FP16 flushes at the current scale, by layer (AMP601, AMP602). Zeros alone mean nothing: a "
            "healthy FP32 run had 65% of them",
        ),
        TriageStep(None, "weights in BF16 or FP16: updates are rounded away (AMP611); keep weights in FP32"),
        TriageStep(None, "if the loss plateaus in FP32, too, it is not the precision; check the learning rate"),
    )


def _spikes(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(RUN, "what came first: the gradient norm, a skipped step, or the loss alone (AMP610)"),
        TriageStep(
            _compare(choice, precision),
            "do losses agree within rounding? Then it is the data or the learning rate, not the precision",
        ),
        TriageStep(
            None,
            'ampwise.Guard(engine, "checkpoints", ladder=ampwise.Ladder(on_spike="rollback")) rolls back',
        ),
    )


def _worse(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            CHECK, "mistakes that silently train worse: the order of clip and unscale_, accumulation, the scheduler"
        ),
        TriageStep(RUN, "lost gradients (AMP601), updates that change no weight (AMP611), formats of each module"),
        TriageStep("ampwise report FP32_RUN HALF_RUN", "where two recorded runs diverge, side by side"),
        TriageStep(None, "validate under the same autocast, or you compare two different models (AMP501)"),
    )


def _mismatch(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            CHECK,
            "model.half() beside a scaler (AMP304: Attempting to unscale FP16 gradients), autocast off without "
            ".float() (AMP406), functions without custom_fwd (--select AMP405)",
        ),
        TriageStep(
            None, "leave model and inputs in FP32: no .half(), no .to(torch.float16); autocast casts what it needs"
        ),
        TriageStep(RUN, "each module with its input and output formats: where they stop matching"),
    )


def _slow(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            _compare(choice, precision),
            "whole steps, and the reason if slow: below 1.1 stay, to 1.5 optional, above use it. torch's own speed is "
            "seldom the reason",
        ),
        TriageStep(
            RUN,
            "share of matmuls in 16 bits (AMP504), casts (AMP505), syncs (AMP502), waiting for data (AMP506)",
        ),
        TriageStep(
            f"ampwise align {choice.subject}{choice.elsewhere}",
            "sizes that are not multiples of 8 for 16 bits, of 16 for FP8, and what each costs",
        ),
        TriageStep("ampwise gpu", "whether it has tensor cores for the format, and whether TF32 was on before"),
        TriageStep(None, "a larger batch, then torch.compile: small models are bound by launches"),
    )


def _memory(choice: PrecisionChoice, precision: str) -> Steps:
    return (
        TriageStep(
            memory_command(choice), "state, activations, cast copies, by precision; the largest batch that fits"
        ),
        TriageStep(
            None, "state is 16 bytes per parameter in FP32 and under autocast alike; only saved activations shrink"
        ),
        TriageStep(None, "large activations: checkpointing (use_reentrant=False), a smaller batch with accumulation"),
        TriageStep(None, "large state: an 8-bit optimizer, FSDP; not model.half(), whose updates are lost"),
    )


BY_SYMPTOM: dict[str, Callable[[PrecisionChoice, str], Steps]] = {
    "nan": _nan,
    "scale-collapse": _scale_collapse,
    "skipped": _skipped,
    "underflow": _underflow,
    "spikes": _spikes,
    "worse": _worse,
    "mismatch": _mismatch,
    "slow": _slow,
    "memory": _memory,
}
