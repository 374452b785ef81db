from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import is_prepared
from ampwise.check.source.call_events import ANYTHING, is_model
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.lightning import hand_cast_modules
from ampwise.check.source.names import arguments_given, code_of, dotted_text, last_name, method_called
from ampwise.check.source.outline import ClassOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.questions import guard_source
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import events_in, trace_function
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import (
        BranchGuard,
        CodeSite,
        CodeTrace,
        EventContext,
        Frame,
        FunctionOutline,
        Loop,
        SourceFile,
    )
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP501",
    name="eval-no-autocast",
    severity=Severity.INFO,
    summary="Training runs under autocast, but the evaluation loop does not.",
    why=(
        "Not wrong, but slower and with more memory than needed, and it measures a different model from the trained "
        "one: what overflows in FP16 in deployment looks fine in FP32 at validation."
    ),
    fix="Run the evaluation under the same autocast as the training.",
    bad="with torch.no_grad():\n    for x, y in val_loader:\n        predictions = model(x)",
    good='with torch.no_grad(), torch.autocast("cuda"):\n    for x, y in val_loader:\n        predictions = model(x)',
    on_by_default=False,
)
NEEDS = (
    ("autocast",),
    (".backward(", ".train()", "def train", "def _train", "def fit"),
    ("no_grad", "inference_mode", "eval", "val", "test"),  # the first two may be in the script that imports this
)

SWITCHED_MANUALLY = "set_autocast_"  # torch.set_autocast_enabled(...): there is no `with` block to analyse
# Generates samples, evaluates nothing.
GENERATES = LazyPattern(r"sampl|generat|interpolat|progress|visuali|plot|draw|demo")
# Computes something of each batch; it evaluates only if it also measures something.
INFERS = LazyPattern(r"infer|predict|extract|embed|encod|feature|pseudo|submi|export|calibrat|update_bn|bn_update")
ONLY_TESTS = LazyPattern(r"^(?!.*(eval|val)).*test")
WRITES = LazyPattern(r"write|save")
MEASURES = LazyPattern(
    r"loss|criterion|metric|acc(urac|\b|_|1)|correct|score|evaluat|\b(auc|f1|iou|dice|psnr|wer|cer|map)\b|"
    r"\b(mse|mae|rmse|ssim|lpips|fid|errors?|err)\b"
)
VALIDATION_DATA = LazyPattern(r"(^|[^a-z])(val|valid|validation|dev)([^a-z]|$)", re.IGNORECASE)
EVALUATION_DATA = LazyPattern(r"(^|[^a-z])(val|valid|validation|eval|test|dev)([^a-z]|$)")
VALIDATES = LazyPattern(r"(^|[^a-z])(val|valid|validation|validate|evaluate)([^a-z]|$)")
EVALUATES_ITSELF = LazyPattern(r"^(eval|valid|test|fit|score|train)")  # evaluate(model, data): its loop is not visible
EVALUATES = LazyPattern(r"^_?(eval|valid|test)|(^|_)(eval|validation|validate|valid|val|test)(_|$)")
TRAINS = LazyPattern(r"(^|_)(train|fit)(_|$)")
# One iteration of an evaluation, given to a trainer: self.validation_step(batch), hook.forward_valid(batch)
EVALUATION_STEP = LazyPattern(
    r"^_?(eval|evaluation|valid|val|validation|test)_?(forward|step|batch|iter|fn|func)$|"
    r"^_?forward_(eval|evaluation|valid|val|validation|test)$"
)
INFERER = LazyPattern(r"infer(er|ence)$", re.IGNORECASE)  # runs the model that it gets, patch by patch
EVALUATION, TRAINING = "evaluation", "training"
PHASE = LazyPattern(
    r" Eq '((?P<evaluation>val|valid|validation|eval|evaluation|test|dev)|train|training)'$", re.IGNORECASE
)
TRAINING_FLAG = LazyPattern(
    r"some\((.*[.:])?(is_)?((?P<evaluation>eval|evaluate|evaluation|val|validation|validate|test|testing)|train|training|optimizer|optim|opt)\)$"
)
HALF_CAST = LazyPattern(r"\.(half|bfloat16)\(\)|\.to\(.*(float16|half|bf16)")
MAY_AUTOCAST = LazyPattern(r"ctx|context|cast|amp|precision|half|scope|dtype", re.IGNORECASE)
BACKWARDS = ("backward", "scaled backward")
# Factories of evaluators, and the option that puts their forward under autocast.
EVALUATORS = {
    "ignite.engine.create_supervised_evaluator": "amp_mode",
    "monai.engines.SupervisedEvaluator": "amp",
    "monai.engines.EnsembleEvaluator": "amp",
}


