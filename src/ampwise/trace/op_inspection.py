"""Inspect one operation as it runs: its inputs, its outputs, and what it would return in FP64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.numbers.census.measure import census
from ampwise.numbers.op_families import base_name, is_collective
from ampwise.trace.failure import TensorSummary
from ampwise.trace.recorder import dtype_name, tensors_in
from ampwise.trace.value_ranges import local_shard, readable_values

__all__ = ["OpInspection", "inspect_op", "values_of"]

MAX_VALUES_IN_FP64 = (
    2**22
)  # values: up to here an operation is recomputed whole in FP64, above only for some of its bad results
CHUNK_VALUES = 2**24  # values of a large tensor to copy at a time
MAX_BAD_RESULTS = 64  # bad results to recompute
NARROW = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class OpInspection:
    """What the inspection of an operation showed."""

    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    exact: str | None = None
    exact_largest: float | None = None
    zero_divisors: int = 0
    outside_domain: int = 0
    masked_rows: int = 0


def inspect_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpInspection]:
    """Run an operation, and inspect its inputs before it may overwrite them and its results after."""
    names = [argument.name for argument in func._schema.arguments]
    inputs = tuple(
        values_of(tensor, name)
        for name, given in (*zip(names, args, strict=False), *kwargs.items())
        for tensor in tensors_in((given,))
        if tensor.is_floating_point()
    )
    zero_divisors, outside = _zero_divisors(func, args), _outside_domain(func, args)
    masked = _masked_rows(func, args)
    can_rerun = not is_collective(str(func))  # other ranks do not run a collective again
    wide = _all_in_fp64(func, args, kwargs) if can_rerun and _size(args, kwargs) <= MAX_VALUES_IN_FP64 else []
    result = func(*args, **kwargs)
    made = _all_in(result)
    worst = _worst(made)
    first = made[worst] if made else None
    exact = wide[worst] if len(wide) == len(made) > 0 and wide[worst].is_floating_point() else None
    if can_rerun and exact is None and first is not None:
        exact = _some_in_fp64(func, args, first)
    kind, largest = ("", None) if exact is None else _classify(exact)
    return result, OpInspection(
        inputs=inputs,
        output=None if first is None else values_of(first),
        exact=kind or None,
        exact_largest=largest,
        zero_divisors=zero_divisors,
        outside_domain=outside,
        masked_rows=masked,
    )


def values_of(tensor: Tensor, name: str = "") -> TensorSummary:
    """Describe all values of a tensor."""
    inner = local_shard(tensor).detach()
    plain = TensorSummary(dtype=dtype_name(inner.dtype), shape=tuple(tensor.shape), name=name)
    values = readable_values(inner)
    if values is None:
        return plain
    low, high = _finite_range(values)
    return replace(plain, low=low, high=high, census=census(values), negative_infs=int((values == -math.inf).sum()))


def _finite_range(values: Tensor) -> tuple[float, float] | tuple[None, None]:
    """Return the smallest and largest finite value; piece by piece, since a copy of a large tensor may not fit."""
    lows, highs = [], []
    for piece in (
        values.flatten().split(CHUNK_VALUES) if values.is_contiguous() or not values.dim() else values.unbind()
    ):
        finite = piece.isfinite()
        lows.append(torch.where(finite, piece, math.inf).amin())
        highs.append(torch.where(finite, piece, -math.inf).amax())
    low, high = float(torch.stack(lows).amin()), float(torch.stack(highs).amax())
    return (low, high) if low <= high else (None, None)


def _size(args: Any, kwargs: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in((*args, *kwargs.values())))


def _classify(exact: Tensor) -> tuple[str, float | None]:
    if exact.numel() == 0 or exact.isnan().any():
        return "nan", None
    largest = float(exact.abs().max())
    return ("inf" if math.isinf(largest) else "finite"), largest


# In FP64


def _widened(each: Any) -> Any:
    if isinstance(each, Tensor):
        each = local_shard(each).detach()
        return each.double() if each.is_floating_point() else each.clone()
    return torch.float64 if each in NARROW else each


def _all_in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Recompute all results in FP64; none if the operation cannot run in FP64."""
    try:
        with torch.random.fork_rng(devices=_devices(args)):
            return _all_in(func(*tree_map(_widened, args), **tree_map(_widened, kwargs)))
    except Exception:  # the operation does not support FP64, or not for these arguments
        return []


