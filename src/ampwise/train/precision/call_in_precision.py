"""Call a function or module in another precision: with autocast set for it, and its inputs cast.

``torch.autocast(enabled=False)`` casts nothing and leaves the inputs as they are, often in 16 bits already. Here the
inputs are cast too, so that "in FP32" means FP32 from the first operation on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ampwise.errors import BadInput, UnknownName
from ampwise.train.precision.precision import PRECISIONS

__all__ = [
    "FP32_OUT",
    "REGIONS",
    "autocast_for",
    "call_in_precision",
    "cast_inputs",
    "checked_precision",
    "is_wrapped_forward",
    "keep",
    "operation_names",
    "operations_named",
    "wrap_forward",
    "wrap_with_operations",
]

P = ParamSpec("P")
R = TypeVar("R")

# What autocast casts to, or None for no autocast. TF32 is a setting of the process, not of a region.
REGIONS = {name: precision.dtype for name, precision in PRECISIONS.items() if not precision.tf32}

FP32_OUT = "fp32-out"  # of a linear layer: 16-bit inputs, sums and output in FP32

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
NARROW = frozenset({torch.float16, torch.bfloat16, *(getattr(torch, name) for name in FLOAT8)})
CAST = {
    "fp32": (NARROW, torch.float32),
    "fp16": (frozenset({torch.bfloat16}), torch.float16),
    "bf16": (frozenset({torch.float16}), torch.bfloat16),
}

MM_TAKES_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8; on CUDA only

# Device types with autocast. Queried once: torch offers no list, and torch.compile cannot trace the query.
CANDIDATES = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia")
DEVICE_TYPES = tuple(kind for kind in CANDIDATES if torch.amp.is_autocast_available(kind))


def checked_precision(asked: str, precision: object, *, layers: bool = False) -> str:
    """Return the name of a precision that code can be kept in, or raise an error that begins with ``asked``.

    layers: it is kept for modules, which can also be kept in ``FP32_OUT``.
    """
    if not isinstance(precision, str):
        raise BadInput(f"{asked}: expected the name of a precision: {_listed()}.")
    if precision == "tf32":
        raise BadInput(f"{asked}: TF32 is switched for a whole device, not for a part of a model. Use {_listed()}.")
    known = (*REGIONS, FP32_OUT) if layers else tuple(REGIONS)
    if precision not in known:
        raise UnknownName("precision", precision, known, listing=f"{asked} takes {_listed(known)}.")
    return precision


def autocast_for(name: str, device_type: str) -> torch.autocast:
    """Return the autocast context of a precision; for FP32, autocast turned off."""
    dtype = REGIONS[name]
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    # Autocast caches the weights it has cast without their dtype: a weight used here and in an enclosing region of the
    # other dtype would come back in the wrong dtype.
    cache = torch.is_autocast_cache_enabled() and torch.get_autocast_dtype(device_type) == dtype
    return torch.autocast(device_type, dtype=dtype, cache_enabled=cache)


def cast_inputs(name: str, tree: Any) -> Any:
    """Cast the tensors in nested lists, tuples and dicts for a region of this precision.

    For FP32, narrower dtypes become FP32. For a 16-bit dtype, the other 16-bit dtype becomes this one; FP32 stays, and
    autocast casts it where needed. If nothing needs a cast, the same object is returned.
    """
    unwanted, dtype = CAST[name]
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.dtype in unwanted else tree
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    leaves, spec = tree_flatten(tree)
    if not any(isinstance(leaf, Tensor) and leaf.dtype in unwanted for leaf in leaves):
        return tree  # a dict that the callee writes to must stay the caller's dict
    return tree_unflatten([cast_inputs(name, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def call_in_precision(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None = None,
) -> Any:
    """Call a function, possibly a module's forward, on cast inputs in a precision."""
    if REGIONS[name] is None:  # the function may compute on other devices than its inputs'
        device_types = tuple(kind for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind))
    else:
        device_types = tuple(kind for kind in _device_types(args, kwargs, module) if kind in DEVICE_TYPES)
    return _nested(
        name,
        device_types,
        function,
        tuple(cast_inputs(name, value) for value in args),
        {key: cast_inputs(name, value) for key, value in kwargs.items()},
    )


