"""How a step went, as far as the host knows, and where the device will tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampwise.engine.scaling.reading import Reading

__all__ = ["StepOutcome", "is_ours", "outcome_of"]


@dataclass(slots=True)
class StepOutcome:
    """Of one optimizer's step."""

    skipped: bool | None = False  # None: the flags tell
    flags: list[Tensor] = field(default_factory=list)  # on the device: above zero if it was skipped
    scale: Tensor | None = None
    reading: Reading | None = None  # of the gradients, by a scaler that has read them


def is_ours(scaler: Any | None) -> bool:
    """A scaler of ampwise, which reads gradients itself."""
    return type(scaler).__module__.startswith("ampwise.")


def outcome_of(optimizer: Any, scaler: Any | None, *, ran: bool) -> StepOutcome:
    """Without waiting. ran: the optimizer's own step was called."""
    scale = scaler._scale if scaler is not None and scaler._enabled else None
    if is_ours(scaler):
        return _of_ours(scaler, optimizer, scale)
    if scaler is None or scale is None:
        return StepOutcome()
    hooked = isinstance(optimizer, Optimizer)  # of any other we are not told whether its step was called
    if hooked and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return StepOutcome(skipped=not ran, scale=scale)  # the scaler has asked the device, and waited
    flags = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return StepOutcome(skipped=None, flags=flags, scale=scale)


def _of_ours(scaler: Any, optimizer: Any, scale: Tensor | None) -> StepOutcome:
    entry = scaler._entries.of(optimizer)
    outcome = entry.outcome
    if outcome is None:
        return StepOutcome(scale=scale)
    if outcome.known_to_skip is not None or outcome.numbers is None:
        return StepOutcome(skipped=bool(outcome.known_to_skip), scale=scale, reading=entry.reading)
    return StepOutcome(skipped=None, flags=[outcome.numbers[1]], scale=scale, reading=entry.reading)
