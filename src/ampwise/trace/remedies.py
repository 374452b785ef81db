"""Fixes for a failure: code to write, and the change that tries it in a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampwise.trace.failure import Failure, Origin

__all__ = [
    "CHANGES",
    "Remedy",
    "clamped_argument",
    "clamped_divisor",
    "nonempty_mean",
    "remedies_for",
    "unmasked_rows",
]

# What a replay can change. The first two set the precision of the step or a module; the others change the inputs or
# the result of the failing operation.
CHANGES = (
    "precision",
    "keep",
    "clamp-argument",
    "clamp-divisor",
    "clamp-exponent",
    "clamp-result",
    "open-masked-rows",
    "count-at-least-one",
)
TINY = {"fp16": "1e-4"}  # lower bound for the argument of a root, a logarithm or a division; else:
TINY_DEFAULT = "1e-12"
CUSTOM_LOOP = "in a custom loop"  # comment on the line for users without an engine


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
    origin, make = failure.origin, BY_KIND.get(failure.kind)
    return () if origin is None or make is None else tuple(make(failure, origin))


def smallest_guard(dtype: str) -> float:
    """Return a small number that is nonzero in the format even when squared or rounded."""
    return float(_tiny(dtype))


def _tiny(dtype: str) -> str:
    return TINY.get(dtype, TINY_DEFAULT)


# Precision changes


def _half_overflow(failure: Failure, origin: Origin) -> list[Remedy]:
    if failure.precision not in ("fp16", "bf16"):  # the weights themselves are in half precision
        return [
            Remedy(
                change="clamp-result",
                what="the result clamped to the format's range",
                code="limit = torch.finfo(y.dtype).max\ny = y.clamp(-limit, limit)",
            )
        ]
    bf16 = Remedy(
        change="precision",
        argument="bf16",
        what="the step in BF16",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="bf16")\n'
            f'autocast = torch.autocast("{failure.device}", torch.bfloat16)  # {CUSTOM_LOOP}'
        ),
    )
    if origin.module:
        paths = dict.fromkeys((origin.module, _alike(origin.module)))
        return [*(_keep(failure, path) for path in paths), bf16]
    fp32 = Remedy(
        change="precision",
        argument="fp32",
        what="the step in FP32",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="fp32")  # this was tried; if one line is enough:\n'
            f'with torch.autocast("{failure.device}", enabled=False):\n    y = f(x.float())'
        ),
    )
    return [fp32, bf16]


def _alike(path: str) -> str:
    """Return the pattern for the same module in all blocks: "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _keep(failure: Failure, path: str) -> Remedy:
    policy = f'ampwise.Policy("{failure.precision}").keep("fp32", {_quoted(path)})'
    return Remedy(
        change="keep",
        argument=path,
        what=f"`{path}` in FP32",
        code=f"engine = ampwise.Engine(model, optimizer, {policy})\n{policy}.apply(model)  # {CUSTOM_LOOP}",
    )


def _quoted(name: str) -> str:
    """Return a module name as a Python literal; names may contain any characters, and users copy this code."""
    return f'"{name}"' if name.isprintable() and not {'"', "\\"} & set(name) else repr(name)


def _gradient_overflow(failure: Failure, origin: Origin) -> list[Remedy]:
    return _half_overflow(failure, origin) if origin.is_narrow and failure.precision == "fp16" else []


def _overflow(failure: Failure, origin: Origin) -> list[Remedy]:
    if origin.family == "exponential":
        return [_clamped_exponent(origin)]
    return _half_overflow(failure, origin) if origin.is_narrow else []


# Bounded arguments


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


def clamped_argument(op: str, dtype: str) -> Remedy:
    """Return the fix that clamps the argument to where the operation and its derivative are finite in the format."""
    tiny, near = _tiny(dtype), _margin(dtype)
    low, high = _bounds(op, float(near))
    written = AWAY_FROM_ONE.get(op)
    if written is not None:
        what, code = "the argument clamped to the domain", written
    else:
        what, code = f"the argument clamped to at least {tiny}", ABOVE_ZERO.get(op, "y = x.clamp_min({tiny}).{op}()")
    return Remedy(
        change="clamp-argument",
        argument=op,
        what=what,
        code=code.format(tiny=tiny, near=near, op=op),
        low=float(tiny) if low is None else low,
        high=high,
    )


