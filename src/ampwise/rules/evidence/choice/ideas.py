"""Common proposals, each under a name; the rules in ``rules/choice`` say what is wrong with them, if anything."""

from __future__ import annotations

__all__ = ["EXACT", "IDEAS", "SYMPTOMS"]

EXACT = ("exact-numbers", "complex-numbers")  # ideas that need FP32 accuracy

IDEAS: dict[str, str] = {
    # remedies
    "autocast-off": "there are NaNs: just turn autocast off",
    "drop-mixed-precision": "it may be the precision: drop mixed precision",
    "tried-already": "we tried that, so it is not that",
    "torch-bug": "there is no speedup: it must be a PyTorch bug",
    "just-works": "it should just work, there is nothing to check",
    "tune-the-scale": "another init_scale or backoff_factor will fix it",
    "zeros-mean-underflow": "more than 5% of the gradients are zero, so they underflow",
    # which precision
    "bf16-is-newer": "BF16 is newer, so it is better",
    "senior-says": "an expert recommended it",
    "bf16-checkpoint": "weights trained in BF16 will work in FP16",
    "fp8-doubles": "FP8 is twice as fast as BF16",
    "tf32-is-on": "TF32 is on by default",
    "mix-halves": "FP16 in one part, BF16 in another",
    "exact-numbers": "the numbers must be accurate to many digits",
    "complex-numbers": "the model computes with complex numbers",
    # whether to use mixed precision
    "always-helps": "mixed precision makes everything faster",
    "skip-measuring": "no time to measure: assume that it helps",
    "halves-memory": "mixed precision halves the memory",
    "half-weights": "model.half() or model.bfloat16(), for the memory",
    "too-complex": "mixed precision is too complex",
    "odd-sizes": "sizes such as 127 or 50257 do not matter",
    "multiples-of-16": "BF16 needs sizes that are multiples of 16",
    # the step
    "manual-scale": "the GradScaler is complicated: multiply the loss by 1000",
    "no-scaler": "FP16 works without a GradScaler",
    "scaler-with-bf16": "a GradScaler for BF16, to be safe",
    "simple-loop": "the short loop is enough: no accumulation, no clipping, no ranks",
    "clip-after-backward": "with a GradScaler, clip right after backward()",
    "norms-after-backward": "with a GradScaler, look at gradients right after backward()",
    "update-every-microbatch": "scaler.update() on every micro-batch",
    "one-scaler-for-all-ranks": "one GradScaler, or different scales, for the ranks of DDP",
    "scheduler-every-iteration": "step the scheduler whatever the scaler did",
    "backward-in-autocast": "backward() inside the autocast block",
    "eval-in-fp32": "validate without autocast",
    # custom losses and functions
    "exp-in-loss": "exp and log in a custom loss under autocast",
    "rewrite-loss": "the loss is custom: rewrite all of it",
    "autocast-off-for-loss": "autocast(enabled=False) around the loss is enough",
    "custom-function": "a custom autograd.Function, unchanged",
    "no-checkpointing": "activation checkpointing does not work with autocast",
}

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
