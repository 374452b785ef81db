"""Autocast's lists of operations, read from the installed torch.

    python -m tools.autocast_lists    prints {device: {operation: policy}} as JSON

No GPU is needed: each operation is called on fake tensors, and autocast's casts are recorded before anything is
computed. It runs in its own process, to contain torch's warnings about deprecated operations and its CUDA state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FP32", "LOWER", "REFUSED", "WIDEST", "lists"]

LOWER, FP32, WIDEST, REFUSED = "lower", "fp32", "widest", "refused"
KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
HALF, FULL = torch.bfloat16, torch.float32
# Values for arguments without a default; the operation itself does not run, so any value of the type works.
STAND_INS: dict[str, Any] = {"List[int]": [1], "List[Optional[Tensor]]": [None], "str": "ij,jk->ik", "bool": False}

# Registered in CUDA builds, and cast together with flattened weights, which empty tensors cannot stand in for.
CUDA_BUILDS_ONLY = {"_cudnn_rnn"}


class _Reached(Exception):
    """Raised when the operation is reached, after autocast's casts."""


class _Casts(TorchDispatchMode):
    """Record the dtypes that values are cast to, or that are requested for a result, and stop at the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is not None:
            self.seen.add(kwargs["dtype"])
        if func.namespace == "prim" or func is torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        raise _Reached


def lists(device: str) -> dict[str, str]:
    """Return the policies by operator name, with the overload if it is not the default."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, HALF)
        try:
            operators = {name.removeprefix("aten::") for name in names if name.startswith("aten::")} - CUDA_BUILDS_ONLY
            # Older versions have overloads for named dimensions, which are resolved before autocast.
            named = {name for name in operators if "name" in name.partition(".")[2].lower()}
            return {name: _policy(name, device) for name in sorted(operators - named)}
        finally:
            torch.set_autocast_enabled(device, False)
            torch.clear_autocast_cache()


def _policy(name: str, device: str) -> str:
    answers = [
        (LOWER, HALF, repeat(FULL)),
        (FP32, FULL, repeat(HALF)),
        (WIDEST, FULL, chain([HALF], cycle([FULL, HALF]))),
    ]
    for answer, cast, given in answers:
        seen, refused = _ask(name, device, given)
        if refused:
            return REFUSED
        if cast in seen:
            return answer
    raise AssertionError(f"autocast on {device} lists {name}, but casts nothing: an unknown policy")


def _ask(name: str, device: str, dtypes: Iterator[torch.dtype]) -> tuple[set[torch.dtype], bool]:
    operator = _operator(name)
    tensors = (torch.empty(2, 2, dtype=dtype, device=device) for dtype in dtypes)
    needed = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
    args = [_value(argument, tensors) for argument in needed if not argument.kwarg_only]
    kwargs = {argument.name: _value(argument, tensors) for argument in needed if argument.kwarg_only}
    casts = _Casts()
    try:
        with casts:
            operator(*args, **kwargs)
    except Exception as error:  # _Reached, or sizes that do not fit, which are checked after the casts
        return casts.seen, "unsafe to autocast" in str(error)
    return casts.seen, False


def _operator(name: str) -> Any:
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload or "default")


def _value(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    kind = str(argument.type)
    if kind == "Tensor":
        return next(tensors)
    if kind == "List[Tensor]":
        return [next(tensors), next(tensors)]
    return None if kind.startswith("Optional") else STAND_INS.get(kind, 1)


if __name__ == "__main__":
    json.dump({device: lists(device) for device in KEYS}, sys.stdout)
