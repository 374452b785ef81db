"""A closer look at one operation as it runs: what went in and came out, and what it would give in FP64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.census.measure import census
from ampwise.evidence.incident import Values
from ampwise.evidence.op_families import base_name, is_collective
from ampwise.trace.ranges import local, readable
from ampwise.trace.recorder import dtype_name, tensors_in

__all__ = ["Look", "look", "values_of"]

WHOLE = 2**22  # numbers: up to here an operation is computed whole in FP64, above for some of its bad results
PIECE = 2**24  # numbers of a large tensor that are copied at a time
SOME = 64
NARROW = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    inputs: tuple[Values, ...] = ()
    output: Values | None = None
    exact: str | None = None
    exact_largest: float | None = None
    zero_divisors: int = 0
    outside_domain: int = 0
    masked_rows: int = 0


def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Look]:
    """Run an operation, and look: before, at what it may write over, and after."""
    names = [argument.name for argument in func._schema.arguments]
    inputs = tuple(
        values_of(tensor, name)
        for name, given in (*zip(names, args, strict=False), *kwargs.items())
        for tensor in tensors_in((given,))
        if tensor.is_floating_point()
    )
    zero_divisors, outside = _zero_divisors(func, args), _outside_domain(func, args)
    masked = _masked_rows(func, args)
    alone = not is_collective(str(func))  # else other ranks would be asked, who do not look
    wide = _whole_in_double(func, args, kwargs) if alone and _size(args, kwargs) <= WHOLE else []
    result = func(*args, **kwargs)
    made = _all_in(result)
    worst = _worst(made)
    first = made[worst] if made else None
    exact = wide[worst] if len(wide) == len(made) > 0 and wide[worst].is_floating_point() else None
    if alone and exact is None and first is not None:
        exact = _some_in_double(func, args, first)
    verdict, largest = ("", None) if exact is None else _judged(exact)
    return result, Look(
        inputs=inputs,
        output=None if first is None else values_of(first),
        exact=verdict or None,
        exact_largest=largest,
        zero_divisors=zero_divisors,
        outside_domain=outside,
        masked_rows=masked,
    )


def values_of(tensor: Tensor, name: str = "") -> Values:
    """What a tensor holds, in full."""
    inner = local(tensor).detach()
    plain = Values(dtype=dtype_name(inner.dtype), shape=tuple(tensor.shape), name=name)
    values = readable(inner)
    if values is None:
        return plain
    low, high = _finite_range(values)
    return replace(plain, low=low, high=high, census=census(values), negative_infs=int((values == -math.inf).sum()))


def _finite_range(values: Tensor) -> tuple[float, float] | tuple[None, None]:
    """In pieces, as a copy of the finite values of a large tensor may not fit."""
    lows, highs = [], []
    for piece in values.flatten().split(PIECE) if values.is_contiguous() or not values.dim() else values.unbind():
        finite = piece.isfinite()
        lows.append(torch.where(finite, piece, math.inf).amin())
        highs.append(torch.where(finite, piece, -math.inf).amax())
    low, high = float(torch.stack(lows).amin()), float(torch.stack(highs).amax())
    return (low, high) if low <= high else (None, None)


def _size(args: Any, kwargs: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in((*args, *kwargs.values())))


def _judged(exact: Tensor) -> tuple[str, float | None]:
    if exact.numel() == 0 or exact.isnan().any():
        return "nan", None
    largest = float(exact.abs().max())
    return ("inf" if math.isinf(largest) else "finite"), largest


# In FP64


def _widened(each: Any) -> Any:
    if isinstance(each, Tensor):
        each = local(each).detach()
        return each.double() if each.is_floating_point() else each.clone()
    return torch.float64 if each in NARROW else each


def _whole_in_double(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """All its results; none if it cannot be run in FP64."""
    try:
        with torch.random.fork_rng(devices=_devices(args)):
            return _all_in(func(*tree_map(_widened, args), **tree_map(_widened, kwargs)))
    except Exception:  # an operation that has no FP64, or none for these arguments
        return []


def _all_in(result: Any) -> list[Tensor]:
    return list(tensors_in(result if isinstance(result, list | tuple) else (result,)))


def _worst(made: list[Tensor]) -> int:
    """Of several results, the place of the first that is not finite; else that of the first."""
    values = [readable(each) for each in made]
    bad = (at for at, numbers in enumerate(values) if numbers is not None and not bool(numbers.isfinite().all()))
    return next(bad, 0)


def _devices(args: Any) -> list[Any]:
    return [device for device in {tensor.device for tensor in tensors_in(args)} if device.type == "cuda"]


def _some_in_double(func: Any, args: Any, result: Tensor) -> Tensor | None:
    """For a few of the bad results, as memory for all of them in FP64 may not be there."""
    bad = local(result).isfinite().logical_not().nonzero()[:SOME]
    if not len(bad):
        return None
    where = tuple(bad.unbind(-1))
    try:
        product = _products(base_name(str(func)), args, where)
        return product if product is not None else _elementwise(func, args, result.shape, where)
    except Exception:
        return None


def _products(name: str, args: Any, where: tuple[Tensor, ...]) -> Tensor | None:
    """Rows times columns of the matrix products at some places."""
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


# What cannot be taken


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


# Of a function's argument, where it has no finite value.
OUTSIDE = {
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
    # Of their second argument.
    "xlogy": lambda x: x <= 0,
    "special_xlog1py": lambda x: x <= -1,
    "polygamma": lambda x: (x <= 0) & (x == x.floor()),
}
SECOND = ("xlogy", "special_xlog1py", "polygamma")


def _outside_domain(func: Any, args: Any) -> int:
    name = base_name(str(func))
    if name == "pow":
        base, exponent = _number(args[0]), _number(args[1])
        return 0 if base is None or exponent is None else _count((base < 0) & (exponent != exponent.round()))
    is_outside = OUTSIDE.get(name)
    if name in SECOND:
        args = args[1:]
    given = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    return 0 if is_outside is None else sum(_count(is_outside(tensor)) for tensor in tensors)


def _masked_rows(func: Any, args: Any) -> int:
    """Rows of a softmax in which nothing is left; of attention, rows of its mask."""
    name = base_name(str(func))
    if name in ("softmax", "log_softmax", "safe_softmax"):
        return _count((args[0] == -math.inf).all(args[1]))
    if name.startswith("scaled_dot_product") and len(args) > 3 and isinstance(args[3], Tensor):
        mask = args[3]
        return _count((~mask if mask.dtype == torch.bool else mask == -math.inf).all(-1))
    return 0
