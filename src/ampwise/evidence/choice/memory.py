"""The memory that no precision changes: weights, gradients and the optimizer's state."""

from __future__ import annotations

from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.model import count_text

__all__ = ["BYTES_A_PARAMETER", "memory_command", "state_bytes", "state_text"]

BYTES_A_PARAMETER = 16  # FP32 weight 4, gradient 4, Adam's two moments 8
GIB = 2**30


def state_bytes(choice: Choice) -> int | None:
    """Of training with Adam under autocast, as in FP32; None when the size is not known."""
    return None if choice.model.parameters is None else BYTES_A_PARAMETER * choice.model.parameters


def state_text(choice: Choice) -> str:
    """Such as ": 104 GiB for 7 B"; empty when the size is not known."""
    state = state_bytes(choice)
    return "" if state is None else f": {gib(state)} for {count_text(choice.model.parameters or 0)}"


def memory_command(choice: Choice) -> str:
    """What counts the rest."""
    model = choice.model
    if model.read or model.parameters is None or model.kind not in (None, "transformer"):
        return f"ampwise memory {choice.subject}{choice.elsewhere}"
    return f"ampwise memory --params {count_text(model.parameters).replace(' ', '')}{choice.elsewhere}"


def gib(number: float) -> str:
    """
    >>> gib(112e9), gib(1.6e6)
    ('104 GiB', '0.0015 GiB')
    """
    value = number / GIB
    return f"{value:.0f} GiB" if value >= 10 else f"{value:.2g} GiB"
