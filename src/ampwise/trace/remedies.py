"""Fixes for a failure: code to write, and the change of the failing call that tries the fix in a replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampwise.trace.call_site import current_line
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import FixTrial, Origin
from ampwise.trace.recorder import dtype_name
from ampwise.trace.replay import Replay, ReplaySettings

__all__ = ["CHANGES", "Remedy", "remedies_for", "try_remedies"]

F = TypeVar("F", bound=Callable[..., Any])
MAX_REMEDIES = 3  # remedies to try
ROUNDING = {"fp16": 2e-3, "bf16": 2e-2}  # relative change of a loss by rounding alone
CUSTOM_LOOP = "in a custom loop"  # comment on the line for users without an engine
# Operations whose derivative is infinite at the edge of their domain.
ROOTED = ("sqrt", "rsqrt", "pow", "log", "acos", "asin", "atanh", "reciprocal", "linalg_vector_norm")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
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


# Changes of the failing call, by name: each calls the function with a remedy applied, and returns the result, and the
# remedy with its code adapted to the call.
APPLY: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any], Remedy], tuple[Any, Remedy]]] = {}


def applies(change: str) -> Callable[[F], F]:
    """Register a function in APPLY."""

    def register(function: F) -> F:
        APPLY[change] = function
        return function

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A possible fix. A replay does what ``code`` says, with the same numbers."""

    change: str  # of CHANGES
    what: str  # description: "`blocks.3` in FP32"
    code: str
    argument: str = ""  # a precision, a module's path, or the operation
    low: float | None = None  # bounds of the argument
    high: float | None = None


def remedies_for(failure: Failure) -> tuple[Remedy, ...]:
    """Return possible fixes, most likely first."""
    origin = failure.origin
    if origin is None:
        return ()
    name, dtype = origin.name, origin.dtype
    match failure.kind:
        case "overflow" | "unstable-loss" if origin.family == "exponential":
            return (_clamped_exponent(origin),)
        case "half-overflow":
            return _wider_format(failure, origin.module)
        case "overflow" | "gradient-overflow" as kind if origin.is_narrow:
            return _wider_format(failure, origin.module) if kind == "overflow" or failure.precision == "fp16" else ()
        case "outside-domain" | "unstable-loss" if origin.family not in ("determinant", "loss"):
            return (_clamped_argument(name, dtype),)
        case "infinite-derivative" if origin.derivative_of in ("div", *ROOTED):
            clamped = _clamped_divisor if origin.derivative_of == "div" else _clamped_argument
            return (clamped(origin.derivative_of, dtype),)
        case "division-by-zero" if name != "linalg_inv_ex":
            return (_division(origin),)
        case "fully-masked-row":
            return (_unmasked_rows(name),)
        case "mean-of-nothing":
            return (_nonempty_mean(name),)
    return ()


def try_remedies(replay: Replay, failure: Failure) -> tuple[FixTrial, ...]:
    """Try the likeliest remedies, up to the first that makes the step finite and leaves an earlier batch as it was."""
    trials: list[FixTrial] = []
    for remedy in remedies_for(failure)[:MAX_REMEDIES]:
        settings = ReplaySettings(
            only_if_finite=True,
            precision=remedy.argument if remedy.change == "precision" else None,
            keep=remedy.argument if remedy.change == "keep" else None,
        )
        assert failure.origin is not None
        mode = RemedyMode(failure.origin, remedy) if remedy.change in APPLY else None
        try:
            ended = replay.plain(settings, mode)
        except Exception:  # raised by the user's code, which may take another path with other values
            continue
        if mode is not None and not mode.met:
            continue
        if ended.vanished:  # nothing would be learned
            continue
        tried = remedy if mode is None else mode.remedy
        trials.append(
            FixTrial(
                what=tried.what,
                code=tried.code,
                change=tried.change,
                argument=tried.argument,
                finite=ended.finite,
                loss=ended.loss,
                bad_gradients=len(ended.bad),
                usual=_usual_losses(replay, settings, failure, remedy) if ended.finite else None,
                rounding=ROUNDING.get(failure.precision, 1e-5),
            )
        )
        if trials[-1].helps:
            break
    return tuple(trials)


