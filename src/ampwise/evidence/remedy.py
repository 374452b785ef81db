"""What would mend an incident: code to write, and the change that tries it in a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampwise.evidence.incident import NARROW, Birth, Incident

__all__ = ["CHANGES", "Remedy", "remedies_for"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One way to mend it."""

    change: str  # of CHANGES
    what: str  # in words: "`blocks.3` in FP32"
    code: str
    argument: str = ""  # a precision, or a module's path


def remedies_for(incident: Incident) -> tuple[Remedy, ...]:
    """The likely ones first."""
    birth, make = incident.birth, BY_KIND.get(incident.kind)
    return () if birth is None or make is None else tuple(make(incident, birth))


def tiny_for(dtype: str) -> float:
    """A number that is small, and that squared or rounded is not yet 0 in the format."""
    return float(TINY.get(dtype, TINY_ELSEWHERE))


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
        code='engine = Engine(model, optimizer, precision="bf16")',
    )
    if birth.module:
        paths = dict.fromkeys((birth.module, _alike(birth.module)))
        return [*(_keep(incident, path) for path in paths), bf16]
    fp32 = Remedy(
        change="precision",
        argument="fp32",
        what="the step in FP32",
        code=(
            'engine = Engine(model, optimizer, precision="fp32")  # which was tried; if one line is enough:\n'
            'with torch.autocast("cuda", enabled=False):\n    y = f(x.float())'
        ),
    )
    return [fp32, bf16]


def _alike(path: str) -> str:
    """The modules of all blocks that are built alike: "blocks.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _keep(incident: Incident, path: str) -> Remedy:
    policy = f'Policy("{incident.precision}").keep("fp32", {_quoted(path)})'
    return Remedy(
        change="keep",
        argument=path,
        what=f"`{path}` in FP32",
        code=f"engine = Engine(model, optimizer, {policy})",
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


def _clamped_exponent(birth: Birth) -> Remedy:
    limit = 10 if birth.dtype in NARROW else 80
    bounds = f"-{limit}, {limit}" if birth.name in ("sinh", "cosh") else f"max={limit}"
    return Remedy(
        change="clamp-exponent",
        what=f"the exponent clamped to {limit}",
        code=f"y = x.clamp({bounds}).{birth.name}()",
        argument=str(limit),
    )


def _clamped_argument(birth: Birth, op: str) -> Remedy:
    tiny = TINY.get(birth.dtype, TINY_ELSEWHERE)
    written = AWAY_FROM_ONE.get(op)
    if written is not None:
        what, code = "the argument clamped to where it is defined", written
    else:
        what, code = f"the argument clamped to {tiny} at least", ABOVE_ZERO.get(op, "y = x.clamp_min({tiny}).{op}()")
    code = code.format(tiny=tiny, near=_margin(birth), op=op)
    return Remedy(change="clamp-argument", argument=op, what=what, code=code)


# Operations that are no methods of a tensor, or take more arguments.
ABOVE_ZERO = {
    "pow": "y = x.clamp_min({tiny}).pow(exponent)",
    "float_power": "y = x.clamp_min({tiny}).float_power(exponent)",
    "linalg_vector_norm": "y = (x.square().sum(-1) + {tiny}).sqrt()",
    "xlogy": "y = torch.xlogy(x, p.clamp_min({tiny}))",
    "polygamma": "y = torch.polygamma(n, x.clamp_min({tiny}))",
}
# And those that end at 1 or -1, where numbers are not as close together as near 0.
AWAY_FROM_ONE = {
    **dict.fromkeys(("acos", "asin", "erfinv", "atanh"), "y = x.clamp(-1 + {near}, 1 - {near}).{op}()"),
    "acosh": "y = x.clamp_min(1 + {near}).acosh()",
    "log1p": "y = x.clamp_min(-1 + {near}).log1p()",
    "logit": "y = torch.logit(x, eps={near})",
    "special_xlog1py": "y = torch.special.xlog1py(x, p.clamp_min(-1 + {near}))",
    "special_ndtri": "y = torch.special.ndtri(x.clamp({near}, 1 - {near}))",
}


def _margin(birth: Birth) -> str:
    """That a number just below 1 can be away from it: BF16's next is 0.996, FP16's 0.9995."""
    return {"bf16": "1e-2", "fp32": "1e-6", "fp64": "1e-6"}.get(birth.dtype, "1e-3")


def _outside_domain(incident: Incident, birth: Birth) -> list[Remedy]:
    return [_clamped_argument(birth, birth.name)] if birth.family != "determinant" else []


def _infinite_derivative(incident: Incident, birth: Birth) -> list[Remedy]:
    name = birth.derivative_of
    if name == "div":
        return _division(incident, birth)
    return [_clamped_argument(birth, name)] if name in ROOTED else []


# Operations whose derivative is infinite at the end of where they are defined.
ROOTED = ("sqrt", "rsqrt", "pow", "log", "acos", "asin", "atanh", "reciprocal", "linalg_vector_norm")


def _division(incident: Incident, birth: Birth) -> list[Remedy]:
    tiny = TINY.get(birth.dtype, TINY_ELSEWHERE)
    others = birth.inputs[1:]  # what is divided is the first; a divisor of whole numbers is not among them
    divisor = others[-1] if others else None
    if birth.name in ("rsqrt", "reciprocal"):
        code = f"y = x.clamp_min({tiny}).{birth.name}()"
    elif birth.name in ("pow", "float_power"):
        code = f"y = x.clamp_min({tiny}).{birth.name}(exponent)"
    elif birth.family == "normalisation":
        code = "norm = nn.LayerNorm(width, eps=1e-5)  # whichever it is: an eps above 0"
    elif divisor is not None and (divisor.low or 0.0) < 0:  # which clamp_min would make positive
        code = f"y = a / torch.where(b.abs() < {tiny}, {tiny}, b)"
    else:
        code = f"y = a / b.clamp_min({tiny})  # clamp_min(1) where b counts something"
    return [Remedy(change="clamp-divisor", what="the divisor kept away from 0", code=code)]


def _masked(incident: Incident, birth: Birth) -> list[Remedy]:
    return [
        Remedy(
            change="open-masked-rows",
            what="rows that are masked throughout left open",
            code=(
                'nothing_left = (scores == float("-inf")).all(-1, keepdim=True)\n'
                "weights = scores.masked_fill(nothing_left, 0.0).softmax(-1).masked_fill(nothing_left, 0.0)"
            ),
        )
    ]


def _mean(incident: Incident, birth: Birth) -> list[Remedy]:
    if birth.name.startswith("nll_loss"):
        code = 'loss = F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp_min(1)'
    elif birth.name.startswith(("var", "std")):
        code = f"y = x.{birth.name[:3]}(correction=0)  # divides by n, not by n - 1"
    else:
        code = "y = x.sum() / max(x.numel(), 1)"
    return [Remedy(change="count-at-least-one", what="the count at least 1", code=code)]


def _unstable_loss(incident: Incident, birth: Birth) -> list[Remedy]:
    if birth.family == "exponential":
        return [_clamped_exponent(birth)]
    return [_clamped_argument(birth, birth.name)] if birth.family != "loss" else []


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
