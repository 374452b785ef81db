"""Inspect some operations as they run: their inputs, their outputs, and what they would return in FP64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.numbers.census.measure import census
from ampwise.numbers.op_families import base_name, is_collective
from ampwise.trace.failure_facts import MASKS, TensorSummary
from ampwise.trace.recorder import UndoMode, dtype_name, result_tensors, tensors_in
from ampwise.trace.value_ranges import local_shard, readable_values

__all__ = ["InspectMode", "inspect_op", "values_of"]

MAX_VALUES_IN_FP64 = 2**22  # up to here an operation is recomputed whole in FP64, above only some of its bad results
MAX_SCORES_IN_FP64 = 2**24  # attention's logits
CHUNK_VALUES = 2**24  # values of a large tensor to copy at a time
MAX_BAD_RESULTS = 64  # bad results to recompute
NARROW = (torch.float16, torch.bfloat16, torch.float32)
DIVISIONS = ("div", "true_divide", "divide", "floor_divide", "remainder", "fmod", "reciprocal", "rsqrt", "addcdiv")
# For which arguments a function has no finite value.
IS_OUTSIDE_DOMAIN = {
    "log": lambda x: x <= 0,
    "log2": lambda x: x <= 0,
    "log10": lambda x: x <= 0,
    "log1p": lambda x: x <= -1,
    "logit": lambda x: (x <= 0) | (x >= 1),
    "sqrt": lambda x: x < 0,
    "rsqrt": lambda x: x < 0,
    "acos": lambda x: x.abs() > 1,
    "asin": lambda x: x.abs() > 1,
    "atanh": lambda x: x.abs() >= 1,
    "erfinv": lambda x: x.abs() >= 1,
    "acosh": lambda x: x < 1,
    "lgamma": lambda x: (x <= 0) & (x == x.floor()),
    "digamma": lambda x: (x <= 0) & (x == x.floor()),
    "special_ndtri": lambda x: (x <= 0) | (x >= 1),
    # These check their second argument.
    "xlogy": lambda x: x <= 0,
    "special_xlog1py": lambda x: x <= -1,
    "polygamma": lambda x: (x <= 0) & (x == x.floor()),
}
# Of a complex argument, where only poles are left out.
POLES = {"log1p": (-1,), "atanh": (1, -1), "logit": (0, 1)}
CHECK_SECOND_ARGUMENT = ("xlogy", "special_xlog1py", "polygamma")


class InspectMode(UndoMode):
    """Dispatch mode that inspects some operations, given by their index and name."""

    def __init__(self, wanted: Mapping[int, str]) -> None:
        super().__init__()
        self.seen: dict[int, dict[str, Any]] = {}  # by index: fields of ``Origin``
        self._wanted, self._count = wanted, -1

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._count += 1
        name = self._wanted.get(self._count)
        if name is None or name != str(func):
            return func(*args, **kwargs)
        result, self.seen[self._count] = inspect_op(func, args, kwargs)
        return result


def inspect_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run an operation; inspect its inputs before it may overwrite them, and its results after."""
    name, schema_names = base_name(str(func)), [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(schema_names, args, strict=False)), **kwargs}
    is_attention = name.startswith("scaled_dot_product")
    seen: dict[str, Any] = {
        "inputs": tuple(
            values_of(tensor, argument)
            for argument, each in given.items()
            for tensor in tensors_in((each,))
            if tensor.is_floating_point()
        ),
        **(_masked_rows(given) if is_attention else _invalid_arguments(name, args)),
    }
    can_rerun = not is_collective(str(func))  # other ranks do not run a collective again
    size = sum(tensor.numel() for tensor in tensors_in((*args, *kwargs.values())))
    wide = []
    if is_attention:
        wide = _attention_in_fp64(given)
    elif can_rerun and size <= MAX_VALUES_IN_FP64:
        wide = _all_in_fp64(func, args, kwargs)
    result = func(*args, **kwargs)
    made = result_tensors(result)
    if not made:
        return result, seen
    worst = 0  # the first result that is not finite
    for at, values in enumerate(map(readable_values, made)):
        if values is not None and not bool(values.isfinite().all()):
            worst = at
            break
    seen["output"] = values_of(made[worst])
    exact = None
    if worst < len(wide) and (is_attention or len(wide) == len(made)) and wide[worst].is_floating_point():
        exact = wide[worst]
    if can_rerun and exact is None and not is_attention:
        exact = _some_in_fp64(func, name, args, made[worst])
    if exact is not None:
        if exact.numel() == 0 or exact.isnan().any():
            seen["exact"] = "nan"
        else:
            largest = float(exact.abs().max())
            seen |= {"exact": "inf" if math.isinf(largest) else "finite", "exact_largest": largest}
    return result, seen


def values_of(tensor: Tensor, name: str = "") -> TensorSummary:
    """Describe all values of a tensor."""
    inner = local_shard(tensor).detach()
    plain = TensorSummary(dtype=dtype_name(inner.dtype), shape=tuple(tensor.shape), name=name)
    values = readable_values(inner)
    if values is None:
        return plain
    is_whole = values.is_contiguous() or not values.dim()
    lows, highs = [], []
    for piece in values.flatten().split(CHUNK_VALUES) if is_whole else values.unbind():  # a copy of all may not fit
        finite = piece.isfinite()
        lows.append(torch.where(finite, piece, math.inf).amin())
        highs.append(torch.where(finite, piece, -math.inf).amax())
    low, high = float(torch.stack(lows).amin()), float(torch.stack(highs).amax())
    if low <= high:
        plain = replace(plain, low=low, high=high)
    return replace(plain, census=census(values), negative_infs=int((values == -math.inf).sum()))


