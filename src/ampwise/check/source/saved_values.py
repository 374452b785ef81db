"""Read what a saved value has in it, and whether the states of an optimizer and of a scaler are among it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.dictionary_changes import changes_of, key_text
from ampwise.check.source.frame import Frame, once_per_function, once_per_node
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, code_of, dotted_text
from ampwise.check.source.outline import ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.torch_names import (
    MODEL_NAME,
    NOT_A_GRAD_SCALER,
    OPTIMIZER,
    OPTIMIZER_CLASS,
    SCALER,
    SCHEDULER,
    role_of_name,
)
from ampwise.check.source.tree_walk import walk

SAVES_CLASS = LazyPattern(r"Checkpoint|Saver$|Snapshot")
A_SAVER = LazyPattern(r"save|saving|ckpt|checkpoint|snapshot|dump|store|write|backup|persist", re.IGNORECASE)
SAVES_ITSELF = LazyPattern(r"^save(_(checkpoint|ckpt|state|snapshot))?$")
TRAINS_ITSELF = LazyPattern(
    r"Trainer|Engine|Accelerator|Fabric|Learner|Runner|Solver|Estimator|initialize|DDP|Parallel"
)
SCALER_ENTRY = LazyPattern(r"scaler|grad_?scal|loss_?scal", re.IGNORECASE)
# A key that names what is not the scaler: "ema_state_dict", "lr_scheduler".
OF_ANOTHER = LazyPattern(
    r"(^|_)(ema|averaged?|model|weights?|net|network|generator|discriminator|encoder|decoder|sched(uler)?|lr|rng|random)"
    r"(_[a-z\d])?(_state)?(_dict)?s?$",
    re.IGNORECASE,
)
AMP_ENTRY = LazyPattern(r"(^|_)amp($|_)|fp16", re.IGNORECASE)
OPTIMIZER_ENTRY = LazyPattern(r"optim|(^|_)opti?s?(_|$|\d)|^(sgd|adamw?)$", re.IGNORECASE)
NOT_AN_OPTIMIZER = LazyPattern(
    r"(name|type|cfg|conf|config|args?|kwargs|params?|path|file|dir|lr|class|cls|kind|steps?|groups?|str|fn|"
    r"options?|opts)$",
    re.IGNORECASE,
)
FLAG = LazyPattern(r"^(save|use|reset|is|has|should|load|with|without|no|keep|include|do|store|skip|resume|restore)_")
DATA_SCALER = LazyPattern(
    r"(lr|data|feature|target|tgt|input|output|std|standard|minmax|min_max|time|obs|reward|label|price|y|x)_?scalers?$",
    re.IGNORECASE,
)
# Objects and dictionaries with options, numbers and texts.
SETTINGS = LazyPattern(
    r"(^|_)(args?|cfg|conf|config|options?|opts?|hparams|hyp|params|flags|settings|metrics?|meta|metadata|info|stats|"
    r"loss|losses|scores?|results?|history|logs?|hyperparameters|[a-z]+_(acc|loss|metrics))\d?$",
    re.IGNORECASE,
)
# A function with such a name returns what its callers save.
GIVES_STATE = LazyPattern(r"(state|save)_?dict|(^|_)states?$|checkpoint|ckpt|snapshot|^save$", re.IGNORECASE)
GETS_STATE = LazyPattern(r"state|optim|cpu|save", re.IGNORECASE)
WRITES = LazyPattern(r"^_?(save|write|store|dump)(_|$)", re.IGNORECASE)
MAKES = LazyPattern(r"^_*[A-Z]|^(build|make|create|get|init|setup|prepare|wrap)")  # an object, not a loss or a count
ITERATES = frozenset(("enumerate", "zip", "reversed", "list", "tuple", "sorted", "chain"))
OF_A_MODULE = ("children", "named_children", "modules", "named_modules", "parameters", "named_parameters", "buffers")
COPIES = frozenset(("copy", "items", "values", "to_dict", "_asdict", "dict", "asdict", "get"))
DICTIONARIES = frozenset(("dict", "OrderedDict", "defaultdict", "EasyDict", "AttrDict", "Namespace", "SimpleNamespace"))
DEEPEST = 12  # names, nested dictionaries and calls that return what is saved
MOST_READ = 600  # expressions of one saved value


class Contents(NamedTuple):
    """What a saved value has in it."""

    optimizer: bool = False
    scaler: bool = False
    whole: bool = True  # False: there may be more that we cannot see


NOTHING, UNKNOWN = Contents(), Contents(whole=False)
THE_OPTIMIZER, THE_SCALER = Contents(optimizer=True), Contents(scaler=True)
HAS_SCALER = Contents(scaler=True, whole=False)  # an object that got it, and may save it


def together(parts: list[Contents]) -> Contents:
    optimizer, scaler = any(part.optimizer for part in parts), any(part.scaler for part in parts)
    return Contents(optimizer, scaler, all(part.whole for part in parts))


def name_of(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


class SavedValueReader:
    """Reads what a saved value has in it, through names, functions, loops and what is added to it later."""

    def __init__(self, stepped: set[str | None], *, alone: bool = False) -> None:
        self.stepped = stepped  # keys of optimizers
        self.alone = alone  # whether it is the only thing that its function saves
        self.read: set[ast.AST] = set()
        self.display: tuple[ast.expr | None, Frame | None] = (None, None)  # the dictionary with the optimizer
        self.owner: tuple[ast.expr, Frame] | None = None  # the first optimizer
        self.optimizers: set[str] = set()  # keys of all of them
        self._depth = 0
        self._known: dict[tuple[ast.expr, Frame], Contents] = {}

    def place(self, call: ast.expr, frame: Frame) -> tuple[ast.expr, Frame]:
        """Return the node to report, and its frame."""
        display, home = self.display
        if display is not None and home is not None and home.function is not frame.function:
            # save_checkpoint(checkpoint_state(model, optimizer), path): where the two are called
            while isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name):
                if call.args[0].id not in frame.arguments or frame.caller is None or frame.call is None:
                    break
                call, frame = frame.call, frame.caller
            called = call.args[0] if isinstance(call, ast.Call) and call.args else None
            callee = frame.callee(called) if isinstance(called, ast.Call) else None
            is_direct = callee is not None and callee[0] is home.function and frame.function is not home.function
            return (call, frame) if is_direct else (display, home)
        if display is not None and home is not None:
            return call, frame
        if self.alone and self.owner is not None and self.owner[1] is frame:
            # def save(optimizer, path): torch.save(optimizer.state_dict(), path)
            node = self.owner[0]
            while isinstance(node, ast.Name) and node.id in frame.arguments and frame.caller and frame.call:
                if not A_SAVER.search(frame.function.name):
                    break  # evaluate(model, optimizer), which saves among other things
                node, call, frame = frame.arguments[node.id], frame.call, frame.caller
        return call, frame

    def given(self, argument: ast.expr, frame: Frame, line: int) -> Contents:
        """Return what an argument of a saving call has in it; numbers, texts and options are not of interest."""
        found = self.of(argument, frame, line)
        is_plain = not (found.optimizer or found.scaler or isinstance(argument, ast.Starred))
        return found._replace(whole=True) if is_plain else found

    def receiver(self, func: ast.Attribute, frame: Frame) -> Contents:
        """Return what an object that saves itself has: ``state`` in ``state.save_checkpoint(path)``."""
        if holds_scaler(frame, func.value):
            return HAS_SCALER
        makers = find_constructors(func.value, frame) if SAVES_ITSELF.search(func.attr) else []
        for maker, home in makers:
            if (
                isinstance(maker, ast.Call)
                and MAKES.search(name_of(maker.func))
                and home.definition(maker.func) is None
            ):
                name = name_of(maker.func)
                given = [part for part in arguments_given(maker) if home.role(part) == OPTIMIZER]
                is_other = SAVES_CLASS.search(name) or TRAINS_ITSELF.search(name)
                if not is_other and any(self._is_optimizer(part, home) for part in given):
                    return THE_OPTIMIZER
        return NOTHING

    def of(self, node: ast.expr, frame: Frame, line: int) -> Contents:
        """Return what an expression has in it, at a line of its function."""
        key = (node, frame)
        if key not in self._known:
            self.read.add(node)
            self._known[key] = NOTHING  # ends cycles
            if self._depth >= DEEPEST or len(self._known) > MOST_READ:
                return UNKNOWN
            self._depth += 1
            self._known[key] = self._contents(node, frame, line)
            self._depth -= 1
        return self._known[key]

    def _contents(self, node: ast.expr, frame: Frame, line: int) -> Contents:
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node, frame, line)
        if isinstance(node, ast.Dict):
            parts = [
                self._merged(value, frame, line) if key is None else self._entry(key_text(key), value, frame, line)
                for key, value in zip(node.keys, node.values, strict=True)
            ]
            return self._displayed(node, frame, together(parts))
        if isinstance(node, ast.Call):
            # In [Adam(model.parameters()) for model in models] the elements have no names.
            is_class = OPTIMIZER_CLASS.search(frame.qualified(node.func) or "") is not None
            makes_optimizer = is_class and frame.role_of_call(node) == OPTIMIZER
            return THE_OPTIMIZER if makes_optimizer else self._called(node, frame, line)
        if isinstance(node, ast.DictComp | ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self._comprehended(node, frame, line)
        if isinstance(node, ast.IfExp):
            return together([self.of(node.body, frame, line), self.of(node.orelse, frame, line)])
        if isinstance(node, ast.BoolOp):
            return together([self.of(part, frame, line) for part in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.Add):
            return together([self.of(node.left, frame, line), self.of(node.right, frame, line)])
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return self._displayed(node, frame, together([self.of(part, frame, line) for part in node.elts]))
        if isinstance(node, ast.Starred):
            return self._merged(node.value, frame, line)
        if isinstance(node, ast.Subscript):
            role = frame.role(node)
            if role == OPTIMIZER and self._is_optimizer(node, frame):
                return self._optimizer(node, frame)
            inner = isinstance(node.value, ast.Call)
            return THE_SCALER if role == SCALER else self.of(node.value, frame, line) if inner else NOTHING
        return self.of(node.value, frame, line) if isinstance(node, ast.NamedExpr | ast.Await) else NOTHING

    def _is_optimizer(self, node: ast.expr, frame: Frame) -> bool:
        """Whether an object whose role is that of an optimizer is one, not its name or the options of the script."""
        while isinstance(node, ast.Subscript):
            node = node.value
        base, _, last = (dotted_text(node) or "").rpartition(".")
        if NOT_AN_OPTIMIZER.search(last):
            return False
        makers = [home.role_of_call(value) for value, home in frame.values(node) if isinstance(value, ast.Call)]
        if OPTIMIZER in makers or frame.key(node) in self.stepped:
            return True
        return not SETTINGS.search(base) and ("optim" in last.lower() or _is_stepped(frame.outline, last))

    def _optimizer(self, node: ast.expr, frame: Frame) -> Contents:
        self.owner = self.owner or (node, frame)
        self.optimizers.add(frame.key(node) or "")
        return THE_OPTIMIZER

    # -- names --------------------------------------------------------------------------------------------

    def _named(self, node: ast.Name | ast.Attribute, frame: Frame, line: int) -> Contents:
        role = frame.role(node)
        if role == SCALER:
            return THE_SCALER if _is_scaler(node, frame) else NOTHING
        if role == SCHEDULER:
            return NOTHING
        parts = [HAS_SCALER] if holds_scaler(frame, node) else []
        if role == OPTIMIZER and self._is_optimizer(node, frame):
            parts.append(self._optimizer(node, frame))
        held = list(_held(node, frame, line))
        if held and all(_is_part(value) for value, _, _ in held):
            return NOTHING  # optimizer_state = checkpoint["optimizer"]: saved again
        if THE_OPTIMIZER in parts and not any(_is_container(value) for value, _, _ in held):
            return together(parts)
        for value, home, at in held:
            part = self._elements(value.iter, home, at) if isinstance(value, ast.For) else self.of(value, home, at)
            parts.append(part)
        added = list(self._added(node, frame, line))
        if added:
            is_open = not held and role is None and not SETTINGS.search(node.id if isinstance(node, ast.Name) else "")
            parts += [*added, UNKNOWN] if is_open else added
        contents = together(parts)
        made = next((value for value, _, _ in held if isinstance(value, ast.Dict | ast.Call)), None)
        if added and contents.optimizer and isinstance(made, ast.expr):
            self.display = (made, next(home for value, home, _ in held if value is made))
        return contents

    def _elements(self, iterated: ast.expr, frame: Frame, line: int) -> Contents:
        if isinstance(iterated, ast.Call):
            func = iterated.func
            if isinstance(func, ast.Attribute) and func.attr in ("items", "values"):
                return self._elements(func.value, frame, line)
            if name_of(func) in ITERATES:
                return together([self._elements(part, frame, line) for part in iterated.args])
            if name_of(func) == "state_dict":
                return self.of(iterated, frame, line)
            return NOTHING if name_of(func) in ("range", "keys", "len", *OF_A_MODULE) else UNKNOWN
        return self._merged(iterated, frame, line)

    def _merged(self, node: ast.expr, frame: Frame, line: int) -> Contents:
        """Return what a dictionary or list adds all of whose elements are taken over; unknown if it is not visible."""
        found = self.of(node, frame, line)
        if found != NOTHING or not isinstance(node, ast.Name | ast.Attribute):
            return found
        name = name_of(node)
        is_known = frame.role(node) is not None or SETTINGS.search(name) or MODEL_NAME.search(name)
        if is_known or any(True for _ in _held(node, frame, line)) or _has_all_keywords(node, frame):
            return found
        return UNKNOWN

    # -- dictionaries -------------------------------------------------------------------------------------

    def _displayed(self, node: ast.expr, frame: Frame, contents: Contents) -> Contents:
        if contents.optimizer:
            self.display = (node, frame)  # the outermost one comes last
        return contents

    def _entry(self, key: str, value: ast.expr, frame: Frame, line: int) -> Contents:
        if isinstance(value, ast.Constant):
            return NOTHING
        found, text = self.of(value, frame, line), code_of(value)
        if not key.startswith("[") and ("state" not in text or OF_ANOTHER.search(key)):
            found = found._replace(whole=True)  # an unknown number, text, option, or state of another object
        owner = value.func.value if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else value
        may_be_scaler = SCALER_ENTRY.search(key) is not None and frame.role(owner) is None
        if may_be_scaler and not (found.scaler or _is_none(value, frame) or _scales_data(value, frame)):
            return together([found, THE_SCALER])
        if not found.scaler and AMP_ENTRY.search(key) and "state_dict(" in text:
            return together([found, THE_SCALER])  # apex: amp.state_dict()
        is_flag = isinstance(value, ast.Name | ast.Attribute) and FLAG.search(name_of(value)) is not None
        if (
            not (found.optimizer or is_flag)
            and OPTIMIZER_ENTRY.search(key)
            and "state" in text
            and "scaler" not in text
        ):
            is_held = isinstance(value, ast.Name | ast.Attribute) and any(True for _ in _held(value, frame, line))
            return found if is_held else together([found, THE_OPTIMIZER])
        return found

    def _comprehended(self, node: ast.expr, frame: Frame, line: int) -> Contents:
        """Return the contents of ``{name: thing.state_dict() for name, thing in objects.items()}``."""
        assert isinstance(node, ast.DictComp | ast.ListComp | ast.SetComp | ast.GeneratorExp)
        each = node.value if isinstance(node, ast.DictComp) else node.elt
        found = self.of(each, frame, line)
        if not found.optimizer:
            variables = {
                part.id for loop in node.generators for part in walk(loop.target) if isinstance(part, ast.Name)
            }
            if any(isinstance(part, ast.Name) and part.id in variables for part in walk(each)):
                found = together([found, *[self._elements(loop.iter, frame, line) for loop in node.generators]])
        return self._displayed(node, frame, found) if isinstance(node, ast.DictComp) else found

    def _added(self, node: ast.Name | ast.Attribute, frame: Frame, line: int) -> Iterator[Contents]:
        """Yield what is added later to a dictionary, a list or an object: by item, by attribute, or by a call."""
        name = dotted_text(node) or ""
        base = name.partition(".")[0]
        scopes: list[tuple[ast.AST, Frame]] = []
        if isinstance(node, ast.Name):
            home = frame.function.home_of(node.id)
            scopes = [(frame.function.node, frame)]
            if home is not None and home is not frame.function:
                scopes = [(home.node, frame.lookup.frame(home))]  # with all functions in it
        elif frame.instance_of is not None and base == frame.function.self_name:
            scopes = [(cls.node, frame) for cls in frame.ancestry(frame.instance_of)]
        for scope, home_frame in scopes:
            for kind, key, value in changes_of(name, scope, home_frame.outline):
                if kind == "item":
                    yield self._entry(key, value, home_frame, value.lineno)
                elif kind == "merge":
                    yield self._merged(value, home_frame, value.lineno)
                elif kind == "pass" and isinstance(value, ast.Call) and _may_add(home_frame, (value, name)):
                    yield UNKNOWN

    # -- calls --------------------------------------------------------------------------------------------

    def _called(self, call: ast.Call, frame: Frame, line: int) -> Contents:
        func, name, given = call.func, name_of(call.func), arguments_given(call)
        if name in ("locals", "globals") or frame.qualified(func) == "torch.load":
            return UNKNOWN
        if name == "getattr" and len(given) > 1:
            is_open = holds_scaler(frame, given[0]) and not isinstance(given[1], ast.Constant)
            return UNKNOWN if is_open else NOTHING
        if WRITES.search(name):
            return NOTHING  # best = save_experiment(model, optimizer, best): a path or a score
        target = frame.callee(call)
        is_followed = target is not None and target[0].name != "__init__"
        if not is_followed and any(isinstance(part, ast.Name) and holds_scaler(frame, part) for part in given):
            return UNKNOWN
        if isinstance(func, ast.Attribute):
            role = frame.role(func.value)
            if role is not None or (GIVES_STATE.search(name) and not is_followed):
                return self._state_of(func.value, frame, line) if role == SCALER or "state" in name else NOTHING
        if target is not None and is_followed:
            return self._returned(target[0], frame.enter(target[0], call, target[1]))
        if name in DICTIONARIES or isinstance(frame.definition(func), ClassOutline):
            parts = [self._merged(part, frame, line) for part in call.args]
            for word in call.keywords:
                if word.arg is None:
                    parts.append(self._merged(word.value, frame, line))
                else:
                    parts.append(self._entry(word.arg, word.value, frame, line))
            return self._displayed(call, frame, together(parts))
        parts = []
        if isinstance(func, ast.Attribute) and (name in COPIES or isinstance(func.value, ast.Call)):
            parts.append(self.of(func.value, frame, line))
        takes_objects = GETS_STATE.search(name) is not None or name[:1].isupper()
        for part in given:
            is_object = isinstance(part, ast.Name | ast.Attribute) and frame.role(part) in (OPTIMIZER, SCALER)
            if not is_object or takes_objects:
                parts.append(self.of(part, frame, line))
        return together(parts)

    def _state_of(self, node: ast.expr, frame: Frame, line: int) -> Contents:
        """Return what the state of an object is: ``thing`` in ``thing.state_dict()``."""
        if isinstance(node, ast.IfExp):
            return together([self._state_of(part, frame, line) for part in (node.body, node.orelse)])
        role = frame.role(node)
        if role == SCALER:
            return THE_SCALER if _is_scaler(node, frame) else NOTHING
        if role == OPTIMIZER:
            return self._optimizer(node, frame)._replace(scaler=bool(holds_scaler(frame, node)))
        if role == SCHEDULER or not isinstance(node, ast.Name | ast.Attribute):
            return NOTHING
        if holds_scaler(frame, node) and not _is_module(node, frame):
            return HAS_SCALER
        held = [(value, home, at) for value, home, at in _held(node, frame, line) if isinstance(node, ast.Name)]
        parts = [self._elements(loop.iter, home, at) for loop, home, at in held if isinstance(loop, ast.For)]
        names = [each for each in held if isinstance(each[0], ast.Name | ast.Attribute | ast.IfExp)]
        if self._depth < DEEPEST:
            self._depth += 1
            parts += [self._state_of(value, home, at) for value, home, at in names if not isinstance(value, ast.For)]
            self._depth -= 1
        return together(parts)

    def _returned(self, function: FunctionOutline, inside: Frame) -> Contents:
        if len(inside.callers()) > DEEPEST:
            return UNKNOWN
        returns = [part for part in walk(function.node) if isinstance(part, ast.Return)]
        return together([self.of(part.value, inside, part.lineno) for part in returns if part.value is not None])


@once_per_function
def holds_scaler(frame: Frame, node: ast.expr) -> bool:
    """Whether an object got the scaler: by its constructor, as an attribute, or by a method as ``register``."""
    name = dotted_text(node)
    if name is None:
        return False
    owner = frame.class_of(node)
    if owner is not None and _mentions_scaler(owner):
        return True
    for scope in frame.function.scopes:
        if any(key.startswith(f"{name}.") and role_of_name(key) == SCALER for key in scope.bindings):
            return True
    for maker, home in find_constructors(node, frame):
        if isinstance(maker, ast.Call) and maker is not node and MAKES.search(name_of(maker.func)):
            given = arguments_given(maker)
            if any(home.role(part) == SCALER and _is_scaler(part, home) for part in given):
                return True
            owners = [home.class_of(part) for part in given if isinstance(part, ast.Name) and part.id == "self"]
            if any(owner is not None and _mentions_scaler(owner) for owner in owners):
                return True
    function = frame.function.home_of(name.partition(".")[0]) or frame.function
    within = function.owner.node if function.owner is not None and "." in name else function.node
    given = [value for kind, _, value in changes_of(name, within, frame.outline) if kind == "keep"]
    return any(frame.role(value) == SCALER for value in given)


@once_per_node
def _may_add(frame: Frame, given: tuple[ast.Call, str]) -> bool:
    """Whether a function that gets a dictionary of this name may add the scaler to it."""
    call, name = given
    if any(frame.role(part) == SCALER for part in arguments_given(call) if dotted_text(part) != name):
        return True
    target = frame.callee(call)
    if target is not None:
        return "caler" in target[0].text
    return isinstance(call.func, ast.Attribute) and bool(holds_scaler(frame, call.func.value))


def _is_container(node: ast.AST) -> bool:
    """Whether a value is made of others, or is the state of something."""
    is_state = isinstance(node, ast.Call) and (name_of(node.func) in DICTIONARIES or "state" in name_of(node.func))
    return is_state or isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.DictComp | ast.ListComp)


def _is_part(node: ast.AST) -> bool:
    """Whether a value is taken out of a dictionary, by a key that is a text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get"):
        return bool(node.args)
    return (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    )


