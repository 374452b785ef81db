"""Text for the parts of a failure: operations, formats, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampwise.errors import AmpwiseError
from ampwise.numbers.formats import Format, find_scalar_format
from ampwise.rules.evidence.failure import Origin, TensorSummary
from ampwise.rules.evidence.number_text import IN_DIGITS, number_text
from ampwise.rules.evidence.op_families import family_of, is_custom
from ampwise.rules.evidence.run_events import CallSite

__all__ = [
    "bad_values_text",
    "counted_text",
    "derivative_text",
    "domain_text",
    "format_title",
    "join_items",
    "line_text",
    "operand_texts",
    "operation_text",
    "overflow_text",
    "range_text",
    "reason_suffix",
    "result_text",
    "value_text",
]

# Names of operations in sentences: by operation, else by family, else torch's name.
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
    "matrix": "matmul",
    "sum": "sum",
    "cast": "cast",
    "exponential": "",  # cosh and softplus go by their own names
}

# Arguments for which an operation is not finite, as the end of "3 of 128 arguments are ...".
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
    "acos": "outside -1 to 1",
    "asin": "outside -1 to 1",
    "acosh": "below 1",
    "atanh": "not between -1 and 1",
    "erfinv": "not between -1 and 1",
    "special_ndtri": "not between 0 and 1",
}
SECOND = ("xlogy", "special_xlog1py", "polygamma")  # their last argument must be in the domain
DOWNWARDS = ("log", "log2", "log10", "log1p")  # infinite only at the lower end of their domain
OUTSIDE_DOMAIN = "outside its domain"

NAMED = 3  # items listed in a sentence


def operation_text(birth: Origin) -> str:
    """Return the operation and its module: "the matmul (addmm) of `blocks.3.fc` (Linear)"."""
    return f"{_called(birth.op, birth.name)}{f' of {_module(birth)}' if birth.module else ''}"


def operand_texts(birth: Origin) -> list[str]:
    """Return its inputs with their roles: "divisor (FP16 64, 0 to 2, 12 zeros)"."""
    inputs = {replace(values, name=""): values.name for values in reversed(birth.inputs)}
    if len(inputs) == 1 < len(birth.inputs):  # as in `h * h`
        return [f"input ({_shown(birth.inputs[0])}) {'twice' if len(birth.inputs) == 2 else 'throughout'}"]
    return [f"{_role(birth, values.name)}({_shown(values)})" for values in birth.inputs]


def _shown(values: TensorSummary) -> str:
    return str(values).replace(values.dtype, format_title(values.dtype), 1)


def _role(birth: Origin, argument: str) -> str:
    """Return the role of an argument, by default torch's name for it."""
    forward = birth.phase == "forward"
    if birth.name in DIVIDES:
        known = {"self": "dividend", "other": "divisor"}
    elif forward and (birth.name == "addmm" or (birth.name == "mm" and "Linear" in birth.module_class)):
        known = {"self": "bias" if birth.name == "addmm" else "input", "mat1": "input", "mat2": "weight"}
    else:
        known = SIDES if len(birth.inputs) > 1 else dict.fromkeys(SIDES, "input")
    name = known.get(argument, argument)
    return f"{name} " if name else ""


# Operations that divide their first argument by the second.
DIVIDES = ("div", "divide", "true_divide", "floor_divide", "remainder", "fmod")
SIDES = {
    **dict.fromkeys(("self", "mat1", "batch1", "tensor1"), "left"),
    **dict.fromkeys(("other", "mat2", "batch2", "tensor2", "vec", "tensor"), "right"),
}


def derivative_text(birth: Origin) -> str:
    """Describe a backward operation: "the derivative of `sqrt` at train.py:12"."""
    if birth.live:
        return f"{operation_text(birth)}, in the backward pass,"
    if not birth.derivative_of:
        return f"a derivative, computed by {operation_text(birth)},"
    within = f", in {_module(birth)}," if birth.module else ""
    by = f" (computed by {birth.name})" if birth.name != birth.derivative_of else ""
    return f"the derivative of `{birth.derivative_of}` at {line_text(birth.site)}{by}{within}"


def _module(birth: Origin) -> str:
    return f"`{birth.module}` ({birth.module_class})" if birth.module_class else f"`{birth.module}`"


