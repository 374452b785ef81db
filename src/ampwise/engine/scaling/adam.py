"""Our Adam in the place of torch's, within torch's own step: hooks, schedulers and state stay torch's.

``Adam.step`` asks ``_init_group`` for the tensors of each group and hands them to its kernel. For the time of a
step we answer instead, take the group's step in one launch, and leave torch with nothing to do. A group that is
out of the ordinary is answered by torch's own method, and so is the first step, which makes the state.
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

from ampwise.census.flat import KINDS
from ampwise.census.launcher import ALIGNMENT
from ampwise.engine.scaling.look import Look
from ampwise.engine.scaling.reading import Launched

if TYPE_CHECKING:
    from ampwise.census.launch import Plan

__all__ = ["ours_within"]

FP32 = KINDS[torch.float32]


@dataclass(slots=True)
class Tables:
    """Where a group's parameters and state are, on the device; good as long as the addresses are."""

    params: Tensor
    exp_avgs: Tensor
    exp_avg_sqs: Tensor
    steps: Tensor
    plan: Plan
    done: Tensor  # chunks of each parameter, in the launch that is running; zero between launches


# By group, with the addresses and sizes they were made for; None where our kernel is not for the group.
_known: WeakKeyDictionary[Optimizer, dict[int, tuple[object, Tables | None]]] = WeakKeyDictionary()


@contextmanager
def ours_within(optimizer: Any, look: Look) -> Iterator[None]:
    """While this lasts, ``optimizer.step`` uses our kernel where it can."""
    addresses = _gradient_addresses(look) if type(optimizer) in (Adam, AdamW) else None
    if addresses is None or "_init_group" in vars(optimizer):
        yield
        return
    torchs, done, unchanged = optimizer._init_group, 0, None

    def init_group(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        nonlocal done, unchanged
        if unchanged is None:  # hooks that run before the step may have put other gradients there
            unchanged = look.gradients.are_those_of(optimizer)
        if not unchanged:
            return torchs(group, *lists)
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        here = addresses[done : done + len(params)]
        done += len(params)
        return False if _take_step(optimizer, group, params, here, look.verdict.numbers) else torchs(group, *lists)

    optimizer._init_group = init_group
    try:
        yield
    finally:
        del optimizer._init_group


def _gradient_addresses(look: Look) -> Tensor | None:
    """Where the gradients are, as the census has read them: None unless all are aligned FP32 on one GPU."""
    parts = look.reading.parts
    if len(parts) != 1 or not isinstance(parts[0], Launched) or not look.gradients.ordinary:
        return None
    batch = parts[0].counted.batch
    if batch.copied or batch.plan.present != {FP32} or look.verdict.numbers.device != batch.device:
        return None
    return batch.addresses


def _take_step(
    optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor], gradients: Tensor, verdict: Tensor
) -> bool:
    """The group's step in one launch; False, and nothing done, if it is not one for our kernel.

    ``params`` are those with a gradient, ``gradients`` the addresses of these, aligned FP32 all of them.
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
    # What autograd goes by when it checks that nobody wrote to what a backward pass still needs.
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
) -> Tables | None:
    """The group's tables, made anew when a tensor has moved: after loading a checkpoint, say."""
    lists = [params, *(list(map(itemgetter(name), states)) for name in ("exp_avg", "exp_avg_sq", "step"))]
    addresses = tuple(map(Tensor.data_ptr, chain.from_iterable(lists)))
    key = (addresses, tuple(map(Tensor.numel, params)))
    known = _known.setdefault(optimizer, {}).get(id(group))
    if known is None or known[0] != key:
        known = _known[optimizer][id(group)] = (key, _new_tables(lists, addresses))
    return known[1]


def _new_tables(lists: Sequence[Sequence[Tensor]], addresses: tuple[int, ...]) -> Tables | None:
    from ampwise.census.launch import address_table, plan_of

    *dense, steps = lists
    device = dense[0][0].device
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensors in lists for tensor in tensors)
    on_device = all(step.device == device and step.dtype == torch.float32 for step in steps)
    some = all(parameter.numel() for parameter in dense[0])  # the last chunk of a parameter counts its step
    if not (plain and some and on_device and all(_are_readable(tensors, device) for tensors in dense)):
        return None
    count = len(steps)
    params, exp_avgs, exp_avg_sqs, steps_there = (
        address_table(addresses[start : start + count], device) for start in range(0, 4 * count, count)
    )
    done = torch.zeros(count, dtype=torch.int32, device=device)
    return Tables(params, exp_avgs, exp_avg_sqs, steps_there, plan_of(dense[0]), done)


def _launch(tables: Tables, gradients: Tensor, verdict: Tensor, group: dict[str, Any], *, decoupled: bool) -> None:
    from ampwise.census.kernel import CHUNK
    from ampwise.census.launch import launching_on
    from ampwise.engine.scaling.adam_kernel import BLOCK, WARPS, adam_kernel

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
