"""Models whose parameters are FP16 or BF16 in some mode of the script, and that are trained in that dtype."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ampwise.check.source.cases import ALWAYS, Conditions, Made, cases_of, conditions_at, joined
from ampwise.check.source.casts import (
    ALL_LAYERS,
    Cast,
    cast_dtypes,
    casts_in,
    default_dtypes,
    module_gone_through,
)
from ampwise.check.source.events import EventContext, EventKind, SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import dtype_in
from ampwise.check.source.module_aliases import aliases
from ampwise.check.source.names import last_name, method_called
from ampwise.check.source.optimized_modules import optimized
from ampwise.check.source.outline import ClassOutline, FunctionOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.relevance import Words, says
from ampwise.check.source.steps import BACKWARDS, Region
from ampwise.check.source.torch_names import BF16, FP16, OPTIMIZER
from ampwise.check.source.trained_parameters import (
    ADAPTS,
    FROZEN_NAME,
    KEEPS_MORE,
    TRAINS_OTHERS,
    frozen_in,
    is_trained_by_name,
    ways_without_adapters,
    words_of,
)
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import MOST_FOLLOWED, CodeSite, WorkBudget, trace_function
from ampwise.finding import Place

# Functions in which a model is cast for another purpose than training.
ASIDE = LazyPattern(r"eval|test|valid|infer|predict|export|save|generat|sampl|bench|teacher|ema|onnx|trace")
# A function with these words may cast a model, or make its optimizer.
PREPARES: Words = (".half(", "float16", "dtype", "HalfTensor", ".parameters(", "param")
MOST_FOLLOWED_CALLS = 40
DEEPEST_PART = 3  # model.encoder.head.proj
POLICIES = ("MixedPrecision", "MixedPrecisionPolicy")  # of FSDP


@dataclass(slots=True, eq=False)
class HalfModel:
    """Module that the script casts to a half dtype, at least in one of its modes."""

    key: str
    dtype: str
    node: ast.Call  # the cast
    context: EventContext
    statement: ast.AST
    given: Conditions
    part: str = ""  # the name of the part that is cast, if it is not the whole module

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

    def is_applied_by(self, step: SourceEvent) -> bool:
        """Whether a step of an optimizer, or of a scaler, applies this one."""
        applied: ast.expr | None = step.receiver
        if step.kind == EventKind.SCALER_STEP:
            applied = step.node.args[0] if isinstance(step.node, ast.Call) and step.node.args else None
        applied_ones = [(applied, step.frame)] if applied is not None else []
        listed = step.frame.iterated(applied) if isinstance(applied, ast.Name) else None
        for value, frame in step.frame.values(listed) if listed is not None else ():  # for o in [first, second]
            applied_ones += [(one, frame) for one in value.elts] if isinstance(value, ast.List | ast.Tuple) else []
        for one, frame in applied_ones:
            if self.optimizer_key is not None and frame.key(one) == self.optimizer_key:
                return True
            made = (case.value for case in cases_of(frame, one))
            if any(isinstance(value, Made) and value.node is self.optimizer for value in made):
                return True
        return False


@functools.lru_cache(maxsize=4)
def _casts(code: SourceFile) -> dict[str, list[Cast]]:
    """Return all casts of this file, by the key of the module."""
    found: dict[str, list[Cast]] = {}
    for site in _sites(code):
        for key, cast in casts_in(site):
            found.setdefault(key, []).append(cast)
    return found


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def half_models(code: SourceFile) -> dict[str, list[HalfModel]]:
    """Return the modules of this file that are FP16 or BF16 in some mode, by key; not those that are cast back."""
    found: dict[str, list[HalfModel]] = {}
    for key, those in _casts(code).items():
        for index, (dtype, node, site, given, part) in enumerate(those):
            others = [cast for cast in those[index + 1 :] if cast.node is not node]
            others += [cast for cast in those[:index] if cast.site.context.loops]
            back = [cast for cast in others if cast.dtype != dtype and cast.part in ("", part)]
            cast_back = any(joined(cast.given, given) is not None for cast in back)
            if dtype in (FP16, BF16) and not cast_back and _is_for_training(site.context):
                found.setdefault(key, []).append(HalfModel(key, dtype, node, site.context, site.node, given, part))
    return found


@functools.lru_cache(maxsize=4)
def half_by_default(code: SourceFile) -> list[Cast]:
    """Return the calls of ``torch.set_default_dtype`` that make every later parameter FP16 or BF16."""
    found = []
    for site in code.calls if "set_default_" in code.script.text and not KEEPS_MORE.search(words_of(code)) else ():
        frame = site.context.frame
        for dtype, when in default_dtypes(site.call, frame):
            for reached in conditions_at(frame, site.call):
                given = joined(when, reached)
                if given is not None and dtype in (FP16, BF16) and _is_for_training(site.context):
                    found.append(Cast(dtype, site.call, site, given))
    return found


def sharded_in(code: SourceFile, dtype: str) -> Iterator[tuple[ast.expr, Conditions, Frame]]:
    """Yield FSDP's policies that gather weights in a half dtype, by constructor or by the usual name of one."""
    text, usual = code.script.text, {FP16: "fpSixteen", BF16: "bfSixteen"}[dtype]
    if not ("MixedPrecision" in text or usual in text):
        return
    for call in code.nodes(ast.Call):
        frame = code.frame(code.function_at(call))
        given = argument_of(call, "param_dtype", 0)
        if given is not None and (frame.qualified(call.func) or "").rpartition(".")[2] in POLICIES:
            for case in cases_of(frame, given):
                if dtype_in(case) == dtype:
                    together = [joined(case.given, reached) for reached in conditions_at(frame, call)]
                    yield from [(call, both, frame) for both in together if both is not None]
    names: list[ast.expr] = [*code.nodes(ast.Attribute), *code.nodes(ast.Name)]
    for name in names if usual in text else ():
        if last_name(name) == usual:
            frame = code.frame(code.function_at(name))
            yield from [(name, given, frame) for given in conditions_at(frame, name)]


