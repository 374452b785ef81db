"""Sums of some weights and gradients at a few steps of each rank; when the run has ended, ranks are compared.

Nothing is communicated, so that nothing can hang: each rank writes its own sums into its part of the record.
"""

from __future__ import annotations

import gc
import math
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.inspection import parameters_of
from ampwise.watch.run_events import ReplicaSum
from ampwise.watch.tracked import TrackedOptimizer

__all__ = ["ReplicaSums"]

TENSORS = 8  # spread over its parameters
VALUES = 4096  # of each


class ReplicaSums:
    """Takes the sums where a process group of several ranks exists; by optimizer and step."""

    def __init__(self) -> None:
        self._taken: list[tuple[TrackedOptimizer, int, bool, AsyncScalars]] = []

    def step_begins(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Sum the weights before an update, and its gradients, which are averaged over ranks by now."""
        if not _is_looked_at(state.steps + 1) or not (dist.is_available() and dist.is_initialized()):
            return
        parameters = parameters_of(optimizer)
        plain = [each for each in parameters if each.layout == torch.strided and not hasattr(each, "placements")]
        if dist.get_world_size() < 2 or not plain or len(plain) < len(parameters):
            return
        chosen = plain[:: max(len(plain) // TENSORS, 1)][:TENSORS]
        wrapped = {id(each) for ddp in _wrappers() for each in ddp.parameters()}
        with torch.no_grad():
            sums = [_sum(each) for each in chosen] + [_sum(each.grad) for each in chosen]
            sums += [_sum(each.grad, shares=2) for each in chosen]
            home = sums[0].device
            numbers = AsyncScalars(torch.stack([each.to(home) for each in sums]))
        is_wrapped = all(id(each) in wrapped for each in chosen)
        self._taken.append((state, state.steps + 1, is_wrapped, numbers))

    def facts(self) -> list[dict[str, Any]]:
        """Return the sums for the record. Syncs with the device."""
        rows = []
        for state, step, is_wrapped, numbers in self._taken:
            every = numbers.read()
            count = len(every) // 3
            row = ReplicaSum(
                optimizer=state.index,
                step=step,
                wrapped=is_wrapped,
                weights=tuple(every[:count]),
                gradients=tuple(every[count : 2 * count]),
                firsts=tuple(every[2 * count :]),
                file=state.made_at.file or "",
                line=state.made_at.line or 0,
            )
            if all(map(math.isfinite, every)):
                rows.append(asdict(row))
        return rows


def _is_looked_at(step: int) -> bool:
    """Whether to look at this step: two in a row at 1, 2, 4, 8, ..."""
    return step.bit_count() == 1 or (step - 1).bit_count() == 1


def _sum(tensor: Tensor | None, shares: int = 1) -> Tensor:
    if tensor is None or tensor.layout != torch.strided:
        return torch.zeros(())
    values = tensor.detach().reshape(-1)[:VALUES]
    return values[: -(-len(values) // shares)].double().sum().float()


def _wrappers() -> list[DistributedDataParallel]:
    """Return the DDP wrappers that average all gradients, and do so in each step."""
    found = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    world = dist.get_world_size()  # of a smaller group, others may have another part of the model
    return [
        each
        for each in found
        if not each._comm_hooks and not each.parameters_to_ignore and dist.get_world_size(each.process_group) == world
    ]
