"""Inspect torch's objects without changing them and without a sync: optimizers, models, saved objects, losses."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from ampwise.trace.value_ranges import version_of
from ampwise.train.scaler.step_result import AsyncScalars

__all__ = [
    "ARITHMETIC",
    "HALVES",
    "MOVING",
    "PRECISIONS",
    "RECURRENT",
    "LossOrigin",
    "WeakStates",
    "autocast_precision",
    "copied_by_reference",
    "device_and_precision",
    "dtype_name",
    "eps_of",
    "first_parameter",
    "floats_in",
    "found_overflow",
    "has_fsdp1",
    "ids_of_contents",
    "inner_model",
    "is_capturing",
    "leaves_of",
    "mark_scaled",
    "nonzero_in_gradients",
    "parameters_of",
    "precisions_of",
    "probe",
    "probed_parameters",
    "read_losses",
    "saved_tensor",
    "saved_tensors",
    "stage_of",
    "states_in",
    "tensors_in",
    "unwrapped",
]

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
HALVES = ("fp16", "bf16")
PROBES = 64  # parameters to look at, to see whether an optimizer has got gradients
MOST_PARTS = 200  # parts of a saved object that are inspected
DEEPEST = 8  # nesting depth in which tensors are looked for
COPIED_DEPTH = 4  # nesting depth of containers that are copied
MOST_STATES = 256  # objects; above this, entries of deleted objects are removed

MARK = "ampwise.scaled"
NEAR = 32  # nodes to visit, starting from the loss
MOST_NODES = 256  # of a graph whose leaves are searched for
MEAN = 1  # the value of reduction="mean" in torch's loss nodes
LEAST_MANUAL_SCALE = 64.0  # a smaller factor on a loss is not taken for a loss scale


# Optimizers, scalers and saved objects


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def precisions_of(optimizer: Any) -> tuple[str, ...]:
    dtypes = {each.dtype for group in optimizer.param_groups for each in group["params"]}
    return tuple(sorted([PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes]))


def eps_of(optimizer: Any) -> float | None:
    eps = optimizer.param_groups[0].get("eps") if optimizer.param_groups else None
    return float(eps) if isinstance(eps, int | float) else None


def has_fsdp1(optimizer: Any) -> bool:
    """Whether the optimizer has flat parameters, which only FSDP1 makes."""
    return any(
        type(each).__name__ == "FlatParameter" or hasattr(each, "_is_flat_param") or hasattr(each, "_fsdp_flattened")
        for group in optimizer.param_groups
        for each in group["params"][:PROBES]
    )


def probed_parameters(optimizer: Any) -> list[Any]:
    """Return some of an optimizer's parameters: enough to see whether it has got gradients."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        params = group["params"]
        found += params if len(params) < 2 * PROBES else params[:: len(params) // PROBES]
    return found


def probe(parameters: Iterable[Any]) -> list[Any]:
    """Return what changes when the parameters get gradients: for each, the identity and version of its gradient."""
    return [None if (grad := each.grad) is None else (id(grad), grad._version) for each in parameters]


def nonzero_in_gradients(parameters: Sequence[Any]) -> AsyncScalars | None:
    """Count nonzero values among a few of the parameters' gradients; None if there are none to look at."""
    grads = [each.grad for each in parameters if each.grad is not None]
    plain = [each for each in grads if each.layout == torch.strided and not hasattr(each, "placements")]
    if not plain or is_capturing():
        return None
    return AsyncScalars(plain[0].detach()[..., :64].count_nonzero() if plain[0].dim() else plain[0].count_nonzero())


def stage_of(scaler: Any, optimizer: Any) -> OptState | None:
    states = getattr(scaler, "_per_optimizer_states", {})
    known = states.get(id(optimizer)) if hasattr(states, "get") else None
    return None if known is None else known["stage"]


def found_overflow(scaler: Any, optimizer: Any) -> bool:
    """Return whether ``unscale_`` found inf or NaN since the last update. Syncs."""
    known = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return any(float(each) > 0 for each in known.get("found_inf_per_device", {}).values())


def states_in(thing: Any, depth: int = 5) -> tuple[bool, bool]:
    """Return whether a saved object contains an optimizer's state, and whether it contains a scaler's."""
    if isinstance(thing, Optimizer | GradScaler):
        return isinstance(thing, Optimizer), isinstance(thing, GradScaler)
    if isinstance(thing, dict):
        keys = {key for key in thing if isinstance(key, str)}
        if {"state", "param_groups"} <= keys or {"scale", "growth_factor", "growth_interval"} <= keys:
            return "param_groups" in keys, "growth_factor" in keys
    if not depth or not isinstance(thing, dict | list | tuple):
        return False, False
    parts = list(thing.values() if isinstance(thing, dict) else thing)[:MOST_PARTS]
    found = [states_in(part, depth - 1) for part in parts if not isinstance(part, Tensor)]
    return any(one for one, _ in found), any(other for _, other in found)


T = TypeVar("T")


class WeakStates(Generic[T]):
    """States of objects by identity. Objects are referenced weakly."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, T]] = {}
        self.count = 0  # of objects ever added

    def get(self, thing: Any) -> T | None:
        found = self._by_id.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def add(self, thing: Any, state: T) -> T:
        try:
            refer: Any = weakref.ref(thing)
        except TypeError:
            refer = lambda: thing  # noqa: E731
        if len(self._by_id) >= MOST_STATES:
            self._by_id = {key: known for key, known in self._by_id.items() if known[0]() is not None}
        self._by_id[id(thing)] = (refer, state)
        self.count += 1
        return state

    def pairs(self) -> list[tuple[Any, T]]:
        """Return (object, state) for the objects that are alive."""
        return [(thing, state) for refer, state in list(self._by_id.values()) if (thing := refer()) is not None]

    def states(self) -> list[T]:
        """Return the states of all objects, also of deleted ones that are still remembered."""
        return [state for _, state in self._by_id.values()]


# Models and tensors


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: what happens now is repeated at each replay, unseen."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def autocast_precision(device_type: str) -> str | None:
    """Return autocast's precision; None if it is off."""
    try:
        if not torch.is_autocast_enabled(device_type):
            return None
        return PRECISIONS.get(torch.get_autocast_dtype(device_type), "other")
    except RuntimeError:  # a device without autocast
        return None


def device_and_precision(model: nn.Module) -> tuple[str, str]:
    """Return device and precision of a model that is about to run: autocast's, or that of its parameters."""
    first = first_parameter(model)
    if first is None:
        return "cpu", "fp32"
    return first.device.type, autocast_precision(first.device.type) or PRECISIONS.get(first.dtype, "other")


def first_parameter(model: nn.Module) -> Tensor | None:
    """Return the first floating-point parameter. Torch's own iterators, which build names, take much longer."""
    pending: list[nn.Module | None] = [model]
    seen: set[int] = set()  # by identity: a module may define __eq__
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in seen:  # modules may contain their parents
            seen.add(id(module))
            for each in module._parameters.values():
                if each is not None and each.is_floating_point():
                    return each
            pending += reversed(module._modules.values())
    return None


def ids_of_contents(model: nn.Module) -> tuple[set[int], set[int]]:
    """Ids of the parameters and of the modules of a model, much faster than by torch's own iterators."""
    parameters: set[int] = set()
    modules: set[int] = set()
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in modules:
            modules.add(id(module))
            parameters.update(map(id, module._parameters.values()))
            pending += module._modules.values()
    parameters.discard(id(None))
    return parameters, modules


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        inner: Any = None
        if "_orig_mod" in model._modules:  # getattr takes long to say no
            inner = model._modules["_orig_mod"]
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def dtype_name(dtype: torch.dtype) -> str:
    """Return a short name, such as "bf16", "fp8_e4m3fn" or "int64"."""
    return PRECISIONS.get(dtype) or str(dtype).removeprefix("torch.").replace("float8_", "fp8_")


def tensors_in(thing: Any, depth: int = COPIED_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a module's inputs or outputs, or in an optimizer's state."""
    if isinstance(thing, Tensor):
        yield thing
    elif depth and isinstance(thing, dict | list | tuple):
        for each in list(thing.values() if isinstance(thing, dict) else thing):
            yield from tensors_in(each, depth - 1)


def floats_in(thing: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested lists, tuples and dicts."""
    return (tensor for tensor in tensors_in(thing) if tensor.is_floating_point())


# How a loss was computed, read from the last nodes of its autograd graph


def _nodes(*kinds: str) -> tuple[str, ...]:
    return tuple([f"{kind}Backward" for kind in kinds])


MULTIPLYING = _nodes("Mul")
AVERAGING = _nodes("Mean")
ARITHMETIC = _nodes("Mul", "Div", "Add", "Sub", "Neg")
MOVING = _nodes("ToCopy", "Clone", "View", "Squeeze", "UnsafeView", "Alias", "Reshape", "Unsqueeze")
REDUCING = _nodes("Mean", "Sum", "Stack", "Cat", "Select", "Index", "Expand", "Permute", "Unbind", "Slice")
RECURRENT = _nodes("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn")
PASSED = ARITHMETIC + MOVING
SEARCHED = ARITHMETIC + MOVING + REDUCING


@dataclass(frozen=True, slots=True)
class LossOrigin:
    """Properties of a loss that its graph shows before the backward pass."""

    scaler: Any = None  # weak reference to the GradScaler that scaled it
    partly: bool = False  # some terms of the loss are scaled, and others are not
    constant: float | None = None  # a manual loss scale
    is_mean: bool | None = None  # the loss is the mean over its batch; None: unknown
    precision: str = "fp32"  # in which it was computed


def mark_scaled(outputs: Any, scaler: Any) -> None:
    """Mark the graph nodes of what ``scaler.scale`` returned."""
    if isinstance(outputs, Tensor):
        node: Any = outputs.grad_fn
        if node is not None:
            node.metadata[MARK] = weakref.ref(scaler)
    elif isinstance(outputs, list | tuple):  # an iterator would be consumed
        for each in outputs:
            mark_scaled(each, scaler)


def read_losses(roots: Sequence[Tensor]) -> LossOrigin:
    """Read the last operations of the tensors that a backward pass starts from."""
    every = [_read_loss(root) for root in roots]
    if len(every) == 1:
        return every[0]
    scalers = [each.scaler for each in every if each.scaler is not None]
    partly = bool(scalers) and (len(scalers) < len(every) or any(each.partly for each in every))
    return LossOrigin(scaler=scalers[0] if scalers else None, partly=partly)


def _read_loss(root: Tensor) -> LossOrigin:
    # The marks that the loss leads back to, and whether some term of it leads back to none.
    marks, unmarked, seen = [], False, set[Any]()
    pending: deque[Any] = deque([root.grad_fn])
    while pending and len(seen) < NEAR:
        term = pending.popleft()
        if term in seen:
            continue
        seen.add(term)
        if MARK in term.metadata:
            marks.append(term.metadata[MARK])
        elif term.name().startswith(SEARCHED):
            pending.extend([before for before, _ in term.next_functions if before is not None])
        else:
            unmarked = True
    # From the loss back, as long as there is one input and only arithmetic and copies.
    constant, untouched = None, True
    node: Any = root.grad_fn
    while True:
        name, ours = node.name(), MARK in node.metadata
        if constant is None and not marks and not ours and name.startswith(MULTIPLYING):
            constant = _manual_scale(node)
        before = [each for each, _ in node.next_functions if each is not None] if name.startswith(PASSED) else []
        if len(before) != 1:
            break
        untouched &= ours or not name.startswith(ARITHMETIC)
        node = before[0]
    is_mean: bool | None = False
    if untouched:
        reduction = getattr(node, "_saved_reduction", None)
        is_mean = name.startswith(AVERAGING) or (None if reduction is None else reduction == MEAN)
    output = next(iter(getattr(node, "_input_metadata", ())), None)  # of the operation, what goes into its backward
    precision = "fp32" if output is None else dtype_name(output.dtype)
    return LossOrigin(marks[0] if marks else None, bool(marks) and unmarked, constant, is_mean, precision)


def _manual_scale(node: Any) -> float | None:
    """Return the number that a loss was multiplied by; None if there is none, or it is small."""
    other = saved_tensor(node, "other")
    # torch keeps a Python number as a CPU tensor; reading one on a device would sync.
    if other is None or other.device.type != "cpu" or other.dim() or other.requires_grad:
        return None
    return scale if (scale := float(other)) >= LEAST_MANUAL_SCALE else None


def saved_tensor(node: Any, name: str) -> Tensor | None:
    """Return a tensor that an operation has saved, without unpacking it; None where that is not possible.

    Unpacking would run a checkpointed forward pass again, or consume what saved-tensor hooks keep. Registering a pack
    hook shows the tensor without unpacking it; torch refuses it where there are such hooks. name: such as ``target``.
    """
    if node is None:
        return None
    key = f"ampwise saved {name}"  # torch shows it once
    if key in node.metadata:
        return cast("Tensor | None", node.metadata[key])
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        alone = tensor.detach()  # the node would keep its own graph
        seen.append(alone.requires_grad_() if tensor.requires_grad else alone)
        return tensor

    with contextlib.suppress(RuntimeError, AttributeError):
        getattr(node, f"_raw_saved_{name}").register_hooks(see, lambda each: each)
    node.metadata[key] = seen[0] if seen else None
    return cast("Tensor | None", node.metadata[key])


def saved_tensors(node: Any, name: str) -> list[Tensor]:
    """Return the tensors that an operation has saved in a list, without unpacking them, as ``saved_tensor`` does.

    Empty where that is not possible.
    """
    key = f"ampwise saved {name}"
    if key not in node.metadata:
        seen: list[Tensor] = []

        def see(tensor: Tensor) -> Tensor:
            seen.append(tensor.detach())
            return tensor

        with contextlib.suppress(RuntimeError, AttributeError):
            for each in getattr(node, f"_raw_saved_{name}"):
                each.register_hooks(see, lambda kept: kept)
        node.metadata[key] = seen
    return cast("list[Tensor]", node.metadata[key])


def leaves_of(roots: Iterable[Tensor]) -> set[int] | None:
    """Return ids of the leaf tensors that a backward pass reaches; None if the graph is large or not all visible."""
    leaves = {id(root) for root in roots if root.grad_fn is None}
    pending: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES or isinstance(node, BackwardCFunction):  # a function of Python may do anything
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        pending += [before for before, _ in node.next_functions]
    return leaves


def copied_by_reference(thing: Any, tensors: list[tuple[Tensor, int]], depth: int = COPIED_DEPTH) -> Any:
    """Copy containers, but not tensors: a script may change its containers."""
    if isinstance(thing, Tensor):
        kept = thing if thing.grad_fn is None else thing.detach().requires_grad_()  # without its graph
        tensors.append((kept, version_of(kept)))
        return kept
    kind = type(thing)
    if depth and kind in (list, tuple):
        return kind([copied_by_reference(each, tensors, depth - 1) for each in thing])
    if depth and kind is dict:
        return {key: copied_by_reference(each, tensors, depth - 1) for key, each in thing.items()}
    tensors += [(each, version_of(each)) for each in tensors_in(thing)]  # an unknown class is kept as it is
    return thing
