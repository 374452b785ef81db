"""What would mend an incident: code to write, and the change that tries it in a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampwise.evidence.incident import NARROW, Birth, Incident

__all__ = [
    "CHANGES",
    "Remedy",
    "clamped_argument",
    "kept_divisor",
    "mean_of_some",
    "opened_rows",
    "remedies_for",
]

# What a replay can change. The first two are about how all of it, or a module, computes; the rest are done to what goes
# into the guilty operation, or comes out of it.
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
TINY = {"fp16": "1e-4"}  # added to or kept below what a root, a logarithm or a division takes; else:
TINY_ELSEWHERE = "1e-12"
BY_HAND = "in a loop of your own"  # for whom the line is that has no engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One way to mend it. What a replay does is what ``code`` says, with the numbers that are in it."""

    change: str  # of CHANGES
    what: str  # in words: "`blocks.3` in FP32"
    code: str
    argument: str = ""  # a precision, a module's path, or the operation
    low: float | None = None  # what an argument is kept within
    high: float | None = None


def remedies_for(incident: Incident) -> tuple[Remedy, ...]:
    """The likely ones first."""
    birth, make = incident.birth, BY_KIND.get(incident.kind)
    return () if birth is None or make is None else tuple(make(incident, birth))


def tiny_for(dtype: str) -> float:
    """A number that is small, and that squared or rounded is not yet 0 in the format."""
    return float(_tiny(dtype))


def _tiny(dtype: str) -> str:
    return TINY.get(dtype, TINY_ELSEWHERE)


# Less precision, or more of it


def _half_overflow(incident: Incident, birth: Birth) -> list[Remedy]:
    if incident.precision not in ("fp16", "bf16"):  # the weights themselves are in half
        return [
            Remedy(
                change="clamp-result",
                what="the result clamped to what the format holds",
                code="limit = torch.finfo(y.dtype).max\ny = y.clamp(-limit, limit)",
            )
        ]
    bf16 = Remedy(
        change="precision",
        argument="bf16",
        what="the step in BF16",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="bf16")\n'
            f'autocast = torch.autocast("{incident.device}", torch.bfloat16)  # {BY_HAND}'
        ),
    )
    if birth.module:
        paths = dict.fromkeys((birth.module, _alike(birth.module)))
        return [*(_keep(incident, path) for path in paths), bf16]
    fp32 = Remedy(
        change="precision",
        argument="fp32",
        what="the step in FP32",
        code=(
            'engine = ampwise.Engine(model, optimizer, precision="fp32")  # which was tried; if one line is enough:\n'
            f'with torch.autocast("{incident.device}", enabled=False):\n    y = f(x.float())'
        ),
    )
    return [fp32, bf16]


