"""Models whose parameters are certainly FP16 or BF16, and that are trained in that dtype."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import method_called
from ampwise.check.source.precision import argument_of, dtypes_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import BACKWARDS
from ampwise.check.source.torch_names import BF16, FP16, FP32, OPTIMIZER
from ampwise.check.source.walk import MOST_FOLLOWED, CodeSite, WorkBudget, trace_function
from ampwise.finding import Place

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


@dataclass(slots=True, eq=False)
class HalfModel:
    """Module that every run of the script casts to a half dtype."""

    key: str
    dtype: str
    node: ast.Call  # the cast
    context: EventContext
    statement: ast.AST

    @property
    def place(self) -> Place:
        return self.context.frame.outline.script.place(self.node)

    def spot(self, seen_from: Place) -> str:
        """Return how a message refers to the line of the cast."""
        return spot(self.node, self.context.frame, seen_from)


@dataclass(slots=True, eq=False)
class TrainedHalfModel:
    """Half model, and the optimizer that gets its parameters."""

    model: HalfModel
    optimizer: ast.Call
    frame: Frame  # where the optimizer is made
    optimizer_key: str | None

    @property
    def place(self) -> Place:
        """Place where the optimizer is made."""
        return self.frame.outline.script.place(self.optimizer)


class _Cast(NamedTuple):
    dtype: str | None  # None: unknown
    node: ast.Call
    site: CodeSite


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def half_models(code: SourceFile) -> dict[str, HalfModel]:
    """Return the modules of this file that are certainly FP16 or certainly BF16, by key."""
    casts: dict[str, list[_Cast]] = {}
    for site in _sites(code):
        for key, cast in _casts_in(site):
            casts.setdefault(key, []).append(cast)
    found = {}
    for key, those in casts.items():
        dtype, node, site = those[0]
        is_certain = all(cast.dtype == dtype and _always_runs(cast.site.context) for cast in those)
        if is_certain and dtype in (FP16, BF16):
            found[key] = HalfModel(key, dtype, node, site.context, site.node)
    return found


@functools.lru_cache(maxsize=4)  # several rules use it for one file
def trained_half_models(code: SourceFile) -> list[TrainedHalfModel]:
    """Return the half models that are trained: an optimizer gets their parameters, and a backward follows the cast."""
    text = code.script.text
    if TRAINED_OTHERWISE.search(text) or ("half" not in text and "float16" not in text):
        return []
    models = half_models(code)
    found: dict[tuple[int, str], TrainedHalfModel] = {}
    for site in _sites(code) if models else ():
        frame, node = site.context.frame, site.node
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and frame.role_of_call(call) == OPTIMIZER:
                for key in _models_optimized(call, frame):
                    if key in models and not FROZEN_NAME.search(key.rpartition(":")[2].lower()):
                        is_plain = isinstance(node, ast.Assign) and len(node.targets) == 1
                        target = frame.key(node.targets[0]) if is_plain else None  # type: ignore[attr-defined]
                        found.setdefault((id(call), key), TrainedHalfModel(models[key], call, frame, target))
    return [pair for pair in found.values() if _trains_after(pair.model, code)]


def half_optimizers(code: SourceFile, dtype: str) -> list[TrainedHalfModel]:
    """Return the optimizers of models trained in this dtype, each with the first of its models."""
    found: dict[ast.Call, TrainedHalfModel] = {}
    for pair in trained_half_models(code):
        if pair.model.dtype == dtype:
            found.setdefault(pair.optimizer, pair)
    return list(found.values())


def only_named_main(context: EventContext) -> bool:
    """Whether ``if __name__ == "__main__"`` is the only condition."""
    return all("__name__" in guard.text for guard in context.guards)


def _sites(code: SourceFile) -> list[CodeSite]:
    """Return the statements of this file, including constructors that no trace reaches."""
    reached = {function for one in code.traces for function in (one.frame.function, *one.followed)}
    constructors = [function for function in code.outline.functions if function.name == "__init__" and function.owner]
    budget = WorkBudget(MOST_FOLLOWED)
    unreached = [trace_function(code.frame(function), budget) for function in constructors if function not in reached]
    return [*code.statements, *[site for one in unreached for site in one.statements]]


def _always_runs(context: EventContext) -> bool:
    if context.loops or context.no_grad or not only_named_main(context):
        return False
    return not any(ASIDE.search(frame.function.name.lower()) for frame in context.frame.callers())


def _casts_in(site: CodeSite) -> Iterator[tuple[str, _Cast]]:
    """Yield the casts of ``model.half()`` and ``model = Net().to(torch.half)``, under each key of the module."""
    node, frame = site.node, site.context.frame
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif not isinstance(node, ast.Expr):
        return
    last, module = _last_cast(node.value, site)
    if last is not None:
        named = [part for part in (*targets, module) if isinstance(part, ast.Name | ast.Attribute)]
        for key in {frame.key(part) for part in named}:
            if key is not None:
                yield key, last


def _last_cast(inner: ast.expr | None, site: CodeSite) -> tuple[_Cast | None, ast.expr | None]:
    """Return the last cast in ``wrap(Net(...).half().cuda())``, and the innermost expression, the module."""
    frame = site.context.frame
    last = None
    while isinstance(inner, ast.Call):
        method = method_called(inner)
        dtype = _cast_dtype(inner, method, frame)
        if last is None and dtype != "":
            last = _Cast(dtype, inner, site)
        if method in CHAINED and isinstance(inner.func, ast.Attribute) and frame.qualified(inner.func) is None:
            inner = inner.func.value
        elif inner.args and _wraps(inner, frame):
            inner = inner.args[0]
        else:
            break
    return last, inner


def _cast_dtype(call: ast.Call, method: str, frame: Frame) -> str | None:
    """Return the dtype that a call casts to; "" if it is not a cast, None if the dtype is unknown."""
    if method in CASTS and not call.args and not call.keywords:
        return CASTS[method]
    given = None
    if method == "to":
        given = argument_of(call, "dtype")
    elif method in ("from_pretrained", "from_config"):
        given = argument_of(call, "torch_dtype") or argument_of(call, "dtype")
    if given is not None:
        return _single(dtypes_of(given, frame))
    for argument in call.args if method == "to" else ():
        dtypes = dtypes_of(argument, frame)
        if dtypes is not None and dtypes & {FP16, BF16, FP32, "float64"}:
            return _single(dtypes)
        if "dtype" in ast.unparse(argument):
            return None
    return ""


def _single(dtypes: frozenset[str] | None) -> str | None:
    return next(iter(dtypes)) if dtypes is not None and len(dtypes) == 1 else None


def _models_optimized(call: ast.Call, frame: Frame) -> set[str]:
    """Return the keys of the modules whose ``parameters()`` an optimizer gets, and of modules that they wrap."""
    given = argument_of(call, "params", 0)
    found: set[str | None] = set()
    for node, home in frame.values(given) if given is not None else ():
        for part in ast.walk(node) if node is not None else ():
            method = part.func if isinstance(part, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in ("parameters", "named_parameters"):
                found.add(home.key(method.value))
                for inner, where in home.values(method.value):
                    if isinstance(inner, ast.Call) and inner.args and _wraps(inner, where):
                        found.add(where.key(inner.args[0]))
    return {key for key in found if key is not None}


def _wraps(call: ast.Call, frame: Frame) -> bool:
    return WRAPPERS.search(frame.qualified(call.func) or ast.unparse(call.func)) is not None


def _trains_after(model: HalfModel, code: SourceFile) -> bool:
    """Whether the cast comes before a backward; one after it is for saving or evaluation."""
    trains = False
    for trace in code.traces:
        backwards = {event.node for event in trace.events() if event.kind in BACKWARDS}
        if not backwards:
            continue
        trains = True
        nodes = [site.node for site in trace.statements]
        if model.statement in nodes:
            later = nodes[nodes.index(model.statement) + 1 :]
            return any(part in backwards for node in later for part in ast.walk(node))
    return trains and model.context.frame.function.name == "__init__"