@functools.lru_cache(maxsize=4)  # several rules use it for one file
def trained_half_models(code: SourceFile) -> list[TrainedHalfModel]:
    """Return the half models that are trained: an optimizer gets their parameters, and a backward follows the cast."""
    if not _may_train_half(code):
        return []
    without_adapters = ways_without_adapters(code)
    if not without_adapters and not _casts_adapters(code):
        return []
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
            for model in _models_optimized(call, site, code):
                if _is_prepared_elsewhere(model.context.frame, code):
                    continue
                others = [ALWAYS] if model.node in _casts_adapters(code) else without_adapters
                given = [both for one in others if (both := joined(model.given, one)) is not None]
                if any(joined(one, way) is not None for one in given for way in ways):
                    pair = TrainedHalfModel(replace(model, given=given[0]), call, frame, target)
                    found.setdefault((id(call), model.key, model.dtype), pair)
    return [pair for pair in found.values() if _trains_after(pair.model, code)]


def _models_optimized(call: ast.Call, site: CodeSite, code: SourceFile) -> Iterator[HalfModel]:
    """Yield the half models whose parameters an optimizer gets, through names, groups and functions."""
    models, casts = half_models(code), _casts(code)
    for part, home, is_whole in optimized(call, site.context.frame):
        for alias, frame, given in aliases(part, home):
            if isinstance(alias, ast.Call):
                for dtype, when in cast_dtypes(alias, frame):
                    together = joined(given, when)
                    context = EventContext(frame)
                    if together is not None and dtype in (FP16, BF16) and _is_for_training(context):
                        yield HalfModel(home.key(part) or "", dtype, alias, context, site.node, together)
                continue
            owner = frame.class_of(alias) if is_whole else None
            keys = {frame.key(alias): ("", owner)} | (_parts_of(owner, frame, code) if owner is not None else {})
            for key, (inner, home_class) in keys.items():
                for model in models.get(key or "", ()):
                    if inner and model.context.frame.function.owner is not home_class:
                        continue  # that of another instance
                    name = f"{(key or '').rpartition(':')[2]}.{inner or model.part}".rstrip(".")
                    is_frozen = FROZEN_NAME.search(name.lower()) or name.rpartition(".")[2] in frozen_in(code)
                    if "." in inner:
                        is_frozen = is_frozen or not is_trained_by_name(inner, code)
                    if not is_frozen and (is_whole or not (model.part or _has_wide_layers(model, casts))):
                        yield model
            known = frame.key(alias) or ""
            if known not in models and any(cast.dtype and not cast.part for cast in casts.get(known, ())):
                break  # cast back under this name, whatever it was cast to under those before