def _held(node: ast.Name | ast.Attribute, frame: Frame, line: int) -> Iterator[tuple[ast.expr | ast.For, Frame, int]]:
    """Yield what a name may hold at a line: expressions, or the loop that it is a variable of, with their frames."""
    function = frame.function
    if not isinstance(node, ast.Name) or not function.holds(node.id):
        yield from ((value, home, 10**9) for value, home in frame.values(node) if value not in (None, node))
        return
    if frame.caller is not None and frame.call is not None:
        passed = frame.arguments.get(node.id)
        extra = None if isinstance(function.node, ast.Module) else function.node.args.kwarg
        if passed is not None:
            yield passed, frame.caller, frame.call.lineno
        elif extra is not None and extra.arg == node.id:
            for word in frame.call.keywords:
                if word.arg not in function.params:
                    yield word.value, frame.caller, frame.call.lineno
        elif node.id in function.defaults:
            yield function.defaults[node.id], frame, line
    bindings = [each for each in function.bindings.get(node.id, ()) if not isinstance(each.node, ast.AugAssign)]
    before = [binding for binding in bindings if getattr(binding.node, "lineno", 0) <= line] or bindings
    # The last one in a block around the line replaces those before it; others may or may not have run.
    last = next((index for index in reversed(range(len(before))) if _is_certain(before[index].node, line, frame)), 0)
    for binding in before[last:]:
        held = binding.node if binding.value is None and isinstance(binding.node, ast.For) else binding.value
        if held is not None:
            yield held, frame, getattr(binding.node, "lineno", line) - 1