def check_source(code: SourceFile) -> Findings:
    if SWITCHED_MANUALLY in code.script.text:
        return
    if code.uses_framework and "Lightning" in code.script.text:
        yield from _steps_of_lightning(code)
    training = _autocast_trainings(code)
    traces = list({id(trace): trace for trace, _ in training}.values())
    if any(site.context.frame.outline is code.outline for _, site in training):
        traces = code.traces  # the training is in this file, which is not only a helper of it
    trained = _models_trained(training)
    plain = _models_trained_without(traces) - trained
    if plain and not trained:
        return  # what autocast is around in the training is a loss: the models run in FP32 there, too
    seen = EvaluationCode(traces, code)
    reported: set[object] = set()
    # A trained model before what is only named like one: `self.processor(x)` before `self.model(x)`.
    for event in sorted(seen.forwards, key=lambda event: event.key not in trained):
        frame = seen.evaluation_of(event, trained) if event.key not in plain else None
        if frame is None or not (frame.outline is code.outline or frame.outline.path in code.project.imported):
            continue
        loop = next((loop for loop in reversed(event.context.loops) if loop.frame is frame), None)
        own: object = loop.node if loop is not None and _trains(frame) else frame.function
        if own in reported or seen.is_wrapped(event.node, frame):
            continue
        reported.add(own)
        node = event.node
        for inner in event.frame.callers():  # up to the call in the evaluation that leads to the forward
            if inner is frame:
                break
            node = inner.call or node
        place = frame.outline.script.place(node)
        yield RULE.at(place, "training runs under autocast, but this evaluation does not")
    for site in code.calls if training else ():
        option = EVALUATORS.get(site.context.frame.qualified(site.call.func) or "")
        if option is not None and site.call not in reported and argument_of(site.call, option) is None:
            reported.add(site.call)
            message = f"training runs under autocast, but this evaluator has no `{option}`"
            yield RULE.at(code.script.place(site.call), message)


def _steps_of_lightning(code: SourceFile) -> Findings:
    """Yield the validation of Lightning modules without the autocast that their ``training_step`` enters by itself."""
    for module in hand_cast_modules(code):
        events = module.training.events()
        trained = {event.key for event in events if event.kind == "forward" and _is_training(event.context)}
        for name in ("validation_step", "test_step"):
            step = module.owner.methods.get(name)
            inside = trace_function(code.project.frame(step, module.owner)).events() if step is not None else []
            forwards = [event for event in inside if event.kind == "forward" and event.key in trained]
            if forwards and not any(event.context.autocasts for event in forwards):
                place = forwards[0].frame.outline.script.place(forwards[0].node)
                yield RULE.at(place, "training runs under autocast, but this evaluation does not")


def _autocast_trainings(code: SourceFile) -> list[tuple[CodeTrace, CodeSite]]:
    """Return the statements of training that run under autocast, each with its trace."""
    regions = [region for region in code.regions if region.has(*BACKWARDS)]
    found = [(region.trace, site) for region in regions for site in region.trace.statements_in(region.loop)]
    if not regions:  # the backward is elsewhere: a loop in a function that is called `train`
        sites = [(trace, site) for trace in code.traces for site in trace.statements if site.context.loops]
        found = [each for each in sites if TRAINS.search(each[1].context.loops[-1].frame.function.name)]
    return [(trace, site) for trace, site in found if _is_training(site.context)]