def _nested(
    name: str, device_types: tuple[str, ...], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    if not device_types:
        return function(*args, **kwargs)
    with autocast_for(name, device_types[0]):  # not an ExitStack, which torch.compile cannot trace
        return _nested(name, device_types[1:], function, args, kwargs)


def _device_types(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None) -> tuple[str, ...]:
    """Return the device types of the inputs; if no input is a tensor, of the module."""
    found: dict[str, None] = {}  # as a set, in order
    for value in chain(args, kwargs.values()):
        for leaf in (value,) if isinstance(value, Tensor) else tree_flatten(value)[0]:
            if isinstance(leaf, Tensor):
                found[leaf.device.type] = None
    if found:
        return tuple(found)
    for parameter in () if module is None else module.parameters():
        return (parameter.device.type,)
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def wrap_forward(name: str, module: nn.Module, owner: object = None) -> partial[Any]:
    """Return a forward for this module that runs the current one in a precision, and records who installed it.

    Hooks would not work: torch.compile cannot trace a context that one hook opens and another closes. Nor would a bound
    method: it is pickled by name, and the name leads to the forward of the class.
    """
    made = partial(_forward, module, name, module.__dict__.get("forward"))
    made.__dict__.update(owner=owner, __wrapped__=module.forward)  # inspect.signature follows __wrapped__
    return made


def is_wrapped_forward(forward: object) -> bool:
    """Return whether ``wrap_forward`` made this forward."""
    return isinstance(forward, partial) and forward.func is _forward


def _forward(
    module: nn.Module, name: str | _Operations, earlier: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    function = partial(type(module).forward, module) if earlier is None else earlier
    if isinstance(name, _Operations):
        with name:
            return function(*args, **kwargs)
    if name == FP32_OUT:
        return _linear_with_fp32_output(module, *args, **kwargs)
    return call_in_precision(name, function, args, kwargs, module)


def _linear_with_fp32_output(module: Any, x: Tensor) -> Tensor:
    """Return a linear layer's output in FP32, from inputs rounded to autocast's dtype, or to that of ``x``."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return functional.linear(x, module.weight, module.bias)
    with torch.autocast(kind, enabled=False):
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        matmul: Any = _MatmulWithFp32Output.apply
        product: Tensor = matmul(flat, module.weight.to(dtype)).reshape(*x.shape[:-1], -1)
        return product if module.bias is None else product + module.bias.float()


class _MatmulWithFp32Output(torch.autograd.Function):
    """``x @ weight.T`` of 16-bit matrices, added up and returned in FP32.

    The gradient of the output is rounded to 16 bits, as in any linear layer under autocast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul_in_fp32(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        return gradient @ weight, gradient.t() @ x


def _matmul_in_fp32(one: Tensor, other: Tensor) -> Tensor:
    """Return the product of 16-bit matrices in FP32. Products of two 16-bit numbers are exact there."""
    if one.device.type == "cuda" and MM_TAKES_OUT_DTYPE:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


def wrap_with_operations(precisions: Mapping[str, str], module: nn.Module, owner: object) -> partial[Any]:
    """Return a forward that runs the current one, with operations by name in other precisions."""
    made = partial(_forward, module, _Operations(precisions), module.__dict__.get("forward"))
    made.__dict__.update(owner=owner, __wrapped__=module.forward)
    return made


class _Operations(TorchFunctionMode):
    """Function mode in which some of torch's operations run in another precision."""

    def __init__(self, precisions: Mapping[str, str]) -> None:
        super().__init__()
        self._names = dict(precisions)
        self._precisions = {function: kept for name, kept in precisions.items() for function in operations_named(name)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        precision = self._precisions.get(func)
        if precision is None:
            return func(*args, **(kwargs or {}))
        return call_in_precision(precision, func, args, kwargs or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _Operations, (self._names,)

    def __deepcopy__(self, memo: object) -> _Operations:
        return _Operations(self._names)


OPERATION_OWNERS = (functional, torch, torch.special, torch.linalg, Tensor)


def operations_named(name: str) -> list[Callable[..., Any]]:
    """Return torch's functions and tensors' methods with this name: what ``softmax`` or ``x @ y`` (matmul) may call."""
    found = [getattr(owner, each, None) for owner in OPERATION_OWNERS for each in (name, f"__{name}__", f"__r{name}__")]
    return list(dict.fromkeys(each for each in found if callable(each) and not isinstance(each, type)))


def operation_names() -> list[str]:
    """Return all names of operations."""
    return sorted({name.strip("_") for owner in OPERATION_OWNERS for name in dir(owner) if operations_named(name)})


def keep(precision: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to run in ``"fp32"``, ``"fp16"`` or ``"bf16"``, whatever autocast is set to.

    For FP32, narrower tensors among the arguments, nested ones too, are cast to FP32, and autocast is off inside.
    ``torch.autocast(enabled=False)`` alone casts nothing, so 16-bit inputs would be computed in 16 bits. For a 16-bit
    dtype, autocast is on inside with that dtype. Gradients have the dtype of the arguments. Works on methods too, and
    torch.compile can trace it. For modules, see ``ampwise.Policy``.

    Args:
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``.

    Returns:
        a decorator.

    Raises:
        UnknownName: no such precision.

    >>> import torch, ampwise
    >>> @ampwise.keep("fp32")
    ... def entropy(logits):
    ...     return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    >>> entropy(torch.zeros(4, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if callable(precision):
        raise BadInput('keep() needs a precision: write @ampwise.keep("fp32").')
    name = checked_precision(f"keep({precision!r})", precision)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _refuse_unless_function(f"keep({name!r})", function)

        @wraps(function)
        def kept(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = call_in_precision(name, function, args, kwargs)
            return result

        return kept

    return decorate


def _refuse_unless_function(asked: str, function: Any) -> None:
    """Raise for a class or module, and for a function that runs after its call has returned."""
    shown = getattr(function, "__qualname__", None) or type(function).__name__
    if isinstance(function, (type, nn.Module)):
        raise BadInput(
            f"{asked} of {shown}: expected a function, not a class or module. Keep a module by its name: "
            "ampwise.Policy(...).keep(precision, name), or put @ampwise.keep on its forward."
        )
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise BadInput(f"{asked} of {shown}: put @ampwise.keep below @{kind}, next to the function.")
    if not callable(function):
        raise BadInput(f"{asked} of {shown}: expected a function.")
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(runs_later(function) for runs_later in later):
        raise BadInput(
            f"{asked} of {shown}: a coroutine or generator runs after its call has returned, outside the precision. "
            "Keep the functions that it calls instead."
        )


def _listed(names: Iterable[str] = tuple(REGIONS)) -> str:
    return " or ".join(repr(name) for name in names)