def _parts_of(owner: ClassOutline, frame: Frame, code: SourceFile) -> dict[str | None, tuple[str, ClassOutline | None]]:
    """Return the keys of what a class casts in itself, each with how it is reached, and the class that holds it."""
    keys: dict[str | None, tuple[str, ClassOutline | None]] = {}
    for cls, path in _modules_inside(owner, code):  # self.encoder.half() in the class of the model
        held = {attribute: (f"{path}{attribute}", cls) for attribute in cls.attributes}
        keys |= {f"{cls.outline.path}:{cls.name}.self.{attribute}": part for attribute, part in held.items()}
    made = frame.method(owner, "__init__")
    if made is not None and made.self_name is not None:  # self.half(), in the class of the model
        keys[code.project.frame(made, owner).key(ast.Name(made.self_name))] = ("", owner)
    return keys


def _modules_inside(owner: ClassOutline, code: SourceFile) -> Iterator[tuple[ClassOutline, str]]:
    """Yield a class, and those whose objects its ``__init__`` makes parts of it, with how they are reached from it."""
    pending = [(owner, "")]
    for each, path in pending:
        yield each, path
        for attribute, bindings in each.attributes.items() if path.count(".") < DEEPEST_PART else ():
            for binding in bindings:
                made = binding.value.func if isinstance(binding.value, ast.Call) else None
                cls = code.project.frame(binding.function, each).definition(made) if made is not None else None
                if isinstance(cls, ClassOutline) and cls not in [known for known, _ in pending]:
                    pending.append((cls, f"{path}{attribute}."))


def _has_wide_layers(model: HalfModel, casts: Mapping[str, list[Cast]]) -> bool:
    """Whether some of its layers are cast to another dtype: ``for m in model.modules(): if ...: m.float()``."""
    return any(cast.part == ALL_LAYERS and cast.dtype != model.dtype for cast in casts.get(model.key, ()))


def half_optimizers(code: SourceFile, dtype: str) -> list[TrainedHalfModel]:
    """Return the optimizers of models trained in this dtype, each with the first of its models."""
    found: dict[ast.Call, TrainedHalfModel] = {}
    for pair in trained_half_models(code):
        if pair.model.dtype == dtype:
            found.setdefault(pair.optimizer, pair)
    return list(found.values())


def half_models_held(node: ast.expr, frame: Frame, code: SourceFile) -> Iterator[HalfModel]:
    """Yield the half models that a name may hold, also as what a function of the file returns."""
    for alias, home, _ in aliases(node, frame):
        yield from half_models(code).get(home.key(alias) or "", ())


def half_models_run(region: Region, code: SourceFile, dtype: str) -> list[HalfModel]:
    """Return the models of this dtype that a step runs whose optimizer was made elsewhere."""
    if not _may_train_half(code) or not ways_without_adapters(code):
        return []
    steps = region.events_of(EventKind.OPTIMIZER_STEP)
    if not all(value.node is None for event in steps for value in event.frame.values(event.receiver)):
        return []
    return half_models_in(region, code, dtype)


def half_models_in(region: Region, code: SourceFile, dtype: str) -> list[HalfModel]:
    """Return the models of this dtype that a step runs, whatever its optimizer gets; not those that are frozen."""
    forwards = region.events_of(EventKind.FORWARD)
    run = dict.fromkeys(event.key for event in forwards if not event.context.no_grad)  # in order
    models = [model for key in run if key for model in half_models(code).get(key, ()) if model.dtype == dtype]
    named = [(model, model.key.rpartition(":")[2]) for model in models]
    return [model for model, name in named if not FROZEN_NAME.search(name.lower()) and name not in frozen_in(code)]


