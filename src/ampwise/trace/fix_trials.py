"""Try fixes in a replay: change the arguments or the result of the call on the line that failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampwise.finding.call_site import CallSite
from ampwise.trace.failure import Failure, FixTrial
from ampwise.trace.recorder import dtype_name
from ampwise.trace.remedies import (
    LOSSES,
    Remedy,
    clamped_argument,
    clamped_divisor,
    nonempty_mean,
    remedies_for,
    unmasked_rows,
)
from ampwise.trace.replay import Replay, ReplaySettings
from ampwise.trace.stack_lines import current_line

__all__ = ["try_remedies"]

MAX_REMEDIES = 3  # remedies to try
# Calls a function with a remedy applied; returns the result, and the remedy with its code adapted to the call.
Change = Callable[[Any, tuple[Any, ...], dict[str, Any], Remedy], tuple[Any, Remedy]]

# Names of the Python functions that run an operation of another name.
PYTHON_NAMES = {
    "div": {"__truediv__", "__rtruediv__", "__itruediv__", "true_divide", "divide", "__floordiv__", "floor_divide"},
    "floor_divide": {"__floordiv__"},
    "remainder": {"__mod__"},
    "reciprocal": {"__rtruediv__", "__rdiv__"},
    "pow": {"__pow__", "__rpow__", "__ipow__", "float_power"},
    "nll_loss_forward": {"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"},
    "nll_loss2d_forward": {"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"},
    "addmm": {"linear", "matmul", "__matmul__", "mm"},
    "mm": {"linear", "matmul", "__matmul__"},
    "bmm": {"matmul", "__matmul__", "einsum", "baddbmm"},
    "mul": {"__mul__", "__rmul__", "__imul__", "multiply"},
    "add": {"__add__", "__radd__", "__iadd__"},
    "sub": {"__sub__", "__rsub__", "__isub__", "rsub"},
    "linalg_vector_norm": {"norm", "vector_norm", "linalg_norm"},
    "convolution": {"conv1d", "conv2d", "conv3d"},
    "to_copy": {"half", "to", "type_as", "type"},
}


class RemedyMode(TorchFunctionMode):
    """Function mode that applies a remedy to functions of some names, called on one line."""

    def __init__(self, names: set[str], site: CallSite, remedy: Remedy) -> None:
        super().__init__()
        self._names, self._site, self.remedy = names, site, remedy
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").rstrip("_") not in self._names and func.__name__ not in self._names:
            return func(*args, **kwargs)
        line = current_line()
        shown = line.own or line.library
        if shown is None or (shown[0], shown[1]) != (self._site.file, self._site.line):
            return func(*args, **kwargs)
        self.met = True
        result, self.remedy = BY_CHANGE[self.remedy.change](func, args, kwargs, self.remedy)
        return result


def try_remedies(replay: Replay, failure: Failure) -> tuple[FixTrial, ...]:
    """Try the likeliest remedies, up to the first that makes the step finite."""
    trials: list[FixTrial] = []
    for remedy in remedies_for(failure)[:MAX_REMEDIES]:
        trial = _try_remedy(replay, failure, remedy)
        if trial is not None:
            trials.append(trial)
            if trial.finite:
                break
    return tuple(trials)


def _try_remedy(replay: Replay, failure: Failure, remedy: Remedy) -> FixTrial | None:
    try:
        if remedy.change == "precision":
            ended = replay.plain(ReplaySettings(only_if_finite=True, precision=remedy.argument))
        elif remedy.change == "keep":
            ended = replay.plain(ReplaySettings(only_if_finite=True, keep=remedy.argument))
        else:
            adjusted = _adjusted(failure, remedy)
            ended = replay.plain(ReplaySettings(only_if_finite=True), adjusted)
            if not adjusted.met:
                return None
            remedy = adjusted.remedy
    except Exception:  # raised by the user's code, which may take another path with other values
        return None
    return FixTrial(
        what=remedy.what,
        code=remedy.code,
        change=remedy.change,
        argument=remedy.argument,
        finite=ended.finite,
        loss=ended.loss,
        bad_gradients=len(ended.bad),
    )


def _adjusted(failure: Failure, remedy: Remedy) -> RemedyMode:
    origin = failure.origin
    assert origin is not None
    name = origin.derivative_of or origin.name
    return RemedyMode({name, *PYTHON_NAMES.get(name, ())}, origin.site, remedy)


class RemedyNotApplicable(Exception):
    """The remedy cannot be applied to this call, so it is not reported as tried."""


def _with(args: tuple[Any, ...], position: int, given: Any) -> tuple[Any, ...]:
    return (*args[:position], given, *args[position + 1 :])


def _clamped_argument(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    op = remedy.argument
    position = 1 if op in ("xlogy", "special_xlog1py") else 0
    given = args[position] if len(args) > position else None
    swapped = func.__name__ == "__rpow__"  # the tensor is the exponent
    if not isinstance(given, Tensor) or swapped or op in ("linalg_vector_norm", "norm", "polygamma"):
        raise RemedyNotApplicable(op)
    remedy = clamped_argument(op, dtype_name(given.dtype))
    return func(*_with(args, position, given.clamp(remedy.low, remedy.high)), **kwargs), remedy


def _clamped_divisor(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    name = func.__name__
    position = 0 if name in ("__rtruediv__", "__rdiv__", "reciprocal") else 2 if name == "addcdiv" else 1
    if len(args) <= position or not isinstance(args[position], Tensor | int | float):
        raise RemedyNotApplicable(name)
    divisor = args[position]
    narrow = divisor if isinstance(divisor, Tensor) else args[0]
    remedy = clamped_divisor(remedy.argument, dtype_name(narrow.dtype), _divisor_kind(divisor))
    return func(*_with(args, position, _away_from_zero(divisor, remedy.low)), **kwargs), remedy


def _divisor_kind(divisor: Any) -> str:
    if not isinstance(divisor, Tensor):
        return "whole" if isinstance(divisor, int) else "number"
    if divisor.is_complex():
        return "signed"
    if not divisor.is_floating_point():
        return "count"
    return "signed" if bool((divisor < 0).any()) else "positive"


def _away_from_zero(divisor: Any, tiny: Any) -> Any:
    kind = _divisor_kind(divisor)
    if kind in ("whole", "number"):
        return divisor or (int(tiny) if kind == "whole" else tiny)
    if kind == "signed":
        return torch.where(divisor.abs() < tiny, tiny, divisor)
    return divisor.clamp_min(int(tiny) if kind == "count" else tiny)


def _clamped_exponent(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    return func(args[0].clamp(remedy.low, remedy.high), *args[1:], **kwargs), remedy


def _clamped_result(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    result = func(*args, **kwargs)
    limit = torch.finfo(result.dtype).max
    return result.clamp(-limit, limit), remedy


def _opened_rows(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    scores, *others = args
    dim = kwargs.get("dim", others[0] if others else -1)
    if not isinstance(dim, int) or "attention" in remedy.argument:
        raise RemedyNotApplicable(remedy.argument)
    nothing_left = (scores == -math.inf).all(dim, keepdim=True)
    result = func(scores.masked_fill(nothing_left, 0.0), *others, **kwargs)
    is_share = remedy.argument != "logsumexp"
    return result.masked_fill(nothing_left, 0.0) if is_share else result, unmasked_rows(remedy.argument, dim)


def _counted(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    op = remedy.argument
    if op.startswith("nll_loss") or op in LOSSES:
        return _summed_loss(func, args, kwargs) / _count(args, kwargs, op), remedy
    if op.startswith(("var", "std")):
        return func(*_without_correction(args), **{**_without(kwargs, "unbiased"), "correction": 0}), remedy
    return _mean(op, args, kwargs)


def _summed_loss(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 2 or kwargs.get("reduction", "mean") != "mean":
        raise RemedyNotApplicable(func.__name__)
    return func(*args, **{**_without(kwargs, "size_average", "reduce"), "reduction": "sum"})


def _count(args: Any, kwargs: Any, op: str) -> Any:
    if op in LOSSES:
        return max(args[0].numel(), 1)
    if args[1].is_floating_point():  # class probabilities instead of labels
        raise RemedyNotApplicable(op)
    return (args[1] != kwargs.get("ignore_index", -100)).sum().clamp_min(1)


def _without_correction(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(each, bool) for each in args):  # it may be unbiased or keepdim
        raise RemedyNotApplicable("correction")
    return args


def _mean(op: str, args: Any, kwargs: Any) -> Any:
    given, *others = args
    dim, keepdim = kwargs.get("dim", others[0] if others else None), bool(kwargs.get("keepdim", False))
    known = len(others) < 2 and not set(kwargs) - {"dim", "keepdim"}
    if op != "mean" or not known or not isinstance(dim, int | None):
        raise RemedyNotApplicable(op)
    if dim is None:
        return given.sum() / max(given.numel(), 1), nonempty_mean(op)
    return given.sum(dim, keepdim=keepdim) / max(given.shape[dim], 1), nonempty_mean(op, dim, keepdim)


def _without(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


BY_CHANGE: dict[str, Change] = {
    "clamp-argument": _clamped_argument,
    "clamp-divisor": _clamped_divisor,
    "clamp-exponent": _clamped_exponent,
    "clamp-result": _clamped_result,
    "open-masked-rows": _opened_rows,
    "count-at-least-one": _counted,
}