def _is_training(context: EventContext) -> bool:
    """Whether this runs under an autocast of the training itself, not of a model's own forward or an evaluation."""
    autocast = context.autocast
    if autocast is None or not autocast.may_be_on or context.no_grad:
        return False
    home = autocast.entered_in or autocast.frame
    if home.function.name in ("forward", "__call__"):
        return False
    return not any(EVALUATES.search(one.function.name) and not _trains(one) for one in context.frame.callers())


def _models_trained(training: list[tuple[CodeTrace, CodeSite]]) -> set[str]:
    """Return the keys of the models that run under autocast in the training."""
    events = (event for trace in {trace for trace, _ in training} for event in trace.events())
    return {event.key for event in events if event.kind == "forward" and event.key and _is_training(event.context)}


def _models_trained_without(traces: list[CodeTrace]) -> set[str]:
    """Return the keys of the models that are trained without autocast, in a class or a function of their own."""
    plain: set[str] = set()
    for trace in traces:
        backwards = {event.context.loops for event in trace.events() if event.kind in BACKWARDS}
        forwards = [event for event in trace.events() if event.kind == "forward" and not event.context.no_grad]
        plain |= {event.key for event in forwards if event.key and event.context.loops in backwards}
    return plain


class EvaluationCode:
    """Calls of models in the code around a training, and what of it runs under autocast."""

    def __init__(self, traces: list[CodeTrace], code: SourceFile) -> None:
        self.events = [event for trace in traces for event in trace.events()]
        forwards = [event for event in self.events if event.kind == "forward"]
        # `model.train_step(batch)` is a forward, in an evaluation too, if the training calls it under autocast.
        steps = {_function_called(event) for event in forwards if event.context.autocasts and not event.context.no_grad}
        self.forwards = [event for event in forwards if not _is_verb(event) or _function_called(event) in steps]
        sites = [site for trace in traces for site in trace.calls]
        for site in sites:
            name = last_name(site.call.func)
            if site.call.args and EVALUATION_STEP.search(name):
                target = site.context.frame.callee(site.call)
                if target is None or target[0].is_abstract:
                    self.forwards.append(SourceEvent("forward", site.call, site.context))
            elif INFERER.search(name) and site.context.frame.callee(site.call) is None:
                given = [part for part in arguments_given(site.call) if is_model(part, site.context.frame)]
                if given:  # sliding_window_inference(x, size, batch, model)
                    key = site.context.frame.key(given[0])
                    self.forwards.append(SourceEvent("forward", site.call, site.context, key=key))
        # The functions from which a call is reached under autocast; also for calls of functions that use it.
        self.wrapped: dict[ast.AST | None, set[FunctionOutline]] = {}
        reached: list[SourceEvent | CodeSite] = [*self.forwards, *sites]
        for one in reached:
            if one.context.autocasts:
                frames = one.context.frame.callers()
                for node in (one.node, *[frame.call for frame in frames]):
                    self.wrapped.setdefault(node, set()).update([frame.function for frame in frames])
        self.code, self.text = code, code.script.text

    def is_wrapped(self, node: ast.AST, evaluation: Frame) -> bool:
        """Whether the evaluation runs a call, or a part of what is called, under autocast."""
        return evaluation.function in self.wrapped.get(node, ())

    def evaluation_of(self, event: SourceEvent, trained: set[str]) -> Frame | None:
        """Return the frame of the evaluation that a forward is part of; None if it is not part of one."""
        context, frames = event.context, event.frame.callers()
        if _phase(context.guards) == EVALUATION:
            return self._of_branch(event)
        loop = context.loops[-1] if context.loops else None
        named = next((frame for frame in frames if EVALUATES.search(frame.function.name)), None)
        if named is not None and (loop is None or loop.frame not in frames[: frames.index(named) + 1]):
            loop = None  # the loop is around the evaluation, which is one forward over all of the data, or a step
        elif loop is None:
            return None
        if loop is not None and _is_whole_validation(event, loop) and event.key in trained:
            return loop.frame  # in the loop over epochs: the validation is one forward over all of the data
        frame = loop.frame if loop is not None else named
        if frame is None or (loop is None and _is_test_case(frame, self.text)):
            return None
        inside = events_in(loop.block) if loop is not None else [one for one in self.events if one.frame is frame]
        trains = any(one.kind in BACKWARDS or ANYTHING in one.keys for one in inside)
        if trains or _is_aside(frame, loop):
            return None
        if _is_branch_without_autocast(event, inside) or _casts(event, frame) or _may_be_wrapped(event, frame):
            return None
        if self._asks_beside_autocast(event, frame) or _is_accelerated(event, self.code):
            return None
        eval_mode = ".eval()" in frame.function.text
        is_another = bool(trained) and event.key is not None and event.key not in trained
        if _trains(frame):  # targets are computed without gradients too: it is validation only after model.eval()
            is_validation = eval_mode or (event.key in trained and _is_asked_for(event, frame))
            return frame if context.no_grad and is_validation and not is_another else None
        if is_another and named is None and frame.caller is not None:
            return None  # a teacher's, a reference's or a reward model's part of the training
        is_train = TRAINS.search(frame.function.name) is not None  # with a target network in evaluation mode
        is_evaluation = context.no_grad or (eval_mode and not is_train) or (loop is not None and named is not None)
        return frame if is_evaluation else None

    def _asks_beside_autocast(self, event: SourceEvent, frame: Frame) -> bool:
        """Whether this only asks a model for something, a scale, say, whose forward the evaluation autocasts."""
        call = event.node
        if not isinstance(call, ast.Call):
            return False
        given = [each for each in call.args if not isinstance(each, ast.Constant)]
        is_forward = event.frame.key(call.func) == event.key
        if is_forward and len(given) > len(call.args) / 2:
            return False
        beside = [one for one in self.forwards if one.key == event.key and one.context.autocasts]
        beside = [one for one in beside if frame in one.frame.callers()]
        asked = [ast.unparse(one.node.func) for one in beside if isinstance(one.node, ast.Call)]
        return bool(asked) and (is_forward or ast.unparse(call.func) not in asked)

    def _of_branch(self, event: SourceEvent) -> Frame | None:
        """Return the frame of a loop whose branch for evaluation has no autocast."""
        loops = event.context.loops
        if not loops:
            return None
        frame = loops[-1].frame
        others = [one for one in events_in(loops[-1].block) if one.kind == "forward" and one.context.autocasts]
        shared = any(_phase(one.context.guards) != TRAINING for one in others)
        return None if shared or _casts(event, frame) or _may_be_wrapped(event, frame) else frame