def _usual_losses(
    replay: Replay, settings: ReplaySettings, failure: Failure, remedy: Remedy
) -> tuple[float, float] | None:
    """Return the loss of an earlier batch without and with a remedy; None if there is none, or it is not finite."""
    usual = replay.subject.usual
    if usual is None or failure.origin is None:
        return None
    try:
        before = replay.plain(ReplaySettings(backward=False), run=usual).loss
        mode = RemedyMode(failure.origin, remedy) if remedy.change in APPLY else None
        after = replay.plain(replace(settings, backward=False), mode, run=usual).loss
    except Exception:  # raised by the user's code
        return None
    return None if before is None or after is None or not math.isfinite(before) else (before, after)


class RemedyMode(TorchFunctionMode):
    """Function mode that applies a remedy to the calls that ran the failing operation, on its line."""

    def __init__(self, origin: Origin, remedy: Remedy) -> None:
        super().__init__()
        name = origin.derivative_of or origin.name
        self._names, self._line = {name, *PYTHON_NAMES.get(name, ())}, (origin.site.file, origin.site.line)
        self.remedy = remedy  # with its code adapted to the call, once there was one
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").rstrip("_") not in self._names and func.__name__ not in self._names:
            return func(*args, **kwargs)
        line = current_line()
        shown = line.own or line.library
        if shown is None or shown[:2] != self._line:
            return func(*args, **kwargs)
        self.met = True
        result, self.remedy = APPLY[self.remedy.change](func, args, kwargs, self.remedy)
        return result


class RemedyNotApplicable(Exception):
    """The remedy cannot be applied to this call, so it is not reported as tried."""


# A wider format


def _wider_format(failure: Failure, module: str) -> tuple[Remedy, ...]:
    if failure.precision not in ("fp16", "bf16"):  # the weights themselves are in half precision
        code = "limit = torch.finfo(y.dtype).max\ny = y.clamp(-limit, limit)"
        return (Remedy(change="clamp-result", what="the result clamped to the format's range", code=code),)
    bf16 = Remedy(
        change="precision",
        argument="bf16",
        what="the step in BF16",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="bf16")\n'
            f'autocast = torch.autocast("{failure.device}", torch.bfloat16)  # {CUSTOM_LOOP}'
        ),
    )
    if module:
        parts = module.split(".")
        in_all_blocks = ".".join("*" if part.isdigit() else part for part in parts)  # "blocks.*.mlp"
        if all(part.isdigit() for part in parts):  # every module would fit "*.*"
            in_all_blocks = module
        return (*(_kept_in_fp32(failure, path) for path in dict.fromkeys((module, in_all_blocks))), bf16)
    fp32 = Remedy(
        change="precision",
        argument="fp32",
        what="the step in FP32",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="fp32")\n'
            "# If one line is enough (not tried):\n"
            f'with torch.autocast("{failure.device}", enabled=False):\n    y = f(x.float())'
        ),
    )
    return fp32, bf16


def _kept_in_fp32(failure: Failure, path: str) -> Remedy:
    # Names may contain any characters, and users copy this code.
    quoted = f'"{path}"' if path.isprintable() and not {'"', "\\"} & set(path) else repr(path)
    policy = f'ampwise.Policy("{failure.precision}").keep("fp32", {quoted})'
    return Remedy(
        change="keep",
        argument=path,
        what=f"`{path}` in FP32",
        code=f"engine = ampwise.Engine(model, optimizer, {policy})\n{policy}.apply(model)  # {CUSTOM_LOOP}",
    )


