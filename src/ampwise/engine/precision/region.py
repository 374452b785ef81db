"""A region of another precision: autocast set for it, and what goes in cast to it.

``torch.autocast(enabled=False)`` turns the casts off and leaves the inputs as they came, often in 16 bits already.
Here the inputs are cast too, so that "in FP32" means computed in FP32 from the first operation on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ampwise.engine.precision.precision import PRECISIONS
from ampwise.errors import BadInput, UnknownName

__all__ = ["REGIONS", "call_in", "checked", "forward_in", "in_precision", "inputs_for", "is_forward_in"]

# What autocast casts to, or None for no autocast. TF32 is switched for a whole device, not for a region.
REGIONS = {name: precision.dtype for name, precision in PRECISIONS.items() if not precision.tf32}

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
NARROW = frozenset({torch.float16, torch.bfloat16, *(getattr(torch, name) for name in FLOAT8)})
CAST = {
    "fp32": (NARROW, torch.float32),
    "fp16": (frozenset({torch.bfloat16}), torch.float16),
    "bf16": (frozenset({torch.float16}), torch.bfloat16),
}

# Where autocast may be on. Asked once: torch has no list to ask for, and torch.compile does not trace the question.
CANDIDATES = ("cuda", "cpu", "xpu", "mps", "hpu", "mtia")
DEVICE_TYPES = tuple(kind for kind in CANDIDATES if torch.amp.is_autocast_available(kind))


def checked(asked: str, precision: object) -> str:
    """The name of a precision that a part of a model can have, or an error that begins with ``asked``."""
    if not isinstance(precision, str):
        raise BadInput(f"{asked}: a precision is expected by name: {_listed()}.")
    if precision == "tf32":
        raise BadInput(f"{asked}: TF32 is switched for a whole device, not for a part of a model. Use {_listed()}.")
    if precision not in REGIONS:
        raise UnknownName("precision", precision, REGIONS, listing=f"{asked} takes {_listed()}.")
    return precision


def in_precision(name: str, device_type: str) -> torch.autocast:
    """The autocast of a precision; for FP32, autocast turned off."""
    dtype = REGIONS[name]
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    # Autocast keeps the weights it has cast, and does not look at the type it has cast them to: a weight used here
    # and in a region of the other type around this one would come back in the wrong type.
    cache = torch.is_autocast_cache_enabled() and torch.get_autocast_dtype(device_type) == dtype
    return torch.autocast(device_type, dtype=dtype, cache_enabled=cache)


def inputs_for(name: str, tree: Any) -> Any:
    """Every tensor in nested lists, tuples and dicts as a region of this precision takes it.

    For FP32, what has fewer bits becomes FP32. For a 16-bit type, the other 16-bit type becomes this one; FP32 stays,
    and autocast casts it where it should. What needs no cast is returned as it is, the same object.
    """
    unwanted, dtype = CAST[name]
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.dtype in unwanted else tree
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    leaves, spec = tree_flatten(tree)
    if not any(isinstance(leaf, Tensor) and leaf.dtype in unwanted for leaf in leaves):
        return tree  # a dict that the callee writes to must stay the caller's dict
    return tree_unflatten([inputs_for(name, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def call_in(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None = None,
) -> Any:
    """Call a function, which may be that of a module, on cast inputs in a region."""
    if REGIONS[name] is None:  # a body may compute elsewhere than where its inputs are
        device_types = tuple(kind for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind))
    else:
        device_types = tuple(kind for kind in _device_types(args, kwargs) or _home(module) if kind in DEVICE_TYPES)
    return _nested(
        name,
        device_types,
        function,
        tuple(inputs_for(name, value) for value in args),
        {key: inputs_for(name, value) for key, value in kwargs.items()},
    )


def _nested(
    name: str, device_types: tuple[str, ...], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    if not device_types:
        return function(*args, **kwargs)
    with in_precision(name, device_types[0]):  # not an ExitStack, which torch.compile cannot trace
        return _nested(name, device_types[1:], function, args, kwargs)


def _device_types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}  # as a set, in order
    for value in chain(args, kwargs.values()):
        for leaf in (value,) if isinstance(value, Tensor) else tree_flatten(value)[0]:
            if isinstance(leaf, Tensor):
                found[leaf.device.type] = None
    return tuple(found)


def forward_in(name: str, module: nn.Module, owner: object = None) -> partial[Any]:
    """A forward for this module that runs the one it has in a region, and knows who has asked for it.

    A hook would not do: torch.compile traces no region that one hook opens and another closes. A bound method would
    not do: it is pickled by name, and the name leads to the forward of the class.
    """
    made = partial(_forward, module, name, module.__dict__.get("forward"))
    made.__dict__.update(owner=owner, __wrapped__=module.forward)  # which inspect.signature follows
    return made


def is_forward_in(forward: object) -> bool:
    """Whether it was made by ``forward_in``."""
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: nn.Module, name: str, earlier: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    function = partial(type(module).forward, module) if earlier is None else earlier
    return call_in(name, function, args, kwargs, module)


def _home(module: nn.Module | None) -> tuple[str, ...]:
    """Where to compute when no input tells."""
    for parameter in () if module is None else module.parameters():
        return (parameter.device.type,)
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def _listed() -> str:
    return " or ".join(repr(name) for name in REGIONS)
