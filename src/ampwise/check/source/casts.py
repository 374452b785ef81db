"""Casts of modules: calls and loops that make the parameters of a module FP16, BF16 or FP32."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from ampwise.check.source.cases import (
    ALWAYS,
    Case,
    Conditions,
    Dtype,
    Known,
    Limit,
    Option,
    cases_of,
    conditions_at,
    joined,
)
from ampwise.check.source.defaults import last_word, option_defaults
from ampwise.check.source.dictionary_changes import changes_of
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.modes import UNKNOWN, dtype_in, table_of
from ampwise.check.source.names import dotted_text, last_name, method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.torch_names import BF16, FP16, FP32, SPELLINGS
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import CodeSite

# Methods that return the module.
CHAINED = frozenset(
    ("to", "cuda", "cpu", "half", "bfloat16", "float", "double", "type", "train", "eval", "requires_grad_")
) | {"share_memory"}
WRAPPERS = LazyPattern(
    r"(DataParallel|DistributedDataParallel|FullyShardedDataParallel|DDP|FSDP|torch\.compile|fsdp\.wrap\.wrap)$"
)
CASTS = {"half": FP16, "bfloat16": BF16, "float": FP32, "double": "float64"}
TENSOR_TYPES = {"HalfTensor": FP16, "BFloat16Tensor": BF16, "FloatTensor": FP32}
# A function that we cannot see, and that casts what it gets, by its name.
TO_FP16 = LazyPattern(r"(^|_)(to|2)_?(half|fp16|float16)$|^convert_\w*(fp16|half|float16)$|^FP16(Model|Module|Net)$")
MAKES_A_TENSOR = LazyPattern(r"torch\.(nn\.functional\.|(?!nn|hub|load|compile|jit)\w+$)")
LOADS = frozenset(("from_pretrained", "from_config", "_from_config"))
# In `for m in model.modules(): m.half()` and `for p in model.parameters(): p.data = p.data.half()`.
GO_THROUGH = frozenset(("modules", "children", "named_modules", "named_children", "parameters", "named_parameters"))
ALL_PARAMETERS = frozenset(("parameters", "named_parameters"))
ALL_LAYERS = "layers"  # the part of a module that a loop over its modules casts, of some kinds only
OF_A_LAYER = frozenset(("data", "weight", "bias"))


DtypeCase = tuple[str | None, Conditions]  # None: unknown


class Cast(NamedTuple):
    """Call that makes the parameters of a module half, or full again."""

    dtype: str | None  # None: unknown
    node: ast.Call
    site: CodeSite
    given: Conditions
    part: str = ""  # the name of a part of the module, if only this is cast


def casts_in(site: CodeSite) -> Iterator[tuple[str, Cast]]:
    """Yield the casts of a statement under each key of the module: ``model.half()``, ``net = Net().to(torch.half)``."""
    node, frame = site.node, site.context.frame
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif not isinstance(node, ast.Expr):
        return
    last, module = last_cast(node.value, frame)
    made_by = frame.qualified(module.func) or "" if isinstance(module, ast.Call) else ""
    if last is None or MAKES_A_TENSOR.match(made_by):
        return
    reached = conditions_at(frame, last)
    held = {
        (key, part)
        for each in (*targets, module)
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
        for key, part in _modules_of(each, frame)
    }
    for key, part in sorted(held):
        for dtype, when in cast_dtypes(last, frame):
            for way in reached:
                given = joined(when, way)
                if given is not None:
                    yield key, Cast(dtype, last, site, given, part)


def _modules_of(node: ast.expr, frame: Frame) -> Iterator[tuple[str, str]]:
    """Yield the keys of what is cast, and of the modules that it is a part of, with the name of the part."""
    part = ""
    while True:
        key = frame.key(node)
        if key is not None:
            yield key, part
        looped = _gone_through(node, frame)
        if looped is not None:
            method, node = looped
            part = part or ("" if method in ALL_PARAMETERS else ALL_LAYERS)
            continue
        if isinstance(node, ast.Subscript):
            part = ""  # model[0].half(): most put the whole network there
        elif isinstance(node, ast.Attribute):
            part = part or ("" if node.attr in OF_A_LAYER else node.attr)
        else:
            passed = _passed(node, frame)
            if passed is None:
                return
            node, frame = passed
            continue
        node = node.value
        if isinstance(node, ast.Name) and node.id == frame.function.self_name:
            return


def _passed(node: ast.expr, frame: Frame) -> tuple[ast.expr, Frame] | None:
    """Return the module that a caller passes as ``model.cuda()``, for the name of the parameter."""
    argument = frame.arguments.get(node.id) if isinstance(node, ast.Name) else None
    while isinstance(argument, ast.Call) and frame.caller is not None:
        argument = moved(argument, frame.caller)
    return (argument, frame.caller) if argument is not None and frame.caller is not None else None


def _gone_through(node: ast.expr, frame: Frame) -> tuple[str, ast.expr] | None:
    """Return how a loop goes through a module, and the module, for the variable of the loop."""
    bindings = frame.function.bindings.get(node.id, []) if isinstance(node, ast.Name) else []
    loop = bindings[0].node if len(bindings) == 1 else None
    return module_gone_through(loop) if isinstance(loop, ast.For) else None


def module_gone_through(loop: ast.For) -> tuple[str, ast.expr] | None:
    """Return ``("modules", model)`` for ``for m in model.modules()``; None for another loop."""
    for call in walk(loop.iter):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in GO_THROUGH:
            return call.func.attr, call.func.value
    return None


def last_cast(inner: ast.expr | None, frame: Frame) -> tuple[ast.Call | None, ast.expr | None]:
    """Return the last cast in ``wrap(Net(...).half().cuda())``, and the innermost expression, the module."""
    last = None
    while isinstance(inner, ast.Call):
        if last is None and cast_dtypes(inner, frame):
            last = inner
        below = moved(inner, frame)
        if below is None:
            break
        inner = below
    return last, inner


def moved(call: ast.Call, frame: Frame) -> ast.expr | None:
    """Return the module that a call moves, casts or wraps, and returns; None for another call."""
    method = method_called(call)
    is_own = method in CHAINED or (not call.args and TO_FP16.search(method) is not None)
    if is_own and isinstance(call.func, ast.Attribute) and frame.qualified(call.func) is None:
        return call.func.value
    takes_it = call.args and (wraps(call, frame) or _casts_by_name(call, frame))
    return call.args[0] if takes_it else None


def wraps(call: ast.Call, frame: Frame) -> bool:
    return WRAPPERS.search(frame.qualified(call.func) or ast.unparse(call.func)) is not None


def _casts_by_name(call: ast.Call, frame: Frame) -> bool:
    return TO_FP16.search(last_name(call.func)) is not None and frame.callee(call) is None


def cast_dtypes(call: ast.Call, frame: Frame) -> list[DtypeCase]:
    """Return the dtypes that a call may cast to, None for an unknown one; nothing if it is not a cast."""
    method = method_called(call)
    if method in CASTS and not call.args and not call.keywords:
        return [(CASTS[method], ALWAYS)]
    if _casts_by_name(call, frame):
        return [(FP16, ALWAYS)]
    if method == "type" and len(call.args) == 1:
        tensor_type = _tensor_type(call.args[0])
        if tensor_type is not None:
            return [(tensor_type, ALWAYS)]
    if method in LOADS or method == "to" or (frame.qualified(call.func) or "").startswith("torch.nn."):
        names = ("torch_dtype", "dtype") if method in LOADS else ("dtype",)
        for name in names:
            given = _given(call, name, frame)
            if given:
                return given
    for argument in call.args if method in ("to", "type") else ():
        dtypes = [pair for case in cases_of(frame, argument) for pair in _dtypes_in(case, frame)]
        if any(dtype is not None for dtype, _ in dtypes):
            return dtypes
        if "dtype" in ast.unparse(argument):
            return [(None, ALWAYS)]
    return []


def _given(call: ast.Call, name: str, frame: Frame) -> list[DtypeCase]:
    """Return the dtypes of a keyword argument, also of one in ``**options``, as they are made or changed later."""
    own = argument_of(call, name)
    if own is not None:
        return [pair for case in cases_of(frame, own) for pair in _dtypes_in(case, frame)]
    held: list[tuple[ast.expr, Frame, Conditions]] = []
    for word in call.keywords:
        if word.arg is not None:
            continue
        for case in cases_of(frame, word.value):
            node, home = (table_of(case.value) or {}).get(name, (None, frame))
            held += [(node, home, case.given)] if node is not None else []
        for kind, key, value in changes_of(dotted_text(word.value) or "", frame.function.node, frame.outline):
            if kind == "item" and key == name and value.lineno < call.lineno:
                held += [(value, frame, given) for given in conditions_at(frame, value)]
    found = [
        (pair, given) for node, home, given in held for case in cases_of(home, node) for pair in _dtypes_in(case, home)
    ]
    return [(dtype, both) for (dtype, when), given in found if (both := joined(when, given)) is not None]


def _dtypes_in(case: Case, frame: Frame) -> list[DtypeCase]:
    """Return the dtype of a value; of an option, its default, and None for anything else."""
    value, given = case
    found: list[DtypeCase] = [(_known_dtype(case), given)]
    if isinstance(value, Option):
        for default in sorted(_defaults(value.name, frame)):
            both = joined(given, {value.name: Limit(frozenset([default]))})
            if both is not None and default.lower() in SPELLINGS:
                found.insert(0, (SPELLINGS[default.lower()], both))
    return found


def _defaults(option: str, frame: Frame) -> set[str]:
    """Return the dtypes by name that an option of the script, or a parameter of a function, may have by default."""
    home = frame.function.home_of(option) if option.isidentifier() else None
    if home is not None:
        default = home.defaults.get(option)
        held = cases_of(frame.lookup.frame(home), default) if default is not None else []
        values = [case.value.value for case in held if isinstance(case.value, Known)]
        return {value.name if isinstance(value, Dtype) else value for value in values if isinstance(value, Dtype | str)}
    options = option_defaults(frame.lookup.code(frame.outline.path))
    return {default for default in options.get(last_word(option), ()) if isinstance(default, str)}


def _tensor_type(node: ast.expr) -> str | None:
    """Return the dtype of ``torch.cuda.HalfTensor``, or of its name as a string."""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else last_name(node)
    return TENSOR_TYPES.get(text.rpartition(".")[2])


def default_dtypes(call: ast.Call, frame: Frame) -> list[DtypeCase]:
    """Return what a call makes the default dtype of new tensors; nothing if it is another call."""
    name = frame.qualified(call.func)
    if name == "torch.set_default_dtype" and call.args:
        return [(_known_dtype(case), case.given) for case in cases_of(frame, call.args[0])]
    if name == "torch.set_default_tensor_type" and call.args:
        return [(_tensor_type(call.args[0]), ALWAYS)]
    return []


def _known_dtype(case: Case) -> str | None:
    dtype = dtype_in(case)
    return None if dtype == UNKNOWN else dtype