def _bounds(op: str, near: float) -> tuple[float | None, float | None]:
    """Return the bounds in the code as numbers; None: the tiny default, or no bound."""
    if op in AROUND_ZERO:
        return -1 + near, 1 - near
    if op in ("logit", "special_ndtri"):
        return near, 1 - near
    if op in ("log1p", "special_xlog1py"):
        return -1 + near, None
    return (1 + near if op == "acosh" else None), None


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


def _margin(dtype: str) -> str:
    """Return how far below 1 a number must be to be distinct: the next in BF16 is 0.996, in FP16 0.9995."""
    return {"bf16": "1e-2", "fp32": "1e-6", "fp64": "1e-6"}.get(dtype, "1e-3")


def _outside_domain(failure: Failure, origin: Origin) -> list[Remedy]:
    return [clamped_argument(origin.name, origin.dtype)] if origin.family != "determinant" else []


def _infinite_derivative(failure: Failure, origin: Origin) -> list[Remedy]:
    name = origin.derivative_of
    if name == "div":
        return [clamped_divisor(name, origin.dtype)]
    return [clamped_argument(name, origin.dtype)] if name in ROOTED else []


# Operations whose derivative is infinite at the edge of their domain.
ROOTED = ("sqrt", "rsqrt", "pow", "log", "acos", "asin", "atanh", "reciprocal", "linalg_vector_norm")


# Divisions


def _division(failure: Failure, origin: Origin) -> list[Remedy]:
    if origin.name == "linalg_inv_ex":
        return []
    if origin.name in ("rsqrt", "pow", "float_power"):
        return [clamped_argument(origin.name, origin.dtype)]
    if origin.family == "normalisation":
        code = "norm = nn.LayerNorm(width, eps=1e-5)  # or another normalisation, with an eps above 0"
        return [Remedy(change="clamp-divisor", what="an eps above 0", code=code)]
    return [clamped_divisor(origin.name, origin.dtype, _divisor(origin))]


def _divisor(origin: Origin) -> str:
    """Return which of DIVISORS it is, as far as the inputs show."""
    if origin.name == "reciprocal" or len(origin.inputs) > 1:
        return "signed" if origin.inputs and (origin.inputs[-1].low or 0.0) < 0 else "positive"
    # The first input is the dividend, and integers are not among the inputs.
    return "count" if origin.inputs and origin.name == "div" else "positive"


def clamped_divisor(op: str, dtype: str, divisor: str = "positive") -> Remedy:
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


# Masked rows and empty means


def _masked(failure: Failure, origin: Origin) -> list[Remedy]:
    return [unmasked_rows(origin.name)]


def unmasked_rows(op: str, dim: int = -1) -> Remedy:
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
    what = "fully masked rows left open"
    return Remedy(change="open-masked-rows", argument=op, what=what, code=code)


def _mean(failure: Failure, origin: Origin) -> list[Remedy]:
    return [nonempty_mean(origin.name)]


def nonempty_mean(op: str, over: int | None = None, keepdim: bool = False) -> Remedy:
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


LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


def _unstable_loss(failure: Failure, origin: Origin) -> list[Remedy]:
    if origin.family == "exponential":
        return [_clamped_exponent(origin)]
    return [clamped_argument(origin.name, origin.dtype)] if origin.family != "loss" else []


BY_KIND: dict[str, Callable[[Failure, Origin], list[Remedy]]] = {
    "half-overflow": _half_overflow,
    "gradient-overflow": _gradient_overflow,
    "overflow": _overflow,
    "outside-domain": _outside_domain,
    "infinite-derivative": _infinite_derivative,
    "division-by-zero": _division,
    "fully-masked-row": _masked,
    "mean-of-nothing": _mean,
    "unstable-loss": _unstable_loss,
}
