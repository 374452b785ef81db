"""Checkpoints of a script: the dictionaries that it saves, and whether optimizer and scaler are in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.events import EventContext
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding, ClassOutline
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import OPTIMIZER, SCALER

__all__ = ["SavedDict", "saved_dicts", "saves_scaler_alone"]

SAVES = LazyPattern(r"(^|_)save(_|$)|checkpoint|ckpt", re.IGNORECASE)
SCALER_ENTRY = LazyPattern(r"scaler|(^|_)amp($|_)|grad_scal|loss_scal|fp16", re.IGNORECASE)
OPTIMIZER_ENTRY = LazyPattern(r"optim|(^|_)opt(_|$|\d)", re.IGNORECASE)

DEEPEST = 4  # nested dictionaries and returned calls


# A dictionary, the frame it is written in, and the calls that returned it; their callers may have added to it.
Display = tuple[ast.expr, Frame, tuple[tuple[ast.expr, Frame], ...]]


class SavedDict:
    """Dictionary that is passed to a function that saves it."""

    __slots__ = ("context", "frame", "has_optimizer", "has_scaler", "is_whole", "node", "payload")

    def __init__(
        self,
        node: ast.Call,
        payload: ast.expr,
        frame: Frame,
        context: EventContext,
        has_optimizer: bool,
        has_scaler: bool,
        is_whole: bool,
    ) -> None:
        self.node = node  # the call that saves it
        self.payload = payload  # the dictionary
        self.frame = frame  # of the dictionary
        self.context = context
        self.has_optimizer = has_optimizer
        self.has_scaler = has_scaler
        self.is_whole = is_whole  # False: entries may be added that we cannot see

    @property
    def where(self) -> ast.expr:
        """Node to report: the saving call, or the dictionary if it comes from another function."""
        return self.node if self.frame is self.context.frame else self.payload


def saved_dicts(code: SourceFile) -> list[SavedDict]:
    """Return every dictionary that is saved, once, with its first save or with one that adds the scaler."""
    found: dict[ast.expr, SavedDict] = {}
    for trace in code.traces:
        for site in trace.calls:
            if isinstance(site.node, ast.Call) and _saves(site.node, site.context.frame):
                for checkpoint in _payloads(site.node, site.context):
                    if checkpoint.has_scaler or checkpoint.payload not in found:
                        found[checkpoint.payload] = checkpoint
    return list(found.values())


def saves_scaler_alone(code: SourceFile) -> bool:
    """Whether a scaler's state is saved to its own file: ``torch.save(scaler.state_dict(), "scaler.pt")``."""
    calls = [(site.node, site.context.frame) for trace in code.traces for site in trace.calls]
    return any(
        isinstance(call, ast.Call)
        and _saves(call, frame)
        and any(_is_scaler_state(given, frame) for given in call.args)
        for call, frame in calls
    )


def _is_scaler_state(node: ast.expr, frame: Frame) -> bool:
    return ast.unparse(node).endswith(".state_dict()") and _mentions_scaler(("", node), frame)


def _saves(call: ast.Call, frame: Frame) -> bool:
    if frame.qualified(call.func) == "torch.save":
        return True
    name = (dotted_text(call.func) or "").rpartition(".")[2]
    return bool(SAVES.search(name)) and frame.callee(call) is None


def _payloads(call: ast.Call, context: EventContext) -> Iterator[SavedDict]:
    for argument in [*call.args, *(word.value for word in call.keywords)]:
        for node, frame, calls in _dictionaries(argument, context.frame, call.lineno):
            entries, whole = _entries(node, frame)
            for made, caller in calls:
                added, sure = _added_later(made, caller)
                entries, whole = entries + added, whole and sure
            yield SavedDict(
                call,
                node,
                frame,
                context,
                has_optimizer=any(_is_state_of(entry, OPTIMIZER, OPTIMIZER_ENTRY, frame) for entry in entries),
                has_scaler=any(_mentions_scaler(entry, frame) for entry in entries),
                is_whole=whole,
            )