def only_named_main(context: EventContext) -> bool:
    """Whether ``if __name__ == "__main__"`` is the only condition."""
    return all("__name__" in guard.text for guard in context.guards)


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def _may_train_half(code: SourceFile) -> bool:
    """Whether a file names a half dtype, and nothing that keeps more than half parameters."""
    text = code.script.text.lower()
    says_half = "half" in text or "float16" in text or "fp16" in text or code.names("float16")
    return says_half and not KEEPS_MORE.search(words_of(code))


def _is_prepared_elsewhere(frame: Frame, code: SourceFile) -> bool:
    """Whether a model is cast in another file, which has adapters, or keeps more than half parameters."""
    if frame.outline is code.outline:
        return False
    words = words_of(code.project.code(frame.outline.path))
    return TRAINS_OTHERS.search(words) is not None or KEEPS_MORE.search(words) is not None


@functools.lru_cache(maxsize=4)
def _casts_adapters(code: SourceFile) -> set[ast.expr]:
    """Return the casts of whole models that come after their adapters were made, which they cast, too."""
    if not TRAINS_OTHERS.search(words_of(code)):
        return set()
    made: dict[FunctionOutline, list[int]] = {}
    for call in code.nodes(ast.Call):
        if ADAPTS.search(last_name(call.func).lower()):
            made.setdefault(code.function_at(call), []).append(call.lineno)
    casts = [cast for those in _casts(code).values() for cast in those if cast.part == ""]
    lines = [(cast.node, made.get(cast.site.context.frame.function, [])) for cast in casts]
    return {node for node, adapted in lines if adapted and max(adapted) < node.lineno}


@functools.lru_cache(maxsize=4)
def _sites(code: SourceFile) -> list[CodeSite]:
    """Return the statements of this file, with those of functions that prepare a model and that no trace followed."""
    reached = {function for one in code.traces for function in (one.frame.function, *one.followed)}
    constructors = [function for function in code.outline.functions if function.name == "__init__" and function.owner]
    budget = WorkBudget(MOST_FOLLOWED)
    found, pending = list(code.statements), list(code.calls)
    for each in constructors:
        if each not in reached:
            inside = trace_function(code.frame(each), budget)
            found += inside.statements
            pending += inside.calls
            reached |= inside.followed
    followed = 0
    for site in pending:
        frame = site.context.frame
        target = frame.callee(site.call) if followed < MOST_FOLLOWED_CALLS else None
        if target is None or target[0] in reached or not says(target[0], PREPARES) or target[0].name == "forward":
            continue
        if target[0].outline is not code.outline or any(one.function is target[0] for one in frame.callers()):
            continue
        followed += 1
        inside = trace_function(frame.enter(target[0], site.call, target[1]), budget)
        found += inside.statements
        pending += inside.calls
    return found


def _is_for_training(context: EventContext) -> bool:
    loops = [loop.node for loop in context.loops]
    if any(not isinstance(loop, ast.For) or module_gone_through(loop) is None for loop in loops) or context.no_grad:
        return False
    return not any(ASIDE.search(frame.function.name.lower()) for frame in context.frame.callers())


def _is_of_framework(event: SourceEvent) -> bool:
    """Whether an event is a backward that a framework may scale: ``accelerator.backward(loss)``."""
    return event.kind == EventKind.OPAQUE and method_called(event.node) == "backward"


def _trains_after(model: HalfModel, code: SourceFile) -> bool:
    """Whether the cast comes before a backward; one after it is for saving or evaluation."""
    calls = {frame.call for frame in model.context.frame.callers() if frame.call is not None}
    trains = False
    for trace in code.traces:
        backwards = {event.node for event in trace.events() if event.kind in BACKWARDS or _is_of_framework(event)}
        if not backwards:
            continue
        trains = True
        nodes = [site.node for site in trace.statements]
        cast = next((n for n, node in enumerate(nodes) if node is model.statement), None)
        if cast is None:  # in a function that was called in one of these statements
            cast = next((n for n, node in enumerate(nodes) if not calls.isdisjoint(walk(node))), None)
        if cast is not None:
            return any(part in backwards for node in nodes[cast + 1 :] for part in walk(node))
    return trains and any(frame.function.name == "__init__" for frame in model.context.frame.callers())
