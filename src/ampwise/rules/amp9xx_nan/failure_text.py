"""Findings about a failed step, and text for its parts: operations, formats, numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampwise.errors import AmpwiseError
from ampwise.finding import Finding, Place, Rule
from ampwise.finding.strict_json import to_json_types
from ampwise.numbers.formats import Format, find_scalar_format
from ampwise.numbers.number_text import IN_DIGITS, number_text
from ampwise.numbers.op_families import is_custom

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure
    from ampwise.trace.failure_facts import BadTensor, FixTrial, Origin, TensorSummary

# Names of operations in sentences: by operation, else by family, else torch's name.
NOUNS = {
    "add": "sum",
    **dict.fromkeys(("sub", "rsub"), "difference"),
    **dict.fromkeys(("mul", "prod", "cumprod"), "product"),
    "convolution": "convolution",
    **dict.fromkeys(("exp", "expm1"), "exponential"),
    "rsqrt": "reciprocal root",
    "reciprocal": "reciprocal",
    "linalg_inv_ex": "inverse of a matrix",
    "log_softmax": "logarithm of a softmax",
    "logsumexp": "logarithm of a sum of exponentials",
    **dict.fromkeys(("var", "var_mean"), "variance"),
    **dict.fromkeys(("std", "std_mean"), "standard deviation"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), "cross entropy"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), "norm"),
    "native_layer_norm": "layer normalisation",
    "native_group_norm": "group normalisation",
    "native_batch_norm": "batch normalisation",
    "binary_cross_entropy": "binary cross entropy",
    "mse_loss": "squared error",
}
FAMILY_NOUNS = {
    **{name: name for name in ("logarithm", "power", "division", "softmax", "mean", "sum", "cast")},
    "root": "square root",
    "matrix": "matmul",
}
ZERO_OR_BELOW = "0 or below"
# Arguments for which an operation is not finite, as the end of "3 of 128 arguments are ...".
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "xlogy", "rsqrt"), ZERO_OR_BELOW),
    **dict.fromkeys(("log1p", "special_xlog1py"), "-1 or below"),
    **dict.fromkeys(("logit", "special_ndtri"), "not between 0 and 1"),
    **dict.fromkeys(("lgamma", "digamma", "polygamma"), "0 or a negative whole number"),
    **dict.fromkeys(("pow", "float_power"), "0 or below, which this exponent does not allow"),
    **dict.fromkeys(("acos", "asin"), "outside -1 to 1"),
    **dict.fromkeys(("atanh", "erfinv"), "not between -1 and 1"),
    "sqrt": "below 0",
    "acosh": "below 1",
}
SECOND = ("xlogy", "special_xlog1py", "polygamma")  # their last argument must be in the domain
DOWNWARDS = ("log", "log2", "log10", "log1p")  # infinite only at the lower end of their domain
# Operations that divide their first argument by the second.
DIVIDES = ("div", "divide", "true_divide", "floor_divide", "remainder", "fmod")
SIDES = {
    **dict.fromkeys(("self", "mat1", "batch1", "tensor1"), "left"),
    **dict.fromkeys(("other", "mat2", "batch2", "tensor2", "vec", "tensor"), "right"),
}
NAMED = 3  # items listed in a sentence
ABSURD = 1e6  # times larger than a plausible loss
INDENT = "    "  # marks code for the printers


def failure_finding(rule: Rule, failure: Failure, what: str, *, advice: str = "") -> Finding:
    """Build the finding from ``what`` happened; the evidence is the operation's inputs and how the value propagated.

    ``advice`` replaces the rule's general fix in this case.
    """
    parts, origin, source, site = [what], failure.origin, failure.source, failure.site
    evidence = {}
    if not failure.not_reproduced:
        if origin is not None:
            for each in origin.literals[:NAMED]:
                becomes = number_text(each.becomes)
                parts.append(f"{number_text(each.value)} is {becomes} in {format_title(each.dtype)}")
            if origin.inputs:
                evidence["inputs"] = _one_line(join_items(operand_texts(origin)))
        if path := _propagation(failure):
            evidence["path"] = _one_line(path)
    culprit = failure.culprit
    place = Place(
        file=site.file or None,
        line=site.line if site.file and site.line and site.line > 0 else None,
        module=culprit.module or None if culprit is not None and culprit.site == site else None,
        parameter=source.name or None if source is not None and source.what == "parameter" else None,
        step=failure.step,
        rank=failure.rank if failure.ranks > 1 else None,
    )
    message = _one_line("; ".join(filter(None, parts)))
    plain: dict[str, object] = to_json_types(evidence)  # names may contain what JSON does not allow
    return rule.at(place, message, evidence=plain | failure.evidence(), fix=_fix(failure, advice or rule.fix))


def _propagation(failure: Failure) -> str:
    """Return how the value propagated: "inf here → NaN at train.py:31 (softmax) → the loss"."""
    if failure.origin is not None:
        path = [f"{_result(failure.origin)} here"]
    elif failure.source is not None and failure.source.name:
        path = [f"`{failure.source.name}`"]
    else:
        return ""
    if failure.nan_origin is not None:
        path.append(f"NaN at {failure.nan_origin.site.in_text} ({failure.nan_origin.name})")
    bad = len(failure.bad_gradients)
    if failure.swallowed:
        path.append("finite but wrong values")
    else:
        if failure.symptom in ("loss", "result", "weights"):
            path.append(f"the {failure.symptom}")
        if bad:
            path.append(f"{bad:,}{f' of {failure.gradients:,}' if failure.gradients >= bad else ''} gradients")
    return " → ".join(path) if len(path) > 1 else ""


def _one_line(text: str) -> str:
    """Join lines: names come from user code and may contain any characters."""
    return " ".join(text.splitlines())


def _fix(failure: Failure, advice: str) -> str:
    """Return a fix that was tried and helped, as code; else the general advice, and a fix that might help."""
    helped = next((trial for trial in failure.trials if trial.helps), None)
    failed = [f"{trial.what} ({_outcome(failure, trial)})" for trial in failure.trials if not trial.helps]
    then = [_one_line(f"Tried in the replay, but did not help: {join_items(failed)}.")] if failed else []
    if helped is not None:
        is_absurd = _is_absurd(failure, helped)
        works = "" if is_absurd or helped.usual is None else ", and it works"
        head = _one_line(f"Tried in the replay{works}: {helped.what} ({_outcome(failure, helped)}).")
        return "\n".join([head, *_indented(helped.code), *then, *([f"In general: {advice}"] if is_absurd else [])])
    untried = None if failed else failure.untried_fix()
    if untried is not None:
        then = [_one_line(f"Possible fix, not tried: {untried.what}."), *_indented(untried.code)]
    return "\n".join([advice, *then])


def _outcome(failure: Failure, trial: FixTrial) -> str:
    """Return the result before and after."""
    losses = [number_text(loss) for loss in (failure.loss, trial.loss) if loss is not None]
    if trial.finite and _is_absurd(failure, trial):
        return f"finite, but the loss is {losses[-1]}"
    parts = [] if trial.loss is None else [f"loss {' → '.join(dict.fromkeys(losses))}"]
    if trial.finite:
        parts.append(f"{'weights' if failure.symptom == 'weights' else 'gradients'} finite")
        if trial.usual is not None:
            same = "the loss of an earlier batch is unchanged"
            before, after = map(number_text, trial.usual)
            parts.append(same if trial.helps else f"but the loss of an earlier batch goes from {before} to {after}")
    elif trial.bad_gradients:
        parts.append(f"{trial.bad_gradients:,} gradient{'s' if trial.bad_gradients != 1 else ''} not finite")
    if not trial.finite and trial.origin is not None and trial.origin.site.file:
        again = " again" if trial.origin.site == failure.site else ""
        parts.append(f"from {operation_text(trial.origin)} at {trial.origin.site.in_text}{again}")
    return ", ".join(parts) or "still not finite"


def _is_absurd(failure: Failure, trial: FixTrial) -> bool:
    """Return whether the loss is finite but useless: the clamped number is still far too large."""
    before = abs(failure.loss) if failure.loss is not None and math.isfinite(failure.loss) else 1.0
    return trial.loss is not None and abs(trial.loss) > ABSURD * max(before, 1.0)


def _indented(code: str) -> list[str]:
    return [f"{INDENT}{line}" for line in code.splitlines()]


# Operations


def operation_text(origin: Origin) -> str:
    """Return the operation and its module: "the matmul (addmm) of `blocks.3.fc` (Linear)"."""
    name, noun = origin.name, ""
    if not is_custom(origin.op):  # the name of a custom operation may say nothing about what it does
        noun = "attention" if "attention" in name else NOUNS.get(name) or FAMILY_NOUNS.get(origin.family, "")
    called = f"`{name}`" if not noun else f"the {noun}" if noun == name else f"the {noun} ({name})"
    return f"{called}{f' of {_module(origin)}' if origin.module else ''}"


def _module(origin: Origin) -> str:
    has_other_class = origin.module_class not in ("", origin.module)
    return f"`{origin.module}` ({origin.module_class})" if has_other_class else f"`{origin.module}`"


def derivative_text(origin: Origin) -> str:
    """Describe a backward operation: "the derivative of `sqrt` at train.py:12"."""
    if origin.live:
        return f"{operation_text(origin)}, in the backward pass,"
    if not origin.derivative_of:
        return f"a derivative, computed by {operation_text(origin)},"
    within = f", in {_module(origin)}," if origin.module else ""
    by = f" (computed by {origin.name})" if origin.name != origin.derivative_of else ""
    return f"the derivative of `{origin.derivative_of}` at {origin.site.in_text}{by}{within}"


def gives_text(origin: Origin) -> str:
    """Return the operation and its result: "the logarithm (log) gives -inf in FP16"."""
    return f"{operation_text(origin)} gives {_result(origin)} in {format_title(origin.dtype)}"


def overflows_text(origin: Origin) -> str:
    """Return the operation and how it overflows: "the exponential (exp) overflows in FP16: FP16 ends at 65504"."""
    does = "overflows" if origin.made == "inf" else f"gives {value_text(origin.made)}"
    where = f" at {origin.site.in_text} of these exponentials" if origin.exponential.file else ""
    return f"{operation_text(origin)}{where} {does} in {format_title(origin.dtype)}{overflow_text(origin)}"


def _result(origin: Origin) -> str:
    """Return the result, with a sign if the operation allows only one."""
    return "-inf" if origin.made == "inf" and origin.name in DOWNWARDS else value_text(origin.made)


def operand_texts(origin: Origin) -> list[str]:
    """Return its inputs with their roles, by default torch's names: "divisor (FP16 64, 0 to 2, 12 zeros)"."""
    name, inputs = origin.name, origin.inputs
    texts = [str(values).replace(values.dtype, format_title(values.dtype), 1) for values in inputs]
    if len(inputs) > 1 == len({replace(values, name="") for values in inputs}):  # as in `h * h`
        return [f"input ({texts[0]}) {'twice' if len(inputs) == 2 else 'throughout'}"]
    if name in DIVIDES:
        roles = {"self": "dividend", "other": "divisor"}
    elif origin.phase == "forward" and (name == "addmm" or (name == "mm" and "Linear" in origin.module_class)):
        roles = {"self": "bias" if name == "addmm" else "input", "mat1": "input", "mat2": "weight"}
    else:
        roles = SIDES if len(inputs) > 1 else dict.fromkeys(SIDES, "input")
    return [
        f"{roles.get(values.name, values.name)} ({text})".lstrip() for values, text in zip(inputs, texts, strict=True)
    ]


