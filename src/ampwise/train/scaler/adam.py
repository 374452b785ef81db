"""Run ampwise's Adam kernel inside torch's ``Adam.step``: hooks, schedulers and state stay torch's.

``Adam.step`` calls ``_init_group`` for the tensors of each group and passes them to its kernel. During a step this
module replaces ``_init_group``: it takes the group's step in one launch and returns no tensors, so torch has nothing to
do. For an unusual group, and for the first step, which creates the state, torch's own method runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ampwise.numbers.census.flat_values import DTYPE_CODES
from ampwise.numbers.census.kernels import ALIGNMENT
from ampwise.train.scaler.checked_gradients import CheckedGradients
from ampwise.train.scaler.grad_stats import GpuStats

if TYPE_CHECKING:
    from ampwise.numbers.census.launch import ChunkPlan

__all__ = ["use_adam_kernel"]

FP32 = DTYPE_CODES[torch.float32]


@dataclass(slots=True)
class AdamTables:
    """Addresses of a group's parameters and state, on the device; valid until a tensor moves."""

    params: Tensor
    exp_avgs: Tensor
    exp_avg_sqs: Tensor
    steps: Tensor
    plan: ChunkPlan
    done: Tensor  # finished chunks of each parameter in the running launch; zero between launches


# By group, with the addresses and sizes they were made for; None for a group that our kernel cannot handle.
_known: WeakKeyDictionary[Optimizer, dict[int, tuple[object, AdamTables | None]]] = WeakKeyDictionary()


@contextmanager
def use_adam_kernel(optimizer: Any, checked: CheckedGradients) -> Iterator[None]:
    """Make ``optimizer.step`` use our kernel inside the context, where possible."""
    addresses = _gradient_addresses(checked) if type(optimizer) in (Adam, AdamW) else None
    if addresses is None or "_init_group" in vars(optimizer):
        yield
        return
    torchs, done, unchanged = optimizer._init_group, 0, None

    def init_group(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        nonlocal done, unchanged
        if unchanged is None:  # pre-step hooks may have replaced gradients
            unchanged = checked.gradients.belong_to(optimizer)
        if not unchanged:
            return torchs(group, *lists)
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        here = addresses[done : done + len(params)]
        done += len(params)
        return False if _take_step(optimizer, group, params, here, checked.decision.numbers) else torchs(group, *lists)

    optimizer._init_group = init_group
    try:
        yield
    finally:
        del optimizer._init_group


def _gradient_addresses(checked: CheckedGradients) -> Tensor | None:
    """Return the addresses of the gradients that the census read; None unless all are aligned FP32 on one GPU."""
    parts = checked.stats.parts
    if len(parts) != 1 or not isinstance(parts[0], GpuStats) or not checked.gradients.ordinary:
        return None
    batch = parts[0].counted.batch
    if batch.copied or batch.plan.present != {FP32} or checked.decision.numbers.device != batch.device:
        return None
    return batch.addresses


def _take_step(
    optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor], gradients: Tensor, verdict: Tensor
) -> bool:
    """Take the group's step in one launch; return False, having done nothing, if our kernel cannot handle it.

    ``params`` are the parameters with a gradient; ``gradients`` holds the addresses of these, all aligned FP32.
    """
    if group["amsgrad"] or group["differentiable"] or not _are_numbers(group, verdict.device):
        return False
    states = [optimizer.state[parameter] for parameter in params]
    if not params or not all(states):
        return False
    tables = _tables(optimizer, group, params, states)
    if tables is None:
        return False
    _launch(tables, gradients, verdict, group, decoupled=_decouples(optimizer, group))
    # Autograd uses version counters to detect writes to tensors that a backward pass still needs.
    gradient_tensors = [parameter.grad for parameter in params if parameter.grad is not None]
    torch.autograd.graph.increment_version([*params, *gradient_tensors])
    return True


def _are_numbers(group: dict[str, Any], device: torch.device) -> bool:
    lr = group["lr"]
    on_device = not isinstance(lr, Tensor) or (lr.device == device and lr.dtype == torch.float32)
    return on_device and not any(isinstance(beta, Tensor) for beta in group["betas"])


def _decouples(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def _are_readable(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return (
        {tensor.dtype for tensor in tensors} == {torch.float32}
        and len({tensor.get_device() for tensor in tensors}) == 1
        and tensors[0].device == device
        and all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    )


def _tables(
    optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]
) -> AdamTables | None:
    """Return the group's tables, rebuilt if a tensor has moved, as after loading a checkpoint."""
    lists = [params, *(list(map(itemgetter(name), states)) for name in ("exp_avg", "exp_avg_sq", "step"))]
    addresses = tuple(map(Tensor.data_ptr, chain.from_iterable(lists)))
    key = (addresses, tuple(map(Tensor.numel, params)))
    known = _known.setdefault(optimizer, {}).get(id(group))
    if known is None or known[0] != key:
        known = _known[optimizer][id(group)] = (key, _new_tables(lists, addresses))
    return known[1]


def _new_tables(lists: Sequence[Sequence[Tensor]], addresses: tuple[int, ...]) -> AdamTables | None:
    from ampwise.numbers.census.launch import address_table, plan_of

    *dense, steps = lists
    device = dense[0][0].device
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensors in lists for tensor in tensors)
    on_device = all(step.device == device and step.dtype == torch.float32 for step in steps)
    some = all(parameter.numel() for parameter in dense[0])  # a parameter's last chunk increments its step count
    if not (plain and some and on_device and all(_are_readable(tensors, device) for tensors in dense)):
        return None
    count = len(steps)
    params, exp_avgs, exp_avg_sqs, steps_there = (
        address_table(addresses[start : start + count], device) for start in range(0, 4 * count, count)
    )
    done = torch.zeros(count, dtype=torch.int32, device=device)
    return AdamTables(params, exp_avgs, exp_avg_sqs, steps_there, plan_of(dense[0]), done)


def _launch(tables: AdamTables, gradients: Tensor, verdict: Tensor, group: dict[str, Any], *, decoupled: bool) -> None:
    from ampwise.numbers.census.kernel import CHUNK
    from ampwise.numbers.census.launch import launching_on
    from ampwise.train.scaler.adam_kernel import BLOCK, WARPS, adam_kernel

    plan, lr = tables.plan, group["lr"]
    beta1, beta2 = group["betas"]
    with launching_on(verdict.device):
        adam_kernel[(len(plan.owners),)](
            tables.params, gradients, tables.exp_avgs, tables.exp_avg_sqs, tables.steps, tables.done,
            plan.sizes, plan.first_chunks, plan.owners, verdict,
            lr if isinstance(lr, Tensor) else float(lr), float(group["weight_decay"]),
            1 - beta1, 1 - beta2, _log(beta1), _log(beta2), float(group["eps"]),
            LR_ON_DEVICE=isinstance(lr, Tensor), DECOUPLED=decoupled, DECAY=group["weight_decay"] != 0,
            MAXIMIZE=bool(group["maximize"]), CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
