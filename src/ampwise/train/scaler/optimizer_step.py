"""Run an optimizer's step, or skip it; and take the step of torch's fused Adam in fewer calls and launches.

``Adam.step`` calls ``_init_group`` for the tensors of each group and passes them to its kernel. During a step this
module replaces ``_init_group``: it takes the group's step itself and returns no tensors, so that torch has nothing to
do, and hooks, schedulers and state stay torch's. With clipping that is our kernel, in one launch; without, torch's own
kernel, so that the result is torch's bit for bit. For an unusual group, and for the first step, which creates the
state, torch's own method runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from ampwise.numbers.census.flat_values import DTYPE_CODES
from ampwise.numbers.census.kernels import ALIGNMENT
from ampwise.train.scaler.grad_stats import NO_CLIPPING, CheckedGradients, GpuStats

if TYPE_CHECKING:
    from ampwise.numbers.census.launch import ChunkPlan

__all__ = ["faster_adam", "has_closure", "refuse_closure", "steps_on_device", "take_step", "takes_grad_scaler"]

FP32 = DTYPE_CODES[torch.float32]
STATE = itemgetter("exp_avg", "exp_avg_sq", "step")
PLAIN = {Tensor, torch.nn.Parameter}


def steps_on_device(optimizer: Optimizer) -> bool:
    """Return whether this is a fused optimizer, which unscales gradients and skips bad steps on the device.

    A torch optimizer that loaded an unfused one's state runs unfused, although its flag still says fused.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if type(optimizer).__module__.startswith("torch.optim"):
        for group in optimizer.param_groups:
            if not group["fused"]:
                return False
    return True