# In FP64


def _all_in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Recompute all results in FP64; none if the operation cannot run in FP64."""
    devices = [device for device in {tensor.device for tensor in tensors_in(args)} if device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=devices):
            return result_tensors(func(*tree_map(_widened, args), **tree_map(_widened, kwargs)))
    except Exception:  # the operation does not support FP64, or not for these arguments
        return []


def _widened(each: Any) -> Any:
    if isinstance(each, Tensor):
        each = local_shard(each).detach()
        return each.double() if each.is_floating_point() else each.clone()
    return torch.float64 if each in NARROW else each


def _attention_in_fp64(given: Mapping[str, Any]) -> list[Tensor]:
    """Return attention's output, or the gradients of query, key and value; none if it drops out or does not fit."""
    query, key, value = (given[name].detach() for name in ("query", "key", "value"))
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    if given.get("dropout_p") or scores > MAX_SCORES_IN_FP64 or query.dim() != 4:
        return []
    wide = [each.double().repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (query, key, value)]
    query, key, value = wide
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    logits = query @ key.transpose(-1, -2) * scale
    mask = next((given[name] for name in MASKS if isinstance(given.get(name), Tensor)), None)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
    if given.get("is_causal"):
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    weights = logits.softmax(-1)
    upper = next((given[name] for name in ("grad_out", "grad_out_") if isinstance(given.get(name), Tensor)), None)
    if upper is None:
        return [weights @ value]
    upper = upper.double()
    inner = upper @ value.transpose(-1, -2)
    inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
    return [inner @ key, inner.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ upper]


def _some_in_fp64(func: Any, name: str, args: Any, result: Tensor) -> Tensor | None:
    """Recompute a few of the bad results of a matmul or an elementwise operation: all of them may not fit in memory."""
    bad = local_shard(result).isfinite().logical_not().nonzero()[:MAX_BAD_RESULTS]
    if not len(bad):
        return None
    where = tuple(bad.unbind(-1))

    def picked(each: Any) -> Any:
        return _widened(each.expand(result.shape)[where]) if isinstance(each, Tensor) and each.dim() else _widened(each)

    try:
        if name in ("mm", "bmm"):
            return _dots(args[0], args[1], where)
        if name in ("addmm", "baddbmm"):
            size = (*args[1].shape[:-1], args[2].shape[-1])
            added: Tensor = args[0].expand(size)[where].double()
            return added + _dots(args[1], args[2], where)
        again = func(*map(picked, args))
        return again if isinstance(again, Tensor) and again.shape == where[0].shape else None
    except Exception:
        return None


def _dots(left: Tensor, right: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    *batch, row, column = where
    return (left[(*batch, row)].double() * right.transpose(-1, -2)[(*batch, column)].double()).sum(-1)


# Arguments without a finite result


def _masked_rows(given: Mapping[str, Any]) -> dict[str, int]:
    """Count the rows of attention's mask that leave nothing."""
    mask = next((given[name] for name in MASKS if isinstance(given.get(name), Tensor)), None)
    if mask is None:
        return {}
    return {"masked_rows": int((~mask if mask.dtype == torch.bool else mask == -math.inf).all(-1).sum())}


def _invalid_arguments(name: str, args: Any) -> dict[str, int]:
    """Count the arguments for which an operation has no finite result, as fields of ``Origin``."""
    if name in ("softmax", "log_softmax", "safe_softmax"):
        return {"masked_rows": int((args[0] == -math.inf).all(args[1]).sum())}
    if name == "pow":
        if (base := _number(args[0])) is None or (exponent := _number(args[1])) is None:
            return {}
        return {
            "zero_divisors": int(((base == 0) & (exponent < 0)).sum()),
            "outside_domain": int(((base < 0) & (exponent != exponent.round())).sum()),
        }
    found = {}
    position = {"reciprocal": 0, "rsqrt": 0, "addcdiv": 2}.get(name, 1)
    if name in DIVISIONS and len(args) > position:
        divisors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
        numbers = [number for number in map(_number, divisors) if number is not None]
        found["zero_divisors"] = sum(int((number == 0).sum()) for number in numbers)
    is_outside = IS_OUTSIDE_DOMAIN.get(name)
    if is_outside is not None:
        given = args[1:2] if name in CHECK_SECOND_ARGUMENT else args[:1]
        given = given[0] if given and isinstance(given[0], list | tuple) else given
        tensors = [each for each in given if isinstance(each, Tensor)]
        found["outside_domain"] = sum(int(is_outside(each).sum()) for each in tensors if each.is_floating_point())
        if name.startswith("log") or name in POLES:
            poles = POLES.get(name, (0,))
            found["outside_domain"] += sum(
                int((each == pole).sum()) for each in tensors if each.is_complex() for pole in poles
            )
    return found


def _number(each: Any) -> Tensor | None:
    if isinstance(each, Tensor):
        return each
    return torch.tensor(float(each)) if isinstance(each, int | float) else None