@applies("clamp-result")
def _apply_clamped_result(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    result = func(*args, **kwargs)
    limit = torch.finfo(result.dtype).max
    return result.clamp(-limit, limit), remedy


# Bounded arguments

# Operations that are not tensor methods, or take more arguments.
ABOVE_ZERO = {
    "pow": "y = x.clamp_min({tiny}).pow(exponent)",
    "float_power": "y = x.clamp_min({tiny}).float_power(exponent)",
    "linalg_vector_norm": "y = (x.square().sum(-1) + {tiny}).sqrt()",
    "xlogy": "y = torch.xlogy(x, p.clamp_min({tiny}))",
    "polygamma": "y = torch.polygamma(n, x.clamp_min({tiny}))",
}
# Operations whose domain ends at 1 or -1, where numbers are less dense than near 0.
AROUND_ZERO = ("acos", "asin", "erfinv", "atanh")
AWAY_FROM_ONE = {
    **dict.fromkeys(AROUND_ZERO, "y = x.clamp(-1 + {near}, 1 - {near}).{op}()"),
    "acosh": "y = x.clamp_min(1 + {near}).acosh()",
    "log1p": "y = x.clamp_min(-1 + {near}).log1p()",
    "logit": "y = torch.logit(x, eps={near})",
    "special_xlog1py": "y = torch.special.xlog1py(x, p.clamp_min(-1 + {near}))",
    "special_ndtri": "y = torch.special.ndtri(x.clamp({near}, 1 - {near}))",
}


def _tiny(dtype: str) -> str:
    """Return the lower bound for the argument of a root, a logarithm or a division."""
    return "1e-4" if dtype == "fp16" else "1e-12"


def _clamped_argument(op: str, dtype: str) -> Remedy:
    """Return the fix that clamps the argument to where the operation and its derivative are finite in the format."""
    tiny = _tiny(dtype)
    # How far below 1 a number must be to be distinct: the next in BF16 is 0.996, in FP16 0.9995.
    near = {"bf16": "1e-2", "fp32": "1e-6", "fp64": "1e-6"}.get(dtype, "1e-3")
    margin, low, high = float(near), float(tiny), None
    if op in AROUND_ZERO:
        low, high = -1 + margin, 1 - margin
    elif op in ("logit", "special_ndtri"):
        low, high = margin, 1 - margin
    elif op in ("log1p", "special_xlog1py"):
        low = -1 + margin
    elif op == "acosh":
        low = 1 + margin
    is_near_one = op in AWAY_FROM_ONE
    if dtype.startswith("complex"):
        code = f"y = torch.where(x.abs() < {tiny}, {tiny}, x).{op}()"
        what = f"the argument kept away from 0 by {tiny}"
        return Remedy(change="clamp-argument", argument=op, what=what, code=code, low=float(tiny))
    code = AWAY_FROM_ONE[op] if is_near_one else ABOVE_ZERO.get(op, "y = x.clamp_min({tiny}).{op}()")
    return Remedy(
        change="clamp-argument",
        argument=op,
        what="the argument clamped to the domain" if is_near_one else f"the argument clamped to at least {tiny}",
        code=code.format(tiny=tiny, near=near, op=op),
        low=low,
        high=high,
    )


@applies("clamp-argument")
def _apply_clamped_argument(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    op = remedy.argument
    position = 1 if op in ("xlogy", "special_xlog1py") else 0
    given = args[position] if len(args) > position else None
    swapped = func.__name__ == "__rpow__"  # the tensor is the exponent
    if not isinstance(given, Tensor) or swapped or op in ("linalg_vector_norm", "norm", "polygamma"):
        raise RemedyNotApplicable(op)
    remedy = _clamped_argument(op, dtype_name(given.dtype))
    if given.is_complex():
        bounded = torch.where(given.abs() < (remedy.low or 0.0), remedy.low or 0.0, given)
    else:
        bounded = given.clamp(remedy.low, remedy.high)
    return func(*_replaced(args, position, bounded), **kwargs), remedy


def _replaced(args: tuple[Any, ...], position: int, given: Any) -> tuple[Any, ...]:
    return (*args[:position], given, *args[position + 1 :])


def _clamped_exponent(origin: Origin) -> Remedy:
    limit, both = 10 if origin.is_narrow else 80, origin.name in ("sinh", "cosh")
    clamped = f"x.clamp(-{limit}, {limit})" if both else f"x.clamp(max={limit})"
    return Remedy(
        change="clamp-exponent",
        what=f"the exponent clamped to {limit}",
        code=f"y = F.softplus({clamped})" if origin.name == "softplus" else f"y = {clamped}.{origin.name}()",
        argument=origin.name,
        low=-float(limit) if both else None,
        high=float(limit),
    )


@applies("clamp-exponent")
def _apply_clamped_exponent(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    return func(args[0].clamp(remedy.low, remedy.high), *args[1:], **kwargs), remedy


# Divisions

# Kinds of divisor, and how each is kept away from 0.
DIVISORS = {
    "positive": "b.clamp_min({tiny})",
    "signed": "torch.where(b.abs() < {tiny}, {tiny}, b)",  # clamp_min would make it positive
    "count": "b.clamp_min({tiny})",  # an integer tensor
    "whole": "(b or {tiny})",  # Python numbers
    "number": "(b or {tiny})",
}
DIVIDING = {
    "remainder": "a % {}",
    "floor_divide": "a // {}",
    "fmod": "torch.fmod(a, {})",
    "addcdiv": "torch.addcdiv(x, a, {})",
}


def _division(origin: Origin) -> Remedy:
    name, inputs = origin.name, origin.inputs
    if name in ("rsqrt", "pow", "float_power"):
        return _clamped_argument(name, origin.dtype)
    if origin.family == "normalisation":
        code = "norm = nn.LayerNorm(width, eps=1e-5)  # or another normalisation, with an eps above 0"
        return Remedy(change="clamp-divisor", what="an eps above 0", code=code)
    # The first input is the dividend, and integers are not among the inputs.
    divisor = "count" if len(inputs) == 1 and name == "div" else "positive"
    if (name == "reciprocal" or len(inputs) > 1) and inputs and (inputs[-1].low or 0.0) < 0:
        divisor = "signed"
    return _clamped_divisor(name, origin.dtype, divisor)


def _clamped_divisor(op: str, dtype: str, divisor: str = "positive") -> Remedy:
    """Return the fix that keeps the divisor away from 0."""
    tiny = "1" if divisor in ("count", "whole") else _tiny(dtype)
    kept = DIVISORS[divisor].format(tiny=tiny)
    hint = "  # clamp_min(1) if b is a count" if divisor == "positive" else ""
    return Remedy(
        change="clamp-divisor",
        argument=op,
        what="the divisor kept away from 0",
        code=f"y = {DIVIDING.get(op, 'a / {}').format(kept)}{hint}",
        low=float(tiny),
    )


@applies("clamp-divisor")
def _apply_clamped_divisor(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    name = func.__name__
    position = 0 if name in ("__rtruediv__", "__rdiv__", "reciprocal") else 2 if name == "addcdiv" else 1
    if len(args) <= position or not isinstance(args[position], Tensor | int | float):
        raise RemedyNotApplicable(name)
    divisor = args[position]
    if not isinstance(divisor, Tensor):
        kind = "whole" if isinstance(divisor, int) else "number"
    elif divisor.is_complex() or (divisor.is_floating_point() and bool((divisor < 0).any())):
        kind = "signed"
    else:
        kind = "positive" if divisor.is_floating_point() else "count"
    narrow = divisor if isinstance(divisor, Tensor) else args[0]
    remedy = _clamped_divisor(remedy.argument, dtype_name(narrow.dtype), kind)
    tiny: Any = int(remedy.low or 0) if kind in ("whole", "count") else remedy.low
    if kind in ("whole", "number"):
        away = divisor or tiny
    elif kind == "signed":
        away = torch.where(divisor.abs() < tiny, tiny, divisor)
    else:
        away = divisor.clamp_min(tiny)
    return func(*_replaced(args, position, away), **kwargs), remedy


# Masked rows and empty means


def _unmasked_rows(op: str, dim: int = -1) -> Remedy:
    """Return the fix that unmasks fully masked rows and clears them afterwards."""
    if "attention" in op:
        code = (
            "all_masked = ~mask.any(-1, keepdim=True)  # for a mask that is True where attention is allowed\n"
            "y = F.scaled_dot_product_attention(q, k, v, mask | all_masked).masked_fill(all_masked, 0.0)"
        )
    else:
        function = op if op in ("log_softmax", "logsumexp") else "softmax"
        opened = f"scores.masked_fill(all_masked, 0.0).{function}({dim})"
        closed = "" if function == "logsumexp" else ".masked_fill(all_masked, 0.0)"
        code = f'all_masked = (scores == float("-inf")).all({dim}, keepdim=True)\ny = {opened}{closed}'
    return Remedy(change="open-masked-rows", argument=op, what="fully masked rows left open", code=code)


@applies("open-masked-rows")
def _apply_unmasked_rows(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    scores, *others = args
    dim = kwargs.get("dim", others[0] if others else -1)
    if not isinstance(dim, int) or "attention" in remedy.argument:
        raise RemedyNotApplicable(remedy.argument)
    nothing_left = (scores == -math.inf).all(dim, keepdim=True)
    result = func(scores.masked_fill(nothing_left, 0.0), *others, **kwargs)
    is_share = remedy.argument != "logsumexp"
    return result.masked_fill(nothing_left, 0.0) if is_share else result, _unmasked_rows(remedy.argument, dim)


def _nonempty_mean(op: str, over: int | None = None, keepdim: bool = False) -> Remedy:
    """Return the fix that makes a mean's count at least 1."""
    if op.startswith("nll_loss"):
        code = 'y = F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp_min(1)'
    elif op in LOSSES:
        code = f'y = F.{op}(output, target, reduction="sum") / max(output.numel(), 1)'
    elif op.startswith(("var", "std")):
        code = f"y = x.{op[:3]}(correction=0)  # divides by n, not by n - 1"
    elif over is None:
        code = "y = x.sum() / max(x.numel(), 1)"
    else:
        code = f"y = x.sum({over}{', keepdim=True' if keepdim else ''}) / max(x.shape[{over}], 1)"
    return Remedy(change="count-at-least-one", argument=op, what="the count at least 1", code=code)


@applies("count-at-least-one")
def _apply_nonempty_mean(func: Any, args: Any, kwargs: Any, remedy: Remedy) -> Any:
    op = remedy.argument
    if op.startswith("nll_loss") or op in LOSSES:
        if len(args) != 2 or kwargs.get("reduction", "mean") != "mean":
            raise RemedyNotApplicable(op)
        if op not in LOSSES and args[1].is_floating_point():  # class probabilities instead of labels
            raise RemedyNotApplicable(op)
        options = {name: value for name, value in kwargs.items() if name not in ("size_average", "reduce")}
        total = func(*args, **{**options, "reduction": "sum"})
        if op in LOSSES:
            return total / max(args[0].numel(), 1), remedy
        return total / (args[1] != kwargs.get("ignore_index", -100)).sum().clamp_min(1), remedy
    if op.startswith(("var", "std")):
        if any(isinstance(each, bool) for each in args):  # it may be unbiased or keepdim
            raise RemedyNotApplicable(op)
        options = {name: value for name, value in kwargs.items() if name != "unbiased"}
        return func(*args, **{**options, "correction": 0}), remedy
    given, *others = args
    dim, keepdim = kwargs.get("dim", others[0] if others else None), bool(kwargs.get("keepdim", False))
    known = len(others) < 2 and not set(kwargs) - {"dim", "keepdim"}
    if op != "mean" or not known or not isinstance(dim, int | None):
        raise RemedyNotApplicable(op)
    if dim is None:
        return given.sum() / max(given.numel(), 1), _nonempty_mean(op)
    return given.sum(dim, keepdim=keepdim) / max(given.shape[dim], 1), _nonempty_mean(op, dim, keepdim)


CHANGES = ("precision", "keep", *APPLY)  # the first two set the precision of the step or of a module
