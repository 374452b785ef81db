"""Checkpoints of a script: what each saving call writes, and whether the scaler is missing."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampwise.check.source.accelerators import ITS_SCALER
from ampwise.check.source.apex import dynamically_scaled_losses, keeps_state
from ampwise.check.source.call_events import ANYTHING, manages_scaling
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text
from ampwise.check.source.outline import ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.saved_values import (
    GIVES_STATE,
    SAVES_CLASS,
    THE_OPTIMIZER,
    THE_SCALER,
    Contents,
    SavedValueReader,
    name_of,
    together,
)
from ampwise.check.source.torch_names import SCALER, role_of_name
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import CodeTrace

# Functions that write what they get; others are known by their names.
WRITERS = LazyPattern(
    r"^(torch\.save|torch\.distributed\.checkpoint\.\w*save\w*|pickle\.dump|joblib\.dump|"
    r"cloudpickle\.dump|dill\.dump|safetensors\.torch\.save_file)$"
)
SAVES = LazyPattern(
    r"(^|_)(save[drs]?|saving|store|write|dump|snapshot|backup|persist)(_|\d|$)|^_?save[A-Z]|Saver$|checkpoint|"
    r"ckpt|ckpoint|(^|_)chkpt"
)
# Named as if they saved a checkpoint, but they do something else.
SAVES_OTHER = LazyPattern(
    r"^on_|load|restore|resume|recover|(^|_)(find|latest|remove|delete|clean|config|cfg|args?|images?|img|imgs|fig|figure|"
    r"plots?|samples?|videos?|audio|csv|json|yaml|metrics?|results?|predictions?|preds|curves?|history|grads?|"
    r"logs?(?!_(ckpt|checkpoint)s?$)|"
    r"path|name|dir|exists|is|should|callback|activation|pretrained|metadata|stats|tokenizer|hparams|fn)(_|$)",
    re.IGNORECASE,
)
TRACKERS = LazyPattern(r"wandb|mlflow|neptune|comet|tensorboard|writer|clearml", re.IGNORECASE)
KEEPS_SCALER = LazyPattern(r"scaler\w*\.(load_)?state_dict\b")
TEXT_FORMATS = ("json.", "yaml.", "toml.", "csv.", "omegaconf.")
RUNS_LATER = frozenset(("partial", "submit", "apply_async", "run_in_executor", "to_thread", "Thread", "Process"))
SCALER_CLASS = LazyPattern(r"(Grad|Native|Loss|Amp|AMP)\w*Scaler\w*$")
HANDS_OVER = RUNS_LATER | {"add_event_handler"}
STEPS_OPTIMIZER = frozenset(("optimizer step", "scaler step", "unscale", "zero grad"))
METHODS_OF_THE_STEP = frozenset(("scale", "unscale_", "step", "update", "get_scale", "is_enabled"))
USES_SCALER = frozenset(("scaled backward", "scaler step", "unscale"))
DEEPEST_SAVER = 4  # functions between the call that names what is saved and the one that writes it


@dataclass(slots=True, eq=False)
class SavedCheckpoint:
    """What one place of a script saves."""

    where: ast.expr  # the saving call, or the dictionary if another function makes it
    frame: Frame  # of ``where``
    contents: Contents
    display: ast.expr | None  # the dictionary with the optimizer's state, if there is one
    optimizers: set[str] = field(default_factory=set)  # keys of those that are known
    traces: list[CodeTrace] = field(default_factory=list)  # that reach it


def checkpoints_without_scaler(code: SourceFile) -> list[SavedCheckpoint]:
    """Return the checkpoints with an optimizer's state but without the scaler's, if a scaler is used.

    Each script is judged by itself: of two that share a file with functions, only one may use a scaler.
    """
    found = list(_lacking_in(code))
    importers = code.project.importers(code.path) if code.outline.classes else {}
    for path in {*importers, *[trace.frame.outline.path for trace in code.traces]} - {code.path}:
        found += [each for each in _lacking_in(code.project.code(path)) if each.frame.outline is code.outline]
    return found


@functools.lru_cache(maxsize=16)  # scripts that share files with functions
def _lacking_in(code: SourceFile) -> list[SavedCheckpoint]:
    users = _scaler_users(code)
    if not users:
        return []
    saved = _saved_checkpoints(code)
    if any(each.contents == THE_SCALER and isinstance(each.where, ast.Call) for each in saved):
        return []  # it has a file of its own
    alone = [each for each in saved if each.contents.scaler and not each.contents.optimizer]
    beside = {each.frame.function for each in alone}
    # One method returns the optimizers for a checkpoint, and another the scalers.
    in_parts = {_owner(each.frame.function) for each in alone if not isinstance(each.where, ast.Call)} - {None}
    # A function that we cannot see may save it if the script loads it, or if another such function gets it.
    may_be_saved = _loads_scaler(code) or any(each.contents.scaler and each.contents.whole for each in saved)
    found = []
    for each in saved:
        has_optimizer, has_scaler, whole = each.contents
        # A dictionary of one entry is one of several files.
        is_complete = each.display is not None and not (
            isinstance(each.display, ast.Dict) and len(each.display.keys) == 1
        )
        is_judged = has_optimizer and (whole or _keeps_scalers(code)) and (is_complete or not may_be_saved)
        is_part = not isinstance(each.where, ast.Call) and _owner(each.frame.function) in in_parts
        has_scaler = has_scaler or is_part or each.frame.function in beside
        if is_judged and not has_scaler and _is_in_reach(each, users, code):
            found.append(each)
    inherited = () if KEEPS_SCALER.search(code.script.text) else _saved_by_bases(code, users)
    return found + [each for each in inherited if each.contents == THE_OPTIMIZER]


def _saved_by_bases(code: SourceFile, users: set[ClassOutline | None]) -> Iterator[SavedCheckpoint]:
    """Yield what classes of other files save in a method that a class with a scaler inherits."""
    frame = code.frame(code.outline.module)
    for user in [each for each in users if each is not None]:
        for base in frame.ancestry(user)[1:]:
            if base.outline is code.outline or KEEPS_SCALER.search(base.outline.script.text):
                continue
            for each in _saved_checkpoints(code.project.code(base.outline.path)):
                function = each.frame.function
                if function.owner is base and frame.method(user, function.name) is function:
                    yield each


def _saved_checkpoints(code: SourceFile) -> list[SavedCheckpoint]:
    """Return what the scripts of a file save, once per place, together with what any caller adds."""
    found: dict[ast.expr, SavedCheckpoint] = {}

    def add(
        reader: SavedValueReader, call: ast.expr, frame: Frame, contents: Contents, trace: CodeTrace | None
    ) -> None:
        where, home = reader.place(call, frame)
        display, made_in = reader.display
        if isinstance(call, ast.Call) and isinstance(display, ast.Dict) and made_in:
            where, home = display, made_in  # once, however often it is saved
        known = found.setdefault(where, SavedCheckpoint(where, home, contents, display))
        known.contents = together([known.contents, contents])
        known.optimizers |= reader.optimizers
        known.traces += [trace] if trace is not None else []

    stepped = {event.other or event.key for event in code.events if event.kind in STEPS_OPTIMIZER}
    saving: dict[FunctionOutline, set[ast.Call]] = {}
    completed: set[ast.AST] = set()  # dictionaries that another save completes with the scaler
    sites = list(_saving_calls(code))
    for call, frame, _, _ in sites:
        saving.setdefault(frame.function, set()).add(call)
    read: set[ast.AST] = set()
    for call, frame, arguments, trace in sites:
        reader = SavedValueReader(stepped, alone=len(saving[frame.function]) == 1)
        contents = together([*[reader.given(each, frame, call.lineno) for each in arguments], _given_by_name(call)])
        if isinstance(call.func, ast.Attribute):
            contents = together([contents, reader.receiver(call.func, frame)])
        add(reader, call, frame, contents, trace)
        read |= reader.read
        completed |= reader.read if contents.scaler else set()
    # What a class or a function returns for others to save.
    text = code.script.text.replace("torch.save(", "")
    for function in code.outline.functions[1:]:
        if function.is_run_by_framework or not GIVES_STATE.search(function.name) or f".{function.name}(self" in text:
            continue
        for part in walk(function.node):
            if isinstance(part, ast.Return) and isinstance(part.value, ast.Dict | ast.Name) and part.value not in read:
                reader = SavedValueReader(stepped)
                frame = code.frame(function)
                contents = reader.of(part.value, frame, part.lineno)
                display = reader.display[0]
                if (contents.scaler and not contents.optimizer) or not (display is None or display in read):
                    add(reader, display or part.value, frame, contents, None)
    made = [node for node in found if node in read and isinstance(node, ast.Call)]
    for node in [call for call in made if SAVES_CLASS.search(name_of(call.func))]:
        del found[node]  # snapshot = Snapshot(model, optimizer), which is saved later: once, at the save
    for each in found.values():
        if each.display in completed:
            each.contents = together([each.contents, THE_SCALER])
    return list(found.values())


def _given_by_name(call: ast.Call) -> Contents:
    """Return what a saving call is given by keyword: ``save(optimizer, scaler=state.scaler)``."""
    values = [word.value for word in call.keywords if role_of_name(word.arg or "") == SCALER]
    is_given = any(not isinstance(value, ast.Constant) for value in values)
    return THE_SCALER if is_given else together([])


def _saving_calls(code: SourceFile) -> Iterator[tuple[ast.Call, Frame, list[ast.expr], CodeTrace | None]]:
    """Yield each call that saves something, with what it saves, once per context that reaches it."""
    reached = set()
    for trace in code.traces:
        reached.update([site.node for site in trace.calls])
        if trace.frame.outline is code.outline:
            for site in trace.calls:
                arguments = _saved_arguments(site.call, site.context.frame)
                if arguments is not None:
                    yield site.call, site.context.frame, arguments, trace
    # In lambdas, in functions that have no part in training, and in scripts that leave the training to a framework.
    unreached = [call for call in code.nodes(ast.Call) if call not in reached and _is_named_as_saver(call)]
    pending = [(call, code.frame(code.function_at(call))) for call in unreached]
    for call, frame in pending:  # the list grows during the loop
        arguments = _saved_arguments(call, frame)
        saver = frame.callee(call) if arguments is None and len(frame.callers()) < DEEPEST_SAVER else None
        if arguments is not None:
            yield call, frame, arguments, None
        elif saver is not None and saver[0] not in [caller.function for caller in frame.callers()]:
            inside = frame.enter(saver[0], call, saver[1])  # save_checkpoint({...}), with a torch.save in it
            calls = [part for part in walk(saver[0].node) if isinstance(part, ast.Call)]
            pending += [(part, inside) for part in calls if _is_named_as_saver(part)]


def _is_named_as_saver(call: ast.Call) -> bool:
    return _may_save(name_of(call.func)) or any(word.arg == "to_save" for word in call.keywords)


def _is_dead(node: ast.AST, frame: Frame) -> bool:
    """Whether it is in the body of ``if False:`` or ``if False and ...:``."""
    if "if False" not in frame.outline.script.text:
        return False
    parents = frame.outline.script.parents
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        above = parents[node]
        if isinstance(above, ast.If) and node in above.body:
            test = above.test
            parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
            if any(isinstance(part, ast.Constant) and part.value is False for part in parts):
                return True
        node = above
    return False


@functools.lru_cache(maxsize=1024)
def _may_save(name: str) -> bool:
    return name in HANDS_OVER or SAVES.search(name) is not None or SAVES_CLASS.search(name) is not None


def _saved_arguments(call: ast.Call, frame: Frame) -> list[ast.expr] | None:
    """Return what a call saves; None if it does not save, or if it is followed into its function."""
    func, given = call.func, arguments_given(call)
    name = name_of(func)
    handed = _handed_to_a_handler(call, frame)
    if handed or name == "add_event_handler":
        return handed or None
    if name in RUNS_LATER:  # partial(save, model, optimizer), Thread(target=torch.save, args=(state, path))
        saver = next((part for part in given if SAVES.search(name_of(part))), None)
        if saver is None or (isinstance(saver, ast.Name) and frame.function.holds(saver.id)):
            return None
        func, given, name = saver, [part for part in given if part is not saver], name_of(saver)
    if not _may_save(name) or _is_dead(call, frame):
        return None
    qualified = frame.qualified(func) or ""
    if qualified.startswith(("torch_xla", *TEXT_FORMATS)):
        return None  # TPUs train in BF16, without a scaler; a text is of settings and results
    if WRITERS.search(qualified):
        return given
    is_visible = frame.callee(call) is not None if func is call.func else frame.definition(func) is not None
    if is_visible or SAVES_OTHER.search(name) or isinstance(frame.definition(func), ClassOutline):
        return None
    receiver = (dotted_text(func.value) or "") if isinstance(func, ast.Attribute) else ""
    return None if TRACKERS.search(receiver) else given


def _handed_to_a_handler(call: ast.Call, frame: Frame) -> list[ast.expr]:
    """Return what a framework saves later, as ignite does: ``f(trainer, to_save={...})``, or what a handler is given.

    The latter is ``trainer.add_event_handler(event, ModelCheckpoint(path), {...})``.
    """
    if name_of(call.func) == "add_event_handler" and len(call.args) > 2:
        makers = [value for value, _ in frame.values(call.args[1]) if isinstance(value, ast.Call)]
        return call.args[2:] if any(SAVES_CLASS.search(name_of(maker.func)) for maker in makers) else []
    named = [word.value for word in call.keywords if word.arg == "to_save"]
    return named if named and frame.callee(call) is None and not _is_dead(call, frame) else []


def _owner(function: FunctionOutline) -> ClassOutline | None:
    return next((scope.owner for scope in function.scopes if scope.owner is not None), None)


@functools.lru_cache(maxsize=4)
def _keeps_scalers(code: SourceFile) -> bool:
    """Whether no scaler of a file gets anywhere but into its training step: no dictionary can have it then.

    Each is made and used under a plain name, and only its methods for the step are called.
    """
    made = {call for call in code.nodes(ast.Call) if SCALER_CLASS.search(name_of(call.func))}
    names: set[str] = set()
    for target, value in code.assignments if made else ():
        if value is not None and not made.isdisjoint(walk(value)):
            if not isinstance(target, ast.Name):
                return False
            names.add(target.id)
    parents = code.script.parents
    for node in code.nodes(ast.Name) if names else ():
        if node.id not in names or isinstance(node.ctx, ast.Store):
            continue
        above = parents[node]
        is_method = isinstance(above, ast.Attribute) and above.attr in METHODS_OF_THE_STEP
        if not (is_method or isinstance(above, ast.Compare | ast.If | ast.BoolOp) or _is_passed_on(node, code)):
            return False
    return bool(names)


def _is_passed_on(node: ast.Name, code: SourceFile) -> bool:
    """Whether a name is an argument of a function of the same file, which calls it the same."""
    call = code.script.parents[node]
    call = code.script.parents[call] if isinstance(call, ast.keyword) else call
    callee = code.frame(code.function_at(node)).callee(call) if isinstance(call, ast.Call) else None
    return callee is not None and callee[0].outline is code.outline and node.id in callee[0].params


@functools.lru_cache(maxsize=2)
def _scaler_users(code: SourceFile) -> set[ClassOutline | None]:
    """Return the classes that use a scaler in the scripts of a file; None for functions outside of classes."""
    own = [trace for trace in code.traces if code.outline in _outlines(trace)]
    users = {_owner(event.frame.function) for trace in own if (events := _scaler_events(trace)) for event in events}
    made = {call for call in code.nodes(ast.Call) if SCALER_CLASS.search(name_of(call.func))}
    given_away: set[str | None] | None = None
    for target, value in code.assignments if made else ():
        for call in made.intersection(walk(value)) if value is not None else ():
            function = code.function_at(call)
            is_scaler = code.frame(function).role_of_call(call) == SCALER
            if is_scaler and not users and given_away is None:
                given_away = _names_given_away(code)
            if is_scaler and (users or dotted_text(target) in (given_away or ())):
                users.add(_owner(function))
    return users | apex_users(code)


def _outlines(trace: CodeTrace) -> list[FileOutline]:
    """Return the file in which a trace starts, and that of its object: the loop may be in a base class."""
    owner = trace.frame.instance_of
    return [trace.frame.outline, *([owner.outline] if owner is not None else [])]


@functools.lru_cache(maxsize=4)
def apex_users(code: SourceFile) -> set[ClassOutline | None]:
    """Return the classes that scale losses by ``apex.amp``, with a scale that changes and is nowhere saved."""
    return set() if keeps_state(code) else {_owner(frame.function) for _, frame in dynamically_scaled_losses(code)}


def _loads_scaler(code: SourceFile) -> bool:
    loads = [call for call in code.nodes(ast.Call) if name_of(call.func) == "load_state_dict"]
    receivers = [call.func.value for call in loads if isinstance(call.func, ast.Attribute)]
    return any(code.frame(code.function_at(receiver)).role(receiver) == SCALER for receiver in receivers)


def _scaler_events(trace: CodeTrace) -> list[SourceEvent]:
    used = [event for event in trace.events() if event.kind in USES_SCALER and event.key != ANYTHING]
    text = trace.frame.outline.script.text
    own = [event for event in used if event.key != ITS_SCALER or "save_state(" not in text]
    return [event for event in own if not manages_scaling(event.receiver, event.frame)]


def _names_given_away(code: SourceFile) -> set[str | None]:
    """Return the names that are called, or passed to a function that is not visible."""
    found: set[str | None] = set()
    for call in code.nodes(ast.Call):
        found.add(dotted_text(call.func))
        given = {name for part in arguments_given(call) if (name := dotted_text(part)) is not None}
        if not given <= found:
            callee = code.frame(code.function_at(call)).callee(call)
            if callee is None or callee[0].is_abstract:
                found |= given
    return found


def _is_in_reach(saved: SavedCheckpoint, users: set[ClassOutline | None], code: SourceFile) -> bool:
    """Whether what saves has to do with a scaler: a class without one, beside a class with one, has not."""
    if saved.optimizers and saved.optimizers <= _unscaled_optimizers(code):
        return False
    owner = _owner(saved.frame.function)
    if owner is None or None in users or any(_scaler_events(trace) for trace in saved.traces):
        return True
    above = saved.frame.ancestry(owner)
    return any(user is not None and (user in above or owner in saved.frame.ancestry(user)) for user in users)


@functools.lru_cache(maxsize=2)
def _unscaled_optimizers(code: SourceFile) -> set[str | None]:
    """Return the keys of optimizers that are stepped without a scaler only."""
    if apex_users(code):
        return set()  # they are stepped as without it
    stepped = {event.key for event in code.events if event.kind == "optimizer step"}
    applied = [event for event in code.events if event.kind in ("scaler step", "unscale")]
    scaled = {event.other for event in applied}
    for event in applied:  # scaler.step(NoamOpt(Adam(...))) applies the optimizers inside
        given = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
        owner = event.frame.class_of(given) if given is not None else None
        inside = f"{owner.outline.path}:{owner.name}.self." if owner is not None else "?"
        scaled |= {key for key in stepped if key is not None and key.startswith(inside)}
    # An unseen function that gets an optimizer with a scaler may step it.
    opaque = [event.keys for event in code.events if any(role_of_name(key) == SCALER for key in event.keys)]
    return stepped - scaled - {key for keys in opaque for key in keys}