def domain_text(origin: Origin) -> str:
    """Return which arguments are outside the domain: "3 of 128 arguments are 0 or below"."""
    where = DOMAINS.get(origin.name, "outside its domain")
    if origin.dtype.startswith("complex"):
        where = "0" if origin.name in ("log", "log2", "log10") else "a pole of it"
    if not origin.outside_domain:
        return f"an argument is {where}"
    census = origin.inputs[-1 if origin.name in SECOND else 0].census if origin.inputs else None
    if where == ZERO_OR_BELOW and census is not None:  # a zero has often underflowed, a negative number has not
        where = "below 0" if not census.zeros else "0" if census.zeros == origin.outside_domain else where
    return f"{counted_text(origin.outside_domain, None if census is None else census.count, 'argument')} {where}"


def overflow_text(origin: Origin) -> str:
    """Return by how much the result exceeds the format's range: ": in FP64 it is inf too"; "" if it is unknown."""
    found, largest, limit = _format(origin.dtype), origin.exact_largest, ""
    if found is not None:
        limit = f"{found.title} ends at {found.max:{'.0f' if found.max < IN_DIGITS else '.3g'}}"
    if found is not None and largest is not None and origin.exact == "finite":
        if largest > found.max:
            return f": the exact result reaches {number_text(largest)}, but {limit}"
        exact = f"the exact result is no larger than {number_text(largest)}"
        return f": {exact}, but {limit}, and an intermediate result exceeds it"
    if origin.exact in ("inf", "nan"):
        return f": in FP64 it is {value_text(origin.exact)} too"
    return f": {limit}" if limit and origin.made == "inf" else ""


