"""Checkpoints of a script: the dictionaries that it saves, and whether optimizer and scaler are in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, last_name
from ampwise.check.source.outline import Binding
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import OPTIMIZER, SCALER

SAVES = LazyPattern(r"(^|_)save(_|$)|checkpoint|ckpt", re.IGNORECASE)
SCALER_ENTRY = LazyPattern(r"scaler|(^|_)amp($|_)|grad_scal|loss_scal|fp16", re.IGNORECASE)
OPTIMIZER_ENTRY = LazyPattern(r"optim|(^|_)opt(_|$|\d)", re.IGNORECASE)

DEEPEST = 4  # nested dictionaries and returned calls

# A dictionary, the frame it is written in, and the calls that returned it; their callers may have added to it.
Display = tuple[ast.expr, Frame, tuple[tuple[ast.expr, Frame], ...]]
Entry = tuple[str, ast.expr]


@dataclass(slots=True, eq=False)
class SavedDict:
    """Dictionary that is passed to a function that saves it."""

    node: ast.Call  # the call that saves it
    payload: ast.expr  # the dictionary
    frame: Frame  # of the dictionary
    context: EventContext
    has_optimizer: bool
    has_scaler: bool
    is_whole: bool  # False: entries may be added that we cannot see

    @property
    def where(self) -> ast.expr:
        """Node to report: the saving call, or the dictionary if it comes from another function."""
        return self.node if self.frame is self.context.frame else self.payload


def saved_dicts(code: SourceFile) -> list[SavedDict]:
    """Return every dictionary that is saved, once, with its first save or with one that adds the scaler."""
    found: dict[ast.expr, SavedDict] = {}
    for call, context in _saving_calls(code):
        for argument in arguments_given(call):
            for node, frame, calls in _dictionaries(argument, context.frame, call.lineno):
                entries, whole = _entries(node, frame)
                for made, caller in calls:
                    added, sure = _added_later(made, caller)
                    entries, whole = entries + added, whole and sure
                has_optimizer = any(_is_optimizer_state(entry, frame) for entry in entries)
                has_scaler = any(_mentions_scaler(entry, frame) for entry in entries)
                if has_scaler or node not in found:
                    found[node] = SavedDict(call, node, frame, context, has_optimizer, has_scaler, whole)
    return list(found.values())


def saves_scaler_alone(code: SourceFile) -> bool:
    """Whether a scaler's state is saved to its own file: ``torch.save(scaler.state_dict(), "scaler.pt")``."""
    for call, context in _saving_calls(code):
        for given in call.args:
            if ast.unparse(given).endswith(".state_dict()") and _mentions_scaler(("", given), context.frame):
                return True
    return False


def _saving_calls(code: SourceFile) -> Iterator[tuple[ast.Call, EventContext]]:
    for site in [site for trace in code.traces for site in trace.calls]:
        call, frame = site.call, site.context.frame
        saves = frame.qualified(call.func) == "torch.save"
        if saves or (SAVES.search(last_name(call.func)) and frame.callee(call) is None):
            yield call, site.context


def _dictionaries(node: ast.expr, frame: Frame, line: int, depth: int = 0) -> Iterator[Display]:
    """Yield the dictionary displays that an expression may evaluate to."""
    is_display = isinstance(node, ast.Dict | ast.DictComp)
    if is_display or (isinstance(node, ast.Call) and dotted_text(node.func) == "dict"):
        yield node, frame, ()
    elif depth >= DEEPEST:
        return
    elif isinstance(node, ast.Call):
        yield from _returned_dictionaries(node, frame, depth)
    elif isinstance(node, ast.Name) and node.id in frame.function.bindings:
        values = [binding.value for binding in frame.function.bindings[node.id] if binding.value is not None]
        before = [value for value in values if value.lineno <= line] or values
        if before:
            yield from _dictionaries(before[-1], frame, line, depth + 1)
    elif isinstance(node, ast.Name | ast.Attribute):
        for value, home in frame.values(node):
            if value is not None and value is not node:
                yield from _dictionaries(value, home, 10**9, depth + 1)


def _returned_dictionaries(call: ast.Call, frame: Frame, depth: int) -> Iterator[Display]:
    target = frame.callee(call)
    if target is None or target[0].name == "__init__":
        return
    inside = frame.enter(target[0], call, target[1])
    for part in ast.walk(target[0].node):
        if isinstance(part, ast.Return) and part.value is not None:
            for display, home, calls in _dictionaries(part.value, inside, part.lineno, depth + 1):
                yield display, home, (*calls, (call, frame))


