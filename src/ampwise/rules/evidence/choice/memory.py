"""Memory that does not depend on the precision: weights, gradients and optimizer state."""

from __future__ import annotations

from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.model import count_text

__all__ = ["BYTES_A_PARAMETER", "memory_command", "state_bytes", "state_text"]

BYTES_A_PARAMETER = 16  # FP32 weight 4, gradient 4, Adam's two moments 8
GIB = 2**30


def state_bytes(choice: PrecisionChoice) -> int | None:
    """Return the bytes of training state with Adam, under autocast as in FP32; None if the size is unknown."""
    return None if choice.model.parameters is None else BYTES_A_PARAMETER * choice.model.parameters


def state_text(choice: PrecisionChoice) -> str:
    """Return text such as ": 104 GiB for 7 B"; empty if the size is unknown."""
    state = state_bytes(choice)
    return "" if state is None else f": {gib_text(state)} for {count_text(choice.model.parameters or 0)}"


def memory_command(choice: PrecisionChoice) -> str:
    """Return the command that estimates the memory of a whole step."""
    model = choice.model
    if model.read or model.parameters is None or model.kind not in (None, "transformer"):
        return f"ampwise memory {choice.subject}{choice.elsewhere}"
    return f"ampwise memory --params {count_text(model.parameters).replace(' ', '')}{choice.elsewhere}"


def gib_text(number: float) -> str:
    """
    >>> gib_text(112e9), gib_text(1.6e6)
    ('104 GiB', '0.0015 GiB')
    """
    value = number / GIB
    return f"{value:.0f} GiB" if value >= 10 else f"{value:.2g} GiB"
