"""Words for what an incident is made of: operations, formats, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampwise.errors import AmpwiseError
from ampwise.evidence.conduct import Site
from ampwise.evidence.incident import Birth, Values
from ampwise.evidence.op_families import family_of, is_custom
from ampwise.evidence.wording import IN_DIGITS, number
from ampwise.formats import Format, find_scalar_format

__all__ = [
    "bad_values",
    "because",
    "counted",
    "derivative",
    "ends_at",
    "how_far",
    "listed",
    "made_of",
    "operands",
    "operation",
    "outside",
    "result_of",
    "spot",
    "title",
]

# What people call an operation: by its own name, else by its family; else it has torch's name alone.
NOUNS = {
    "add": "sum",
    "sub": "difference",
    "rsub": "difference",
    "mul": "product",
    "prod": "product",
    "cumprod": "product",
    "convolution": "convolution",
    "exp": "exponential",
    "expm1": "exponential",
    "rsqrt": "reciprocal root",
    "reciprocal": "reciprocal",
    "linalg_inv_ex": "inverse of a matrix",
    "log_softmax": "logarithm of a softmax",
    "logsumexp": "logarithm of a sum of exponentials",
    "var": "variance",
    "var_mean": "variance",
    "std": "standard deviation",
    "std_mean": "standard deviation",
    "nll_loss_forward": "cross entropy",
    "nll_loss2d_forward": "cross entropy",
    "linalg_vector_norm": "norm",
    "norm": "norm",
    "native_layer_norm": "layer normalisation",
    "native_group_norm": "group normalisation",
    "native_batch_norm": "batch normalisation",
    "binary_cross_entropy": "binary cross entropy",
    "mse_loss": "squared error",
}
FAMILY_NOUNS = {
    "logarithm": "logarithm",
    "root": "square root",
    "power": "power",
    "division": "division",
    "softmax": "softmax",
    "mean": "mean",
    "matrix": "matrix product",
    "sum": "sum",
    "cast": "cast",
    "exponential": "",  # cosh and softplus are known by their names
}

# Which arguments an operation has no finite value for, to stand after "3 of 128 arguments are".
DOMAINS = {
    "log": "0 or below",
    "log2": "0 or below",
    "log10": "0 or below",
    "log1p": "-1 or below",
    "xlogy": "0 or below",
    "special_xlog1py": "-1 or below",
    "logit": "not between 0 and 1",
    "lgamma": "0 or a negative whole number",
    "digamma": "0 or a negative whole number",
    "polygamma": "0 or a negative whole number",
    "sqrt": "below 0",
    "rsqrt": "0 or below",
    "pow": "0 or below, which this exponent does not allow",
    "float_power": "0 or below, which this exponent does not allow",
    "acos": "outside of -1 to 1",
    "asin": "outside of -1 to 1",
    "acosh": "below 1",
    "atanh": "not between -1 and 1",
    "erfinv": "not between -1 and 1",
    "special_ndtri": "not between 0 and 1",
}
SECOND = ("xlogy", "special_xlog1py", "polygamma")  # it is their last argument that must be in the domain
DOWNWARDS = ("log", "log2", "log10", "log1p")  # at the lower end of what they take, where alone they are infinite
ELSEWHERE = "outside of what it is defined for"

NAMED = 3  # things in a sentence


def operation(birth: Birth) -> str:
    """What it was, and whose: "the matrix product (addmm) of `blocks.3.fc` (Linear)"."""
    return f"{_called(birth.op, birth.name)}{f' of {_module(birth)}' if birth.module else ''}"


def operands(birth: Birth) -> list[str]:
    """What it was given, each by what it is there: "divisor (FP16 64, 0 to 2, 12 zeros)"."""
    inputs = {replace(values, name=""): values.name for values in reversed(birth.inputs)}
    if len(inputs) == 1 < len(birth.inputs):  # as `h * h` is
        return [f"input ({_shown(birth.inputs[0])}) {'twice' if len(birth.inputs) == 2 else 'throughout'}"]
    return [f"{_role(birth, values.name)}({_shown(values)})" for values in birth.inputs]


def _shown(values: Values) -> str:
    return str(values).replace(values.dtype, title(values.dtype), 1)


def _role(birth: Birth, argument: str) -> str:
    """torch's own name for an argument, unless it says nothing."""
    forward = birth.phase == "forward"
    if birth.name in DIVIDES:
        known = {"self": "dividend", "other": "divisor"}
    elif forward and (birth.name == "addmm" or (birth.name == "mm" and "Linear" in birth.module_class)):
        known = {"self": "bias" if birth.name == "addmm" else "input", "mat1": "input", "mat2": "weight"}
    else:
        known = SIDES if len(birth.inputs) > 1 else dict.fromkeys(SIDES, "input")
    name = known.get(argument, argument)
    return f"{name} " if name else ""


# Whose first argument is divided by the second.
DIVIDES = ("div", "divide", "true_divide", "floor_divide", "remainder", "fmod")
SIDES = {
    **dict.fromkeys(("self", "mat1", "batch1", "tensor1"), "left"),
    **dict.fromkeys(("other", "mat2", "batch2", "tensor2", "vec", "tensor"), "right"),
}