def _entries(node: ast.expr, frame: Frame, depth: int = 0) -> tuple[list[Entry], bool]:
    """Return the entries of a dictionary, including those added later in its function, and whether these are all."""
    entries: list[Entry] = []
    whole = True
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = list(_dictionaries(value, frame, value.lineno, depth + 1)) if depth < DEEPEST else []
                for display, home, _ in inner:
                    entries += _entries(display, home, depth + 1)[0]
                whole = whole and bool(inner)
            else:
                entries.append((key.value if isinstance(key, ast.Constant) else ast.unparse(key), value))  # type: ignore[arg-type]
    elif isinstance(node, ast.DictComp):
        entries, whole = _states_of_all(node, frame, depth)
    elif isinstance(node, ast.Call):
        entries += [(word.arg, word.value) for word in node.keywords if word.arg]
        whole = not node.args and all(word.arg for word in node.keywords)
    added, sure = _added_later(node, frame)
    return entries + added, whole and sure


def _states_of_all(node: ast.DictComp, frame: Frame, depth: int) -> tuple[list[Entry], bool]:
    """Return the entries of ``{name: thing.state_dict() for name, thing in objects.items()}``."""
    loop = node.generators[0]
    method = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    if len(node.generators) > 1 or not isinstance(method, ast.Attribute) or method.attr != "items" or depth >= DEEPEST:
        return [], False
    found = list(_dictionaries(method.value, frame, node.lineno, depth + 1))
    if len(found) != 1 or found[0][2] or not ast.unparse(node.value).endswith(".state_dict()"):
        return [], False
    entries: list[Entry] = []
    objects, whole = _entries(found[0][0], found[0][1], depth + 1)
    for key, value in objects:
        state = ast.Call(func=ast.Attribute(value=value, attr="state_dict", ctx=ast.Load()), args=[], keywords=[])
        entries.append((key, state))
    return entries, whole


def _added_later(node: ast.expr, frame: Frame) -> tuple[list[Entry], bool]:
    """Return the entries that a dictionary gets after it was made, and whether these are all that it may get."""
    classes = frame.ancestry(frame.instance_of) if frame.instance_of is not None else []
    names = _names_of(node, frame.function.bindings)
    attributes = {f"self.{name}" for cls in classes for name in _names_of(node, cls.attributes)}
    scopes: list[ast.AST] = [frame.function.node] if names else []
    scopes += [cls.node for cls in classes] if attributes else []  # another method may add to it
    names |= attributes
    entries: list[Entry] = []
    sure = True
    for part in (part for scope in scopes for part in ast.walk(scope)):
        if isinstance(part, ast.Assign):
            for target in part.targets:  # state["a"]["b"] = ...
                inner = target
                while isinstance(inner, ast.Subscript):
                    inner = inner.value
                if isinstance(target, ast.Subscript) and dotted_text(inner) in names:
                    key = str(target.slice.value) if isinstance(target.slice, ast.Constant) else ""
                    entries.append((key, part.value))
        elif isinstance(part, ast.AugAssign) and dotted_text(part.target) in names:  # state |= {...}
            entries.append(("", part.value))
            sure = sure and isinstance(part.value, ast.Dict)
        elif isinstance(part, ast.Call):
            added, known = _added_by_call(part, names, frame)
            entries += added
            sure = sure and known
    return entries, sure


def _names_of(node: ast.expr, bindings: dict[str, list[Binding]]) -> set[str]:
    return {name for name, those in bindings.items() if any(binding.value is node for binding in those)}


def _added_by_call(call: ast.Call, names: set[str], frame: Frame) -> tuple[list[Entry], bool]:
    """Return the entries that a call adds to the dictionary, and whether these are all that it may add."""
    func = call.func
    if isinstance(func, ast.Attribute) and dotted_text(func.value) in names and func.attr in ("update", "setdefault"):
        entries = [("", argument) for argument in call.args]
        entries += [(word.arg or "", word.value) for word in call.keywords]
        known = func.attr == "setdefault" or all(isinstance(argument, ast.Dict) for argument in call.args)
        return entries, known and all(word.arg for word in call.keywords)
    given = arguments_given(call)
    is_passed_on = any(dotted_text(argument) in names for argument in given)
    return [], not (is_passed_on and any(frame.role(argument) == SCALER for argument in given))


def _is_optimizer_state(entry: Entry, frame: Frame) -> bool:
    key, value = entry
    called = [part.func for part in ast.walk(value) if isinstance(part, ast.Call)]
    owners = [func.value for func in called if isinstance(func, ast.Attribute) and func.attr == "state_dict"]
    return any(frame.role(owner) == OPTIMIZER or OPTIMIZER_ENTRY.search(str(key)) for owner in owners)


def _mentions_scaler(entry: Entry, frame: Frame) -> bool:
    key, value = entry
    if SCALER_ENTRY.search(str(key)):
        return True
    names = [part for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute)]
    return any(frame.role(name) == SCALER for name in names) or "scaler" in ast.unparse(value).lower()
