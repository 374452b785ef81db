"""The names of training precisions; without torch, so that a command line can be checked before it is imported."""

from __future__ import annotations

__all__ = ["AUTO", "EMULATE", "PLAIN", "RIGHT_NAMES"]

PLAIN = ("fp32", "tf32", "fp16", "bf16")  # those that torch provides itself
AUTO = "auto"
EMULATE = "emulate:"  # followed by a format: matmuls on values rounded to it, on any device

# Names that other libraries use, for the error message: they are not accepted.
OTHER_NAMES = {
    "fp32": ("float32", "float", "32", "32-true", "no"),
    "fp16": ("float16", "half", "16", "16-mixed"),
    "bf16": ("bfloat16", "bf16-mixed"),
    "fp8": ("float8", "fp8-mixed", "transformer-engine"),
    "bf16-pure": ("bf16-true", "pure-bf16"),
}
RIGHT_NAMES = {other: name for name, others in OTHER_NAMES.items() for other in others}