def _dictionaries(node: ast.expr, frame: Frame, line: int, depth: int = 0) -> Iterator[Display]:
    """Yield the dictionary displays that an expression may evaluate to."""
    if _is_dictionary(node):
        yield node, frame, ()
    elif isinstance(node, ast.Call) and depth < DEEPEST:
        target = frame.callee(node)
        if target is not None and target[0].name != "__init__":
            inside = frame.enter(target[0], node, target[1])
            for part in ast.walk(target[0].node):
                if isinstance(part, ast.Return) and part.value is not None:
                    for display, home, calls in _dictionaries(part.value, inside, part.lineno, depth + 1):
                        yield display, home, (*calls, (node, frame))
    elif isinstance(node, ast.Name | ast.Attribute) and depth < DEEPEST:
        yield from _from_name(node, frame, line, depth)


def _from_name(node: ast.Name | ast.Attribute, frame: Frame, line: int, depth: int) -> Iterator[Display]:
    if isinstance(node, ast.Name) and node.id in frame.function.bindings:
        bindings = [b for b in frame.function.bindings[node.id] if b.value is not None]
        before = [b for b in bindings if b.value is not None and b.value.lineno <= line] or bindings
        if before:
            latest = before[-1].value
            assert latest is not None
            yield from _dictionaries(latest, frame, line, depth + 1)
        return
    for value in frame.values(node):
        if value.node is not None and value.node is not node:
            yield from _dictionaries(value.node, value.frame, 10**9, depth + 1)


def _is_dictionary(node: ast.expr) -> bool:
    return isinstance(node, ast.Dict | ast.DictComp) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
    )


Entry = tuple[str, ast.expr]


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
    objects, whole = _entries(found[0][0], found[0][1], depth + 1)
    return [(key, _state_of(value)) for key, value in objects], whole


def _state_of(node: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Attribute(value=node, attr="state_dict", ctx=ast.Load()), args=[], keywords=[])


def _added_later(node: ast.expr, frame: Frame) -> tuple[list[Entry], bool]:
    names = _names_of(node, frame.function.bindings)
    attributes = {f"self.{name}" for cls in _classes_of(frame) for name in _names_of(node, cls.attributes)}
    scopes: list[ast.AST] = [frame.function.node] if names else []
    scopes += [cls.node for cls in _classes_of(frame)] if attributes else []  # another method may add to it
    names |= attributes
    entries: list[Entry] = []
    sure = True
    for part in (part for scope in scopes for part in ast.walk(scope)):
        if isinstance(part, ast.Assign):
            entries += [(_key_of(target), part.value) for target in part.targets if _element_of(target) in names]
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


def _classes_of(frame: Frame) -> list[ClassOutline]:
    """Return the class of the current method, and its bases."""
    return frame.ancestry(frame.instance_of) if frame.instance_of is not None else []


def _element_of(target: ast.expr) -> str | None:
    """Return the dictionary in ``state["a"]["b"] = ...``."""
    if not isinstance(target, ast.Subscript):
        return None
    inner: ast.expr = target
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    return dotted_text(inner)


def _key_of(target: ast.expr) -> str:
    key = target.slice if isinstance(target, ast.Subscript) else None
    return str(key.value) if isinstance(key, ast.Constant) else ""


def _added_by_call(call: ast.Call, names: set[str], frame: Frame) -> tuple[list[Entry], bool]:
    """Return the entries that a call adds to the dictionary, and whether these are all that it may add."""
    func = call.func
    if isinstance(func, ast.Attribute) and dotted_text(func.value) in names and func.attr in ("update", "setdefault"):
        entries = [("", argument) for argument in call.args]
        entries += [(word.arg or "", word.value) for word in call.keywords]
        known = func.attr == "setdefault" or all(isinstance(argument, ast.Dict) for argument in call.args)
        return entries, known and all(word.arg for word in call.keywords)
    given = [*call.args, *(word.value for word in call.keywords)]
    passed_on = any(dotted_text(argument) in names for argument in given)
    return [], not (passed_on and any(frame.role(argument) == SCALER for argument in given))


def _is_state_of(entry: Entry, role: str, name: LazyPattern, frame: Frame) -> bool:
    key, value = entry
    called = [part.func for part in ast.walk(value) if isinstance(part, ast.Call)]
    owners = [func.value for func in called if isinstance(func, ast.Attribute) and func.attr == "state_dict"]
    return any(frame.role(owner) == role or name.search(str(key)) for owner in owners)


def _mentions_scaler(entry: Entry, frame: Frame) -> bool:
    key, value = entry
    if SCALER_ENTRY.search(str(key)):
        return True
    names = (part for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute))
    return any(frame.role(name) == SCALER for name in names) or "scaler" in ast.unparse(value).lower()
