"""Models whose parameters are FP16 or BF16 in some mode of the script, and that are trained in that dtype."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.check.source.cases import ALWAYS, Case, Conditions, Dtype, Known, Made, cases_of, conditions_at, joined
from ampwise.check.source.events import EventContext, EventKind
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import UNKNOWN, dtype_in
from ampwise.check.source.names import method_called
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import BACKWARDS, Region
from ampwise.check.source.torch_names import BF16, FP16, FP32, OPTIMIZER
from ampwise.check.source.tree_walk import walk
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
# Master weights, stochastic rounding: the optimizer keeps more than the half parameters.
KEEPS_MORE = LazyPattern(
    r"master_?(param|weight|cop|grad|model)|fp32_?(master|param|weight|copy)|float_params|param_copy|stochastic_?round|"
    r"kahan|\boptimi\b|torchao|adamw_?bf16|grad_dtype|keep_fp32|upcast|bf16-pure|adamw?(8bit|4bit|fp8)|"
    r"bitsandbytes|\bbnb\b|FP16_Optimizer|MixedPrecisionOptimizer",
    re.IGNORECASE,
)
# Adapters, quantised and frozen bases: the trained parameters are others.
TRAINS_OTHERS = LazyPattern(
    r"(?<![a-z])(peft|q?lora)|adapter|requires_grad_\(|\.requires_grad\s*=|load_in_[48]bit|prepare_model_for|"
    r"cast_training_params",
    re.IGNORECASE,
)


@dataclass(slots=True, eq=False)
class HalfModel:
    """Module that the script casts to a half dtype, at least in one of its modes."""

    key: str
    dtype: str
    node: ast.Call  # the cast
    context: EventContext
    statement: ast.AST
    given: Conditions

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


class Cast(NamedTuple):
    """Call that makes parameters half, or full again."""

    dtype: str | None  # None: unknown
    node: ast.Call
    site: CodeSite
    given: Conditions


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def half_models(code: SourceFile) -> dict[str, list[HalfModel]]:
    """Return the modules of this file that are FP16 or BF16 in some mode, by key; not those that are cast back."""
    casts: dict[str, list[Cast]] = {}
    for site in _sites(code):
        for key, cast in _casts_in(site):
            casts.setdefault(key, []).append(cast)
    found: dict[str, list[HalfModel]] = {}
    for key, those in casts.items():
        for index, (dtype, node, site, given) in enumerate(those):
            others = [cast for cast in those[index + 1 :] if cast.node is not node]
            others += [cast for cast in those[:index] if cast.site.context.loops]
            cast_back = any(cast.dtype != dtype and joined(cast.given, given) is not None for cast in others)
            if dtype in (FP16, BF16) and not cast_back and _is_for_training(site.context):
                found.setdefault(key, []).append(HalfModel(key, dtype, node, site.context, site.node, given))
    return found


@functools.lru_cache(maxsize=4)
def half_by_default(code: SourceFile) -> list[Cast]:
    """Return the calls of ``torch.set_default_dtype`` that make every later parameter FP16 or BF16."""
    found = []
    text = code.script.text
    for site in code.calls if "set_default_dtype" in text and not KEEPS_MORE.search(text) else ():
        frame = site.context.frame
        if frame.qualified(site.call.func) == "torch.set_default_dtype" and site.call.args:
            for case in cases_of(frame, site.call.args[0]):
                for reached in conditions_at(frame, site.call):
                    given = joined(case.given, reached)
                    if given is not None and dtype_in(case) in (FP16, BF16) and _is_for_training(site.context):
                        found.append(Cast(dtype_in(case), site.call, site, given))
    return found


@functools.lru_cache(maxsize=4)  # several rules use it for one file
def trained_half_models(code: SourceFile) -> list[TrainedHalfModel]:
    """Return the half models that are trained: an optimizer gets their parameters, and a backward follows the cast."""
    text = code.script.text
    if TRAINS_OTHERS.search(text) or KEEPS_MORE.search(text) or ("half" not in text and "float16" not in text):
        return []
    models = half_models(code)
    found: dict[tuple[int, str, str], TrainedHalfModel] = {}
    for site in _sites(code):
        frame, node = site.context.frame, site.node
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        for call in walk(node):
            if not isinstance(call, ast.Call) or frame.role_of_call(call) != OPTIMIZER:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else []
            target = frame.key(targets[0]) if len(targets) == 1 else None
            ways = conditions_at(frame, call)
            for part, home in _optimized(call, frame):
                key = home.key(part)
                if key is None or FROZEN_NAME.search(key.rpartition(":")[2].lower()):
                    continue
                for model in [*models.get(key, ()), *_returned_half(part, home, key, site)]:
                    if any(joined(model.given, way) is not None for way in ways):
                        found.setdefault((id(call), key, model.dtype), TrainedHalfModel(model, call, frame, target))
    return [pair for pair in found.values() if _trains_after(pair.model, code)]


def _returned_half(part: ast.expr, frame: Frame, key: str, site: CodeSite) -> Iterator[HalfModel]:
    """Yield the half models that a function of the script makes and returns: ``model = load_model(args)``."""
    for value, given in cases_of(frame, part):
        last = None
        if isinstance(value, Made) and value.frame.function is not frame.function:
            last, _ = _last_cast(value.node, value.frame)
        if last is None or not isinstance(value, Made):
            continue
        context = EventContext(value.frame)
        for dtype, when in _cast_dtypes(last, value.frame):
            together = joined(given, when)
            if together is not None and dtype in (FP16, BF16) and _is_for_training(context):
                yield HalfModel(key, dtype, last, context, site.node, together)


def half_optimizers(code: SourceFile, dtype: str) -> list[TrainedHalfModel]:
    """Return the optimizers of models trained in this dtype, each with the first of its models."""
    found: dict[ast.Call, TrainedHalfModel] = {}
    for pair in trained_half_models(code):
        if pair.model.dtype == dtype:
            found.setdefault(pair.optimizer, pair)
    return list(found.values())


def half_models_run(region: Region, code: SourceFile, dtype: str) -> list[HalfModel]:
    """Return the models of this dtype that a step runs whose optimizer was made elsewhere."""
    text = code.script.text
    if ("half" not in text and "float16" not in text) or TRAINS_OTHERS.search(text) or KEEPS_MORE.search(text):
        return []
    steps = region.events_of(EventKind.OPTIMIZER_STEP)
    if not all(value.node is None for event in steps for value in event.frame.values(event.receiver)):
        return []
    run = {event.key for event in region.events_of(EventKind.FORWARD) if not event.context.no_grad}
    models = [model for key in run if key for model in half_models(code).get(key, ()) if model.dtype == dtype]
    return [model for model in models if not FROZEN_NAME.search(model.key.rpartition(":")[2].lower())]


def only_named_main(context: EventContext) -> bool:
    """Whether ``if __name__ == "__main__"`` is the only condition."""
    return all("__name__" in guard.text for guard in context.guards)


@functools.lru_cache(maxsize=4)
def _sites(code: SourceFile) -> list[CodeSite]:
    """Return the statements of this file, including constructors that no trace reaches."""
    reached = {function for one in code.traces for function in (one.frame.function, *one.followed)}
    constructors = [function for function in code.outline.functions if function.name == "__init__" and function.owner]
    budget = WorkBudget(MOST_FOLLOWED)
    unreached = [trace_function(code.frame(function), budget) for function in constructors if function not in reached]
    return [*code.statements, *[site for one in unreached for site in one.statements]]


def _is_for_training(context: EventContext) -> bool:
    if context.loops or context.no_grad:
        return False
    return not any(ASIDE.search(frame.function.name.lower()) for frame in context.frame.callers())


def _casts_in(site: CodeSite) -> Iterator[tuple[str, Cast]]:
    """Yield the casts of ``model.half()`` and ``model = Net().to(torch.half)``, under each key of the module."""
    node, frame = site.node, site.context.frame
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif not isinstance(node, ast.Expr):
        return
    last, module = _last_cast(node.value, frame)
    if last is not None:
        named: list[ast.expr]
        named = [part for part in (*targets, module) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)]
        named += [part.value for part in named if isinstance(part, ast.Subscript)]  # a part of it: model[0].half()
        reached = conditions_at(frame, last)
        for key in {frame.key(part) for part in named}:
            if key is None:
                continue
            for dtype, when in _cast_dtypes(last, frame):
                for way in reached:
                    given = joined(when, way)
                    if given is not None:
                        yield key, Cast(dtype, last, site, given)


def _last_cast(inner: ast.expr | None, frame: Frame) -> tuple[ast.Call | None, ast.expr | None]:
    """Return the last cast in ``wrap(Net(...).half().cuda())``, and the innermost expression, the module."""
    last = None
    while isinstance(inner, ast.Call):
        if last is None and _cast_dtypes(inner, frame):
            last = inner
        method = method_called(inner)
        if method in CHAINED and isinstance(inner.func, ast.Attribute) and frame.qualified(inner.func) is None:
            inner = inner.func.value
        elif inner.args and _wraps(inner, frame):
            inner = inner.args[0]
        else:
            break
    return last, inner


def _cast_dtypes(call: ast.Call, frame: Frame) -> list[tuple[str | None, Conditions]]:
    """Return the dtypes that a call may cast to, None for an unknown one; nothing if it is not a cast."""
    method = method_called(call)
    if method in CASTS and not call.args and not call.keywords:
        return [(CASTS[method], ALWAYS)]
    given = None
    if method == "to":
        given = argument_of(call, "dtype")
    elif method in ("from_pretrained", "from_config"):
        given = argument_of(call, "torch_dtype") or argument_of(call, "dtype")
    if given is not None:
        return [(_known_dtype(case), case.given) for case in cases_of(frame, given)]
    for argument in call.args if method == "to" else ():
        cases = cases_of(frame, argument)
        if any(isinstance(case.value, Known) and isinstance(case.value.value, Dtype) for case in cases):
            return [(_known_dtype(case), case.given) for case in cases]
        if "dtype" in ast.unparse(argument):
            return [(None, ALWAYS)]
    return []


def _known_dtype(case: Case) -> str | None:
    dtype = dtype_in(case)
    return None if dtype == UNKNOWN else dtype


def _optimized(call: ast.Call, frame: Frame) -> Iterator[tuple[ast.expr, Frame]]:
    """Yield the names in what an optimizer gets, with those that they wrap: its models are among them."""
    if method_called(call) == "configure_optimizers" and isinstance(call.func, ast.Attribute):
        yield call.func.value, frame
    given = argument_of(call, "params", 0)
    for node, home in frame.values(given) if given is not None else ():
        for part in walk(node) if node is not None else ():
            if isinstance(part, ast.Name | ast.Attribute):
                yield part, home
                for inner, where in home.values(part):
                    if isinstance(inner, ast.Call) and inner.args and _wraps(inner, where):
                        yield inner.args[0], where


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
            return any(part in backwards for node in later for part in walk(node))
    return trains and model.context.frame.function.name == "__init__"