def _has_all_keywords(node: ast.Name | ast.Attribute, frame: Frame) -> bool:
    """Whether a name is the ``**more`` of a function whose call is known and spells its keywords out."""
    definition = frame.function.node
    extra = None if isinstance(definition, ast.Module) else definition.args.kwarg
    if extra is None or not isinstance(node, ast.Name) or node.id != extra.arg or frame.call is None:
        return False
    return all(word.arg is not None for word in frame.call.keywords)


def _is_certain(statement: ast.AST, line: int, frame: Frame) -> bool:
    """Whether a line is in the block of a statement before it: no line between them is indented less."""
    first, column = getattr(statement, "end_lineno", None) or 0, getattr(statement, "col_offset", 0)
    return min(frame.outline.script.indentation[first:line], default=column) >= column


def _is_none(node: ast.expr, frame: Frame) -> bool:
    """Whether a name certainly holds None: a parameter that this caller does not give."""
    return all(isinstance(value, ast.Constant) and value.value is None for value, _ in frame.values(node))


def _is_scaler(node: ast.expr, frame: Frame) -> bool:
    """Whether an object whose role is that of a scaler scales losses, not data, and is there at all."""
    return not (DATA_SCALER.search(dotted_text(node) or "") or _is_none(node, frame))


def _scales_data(node: ast.expr, frame: Frame) -> bool:
    """Whether an object is a scaler of scikit-learn or the like."""
    calls = [(call, home) for value, home in frame.values(node) if value for call in walk(value)]
    names = [home.qualified(call.func) or name_of(call.func) for call, home in calls if isinstance(call, ast.Call)]
    return any(NOT_A_GRAD_SCALER.search(name) for name in names)


@functools.lru_cache(maxsize=256)
def _is_stepped(outline: FileOutline, name: str) -> bool:
    """Whether an object of this name is used as an optimizer; ``opt`` may also be the options."""
    used = rf"\b{re.escape(name)}(\[\w+\])?\.(step|zero_grad|state_dict|load_state_dict|param_groups)\b"
    given = rf"\.(step|unscale_)\((\w+\.)?{re.escape(name)}\b"
    return re.search(f"{used}|{given}", outline.script.text) is not None


def _is_module(node: ast.expr, frame: Frame) -> bool:
    """Whether an object is an nn.Module, whose state has its parameters and buffers only."""
    owner = frame.class_of(node)
    return owner is not None and any(
        "Module" in code_of(base) for cls in frame.ancestry(owner) for base in cls.node.bases
    )


@functools.lru_cache(maxsize=64)
def _mentions_scaler(owner: ClassOutline) -> bool:
    """Whether an object of a class has a scaler."""
    last = owner.node.end_lineno or owner.node.lineno
    text = "\n".join(owner.outline.script.lines[owner.node.lineno - 1 : last])
    return re.search(r"\b(self|cls)\.\w*scaler", text) is not None