def _is_accelerated(event: SourceEvent, code: SourceFile) -> bool:
    """Whether Accelerate prepared the model, whose forward it then runs under autocast, everywhere."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Name | ast.Attribute) and "ccelerator" in code.script.text and is_prepared(func, code)


def _function_called(event: SourceEvent) -> str:
    return ast.unparse(event.node.func) if isinstance(event.node, ast.Call) else ""


def _is_verb(event: SourceEvent) -> bool:
    """Whether this calls a function that does a whole evaluation or training: ``evaluate_model(net)``."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return func is not None and EVALUATES_ITSELF.search(last_name(func)) is not None


def _phase(guards: Sequence[BranchGuard]) -> str | None:
    """Return the phase that a branch is for: evaluation in ``phase == "val"``, training in ``if is_training``."""
    for guard in guards:
        found = PHASE.search(guard.text) or TRAINING_FLAG.search(guard.text)
        if found is not None:
            return EVALUATION if guard.holds == (found["evaluation"] is not None) else TRAINING
    return None


def _exclude(guards: Sequence[BranchGuard], others: Sequence[BranchGuard]) -> bool:
    sides = {guard.text: guard.holds for guard in guards}
    return any(sides.get(other.text, other.holds) != other.holds for other in others)


def _is_branch_without_autocast(event: SourceEvent, inside: list[SourceEvent]) -> bool:
    """Whether another branch is under autocast, and this one is for those who want none."""
    others = [one for one in inside if one.context.autocasts]
    if not others or event.context.autocasts:
        return False
    same = [one for one in others if one.kind == "forward" and one.key == event.key]
    return all(_exclude(event.context.guards, one.context.guards) for one in same)


