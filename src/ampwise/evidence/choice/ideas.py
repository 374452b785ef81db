"""What people propose, each under a name: the rules in ``rules/choice`` say what is wrong with it, if anything is."""

from __future__ import annotations

__all__ = ["EXACT", "IDEAS", "SYMPTOMS"]

EXACT = ("exact-numbers", "complex-numbers")  # the ideas that leave FP32 alone

IDEAS: dict[str, str] = {
    # cures
    "autocast-off": "there are NaNs: just turn autocast off",
    "drop-mixed-precision": "it may be the precision: take mixed precision out",
    "tried-already": "we tried that, so it is not that",
    "torch-bug": "there is no speed-up: it must be a bug of PyTorch",
    "just-works": "it should just work, there is nothing to look at",
    "tune-the-scale": "another init_scale or backoff_factor will mend it",
    "zeros-mean-underflow": "more than 5% of the gradients are zero, so they underflow",
    # which precision
    "bf16-is-newer": "BF16 is newer, so it is better",
    "senior-says": "somebody who knows says that we should",
    "bf16-checkpoint": "weights that were trained in BF16 will do in FP16",
    "fp8-doubles": "FP8 is twice as fast as BF16",
    "tf32-is-on": "TF32 is on by default",
    "mix-halves": "FP16 in one part, BF16 in another",
    "exact-numbers": "the numbers must be right to many digits",
    "complex-numbers": "the model computes with complex numbers",
    # whether at all
    "always-helps": "mixed precision makes everything faster",
    "skip-measuring": "no time to measure: assume that it helps",
    "halves-memory": "mixed precision halves the memory",
    "half-weights": "model.half() or model.bfloat16(), for the memory",
    "too-complex": "mixed precision is too complex",
    "odd-sizes": "sizes such as 127 or 50257 do not matter",
    "multiples-of-16": "BF16 needs sizes that are multiples of 16",
    # the step
    "manual-scale": "the GradScaler is complicated: multiply the loss by 1000",
    "no-scaler": "FP16 will do without a GradScaler",
    "scaler-with-bf16": "a GradScaler for BF16, to be safe",
    "simple-loop": "the short loop will do: no accumulation, no clipping, no ranks",
    "clip-after-backward": "with a GradScaler, clip right after backward()",
    "norms-after-backward": "with a GradScaler, look at gradients right after backward()",
    "update-every-microbatch": "scaler.update() with every micro-batch",
    "one-scaler-for-all-ranks": "one GradScaler, or different scales, among the ranks of DDP",
    "scheduler-every-iteration": "step the scheduler whatever the scaler did",
    "backward-in-autocast": "backward() inside the autocast block",
    "eval-in-fp32": "validate without autocast",
    # losses and functions of one's own
    "exp-in-loss": "exp and log in a loss of my own, under autocast",
    "rewrite-loss": "the loss is custom: write all of it anew",
    "autocast-off-for-loss": "autocast(enabled=False) around the loss is enough",
    "custom-function": "an autograd.Function of my own, as it is",
    "no-checkpointing": "activation checkpointing does not go with autocast",
}

SYMPTOMS: dict[str, str] = {
    "nan": "the loss is NaN or inf",
    "scale-collapse": "the loss scale falls and falls",
    "skipped": "the scaler skips steps",
    "underflow": "the loss stands still, gradients vanish",
    "spikes": "the loss jumps",
    "worse": "it trains, and ends worse than in FP32",
    "mismatch": "an error about Half and Float, or about unscaling FP16 gradients",
    "slow": "little or no speed-up",
    "memory": "out of memory, or no memory saved",
}