def _alike(path: str) -> str:
    """The modules of all blocks that are built alike: "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _keep(incident: Incident, path: str) -> Remedy:
    policy = f'ampwise.Policy("{incident.precision}").keep("fp32", {_quoted(path)})'
    return Remedy(
        change="keep",
        argument=path,
        what=f"`{path}` in FP32",
        code=f"engine = ampwise.Engine(model, optimizer, {policy})\n{policy}.apply(model)  # {BY_HAND}",
    )


def _quoted(name: str) -> str:
    """As Python has it. A module may be named as one likes, and what is shown here is copied."""
    return f'"{name}"' if name.isprintable() and not {'"', "\\"} & set(name) else repr(name)


def _gradient_overflow(incident: Incident, birth: Birth) -> list[Remedy]:
    return _half_overflow(incident, birth) if birth.dtype in NARROW and incident.precision == "fp16" else []


def _overflow(incident: Incident, birth: Birth) -> list[Remedy]:
    if birth.family == "exponential":
        return [_clamped_exponent(birth)]
    return _half_overflow(incident, birth) if birth.dtype in NARROW else []


# Arguments in bounds


def _clamped_exponent(birth: Birth) -> Remedy:
    limit, both = 10 if birth.dtype in NARROW else 80, birth.name in ("sinh", "cosh")
    clamped = f"x.clamp(-{limit}, {limit})" if both else f"x.clamp(max={limit})"
    return Remedy(
        change="clamp-exponent",
        what=f"the exponent clamped to {limit}",
        code=f"y = F.softplus({clamped})" if birth.name == "softplus" else f"y = {clamped}.{birth.name}()",
        argument=birth.name,
        low=-float(limit) if both else None,
        high=float(limit),
    )


def clamped_argument(op: str, dtype: str) -> Remedy:
    """What the operation is given kept to where it is finite with its derivative, by what the format can tell."""
    tiny, near = _tiny(dtype), _margin(dtype)
    low, high = _bounds(op, float(near))
    written = AWAY_FROM_ONE.get(op)
    if written is not None:
        what, code = "the argument clamped to where it is defined", written
    else:
        what, code = f"the argument clamped to {tiny} at least", ABOVE_ZERO.get(op, "y = x.clamp_min({tiny}).{op}()")
    return Remedy(
        change="clamp-argument",
        argument=op,
        what=what,
        code=code.format(tiny=tiny, near=near, op=op),
        low=float(tiny) if low is None else low,
        high=high,
    )


def _bounds(op: str, near: float) -> tuple[float | None, float | None]:
    """What the code says, as numbers; None: that it is small, or that there is none."""
    if op in AROUND_ZERO:
        return -1 + near, 1 - near
    if op in ("logit", "special_ndtri"):
        return near, 1 - near
    if op in ("log1p", "special_xlog1py"):
        return -1 + near, None
    return (1 + near if op == "acosh" else None), None


# Operations that are no methods of a tensor, or take more arguments.
ABOVE_ZERO = {
    "pow": "y = x.clamp_min({tiny}).pow(exponent)",
    "float_power": "y = x.clamp_min({tiny}).float_power(exponent)",
    "linalg_vector_norm": "y = (x.square().sum(-1) + {tiny}).sqrt()",
    "xlogy": "y = torch.xlogy(x, p.clamp_min({tiny}))",
    "polygamma": "y = torch.polygamma(n, x.clamp_min({tiny}))",
}
# And those that end at 1 or -1, where numbers are not as close together as near 0.
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
    """That a number just below 1 can be away from it: BF16's next is 0.996, FP16's 0.9995."""
    return {"bf16": "1e-2", "fp32": "1e-6", "fp64": "1e-6"}.get(dtype, "1e-3")


def _outside_domain(incident: Incident, birth: Birth) -> list[Remedy]:
    return [clamped_argument(birth.name, birth.dtype)] if birth.family != "determinant" else []


def _infinite_derivative(incident: Incident, birth: Birth) -> list[Remedy]:
    name = birth.derivative_of
    if name == "div":
        return [kept_divisor(name, birth.dtype)]
    return [clamped_argument(name, birth.dtype)] if name in ROOTED else []


# Operations whose derivative is infinite at the end of where they are defined.
ROOTED = ("sqrt", "rsqrt", "pow", "log", "acos", "asin", "atanh", "reciprocal", "linalg_vector_norm")


# Divisions


def _division(incident: Incident, birth: Birth) -> list[Remedy]:
    if birth.name == "linalg_inv_ex":
        return []
    if birth.name in ("rsqrt", "pow", "float_power"):
        return [clamped_argument(birth.name, birth.dtype)]
    if birth.family == "normalisation":
        code = "norm = nn.LayerNorm(width, eps=1e-5)  # whichever it is: an eps above 0"
        return [Remedy(change="clamp-divisor", what="an eps above 0", code=code)]
    return [kept_divisor(birth.name, birth.dtype, _divisor(birth))]


def _divisor(birth: Birth) -> str:
    """What of DIVISORS it is, as far as the inputs tell."""
    if birth.name == "reciprocal" or len(birth.inputs) > 1:
        return "signed" if birth.inputs and (birth.inputs[-1].low or 0.0) < 0 else "positive"
    # What is divided is the first of them, and whole numbers are not among them.
    return "count" if birth.inputs and birth.name == "div" else "positive"


def kept_divisor(op: str, dtype: str, divisor: str = "positive") -> Remedy:
    """The divisor kept away from 0, by what suits it."""
    tiny = "1" if divisor in ("count", "whole") else _tiny(dtype)
    kept = DIVISORS[divisor].format(tiny=tiny)
    hint = "  # clamp_min(1) where b counts something" if divisor == "positive" else ""
    return Remedy(
        change="clamp-divisor",
        argument=op,
        what="the divisor kept away from 0",
        code=f"y = {DIVIDING.get(op, 'a / {}').format(kept)}{hint}",
        low=float(tiny),
    )


# What a divisor is, and how it is kept away from 0.
DIVISORS = {
    "positive": "b.clamp_min({tiny})",
    "signed": "torch.where(b.abs() < {tiny}, {tiny}, b)",  # which clamp_min would make positive
    "count": "b.clamp_min({tiny})",  # a tensor of whole numbers
    "whole": "(b or {tiny})",  # numbers of Python's
    "number": "(b or {tiny})",
}
DIVIDING = {
    "remainder": "a % {}",
    "floor_divide": "a // {}",
    "fmod": "torch.fmod(a, {})",
    "addcdiv": "torch.addcdiv(x, a, {})",
}


# Nothing to share out, nothing to count


def _masked(incident: Incident, birth: Birth) -> list[Remedy]:
    return [opened_rows(birth.name)]


def opened_rows(op: str, dim: int = -1) -> Remedy:
    """Rows with nothing but -inf given something, and taken out afterwards."""
    if "attention" in op:
        code = (
            "nothing_left = ~mask.any(-1, keepdim=True)  # of a mask that is True where to look\n"
            "y = F.scaled_dot_product_attention(q, k, v, mask | nothing_left).masked_fill(nothing_left, 0.0)"
        )
    else:
        function = op if op in ("log_softmax", "logsumexp") else "softmax"
        opened = f"scores.masked_fill(nothing_left, 0.0).{function}({dim})"
        closed = "" if function == "logsumexp" else ".masked_fill(nothing_left, 0.0)"
        code = f'nothing_left = (scores == float("-inf")).all({dim}, keepdim=True)\ny = {opened}{closed}'
    what = "rows that are masked throughout left open"
    return Remedy(change="open-masked-rows", argument=op, what=what, code=code)


def _mean(incident: Incident, birth: Birth) -> list[Remedy]:
    return [mean_of_some(birth.name)]


def mean_of_some(op: str, over: int | None = None, keepdim: bool = False) -> Remedy:
    """A mean whose count is at least 1."""
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


def _unstable_loss(incident: Incident, birth: Birth) -> list[Remedy]:
    if birth.family == "exponential":
        return [_clamped_exponent(birth)]
    return [clamped_argument(birth.name, birth.dtype)] if birth.family != "loss" else []


BY_KIND: dict[str, Callable[[Incident, Birth], list[Remedy]]] = {
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