def _called(op: str, name: str) -> str:
    if is_custom(op):
        return f"`{name}`"  # its name may say nothing about what it does
    noun = "attention" if "attention" in name else NOUNS.get(name) or FAMILY_NOUNS.get(family_of(op), "")
    if not noun:
        return f"`{name}`"
    return f"the {noun}" if noun == name else f"the {noun} ({name})"


def domain_text(birth: Origin) -> str:
    """Return which arguments are outside the domain: "3 of 128 arguments are 0 or below"."""
    where = DOMAINS.get(birth.name, OUTSIDE_DOMAIN)
    if not birth.outside_domain:
        return f"an argument is {where}"
    census = birth.inputs[-1 if birth.name in SECOND else 0].census if birth.inputs else None
    return f"{counted_text(birth.outside_domain, None if census is None else census.count, 'argument')} {where}"


def format_title(dtype: str) -> str:
    """
    >>> format_title("fp16"), format_title("fp8_e4m3"), format_title("int64")
    ('FP16', 'FP8 E4M3', 'int64')
    """
    found = _format(dtype)
    return dtype if found is None else found.title


def range_text(dtype: str) -> str:
    """
    >>> range_text("fp16"), range_text("bf16"), range_text("int64")
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
    except AmpwiseError:  # integer and complex dtypes
        return None


def overflow_text(birth: Origin) -> str:
    """Return by how much the result exceeds the format's range."""
    limit, largest = range_text(birth.dtype), birth.exact_largest
    if birth.exact == "finite" and largest is not None and limit:
        found = _format(birth.dtype)
        if found is not None and largest <= found.max:
            return (
                f"the exact result is no larger than {number_text(largest)}, but {limit}, and an intermediate result "
                "exceeds it"
            )
        return f"the exact result reaches {number_text(largest)}, but {limit}"
    if birth.exact in ("inf", "nan"):
        return f"in FP64 it is {value_text(birth.exact)} too"
    return limit if birth.made == "inf" else ""


def reason_suffix(reason: str) -> str:
    """Return the reason with a leading colon, or nothing if it is unknown."""
    return f": {reason}" if reason else ""


def counted_text(count: int, total: int | None, noun: str) -> str:
    """Return a count with its noun and "is" or "are".

    >>> counted_text(12, 64, "divisor"), counted_text(1, None, "row")
    ('12 of 64 divisors are', '1 row is')
    >>> counted_text(64, 64, "divisor"), counted_text(1, 1, "divisor")
    ('all 64 divisors are', 'the divisor is')
    """
    if total == 1 == count:
        return f"the {noun} is"
    if total is not None and total > count:
        return f"{count:,} of {total:,} {noun}s {'is' if count == 1 else 'are'}"
    every = "all " if total == count else ""
    return f"{every}{count:,} {noun}{' is' if count == 1 else 's are'}"


def value_text(what: str) -> str:
    """Return the usual spelling: "NaN", "inf"."""
    return "NaN" if what == "nan" else what


def result_text(birth: Origin) -> str:
    """Return the result, with a sign if the operation allows only one."""
    return "-inf" if birth.made == "inf" and birth.name in DOWNWARDS else value_text(birth.made)


def bad_values_text(values: TensorSummary | None) -> str:
    """Return the non-finite values of a tensor: "3 NaN and 1 inf among 4,096 values"."""
    census = values.census if values is not None else None
    if census is None or census.finite:
        return "values that are not finite"
    special = values.special if values is not None else {}
    kinds = [f"{special[name]:,} {name}" for name in ("NaN", "inf", "-inf") if special[name]]
    return f"{join_items(kinds)} among {census.count:,} value{'s' if census.count != 1 else ''}"


def line_text(site: CallSite) -> str:
    """Return a source location for a sentence: the file name without folders, and the line."""
    if not site.file:
        return "an unknown location"
    name = site.file.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{site.line}" if site.line else name


def join_items(words: Sequence[object]) -> str:
    """
    >>> join_items(["a", "b"]), join_items([1, 2, 3, 4, 5])
    ('a and b', '1, 2, 3 and 2 more')
    """
    shown, more = [str(word) for word in words[:NAMED]], len(words) - NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more:,} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
