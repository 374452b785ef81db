"""Models whose parameters are FP16 or BF16 in some mode of the script, and that are trained in that dtype."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ampwise.check.source.cases import ALWAYS, Conditions, Limit, Made, cases_of, combined, conditions_at, joined
from ampwise.check.source.casts import (
    ALL_LAYERS,
    Cast,
    cast_dtypes,
    casts_in,
    default_dtypes,
    last_cast,
    module_gone_through,
    moved,
)
from ampwise.check.source.dictionary_changes import changes_of
from ampwise.check.source.events import EventContext, EventKind, SourceEvent
from ampwise.check.source.frame import Frame, place_of
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import dtype_in
from ampwise.check.source.names import dotted_text, last_name, method_called
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.relevance import Words, says
from ampwise.check.source.steps import BACKWARDS, Region
from ampwise.check.source.torch_names import BF16, FP16, OPTIMIZER
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import MOST_FOLLOWED, CodeSite, WorkBudget, trace_function
from ampwise.finding import Place

# Functions in which a model is cast for another purpose than training.
ASIDE = LazyPattern(r"eval|test|valid|infer|predict|export|save|generat|sampl|bench|teacher|ema|onnx|trace")
FROZEN_NAME = LazyPattern(
    r"teacher|(^|_|\.)ema|vae|clip|text_enc|tokenizer|frozen|reference|ref_model|critic_target|lpips|vgg|vision_tower"
)
# Two patterns for lower-case text: each branch begins with a letter, which is ten times as fast as to ignore case.
# Master weights, stochastic rounding: the optimizer keeps more than the half parameters.
KEEPS_MORE = LazyPattern(
    r"master_?(param|weight|cop|grad|model)|fp32_?(master|param|weight|copy)|float_params|param_copy|stochastic_?round|"
    r"kahan|optimi\b(?<!\woptimi)|torchao|adamw_?bf16|grad_dtype|keep_fp32|upcast|bf16-pure|"
    r"fp16_optimizer|mixedprecisionoptimizer"
)
# Adapters and quantised bases: the trained parameters are others.
TRAINS_OTHERS = LazyPattern(
    r"peft(?<![a-z]peft)|lora(?<![a-z]lora)|qlora(?<![a-z]qlora)|adapter|load_in_[48]bit|prepare_model_for|"
    r"cast_training_params"
)
ADAPTS = LazyPattern(
    r"get_peft_model|peftmodel|prepare_model_for|(apply|add|inject|insert|replace|with|to)\w*_(lora|adapter)|lora_?model|^(apply|add|inject)_?lora"
)
# What is frozen: `net.requires_grad_(False)`, a loop over its parameters, `freeze(net)`.
FREEZES = LazyPattern(
    r"([\w.]+)\.requires_grad_\(\s*(?:requires_grad\s*=\s*)?False|freeze\w*\(\s*([\w.]+)|requires_grad\(([\w.]+),\s*False|"
    r" in ([\w.]+)\.(?:named_)?parameters\(\):\s+(?:[^\n]*\n\s+){0,2}?\w+\.requires_grad(?:_\(|\s*=\s*)False"
)
TRAINS_AGAIN = LazyPattern(r"\.requires_grad(_\((True)?\)|\s*=\s*True)")
# A function with these words may cast a model, or make its optimizer.
PREPARES: Words = (".half(", "float16", "dtype", "HalfTensor", ".parameters(", "param")
GROUPS = LazyPattern(r"param|group|^(filter|list|tuple|chain|iter|sorted|itertools)$")
COPIES = frozenset(("clone", "float", "to", "copy", "deepcopy", "detach"))
DISPLAYS = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.BinOp)
MOST_FOLLOWED_CALLS = 40
POLICIES = ("MixedPrecision", "MixedPrecisionPolicy")  # of FSDP
OPTION = LazyPattern(r"[\w.\[\]'\"]+$")
LONGEST_WORD = 60
DEEPEST_HELPER = 3  # that gives a model its adapters
NAMED_BY = ("id", "attr", "arg", "name")  # the fields of syntax nodes that are names
DEEPEST = 6  # names and calls between an optimizer and the module whose parameters it gets
REGISTERS = ("__init__", "add_module", "register_module")  # a module as a part of another
MOST_ALIASES = 48  # names and calls that may be one module


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
    for site in code.calls if "set_default_" in code.script.text and not KEEPS_MORE.search(_words(code)) else ():
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
    without_adapters = _ways_without_adapters(code)
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
    for part, home, is_whole in _optimized(call, site.context.frame):
        for alias, frame, given in _aliases(part, home):
            if isinstance(alias, ast.Call):
                for dtype, when in cast_dtypes(alias, frame):
                    together = joined(given, when)
                    context = EventContext(frame)
                    if together is not None and dtype in (FP16, BF16) and _is_for_training(context):
                        yield HalfModel(home.key(part) or "", dtype, alias, context, site.node, together)
                continue
            keys = {frame.key(alias): ""}
            owner = frame.class_of(alias) if is_whole else None
            if owner is not None:  # self.encoder.half() in the class of the model
                path, name = owner.outline.path, owner.name
                keys |= {f"{path}:{name}.self.{attribute}": attribute for attribute in owner.attributes}
                made = frame.method(owner, "__init__")
                if made is not None and made.self_name is not None:  # self.half(), in the class of the model
                    keys[code.project.frame(made, owner).key(ast.Name(made.self_name))] = ""
            for key, inner in keys.items():
                for model in models.get(key or "", ()):
                    if inner and model.context.frame.function.owner is not owner:
                        continue  # that of another instance
                    name = f"{(key or '').rpartition(':')[2]}.{inner or model.part}".rstrip(".")
                    is_frozen = FROZEN_NAME.search(name.lower()) or name.rpartition(".")[2] in _frozen(code)
                    if not is_frozen and (is_whole or not (model.part or _has_wide_layers(model, casts))):
                        yield model
            known = frame.key(alias) or ""
            if known not in models and any(cast.dtype and not cast.part for cast in casts.get(known, ())):
                break  # cast back under this name, whatever it was cast to under those before


def _has_wide_layers(model: HalfModel, casts: Mapping[str, list[Cast]]) -> bool:
    """Whether some of its layers are cast to another dtype: ``for m in model.modules(): if ...: m.float()``."""
    return any(cast.part == ALL_LAYERS and cast.dtype != model.dtype for cast in casts.get(model.key, ()))


def _kept_by(init: FunctionOutline, frame: Frame) -> list[ast.Name]:
    """Return the arguments that a module keeps as parts of it; not those that it only asks for something."""
    kept = {each.id for each in walk(init.node) if isinstance(each, ast.Name) and _is_kept(each, init)}
    return [given for name, given in frame.arguments.items() if name in kept and isinstance(given, ast.Name)]


def _is_kept(name: ast.Name, init: FunctionOutline) -> bool:
    """Whether a module becomes part of another: ``self.net = net``, ``nn.Sequential(net)``, ``ModuleList([net])``."""
    parents = init.outline.script.parents
    outer = parents[name]
    if isinstance(outer, ast.Assign):
        return any(isinstance(target, ast.Attribute) for target in outer.targets)
    while isinstance(outer, ast.List | ast.Tuple | ast.keyword):
        outer = parents[outer]
    called = last_name(outer.func) if isinstance(outer, ast.Call) and outer.func is not name else ""
    return called[:1].isupper() or called in REGISTERS


def _aliases(node: ast.expr, frame: Frame) -> Iterator[tuple[ast.expr, Frame, Conditions]]:
    """Yield what a module also is: what was passed, returned or wrapped, up to a cast, with the conditions."""
    pending: list[tuple[ast.expr, Frame, Conditions]] = [(node, frame, ALWAYS)]
    seen: set[object] = set()
    for part, home, given in pending:
        again = place_of(part), home.function, home.call, frozenset(given.items())
        if again in seen or len(seen) > MOST_ALIASES:
            continue
        seen.add(again)
        callee = home.callee(part) if isinstance(part, ast.Call) else None
        if isinstance(part, ast.Call) and callee is not None and callee[0].returns and len(home.callers()) < DEEPEST:
            inside = home.enter(callee[0], part, callee[1])
            pending += [(value, inside, given) for value in callee[0].returns if value is not None]
        elif isinstance(part, ast.Call):
            statement = home.outline.script.parents.get(part)
            is_cast = bool(cast_dtypes(part, home))
            in_own_file = home.outline is frame.outline  # where its name has this cast, and what comes later
            if isinstance(statement, ast.Assign) and in_own_file:
                pending += [(target, home, given) for target in statement.targets]
                inner = last_cast(part, home)[1] if is_cast else moved(part, home)
            else:
                yield part, home, given
                inner = moved(part, home)
            if callee is not None and callee[0].name == "__init__":  # Wrapper(student) has its parameters
                pending += [(word, home, given) for word in _kept_by(callee[0], home.enter(callee[0], part, callee[1]))]
            if home.qualified(part.func) == "torch.nn.Sequential":
                pending += [(layer, home, given) for layer in part.args if isinstance(layer, ast.Name | ast.Call)]
            if inner is not None and (not is_cast or (isinstance(statement, ast.Assign) and in_own_file)):
                pending.append((inner, home, given))
        else:
            yield part, home, given
            if isinstance(part, ast.Name) and part.id in home.arguments and home.caller is not None:
                pending.append((home.arguments[part.id], home.caller, given))
            for made, where in home.values(part):
                if isinstance(made, ast.Call) and where.callee(made) is not None:
                    pending.append((made, where, given))  # a function that may cast what it gets
            for value, when in cases_of(home, part):
                together = joined(given, when)
                if isinstance(value, Made) and value.node is not part and together is not None:
                    pending.append((value.node, value.frame, together))


def half_optimizers(code: SourceFile, dtype: str) -> list[TrainedHalfModel]:
    """Return the optimizers of models trained in this dtype, each with the first of its models."""
    found: dict[ast.Call, TrainedHalfModel] = {}
    for pair in trained_half_models(code):
        if pair.model.dtype == dtype:
            found.setdefault(pair.optimizer, pair)
    return list(found.values())


def half_models_held(node: ast.expr, frame: Frame, code: SourceFile) -> Iterator[HalfModel]:
    """Yield the half models that a name may hold, also as what a function of the file returns."""
    for alias, home, _ in _aliases(node, frame):
        yield from half_models(code).get(home.key(alias) or "", ())


def half_models_run(region: Region, code: SourceFile, dtype: str) -> list[HalfModel]:
    """Return the models of this dtype that a step runs whose optimizer was made elsewhere."""
    if not _may_train_half(code) or not _ways_without_adapters(code):
        return []
    steps = region.events_of(EventKind.OPTIMIZER_STEP)
    if not all(value.node is None for event in steps for value in event.frame.values(event.receiver)):
        return []
    run = {event.key for event in region.events_of(EventKind.FORWARD) if not event.context.no_grad}
    models = [model for key in run if key for model in half_models(code).get(key, ()) if model.dtype == dtype]
    named = [(model, model.key.rpartition(":")[2]) for model in models]
    return [model for model, name in named if not FROZEN_NAME.search(name.lower()) and name not in _frozen(code)]


@functools.lru_cache(maxsize=4)  # asked for every half model
def _frozen(code: SourceFile) -> set[str]:
    """Return the last parts of the names of modules that the file freezes."""
    found = (next(filter(None, match), "") for match in FREEZES.findall(code.script.text))
    frozen = {name.rpartition(".")[2] for name in found}
    return frozen - _trained_again(code) if frozen else frozen


def _trained_again(code: SourceFile) -> set[str]:
    """Return the models of which the file trains a part that they had: ``for p in model.layers[-1].parameters()``."""
    replaced = {dotted_text(target) for target, _ in code.assignments}
    found = set()
    for loop in code.nodes(ast.For):
        gone_through = module_gone_through(loop)
        part = gone_through[1] if gone_through is not None else None
        while isinstance(part, ast.Subscript):
            part = part.value
        names = (dotted_text(part) or "").split(".") if part is not None else []
        starts = [".".join(names[: end + 1]) for end in range(1, len(names))]
        if starts and replaced.isdisjoint(starts) and TRAINS_AGAIN.search(code.script.segment(loop)):
            found.update(names[:-1])
    return found


def only_named_main(context: EventContext) -> bool:
    """Whether ``if __name__ == "__main__"`` is the only condition."""
    return all("__name__" in guard.text for guard in context.guards)


@functools.lru_cache(maxsize=4)  # used for every training step of a file
def _may_train_half(code: SourceFile) -> bool:
    """Whether a file names a half dtype, and nothing that keeps more than half parameters."""
    text = code.script.text.lower()
    says_half = "half" in text or "float16" in text or "fp16" in text or code.names("float16")
    return says_half and not KEEPS_MORE.search(_words(code))


def _is_prepared_elsewhere(frame: Frame, code: SourceFile) -> bool:
    """Whether a model is cast in another file, which has adapters, or keeps more than half parameters."""
    if frame.outline is code.outline:
        return False
    words = _words(code.project.code(frame.outline.path))
    return TRAINS_OTHERS.search(words) is not None or KEEPS_MORE.search(words) is not None


@functools.lru_cache(maxsize=4)
def _words(code: SourceFile) -> str:
    """Return the names in a file and its strings of one word, in lower case: its code without comments and messages."""
    found: set[str] = set()
    for node in code.tree_nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update([node.value] if len(node.value) < LONGEST_WORD and " " not in node.value else [])
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""  # `peft_pretraining` is not peft
            found.update([module] if module.partition(".")[0] == "peft" or KEEPS_MORE.search(module.lower()) else [])
        else:
            found.update(name for field in NAMED_BY if isinstance(name := getattr(node, field, None), str))
    return "\n".join(sorted(found)).lower()


@functools.lru_cache(maxsize=4)
def _ways_without_adapters(code: SourceFile) -> list[Conditions]:
    """Return the conditions under which a model has no adapters, so that its own parameters are trained; empty: never.

    Adapters made under an option leave the modes in which it is off.
    """
    if not TRAINS_OTHERS.search(_words(code)):
        return [ALWAYS]
    made = [call for call in code.nodes(ast.Call) if ADAPTS.search((dotted_text(call.func) or "").lower())]
    found = [ALWAYS] if made else []
    for call in made:
        for reached in _reached(call, code):
            found = combined(found, _opposites(reached))
    return [] if made and found == [ALWAYS] else found  # too many


def _reached(call: ast.Call, code: SourceFile, depth: int = 0) -> list[Conditions]:
    """Return the conditions of a call, with those of the calls of its function in this file."""
    frame = code.frame(code.function_at(call))
    own, name = conditions_at(frame, call), frame.function.name
    calls = [other for other in code.nodes(ast.Call) if name and last_name(other.func) == name]
    calls = [other for other in calls if code.function_at(other) is not frame.function]
    around = [way for other in calls for way in _reached(other, code, depth + 1)] if depth < DEEPEST_HELPER else []
    return combined(own, around) if around else own


def _opposites(conditions: Conditions) -> list[Conditions]:
    """Return the ways in which not all of these conditions on options hold."""
    options = [(name, limit) for name, limit in conditions.items() if OPTION.match(name)]
    return [
        {name: Limit(limit.without) if limit.among is None else Limit(without=limit.among)} for name, limit in options
    ]


@functools.lru_cache(maxsize=4)
def _casts_adapters(code: SourceFile) -> set[ast.expr]:
    """Return the casts of whole models that come after their adapters were made, which they cast, too."""
    if not TRAINS_OTHERS.search(_words(code)):
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


def _optimized(call: ast.Call, frame: Frame) -> Iterator[tuple[ast.expr, Frame, bool]]:
    """Yield the names in what an optimizer gets, and whether it gets all parameters of what they name."""
    if method_called(call) == "configure_optimizers" and isinstance(call.func, ast.Attribute):
        yield call.func.value, frame, True
    given = argument_of(call, "params", 0)
    pending = [(given, frame, 0)] if given is not None else []
    seen: set[ast.expr] = set()
    for expression, home, depth in pending:
        if expression in seen or depth > DEEPEST or _copies(expression):
            continue
        seen.add(expression)
        parts = walk(expression)
        taken = {part.value for part in parts if isinstance(part, ast.Attribute)}
        all_of = {part.value for part in parts if isinstance(part, ast.Attribute) and "parameters" in part.attr}
        for part in parts:
            if not isinstance(part, ast.Name | ast.Attribute):
                continue
            yield part, home, part in all_of or part not in taken
            for module in _looped_over(part, home):
                yield module, home, True
            for value, where in home.values(part):
                if value is not None and value is not part and _is_group(value):
                    pending.append((value, where, depth + 1))
                    pending += [(added, where, depth + 1) for added in _added(part, where)]


def _added(name: ast.expr, frame: Frame) -> list[ast.expr]:
    """Return what the function of a frame adds to a list: ``params += list(net.parameters())``, ``decay.append(p)``."""
    changes = changes_of(dotted_text(name) or "", frame.function.node, frame.outline)
    return [value for kind, _, value in changes if kind in ("item", "merge")]


def _looped_over(node: ast.expr, frame: Frame) -> list[ast.expr]:
    """Return the module whose parameters, or the modules that, a loop around a name goes through under this name."""
    outer: ast.AST | None = frame.outline.script.parents.get(node) if isinstance(node, ast.Name) else None
    while isinstance(outer, ast.expr | ast.keyword | ast.stmt) and outer is not frame.function.node:
        if isinstance(outer, ast.For) and node not in walk(outer.iter):
            names = [part.id for part in walk(outer.target) if isinstance(part, ast.Name)]
            gone_through = module_gone_through(outer)
            if isinstance(node, ast.Name) and node.id in names[-1:]:
                if gone_through is not None:
                    return [gone_through[1]]
                return outer.iter.elts if isinstance(outer.iter, ast.List | ast.Tuple) else []
        outer = frame.outline.script.parents.get(outer)
    return []


def _copies(node: ast.expr) -> bool:
    """Whether an expression holds copies: ``[p.detach().clone().float() for p in model.parameters()]``, or is one."""
    each = node.elt if isinstance(node, ast.ListComp | ast.GeneratorExp) else None
    is_copy = method_called(node) in COPIES and not any(method_called(part) == "parameters" for part in walk(node))
    return is_copy or (each is not None and any(method_called(part) in COPIES for part in walk(each)))


def _is_group(node: ast.expr) -> bool:
    """Whether an expression holds parameters, or groups of them, not a module."""
    return isinstance(node, DISPLAYS) or (isinstance(node, ast.Call) and bool(GROUPS.search(last_name(node.func))))


def _trains_after(model: HalfModel, code: SourceFile) -> bool:
    """Whether the cast comes before a backward; one after it is for saving or evaluation."""
    calls = {frame.call for frame in model.context.frame.callers() if frame.call is not None}
    trains = False
    for trace in code.traces:
        backwards = {event.node for event in trace.events() if event.kind in BACKWARDS}
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
