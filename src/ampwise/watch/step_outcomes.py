"""Result of a step: what the host knows, and device tensors with what it does not know yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampwise.train.scaler.grad_stats import GradStats

__all__ = ["StepOutcome", "is_ours", "outcome_of"]


@dataclass(slots=True)
class StepOutcome:
    """Result of one optimizer's step."""

    skipped: bool | None = False  # None: see the flags
    flags: list[Tensor] = field(default_factory=list)  # on the device: above zero if the step was skipped
    scale: Tensor | None = None
    reading: GradStats | None = None  # of the gradients, if the scaler has read them


def is_ours(scaler: Any | None) -> bool:
    """Whether the scaler is one of ampwise, which reads gradients itself."""
    return type(scaler).__module__.startswith("ampwise.")


def outcome_of(optimizer: Any, scaler: Any | None, *, ran: bool) -> StepOutcome:
    """Return the outcome of a step without a sync. ran: the optimizer's own step was called."""
    scale = scaler._scale if scaler is not None and scaler._enabled else None
    if is_ours(scaler):
        return _of_ours(scaler, optimizer, scale)
    if scaler is None or scale is None:
        return StepOutcome()
    hooked = isinstance(optimizer, Optimizer)  # other objects do not run the step hooks
    if hooked and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return StepOutcome(skipped=not ran, scale=scale)  # the scaler has synced and decided
    flags = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return StepOutcome(skipped=None, flags=flags, scale=scale)


def _of_ours(scaler: Any, optimizer: Any, scale: Tensor | None) -> StepOutcome:
    entry = scaler._entries.of(optimizer)
    outcome = entry.outcome
    if outcome is None:
        return StepOutcome(scale=scale)
    if outcome.skipped_on_host is not None or outcome.numbers is None:
        return StepOutcome(skipped=bool(outcome.skipped_on_host), scale=scale, reading=entry.stats)
    return StepOutcome(skipped=None, flags=[outcome.numbers[1]], scale=scale, reading=entry.stats)
