"""Models whose parameters are certainly FP16 or BF16, and that are trained in that dtype."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import EventContext, EventKind
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.precision import argument_of, dtypes_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import BF16, FP16, FP32, OPTIMIZER
from ampwise.check.source.walk import MOST_FOLLOWED, CodeSite, CodeTrace, WorkBudget, trace_function
from ampwise.finding import Place

__all__ = [
    "HalfModel",
    "TrainedHalfModel",
    "half_models",
    "half_optimizers",
    "only_named_main",
    "trained_half_models",
]

# Methods that return the module.
CHAINED = frozenset(
    ("to", "cuda", "cpu", "half", "bfloat16", "float", "double", "train", "eval", "requires_grad_", "share_memory")
)
WRAPPERS = LazyPattern(r"(DataParallel|DistributedDataParallel|FullyShardedDataParallel|DDP|FSDP|torch\.compile)$")
CASTS = {"half": FP16, "bfloat16": BF16, "float": FP32, "double": "float64"}
# Functions in which a model is cast for another purpose than training.
ASIDE = LazyPattern(r"eval|test|valid|infer|predict|export|save|convert|generat|sampl|bench|teacher|ema|onnx|trace")
FROZEN_NAME = LazyPattern(
    r"teacher|(^|_|\.)ema|vae|clip|text_enc|tokenizer|frozen|reference|ref_model|critic_target|lpips|vgg"
)
# Adapters, quantised bases, master weights, stochastic rounding: the trained parameters are not plain half ones.
TRAINED_OTHERWISE = LazyPattern(
    r"peft|lora|adapter|requires_grad|load_in_[48]bit|bitsandbytes|\bbnb\b|prepare_model_for|cast_training_params|"
    r"master|fp32_(param|weight|copy)|float_params|param_copy|stochastic|kahan|\boptimi\b|torchao|adamw_?bf16|"
    r"grad_dtype|keep_fp32|upcast|bf16-pure|adamw?(8bit|4bit|fp8)",
    re.IGNORECASE,
)


class HalfModel:
    """Module that every run of the script casts to a half dtype."""

    __slots__ = ("context", "dtype", "key", "node", "statement")

    def __init__(self, key: str, dtype: str, node: ast.Call, context: EventContext, statement: ast.stmt) -> None:
        self.key = key
        self.dtype = dtype
        self.node = node  # the cast
        self.context = context
        self.statement = statement

    @property
    def place(self) -> Place:
        return self.context.frame.outline.script.place(self.node)

    def spot(self, seen_from: Place) -> str:
        """Return how a message refers to the line of the cast."""
        return spot(self.node, self.context.frame, seen_from)


class TrainedHalfModel:
    """Half model, and the optimizer that gets its parameters."""

    __slots__ = ("frame", "model", "optimizer", "optimizer_key")

    def __init__(self, model: HalfModel, optimizer: ast.Call, frame: Frame, optimizer_key: str | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.frame = frame  # where the optimizer is made
        self.optimizer_key = optimizer_key

    @property
    def place(self) -> Place:
        """Place where the optimizer is made."""
        return self.frame.outline.script.place(self.optimizer)


class _Cast:
    __slots__ = ("dtype", "node", "site")

    def __init__(self, dtype: str | None, node: ast.Call, site: CodeSite) -> None:
        self.dtype = dtype  # None: unknown
        self.node = node
        self.site = site


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def half_models(code: SourceFile) -> dict[str, HalfModel]:
    """Return the modules of this file that are certainly FP16 or certainly BF16, by key."""
    casts: dict[str, list[_Cast]] = {}
    for site in _sites(code):
        for key, cast in _casts_in(site):
            casts.setdefault(key, []).append(cast)
    found = {}
    for key, found_casts in casts.items():
        dtypes = {cast.dtype for cast in found_casts}
        first = found_casts[0]
        if len(dtypes) == 1 and first.dtype in (FP16, BF16) and all(_always(cast.site.context) for cast in found_casts):
            assert isinstance(first.site.node, ast.stmt)
            found[key] = HalfModel(key, first.dtype, first.node, first.site.context, first.site.node)
    return found


@functools.lru_cache(maxsize=4)  # several rules use it for one file
def trained_half_models(code: SourceFile) -> list[TrainedHalfModel]:
    """Return the half models that are trained: an optimizer gets their parameters, and a backward follows the cast."""
    if TRAINED_OTHERWISE.search(code.script.text) or not _mentions_half(code):
        return []
    models = half_models(code)
    found: dict[tuple[int, str], TrainedHalfModel] = {}
    for site in _sites(code) if models else ():
        for call in ast.walk(site.node):
            if isinstance(call, ast.Call) and site.context.frame.role_of_call(call) == OPTIMIZER:
                frame = site.context.frame
                for key in _models_optimized(call, frame):
                    model = models.get(key)
                    if model is not None and not FROZEN_NAME.search(key.rpartition(":")[2].lower()):
                        pair = TrainedHalfModel(model, call, frame, _target_key(site))
                        found.setdefault((id(call), key), pair)
    orders = [_Order(one) for one in code.traces] if found else []
    return [pair for pair in found.values() if _before_training(pair.model, orders)]


def half_optimizers(code: SourceFile, dtype: str) -> list[TrainedHalfModel]:
    """Return the optimizers of models trained in this dtype, each with the first of its models."""
    found: dict[ast.Call, TrainedHalfModel] = {}
    for pair in trained_half_models(code):
        if pair.model.dtype == dtype:
            found.setdefault(pair.optimizer, pair)
    return list(found.values())


def _sites(code: SourceFile) -> list[CodeSite]:
    """Return the statements of this file, including constructors that no trace reaches."""
    reached = {function for one in code.traces for function in (one.frame.function, *one.followed)}
    constructors = [function for function in code.outline.functions if function.name == "__init__" and function.owner]
    budget = WorkBudget(MOST_FOLLOWED)
    unreached = [trace_function(code.frame(function), budget) for function in constructors if function not in reached]
    return [*code.statements, *(site for one in unreached for site in one.statements)]


def only_named_main(context: EventContext) -> bool:
    """Whether ``if __name__ == "__main__"`` is the only condition."""
    return all(_is_main_guard(guard.text) for guard in context.guards)


def _is_main_guard(text: str) -> bool:
    return "__name__" in text


def _mentions_half(code: SourceFile) -> bool:
    return re.search(r"half|float16", code.script.text) is not None


def _always(context: EventContext) -> bool:
    names = (frame.function.name.lower() for frame in context.frame.callers())
    plain = only_named_main(context) and not context.loops and not context.no_grad
    return plain and not any(ASIDE.search(name) for name in names)


def _casts_in(site: CodeSite) -> Iterator[tuple[str, _Cast]]:
    """Yield the casts of ``model.half()`` and ``model = Net().to(torch.half)``, under each key of the module."""
    node, frame = site.node, site.context.frame
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    elif isinstance(node, ast.Expr):
        targets, value = [], node.value
    else:
        return
    casts, root = _spine(value, site)
    keys = {frame.key(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)}
    if isinstance(root, ast.Name | ast.Attribute):
        keys.add(frame.key(root))
    for key in keys:
        if key is not None and casts:
            yield key, casts[0]


def _spine(node: ast.expr, site: CodeSite) -> tuple[list[_Cast], ast.expr]:
    """Return the casts in ``wrap(Net(...).half().cuda())``, the last one first, and the innermost expression."""
    casts: list[_Cast] = []
    frame = site.context.frame
    while isinstance(node, ast.Call):
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        dtype = _cast_dtype(node, method, frame)
        if dtype != "":
            casts.append(_Cast(dtype, node, site))
        if method in CHAINED and isinstance(node.func, ast.Attribute) and frame.qualified(node.func) is None:
            node = node.func.value
        elif node.args and _wraps(node, frame):
            node = node.args[0]
        else:
            break
    return casts, node


def _cast_dtype(call: ast.Call, method: str, frame: Frame) -> str | None:
    """Return the dtype that a call casts to; "" if it is not a cast, None if the dtype is unknown."""
    if method in CASTS and not call.args and not call.keywords:
        return CASTS[method]
    if method == "to":
        return _dtype_of_to(call, frame)
    if method in ("from_pretrained", "from_config"):
        given = argument_of(call, "torch_dtype") or argument_of(call, "dtype")
        return "" if given is None else _single(dtypes_of(given, frame))
    return ""


def _dtype_of_to(call: ast.Call, frame: Frame) -> str | None:
    given = argument_of(call, "dtype")
    if given is not None:
        return _single(dtypes_of(given, frame))
    for argument in call.args:
        dtypes = dtypes_of(argument, frame)
        if dtypes is not None and dtypes & {FP16, BF16, FP32, "float64"}:
            return _single(dtypes)
        if "dtype" in ast.unparse(argument):
            return None
    return ""


def _single(dtypes: frozenset[str] | None) -> str | None:
    return next(iter(dtypes)) if dtypes is not None and len(dtypes) == 1 else None


def _models_optimized(call: ast.Call, frame: Frame) -> set[str]:
    """Return the keys of the modules whose ``parameters()`` an optimizer gets."""
    given = argument_of(call, "params", 0)
    found = set()
    for value in frame.values(given) if given is not None else ():
        for part in ast.walk(value.node) if value.node is not None else ():
            method = part.func if isinstance(part, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in ("parameters", "named_parameters"):
                found |= _keys_of_module(method.value, value.frame)
    return found


def _keys_of_module(node: ast.expr, frame: Frame) -> set[str]:
    """Return the key of a module and of a module that it wraps."""
    keys = {frame.key(node)}
    for value in frame.values(node):
        inner = value.node
        if isinstance(inner, ast.Call) and inner.args and _wraps(inner, value.frame):
            keys.add(value.frame.key(inner.args[0]))
    return {key for key in keys if key is not None}


def _wraps(call: ast.Call, frame: Frame) -> bool:
    return WRAPPERS.search(frame.qualified(call.func) or ast.unparse(call.func)) is not None


def _target_key(site: CodeSite) -> str | None:
    node = site.node
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return site.context.frame.key(node.targets[0])
    return None


class _Order:
    """Order of a trace: the first position of each statement, and the last position of a backward."""

    def __init__(self, one: CodeTrace) -> None:
        backwards = {
            event.node for event in one.events() if event.kind in (EventKind.BACKWARD, EventKind.SCALED_BACKWARD)
        }
        self.trains = bool(backwards)
        self.first: dict[ast.AST, int] = {}
        self.last_backward = -1
        for index, site in enumerate(one.statements if backwards else ()):
            self.first.setdefault(site.node, index)
            if any(part in backwards for part in ast.walk(site.node)):
                self.last_backward = index


def _before_training(model: HalfModel, orders: list[_Order]) -> bool:
    """Whether the cast comes before a backward; one after it is for saving or evaluation."""
    training = [order for order in orders if order.trains]
    for order in training:
        if model.statement in order.first:
            return order.first[model.statement] < order.last_backward
    return bool(training) and model.context.frame.function.name == "__init__"