# Formats, numbers, tensors


def format_title(dtype: str) -> str:
    """
    >>> format_title("fp16"), format_title("fp8_e4m3"), format_title("int64")
    ('FP16', 'FP8 E4M3', 'int64')
    """
    found = _format(dtype)
    return dtype if found is None else found.title


def _format(dtype: str) -> Format | None:
    try:
        return find_scalar_format(dtype)
    except AmpwiseError:  # integer and complex dtypes
        return None


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


def bad_source_text(source: BadTensor, since: str = "") -> str:
    """Describe a parameter or buffer that was bad before the step."""
    whose = f" ({source.module_class})" if source.module_class else ""
    first = f"; {operation_text(source.first_use)} was the first to read it" if source.first_use is not None else ""
    return f"`{source.name}`{whose} had {bad_values_text(source.values)} before the step{since}{first}"


def bad_values_text(values: TensorSummary | None) -> str:
    """Return the non-finite values of a tensor: "3 NaN and 1 inf among 4,096 values"."""
    if values is None or values.census is None or values.census.finite:
        return "values that are not finite"
    kinds = [f"{values.special[name]:,} {name}" for name in ("NaN", "inf", "-inf") if values.special[name]]
    return f"{join_items(kinds)} among {values.census.count:,} value{'s' if values.census.count != 1 else ''}"


def join_items(words: Sequence[object]) -> str:
    """
    >>> join_items(["a", "b"]), join_items([1, 2, 3, 4, 5])
    ('a and b', '1, 2, 3 and 2 more')
    """
    shown, more = [str(word) for word in words[:NAMED]], len(words) - NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more:,} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