def takes_grad_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` takes a ``grad_scaler``, torch's older protocol."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return False  # without inspect.signature, which takes longer than a launch
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments of ``optimizer.step`` include a closure."""
    return kwargs.get("closure") is not None or bool(args and callable(args[0]))


def refuse_closure(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for a closure: its gradients are computed inside the step, where they cannot be unscaled."""
    words = "Closure use is not currently supported if GradScaler is enabled."
    if isinstance(optimizer, LBFGS):
        raise RuntimeError(f"{words} LBFGS needs one: train in FP32 or BF16, with GradScaler(enabled=False).")
    if "closure" in kwargs or has_closure(args, kwargs):
        raise RuntimeError(f"{words} Compute the gradients before scaler.step(optimizer).")


def take_step(
    optimizer: Any, checked: CheckedGradients, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool | None]:
    """Return what ``optimizer.step`` returned, and whether the step was skipped: None if only the device knows."""
    decision, skipped = checked.decision, None
    on_device = steps_on_device(optimizer) and not takes_grad_scaler(optimizer)
    if not on_device or _has_no_momentum_yet(optimizer):  # then the host has to decide, which syncs with the device
        if decision.found_inf.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"GradScaler.step() in a CUDA graph needs an optimizer that skips on the device: "
                f"{type(optimizer).__name__}(..., fused=True, capturable=True), after a few steps outside the graph."
            )
        skipped = bool(decision.found_inf.item())
        if skipped:
            return None, True
    is_mixed = 0 < len(checked.gradients.shards) < len(checked.gradients)
    is_mixed = is_mixed and type(optimizer).__module__.startswith("torch.optim")
    if not on_device:
        checked.unscale_and_clip_()
        with _apart(optimizer) if is_mixed else nullcontext():
            return optimizer.step(*args, **kwargs), skipped  # noqa: AMP109
    # A fused optimizer's kernel divides the gradients by grad_scale, and does nothing if found_inf is 1.
    of_the_user = getattr(optimizer, "grad_scale", None)
    grad_scale = decision.grad_scale if checked.scaled or checked.max_norm != NO_CLIPPING else None
    if grad_scale is None or of_the_user is None:
        optimizer.grad_scale = of_the_user if grad_scale is None else grad_scale
    else:
        optimizer.grad_scale = grad_scale * of_the_user
    optimizer.found_inf = decision.found_inf
    init_group = faster_adam(optimizer, checked) if of_the_user is None else None
    if init_group is not None:
        optimizer._init_group = init_group
    try:
        with _apart(optimizer) if is_mixed else nullcontext():
            return optimizer.step(*args, **kwargs), skipped  # noqa: AMP109
    finally:  # else they would affect the next step too
        del optimizer.grad_scale, optimizer.found_inf
        if init_group is not None:
            del optimizer._init_group


@contextmanager
def _apart(optimizer: Any) -> Iterator[None]:
    """Within the context, a torch optimizer has DTensors and plain tensors in groups of their own.

    Its foreach and fused kernels work on a whole group, and take no mixture of them.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": list(some)}
        for group in groups
        for _, some in groupby(group["params"], key=lambda each: hasattr(each, "placements"))
    ]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _has_no_momentum_yet(optimizer: Optimizer) -> bool:
    """Return whether fused SGD would create momentum buffers, which stay uninitialised if that step is skipped."""
    if not isinstance(optimizer, SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            if first is not None and optimizer.state[first].get("momentum_buffer") is None:
                return True
    return False


class AdamTensors(NamedTuple):
    """A group's parameters with a gradient, and their state."""

    params: list[Tensor]
    exp_avgs: tuple[Tensor, ...]
    exp_avg_sqs: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]


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
# By group, the identities of tensors that are all of one dtype on one device.
_alike: WeakKeyDictionary[Optimizer, dict[int, list[int]]] = WeakKeyDictionary()


def faster_adam(optimizer: Any, checked: CheckedGradients) -> Callable[..., Any] | None:
    """Return what to use as ``optimizer._init_group`` during the step; None if there is nothing faster."""
    gradients, decision = checked.gradients, checked.decision
    if type(optimizer) not in (Adam, AdamW) or not gradients.ordinary or "_init_group" in vars(optimizer):
        return None
    if hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable"):  # ours would be compiled with it, each time
        return None
    if decision.numbers.device != gradients.values[0].device:
        return None
    clips = checked.max_norm != NO_CLIPPING
    addresses = _gradient_addresses(checked) if clips else None
    if clips and addresses is None:
        return None
    torchs = optimizer._init_group
    seen = done = 0  # parameters and gradients of earlier groups

    def init_group(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        nonlocal seen, done
        params = group["params"]
        now = [parameter.grad for parameter in params]
        before = gradients.seen[seen : seen + len(now)]
        seen += len(now)
        unchanged = len(before) == len(now) and all(map(is_, now, before))  # step hooks may have replaced some
        if len(gradients.values) < len(gradients.seen):
            params = [parameter for parameter, gradient in zip(params, now, strict=True) if gradient is not None]
        mine = slice(done, done + len(params))
        done += len(params)
        unusual = group["amsgrad"] or group["differentiable"] or any(map(torch.is_tensor, group["betas"]))
        if not params or not unchanged or unusual:
            return torchs(group, *lists)
        try:
            states = [STATE(optimizer.state[parameter]) for parameter in params]
        except KeyError:  # the first step makes it
            return torchs(group, *lists)
        tensors = AdamTensors(params, *zip(*states, strict=True))
        if addresses is None:
            taken = _take_torchs_step(optimizer, group, tensors, gradients.values[mine], checked)
        else:
            taken = _take_our_step(optimizer, group, tensors, addresses[mine], decision.numbers)
        return False if taken else torchs(group, *lists)

    return init_group


def _take_torchs_step(
    optimizer: Optimizer,
    group: dict[str, Any],
    tensors: AdamTensors,
    gradients: list[Tensor],
    checked: CheckedGradients,
) -> bool:
    """Run torch's fused kernel as torch does, without grouping tensors; False if they are not all alike."""
    if not group["fused"] or isinstance(group["lr"], Tensor):
        return False
    everything = [*chain.from_iterable(tensors)]
    key, known = list(map(id, everything)), _alike.setdefault(optimizer, {})
    if known.get(id(group)) != key:  # looking into every tensor would take as long as the launches
        values = everything[: -len(tensors.steps)]
        alike = {(type(each) in PLAIN, each.device) for each in everything} == {(True, gradients[0].device)}
        if not alike or len({each.dtype for each in values}) != 1:
            return False
        known[id(group)] = key
    if set(map(attrgetter("dtype"), gradients)) != {tensors.params[0].dtype}:
        return False
    beta1, beta2 = group["betas"]
    kernel = torch._fused_adamw_ if _decouples(optimizer, group) else torch._fused_adam_
    # Torch adds 1 and subtracts found_inf afterwards. A list, as the host would read a single tensor on the device.
    torch._foreach_add_(tensors.steps, [checked.decision.applied] * len(tensors.steps))
    kernel(
        tensors.params,
        gradients,
        tensors.exp_avgs,
        tensors.exp_avg_sqs,
        [],
        tensors.steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=checked.decision.grad_scale if checked.scaled else None,
        found_inf=checked.decision.found_inf,
    )
    return True


def _decouples(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def _gradient_addresses(checked: CheckedGradients) -> Tensor | None:
    """Return the addresses of the gradients that the census read; None unless all are aligned FP32 on one GPU."""
    parts = checked.stats.parts
    if len(parts) != 1 or not isinstance(parts[0], GpuStats):
        return None
    batch = parts[0].counted.batch
    return None if batch.copied or batch.plan.present != {FP32} else batch.addresses


def _take_our_step(
    optimizer: Optimizer, group: dict[str, Any], tensors: AdamTensors, gradients: Tensor, decision: Tensor
) -> bool:
    """Take the group's step in one launch; return False, having done nothing, if our kernel cannot handle it.

    ``gradients`` holds the addresses of the gradients, all aligned FP32.
    """
    lr, device = group["lr"], decision.device
    if isinstance(lr, Tensor) and (lr.device != device or lr.dtype != torch.float32):
        return False
    # The tables are made again if a tensor has moved, as after loading a checkpoint.
    addresses = tuple(map(Tensor.data_ptr, chain.from_iterable(tensors)))
    key = (addresses, tuple(map(Tensor.numel, tensors.params)))
    known = _known.setdefault(optimizer, {}).get(id(group))
    if known is None or known[0] != key:
        known = _known[optimizer][id(group)] = (key, _new_tables(tensors, addresses))
    tables = known[1]
    if tables is None:
        return False

    from ampwise.numbers.census.kernel import CHUNK
    from ampwise.numbers.census.launch import launch
    from ampwise.train.scaler.adam_kernel import BLOCK, WARPS, adam_kernel

    plan = tables.plan
    beta1, beta2 = group["betas"]
    launch(
        adam_kernel, plan.programs, device,
        tables.params, gradients, tables.exp_avgs, tables.exp_avg_sqs, tables.steps, tables.done,
        plan.sizes, plan.first_chunks, plan.owners, decision,
        lr if isinstance(lr, Tensor) else float(lr), float(group["weight_decay"]),
        1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2), float(group["eps"]),
        LR_ON_DEVICE=isinstance(lr, Tensor), DECOUPLED=_decouples(optimizer, group),
        DECAY=group["weight_decay"] != 0, MAXIMIZE=bool(group["maximize"]),
        CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    # Autograd uses version counters to detect writes to tensors that a backward pass still needs.
    with_gradients = [parameter.grad for parameter in tensors.params if parameter.grad is not None]
    torch.autograd.graph.increment_version([*tensors.params, *with_gradients])
    return True


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _new_tables(tensors: AdamTensors, addresses: tuple[int, ...]) -> AdamTables | None:
    """Return the tables of a group; None unless all is aligned FP32 on one device."""
    from ampwise.numbers.census.launch import address_table, plan_of

    device, count = tensors.params[0].device, len(tensors.params)
    for tensor in chain.from_iterable(tensors):
        if type(tensor) not in PLAIN or tensor.dtype != torch.float32 or tensor.device != device:
            return None
    for tensor in chain(tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs):
        # A parameter's last chunk increments its step count, so there must be one.
        if not tensor.numel() or not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            return None
    params, exp_avgs, exp_avg_sqs, steps = (
        address_table(addresses[start : start + count], device) for start in range(0, 4 * count, count)
    )
    done = torch.zeros(count, dtype=torch.int32, device=device)
    return AdamTables(params, exp_avgs, exp_avg_sqs, steps, plan_of(tensors.params), done)
