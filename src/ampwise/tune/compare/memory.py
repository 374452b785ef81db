"""What a step takes of a device's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampwise.evidence.speed import StepMemory
from ampwise.tune.compare.contender import Contender

__all__ = ["let_go", "peak_of"]


def peak_of(contender: Contender) -> StepMemory | None:
    """Of one more step; None where nobody counts. The caller has given the contender its turn."""
    step = contender.step
    device = step.subject.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    contender()
    torch.cuda.synchronize(device)
    trained = step.subject.parameters
    states = (value for state in step.optimizer.state.values() for value in state.values())
    return StepMemory(
        peak=torch.cuda.max_memory_allocated(device),
        parameters=_bytes(step.subject.model.parameters()),
        gradients=_bytes(trained),
        optimizer=_bytes(value for value in states if isinstance(value, Tensor) and value.device.type == "cuda"),
    )


def let_go(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
