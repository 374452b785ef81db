"""Device memory that a step takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.speeds import StepMemory

__all__ = ["free_memory", "measure_peak"]


def measure_peak(contender: Contender) -> StepMemory | None:
    """Measure the memory of one more step; None without an allocator that counts. Call it in the contender's turn."""
    step = contender.step
    device = step.case.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    contender()
    torch.cuda.synchronize(device)
    trained = step.case.parameters
    states = (value for state in step.optimizer.state.values() for value in state.values())
    return StepMemory(
        peak=torch.cuda.max_memory_allocated(device),
        parameters=_bytes(step.case.model.parameters()),
        gradients=_bytes(trained),
        optimizer=_bytes(value for value in states if isinstance(value, Tensor) and value.device.type == "cuda"),
    )


def free_memory(device: torch.device) -> None:
    """Free memory that is no longer referenced."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