def _is_whole_validation(event: SourceEvent, loop: Loop) -> bool:
    """Whether a forward in a loop of training has a ``no_grad`` of its own, with a measure and validation data."""
    if not event.context.no_grad or event.frame is not loop.frame or ".eval()" not in event.frame.function.text:
        return False
    script, call = event.frame.outline.script, event.node
    block = script.parents.get(script.statement(call))
    if not isinstance(block, ast.With) or not isinstance(call, ast.Call):
        return False
    if not any(word in ast.unparse(block.items[0]) for word in ("no_grad", "inference_mode")):
        return False
    if _is_now_and_then_in_eval_mode(event, block):
        return True
    if MEASURES.search(ast.unparse(block).lower()) is None:
        return False
    given = arguments_given(call)
    return any(VALIDATION_DATA.search(ast.unparse(one)) or _is_read_from_evaluation(one, event.frame) for one in given)


def _is_now_and_then_in_eval_mode(event: SourceEvent, block: ast.With) -> bool:
    """Whether ``model.eval()`` stands before a block, in one branch that is taken every so many iterations."""
    script = event.frame.outline.script
    if not any(guard.boundary is not None or "%" in guard_source(guard) for guard in event.context.guards):
        return False
    around = getattr(script.parents[block], "body", [])
    calls = [one.value for one in around if isinstance(one, ast.Expr) and one.lineno < block.lineno]
    switches = [call for call in calls if method_called(call) in ("eval", "train") and isinstance(call, ast.Call)]
    own = [call for call in switches if event.frame.key(call.func.value) == event.key]  # type: ignore[attr-defined]
    return bool(own) and method_called(own[-1]) == "eval"


def _is_read_from_evaluation(node: ast.expr, frame: Frame) -> bool:
    """Whether the last assignment of a name before its use is from evaluation data: ``x, y = next(test_data)``."""
    bindings = frame.function.bindings.get(node.id, ()) if isinstance(node, ast.Name) else ()
    assigned = [one.node for one in bindings if isinstance(one.node, ast.Assign) and one.node.lineno < node.lineno]
    last = max(assigned, key=lambda one: one.lineno, default=None)
    return last is not None and EVALUATION_DATA.search(ast.unparse(last.value)) is not None


def _is_aside(frame: Frame, loop: Loop | None) -> bool:
    """Whether a function uses a model for something else than to evaluate it: to sample, to predict, to time it."""
    function = frame.function
    name = function.name.lower()
    if GENERATES.search(name) or (WRITES.search(name) and not MEASURES.search(function.text.lower())):
        return True
    if EVALUATES.search(name):
        text = function.text.lower()  # a test may also only write what the model makes of each batch
        return bool(ONLY_TESTS.search(name) and WRITES.search(text)) and MEASURES.search(text) is None
    over = "" if loop is None or isinstance(loop.node, ast.While) else ast.unparse(loop.node.iter)
    names = set(re.findall(r"\w+", over)) & frame.arguments.keys()
    if VALIDATION_DATA.search(" ".join([over, *[ast.unparse(frame.arguments[one]) for one in names]])):
        return False
    if EVALUATION_DATA.search(over) and not INFERS.search(name):
        return False
    if loop is not None and isinstance(loop.node, ast.While) and _trains(frame):
        return MEASURES.search(ast.unparse(loop.node).lower()) is None  # a text is generated after the training
    return MEASURES.search(function.text.lower()) is None


