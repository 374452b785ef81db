"""Find the operation with which an optimizer spoiled its weights, in a step that nobody has recorded.

The gradients of that step are gone. But an optimizer that divides by a statistic of the gradients without an eps spoils
the weights whose statistic is still 0, whatever the weights are: it does so again with gradients of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.trace.diagnosis import diagnose
from ampwise.trace.failure import Failure
from ampwise.trace.ranks import collectives_refused
from ampwise.trace.replay import ReplaySettings, ReplayStep, is_finite

__all__ = ["failing_update"]


def failing_update(optimizer: Optimizer, step: int | None) -> Failure | None:
    """Make a step with gradients of zeros, and return what spoils the same weights as the last step has; else None.

    Optimizers of torch are explained by their settings. Everything is restored.
    """
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    bad = {each: ~each.detach().isfinite() for each in weights if not is_finite(each)}
    held = {each: dict(entries) for each, entries in optimizer.state.items() if isinstance(entries, dict)}
    tensors = [each for entries in held.values() for each in entries.values() if isinstance(each, Tensor)]
    is_plain = type(optimizer).__module__.startswith("torch.optim")
    if (
        is_plain
        or not bad
        or not all(map(is_finite, tensors))
        or any(each.layout != torch.strided or hasattr(each, "placements") for each in bad)
    ):
        return None
    before = [(each, each.detach().clone()) for each in (*weights, *tensors)]
    gradients = [(each, each.grad) for each in weights]
    entries_now = list(optimizer.state.items())

    # Hooks, such as an engine's, take a step for the script's own.
    own: Any = type(optimizer).step
    step_without_hooks: Any = own.__wrapped__ if hasattr(own, "hooked") else own

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in before:
                tensor.copy_(copy)
        optimizer.state.clear()
        optimizer.state.update({each: dict(entries) for each, entries in held.items()})

    spoils_the_same: bool | None = None  # before fixes are tried

    def run(settings: ReplaySettings) -> Any:
        nonlocal spoils_the_same
        restore()
        with torch.no_grad():
            for each in weights:
                each.copy_(each.nan_to_num(0.0, 0.0, 0.0))
                each.grad = torch.zeros_like(each)
        with collectives_refused():  # other ranks may not probe theirs
            step_without_hooks(optimizer)
        if spoils_the_same is None:
            spoils_the_same = not any(each.detach()[mask].isfinite().any() for each, mask in bad.items())
        return [each for each in weights if not is_finite(each)] or [torch.zeros(())]

    try:
        device = next(iter(bad)).device
        found = diagnose(ReplayStep(run=run, device=device, step=step, touched=(optimizer,)))
    except Exception:  # the optimizer's own: it does not step with such gradients
        return None
    finally:
        restore()
        optimizer.state.clear()
        optimizer.state.update(entries_now)
        for each, gradient in gradients:
            each.grad = gradient
    if found is None or found.origin is None or not spoils_the_same:
        return None
    remark = "The gradients of that step are gone: it was repeated with gradients of zeros."
    return found.but(symptom="weights", loss=None, trials=(), remarks=(*found.remarks, remark))
