"""Remedies, tried in a replay: at the guilty line, a function is given other arguments, or its result is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampwise.evidence.conduct import Site
from ampwise.evidence.incident import Incident, Trial
from ampwise.evidence.remedy import Remedy, remedies_for, tiny_for
from ampwise.trace.replay import Replay, Settings
from ampwise.trace.where import line_here

__all__ = ["tried"]

MOST = 3  # remedies that are tried
Change = Callable[[Any, tuple[Any, ...], dict[str, Any], str], Any]

# What functions are called in Python that come down to an operation of another name.
CALLED = {
    "div": {"__truediv__", "__rtruediv__", "__itruediv__", "true_divide", "divide", "__floordiv__", "floor_divide"},
    "reciprocal": {"__rtruediv__", "__rdiv__"},
    "pow": {"__pow__", "__rpow__", "__ipow__", "float_power"},
    "nll_loss_forward": {"cross_entropy_loss", "nll_loss", "nll_loss_nd"},
    "nll_loss2d_forward": {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"},
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


class Adjusted(TorchFunctionMode):
    """Functions of some names, called at a line, behave as ``change`` says."""

    def __init__(self, names: set[str], site: Site, change: Change, argument: str) -> None:
        super().__init__()
        self._names, self._site, self._change, self._argument = names, site, change, argument
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").rstrip("_") not in self._names and func.__name__ not in self._names:
            return func(*args, **kwargs)
        line = line_here()
        shown = line.own or line.library
        if shown is None or (shown[0], shown[1]) != (self._site.file, self._site.line):
            return func(*args, **kwargs)
        self.met = True
        return self._change(func, args, kwargs, self._argument)


def tried(replay: Replay, incident: Incident) -> tuple[Trial, ...]:
    """The likeliest remedies, up to the first that makes the step finite."""
    trials: list[Trial] = []
    for remedy in remedies_for(incident)[:MOST]:
        trial = _tried(replay, incident, remedy)
        if trial is not None:
            trials.append(trial)
            if trial.finite:
                break
    return tuple(trials)


def _tried(replay: Replay, incident: Incident, remedy: Remedy) -> Trial | None:
    try:
        if remedy.change == "precision":
            ended = replay.plain(Settings(only_if_finite=True, precision=remedy.argument))
        elif remedy.change == "keep":
            ended = replay.plain(Settings(only_if_finite=True, keep=remedy.argument))
        else:
            adjusted = _adjusted(incident, remedy)
            ended = replay.plain(Settings(only_if_finite=True), adjusted)
            if not adjusted.met:
                return None
    except Exception:  # the script's own, which other numbers may lead elsewhere
        return None
    return Trial(
        what=remedy.what,
        code=remedy.code,
        finite=ended.finite,
        loss=ended.loss,
        bad_gradients=len(ended.bad),
    )


def _adjusted(incident: Incident, remedy: Remedy) -> Adjusted:
    birth = incident.birth
    assert birth is not None
    name = birth.derivative_of or birth.name
    return Adjusted({name, *CALLED.get(name, ())}, birth.site, BY_CHANGE[remedy.change], remedy.argument)


def _clamped_argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    position = 1 if name in ("xlogy", "special_xlog1py") else 0
    given = args[position] if len(args) > position else None
    if not isinstance(given, Tensor) or name in ("linalg_vector_norm", "norm", "polygamma"):
        raise NotImplementedError(name)  # not tried, and nothing is said to have been
    low, high = _bounds(name, given)
    return func(*args[:position], given.clamp(low, high), *args[position + 1 :], **kwargs)


def _bounds(name: str, given: Tensor) -> tuple[float, float | None]:
    """Where a function is defined, and finite with its derivative."""
    near = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(given.dtype, 1e-6)
    if name in ("acos", "asin", "atanh", "erfinv"):
        return -1 + near, 1 - near
    if name in ("logit", "special_ndtri"):
        return near, 1 - near
    if name in ("log1p", "special_xlog1py"):
        return -1 + near, None
    return (1 + near if name == "acosh" else _tiny(given)), None


def _tiny(tensor: Tensor) -> float:
    return tiny_for("fp16" if tensor.dtype == torch.float16 else "")


def _clamped_divisor(func: Any, args: Any, kwargs: Any, _: str) -> Any:
    swapped = func.__name__ in ("__rtruediv__", "__rdiv__", "reciprocal", "rsqrt")
    position = 0 if swapped else 1
    divisor = args[position] if len(args) > position else None
    if isinstance(divisor, int | float):
        divisor = divisor or (1 if isinstance(divisor, int) else _tiny(args[0]))
    elif not isinstance(divisor, Tensor):
        raise NotImplementedError(func.__name__)  # not tried, and nothing is said to have been
    elif not (divisor.is_floating_point() or divisor.is_complex()):
        divisor = divisor.clamp_min(1)
    else:
        divisor = torch.where(divisor.abs() < _tiny(divisor), torch.full_like(divisor, _tiny(divisor)), divisor)
    return func(*args[:position], divisor, *args[position + 1 :], **kwargs)


def _clamped_exponent(func: Any, args: Any, kwargs: Any, limit: str) -> Any:
    both = func.__name__ in ("sinh", "cosh")
    return func(args[0].clamp(-float(limit) if both else None, float(limit)), *args[1:], **kwargs)


def _clamped_result(func: Any, args: Any, kwargs: Any, _: str) -> Any:
    result = func(*args, **kwargs)
    limit = torch.finfo(result.dtype).max
    return result.clamp(-limit, limit)


def _opened_rows(func: Any, args: Any, kwargs: Any, _: str) -> Any:
    scores, *others = args
    dim = kwargs.get("dim", next((each for each in others if isinstance(each, int)), -1))
    nothing_left = (scores == -math.inf).all(dim, keepdim=True)
    return func(scores.masked_fill(nothing_left, 0.0), *others, **kwargs).masked_fill(nothing_left, 0.0)


def _counted(func: Any, args: Any, kwargs: Any, _: str) -> Any:
    result = func(*args, **kwargs)
    return (args[0] * 0).sum() if result.numel() == 1 and not result.isfinite() else result


BY_CHANGE: dict[str, Change] = {
    "clamp-argument": _clamped_argument,
    "clamp-divisor": _clamped_divisor,
    "clamp-exponent": _clamped_exponent,
    "clamp-result": _clamped_result,
    "open-masked-rows": _opened_rows,
    "count-at-least-one": _counted,
}