def _is_asked_for(event: SourceEvent, frame: Frame) -> bool:
    """Whether a condition around a loop over data says that it is a validation: ``if args.validate:``."""
    return any(guard.holds and guard.frame is frame and VALIDATES.search(guard.text) for guard in event.context.guards)


def _is_test_case(frame: Frame, text: str) -> bool:
    return frame.function.name.startswith("test_") and ("pytest" in text or "unittest" in text)


def _casts(event: SourceEvent, frame: Frame) -> bool:
    """Whether the function of an evaluation casts the model to half: ``model.half()``, ``net = net.bfloat16()``."""
    func = event.node.func if isinstance(event.node, ast.Call) else event.node
    names = {dotted_text(func), dotted_text(func.value) if isinstance(func, ast.Attribute) else None} - {None}
    for home in event.frame.callers()[: event.frame.callers().index(frame) + 1]:
        if home.function.parent is None or not HALF_CAST.search(home.function.text):
            continue
        for call in walk(home.function.node):
            inner: ast.AST = call
            is_cast = method_called(call) in ("half", "bfloat16") or (
                method_called(call) == "to" and isinstance(call, ast.Call) and HALF_CAST.search(ast.unparse(call))
            )
            while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                inner = inner.func.value
            if is_cast and (dotted_text(inner) in names or home.key(inner) == event.key):  # type: ignore[arg-type]
                return True
    return False


def _may_be_wrapped(event: SourceEvent, frame: Frame) -> bool:
    """Whether a context manager whose code we cannot see, around the forward, may be autocast."""
    node: ast.AST | None = event.node
    for home in event.frame.callers():
        while node is not None and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node, ast.With | ast.AsyncWith):
                managers = [item.context_expr for item in node.items]
                funcs = [manager.func if isinstance(manager, ast.Call) else manager for manager in managers]
                names = [last_name(func) for func in funcs if _may_autocast(func, home)]
                if any(MAY_AUTOCAST.search(name) for name in names):
                    return True
            node = home.outline.script.parents.get(node)
        if home is frame:
            break
        node = home.call
    return False


def _may_autocast(manager: ast.expr, frame: Frame) -> bool:
    """Whether a context manager is not torch's, and not a class or a function without autocast that is visible."""
    if (frame.qualified(manager) or "").startswith("torch."):
        return False
    made = frame.definition(manager)
    if isinstance(made, ClassOutline):
        return any("autocast" in code_of(cls.node) for cls in frame.ancestry(made)) or bool(made.node.bases)
    return made is None or "autocast" in made.text


def _trains(frame: Frame) -> bool:
    """Return whether this function also contains the training."""
    return frame.function.parent is None or ".backward(" in frame.function.text


def check_run(run: RunEvents) -> Findings:
    for forward, times in run.forwards.items():
        # The same model, or a copy such as an average of weights, which is matched by class.
        same = [each for each in run.forwards if each.model == forward.model and forward.number in (each.number, None)]
        trained = {each.precision for each in same if each.training}
        halves = trained - {"fp32", "fp64"}
        if not forward.training and halves and forward.precision not in trained:
            precisions = f"{min(halves).upper()}, but is evaluated in {forward.precision.upper()} here"
            called = {"called_from": forward.site.called_from} if forward.site.called_from else {}
            message = f"{forward.model} was trained in {precisions}"
            yield RULE.at(forward.site.place, message, evidence={"times": times} | called)