def _all_in(result: Any) -> list[Tensor]:
    return list(tensors_in(result if isinstance(result, list | tuple) else (result,)))


def _worst(made: list[Tensor]) -> int:
    """Return the index of the first result that is not finite, else 0."""
    values = [readable_values(each) for each in made]
    bad = (at for at, numbers in enumerate(values) if numbers is not None and not bool(numbers.isfinite().all()))
    return next(bad, 0)


def _devices(args: Any) -> list[Any]:
    return [device for device in {tensor.device for tensor in tensors_in(args)} if device.type == "cuda"]


def _some_in_fp64(func: Any, args: Any, result: Tensor) -> Tensor | None:
    """Recompute a few of the bad results in FP64: all of them may not fit into memory."""
    bad = local_shard(result).isfinite().logical_not().nonzero()[:MAX_BAD_RESULTS]
    if not len(bad):
        return None
    where = tuple(bad.unbind(-1))
    try:
        dots = _matmul_at(base_name(str(func)), args, where)
        return dots if dots is not None else _elementwise(func, args, result.shape, where)
    except Exception:
        return None


def _matmul_at(name: str, args: Any, where: tuple[Tensor, ...]) -> Tensor | None:
    """Recompute some elements of a matmul; None for other operations."""
    if name in ("mm", "bmm"):
        return _dots(args[0], args[1], where)
    if name in ("addmm", "baddbmm"):
        size = (*args[1].shape[:-1], args[2].shape[-1])
        added: Tensor = args[0].expand(size)[where].double()
        return added + _dots(args[1], args[2], where)
    return None


def _dots(left: Tensor, right: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    *batch, row, column = where
    return (left[(*batch, row)].double() * right.transpose(-1, -2)[(*batch, column)].double()).sum(-1)


def _elementwise(func: Any, args: Any, shape: torch.Size, where: tuple[Tensor, ...]) -> Tensor | None:
    def picked(each: Any) -> Any:
        return _widened(each.expand(shape)[where]) if isinstance(each, Tensor) and each.dim() else _widened(each)

    result = func(*(picked(each) for each in args))
    return result if isinstance(result, Tensor) and result.shape == where[0].shape else None


# Arguments without a finite result


def _number(each: Any) -> Tensor | None:
    if isinstance(each, Tensor):
        return each
    return torch.tensor(float(each)) if isinstance(each, int | float) else None


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _zero_divisors(func: Any, args: Any) -> int:
    name = base_name(str(func))
    position = {"reciprocal": 0, "rsqrt": 0, "addcdiv": 2}.get(name, 1)
    if name == "pow":
        base, exponent = _number(args[0]), _number(args[1])
        return 0 if base is None or exponent is None else _count((base == 0) & (exponent < 0))
    divides = name in (
        "div",
        "true_divide",
        "divide",
        "floor_divide",
        "remainder",
        "fmod",
        "reciprocal",
        "rsqrt",
        "addcdiv",
    )
    if not divides or len(args) <= position:
        return 0
    divisors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
    numbers = [number for number in map(_number, divisors) if number is not None]
    return sum(_count(number == 0) for number in numbers)


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
CHECK_SECOND_ARGUMENT = ("xlogy", "special_xlog1py", "polygamma")


def _outside_domain(func: Any, args: Any) -> int:
    name = base_name(str(func))
    if name == "pow":
        base, exponent = _number(args[0]), _number(args[1])
        return 0 if base is None or exponent is None else _count((base < 0) & (exponent != exponent.round()))
    is_outside = IS_OUTSIDE_DOMAIN.get(name)
    if name in CHECK_SECOND_ARGUMENT:
        args = args[1:]
    given = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    return 0 if is_outside is None else sum(_count(is_outside(tensor)) for tensor in tensors)


def _masked_rows(func: Any, args: Any) -> int:
    """Count the rows of a softmax, or of an attention mask, in which every value is masked."""
    name = base_name(str(func))
    if name in ("softmax", "log_softmax", "safe_softmax"):
        return _count((args[0] == -math.inf).all(args[1]))
    if name.startswith("scaled_dot_product") and len(args) > 3 and isinstance(args[3], Tensor):
        mask = args[3]
        return _count((~mask if mask.dtype == torch.bool else mask == -math.inf).all(-1))
    return 0