def derivative(birth: Birth) -> str:
    """Of a backward operation: "the derivative of `sqrt` at train.py:12"."""
    if birth.live:
        return f"{operation(birth)}, in the backward pass,"
    if not birth.derivative_of:
        return f"a derivative, computed by {operation(birth)},"
    within = f", in {_module(birth)}," if birth.module else ""
    by = f" (computed by {birth.name})" if birth.name != birth.derivative_of else ""
    return f"the derivative of `{birth.derivative_of}` at {spot(birth.site)}{by}{within}"


def _module(birth: Birth) -> str:
    return f"`{birth.module}` ({birth.module_class})" if birth.module_class else f"`{birth.module}`"


def _called(op: str, name: str) -> str:
    if is_custom(op):
        return f"`{name}`"  # whatever its name says, nobody knows what it does
    noun = "attention" if "attention" in name else NOUNS.get(name) or FAMILY_NOUNS.get(family_of(op), "")
    if not noun:
        return f"`{name}`"
    return f"the {noun}" if noun == name else f"the {noun} ({name})"


def outside(birth: Birth) -> str:
    """Which of its arguments the operation is not defined for: "3 of 128 arguments are 0 or below"."""
    where = DOMAINS.get(birth.name, ELSEWHERE)
    if not birth.outside_domain:
        return f"an argument is {where}"
    census = birth.inputs[-1 if birth.name in SECOND else 0].census if birth.inputs else None
    return f"{counted(birth.outside_domain, None if census is None else census.count, 'argument')} {where}"


def title(dtype: str) -> str:
    """
    >>> title("fp16"), title("fp8_e4m3"), title("int64")
    ('FP16', 'FP8 E4M3', 'int64')
    """
    found = _format(dtype)
    return dtype if found is None else found.title


def ends_at(dtype: str) -> str:
    """
    >>> ends_at("fp16"), ends_at("bf16"), ends_at("int64")
    ('FP16 ends at 65504', 'BF16 ends at 3.39e+38', '')
    """
    found = _format(dtype)
    if found is None:
        return ""
    return (
        f"{found.title} ends at {found.max:.0f}" if found.max < IN_DIGITS else f"{found.title} ends at {found.max:.3g}"
    )


def _format(dtype: str) -> Format | None:
    try:
        return find_scalar_format(dtype)
    except AmpwiseError:  # whole numbers, complex ones
        return None


def how_far(birth: Birth) -> str:
    """By how much its result is beyond what the format holds."""
    limit, largest = ends_at(birth.dtype), birth.exact_largest
    if birth.exact == "finite" and largest is not None and limit:
        found = _format(birth.dtype)
        if found is not None and largest <= found.max:
            return f"the exact result is no larger than {number(largest)}, but {limit}, and a step on the way is beyond"
        return f"the exact result reaches {number(largest)}, and {limit}"
    if birth.exact in ("inf", "nan"):
        return f"in FP64 it is {made_of(birth.exact)} too"
    return limit if birth.made == "inf" else ""


def because(reason: str) -> str:
    """To be put after what happened, where a reason is known."""
    return f": {reason}" if reason else ""


def counted(count: int, total: int | None, noun: str) -> str:
    """How many of how many, and the verb.

    >>> counted(12, 64, "divisor"), counted(1, None, "row"), counted(64, 64, "divisor"), counted(1, 1, "divisor")
    ('12 of 64 divisors are', '1 row is', 'all 64 divisors are', 'the divisor is')
    """
    if total == 1 == count:
        return f"the {noun} is"
    if total is not None and total > count:
        return f"{count:,} of {total:,} {noun}s {'is' if count == 1 else 'are'}"
    every = "all " if total == count else ""
    return f"{every}{count:,} {noun}{' is' if count == 1 else 's are'}"


def made_of(what: str) -> str:
    """As people write it: "NaN", "inf"."""
    return "NaN" if what == "nan" else what


def result_of(birth: Birth) -> str:
    """What it made, with the sign where the operation has one alone."""
    return "-inf" if birth.made == "inf" and birth.name in DOWNWARDS else made_of(birth.made)


def bad_values(values: Values | None) -> str:
    """What of a tensor is not finite: "3 NaN and 1 inf among 4,096 values"."""
    census = values.census if values is not None else None
    if census is None or census.finite:
        return "values that are not finite"
    special = values.special if values is not None else {}
    kinds = [f"{special[name]:,} {name}" for name in ("NaN", "inf", "-inf") if special[name]]
    return f"{listed(kinds)} among {census.count:,} value{'s' if census.count != 1 else ''}"


def spot(site: Site) -> str:
    """A place in a sentence: the file without its folders, and the line."""
    if not site.file:
        return "an unknown place"
    name = site.file.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{site.line}" if site.line else name


def listed(words: Sequence[object]) -> str:
    """
    >>> listed(["a", "b"]), listed([1, 2, 3, 4, 5])
    ('a and b', '1, 2, 3 and 2 more')
    """
    shown, more = [str(word) for word in words[:NAMED]], len(words) - NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more:,} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
