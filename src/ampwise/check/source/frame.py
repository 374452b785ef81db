"""A function in one calling context: what its names refer to there.

Following ``train(model, opt, scaler)`` into ``def train(net, optimizer, grad_scaler)`` needs the parameters
bound to the caller's arguments. A ``Frame`` holds these bindings. Its ``key`` identifies an object, so that two
names of the same object, in two functions, get the same key; its ``values`` are the expressions a name may hold.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import code_of, dotted_text, last_name
from ampwise.check.source.outline import Binding, ClassOutline, FunctionOutline
from ampwise.check.source.torch_names import (
    AUTOCASTS,
    GRAD_SCALERS,
    NOT_A_GRAD_SCALER,
    SCALER,
    role_of_constructor,
    role_of_name,
)

if TYPE_CHECKING:
    from ampwise.check.source.project import Project

MOST_VALUES = 40  # a name with more possible values is treated as unknown
MOST_BASES = 64  # base classes of a class
# Attributes that refer to the same object.
TRANSPARENT = frozenset(("module", "_orig_mod", "data"))
PARTIALS = ("partial", "partialmethod")
HOLD_FUNCTIONS = (*PARTIALS, "compile", "script")
MOST_HOLDERS = 3  # around one function
# Dictionaries of settings or saved states: what they hold under "optimizer" is not an optimizer.
SETTINGS = LazyPattern(r"c(on)?fi?g|arg|opts?$|param|setting|ckpt|checkpoint|saved|load|state_dict|kw", re.IGNORECASE)
INTERFACES = ("Protocol", "ABC")
ARGUMENT_PARSERS = ("parse_args", "parse_known_args", "ArgumentParser")

Given = TypeVar("Given")
Found = TypeVar("Found")
Callee = tuple[FunctionOutline, ClassOutline | None]  # a function, and the class of its ``self``


class PossibleValue(NamedTuple):
    """Expression that a name may hold, and the frame to evaluate it in; the node is None if it is unknown."""

    node: ast.expr | None
    frame: Frame


def once_per_argument(find: Callable[[Frame, Given], Found | None]) -> Callable[[Frame, Given], Found | None]:
    """Call a method of a frame once for each argument; while it runs its result is None, which ends cycles."""

    @functools.wraps(find)
    def find_once(self: Frame, given: Given) -> Found | None:
        known = self._known[find]
        if given not in known:
            known[given] = None
            known[given] = find(self, given)
        found: Found | None = known[given]
        return found

    return find_once


def place_of(node: ast.expr) -> ast.expr | str:
    """Return what identifies a node in its frame: all occurrences of a name, or of `self.name`, are one object."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node


def once_per_function(
    find: Callable[[Frame, Given], Found | None], place: Callable[[Any], object] = place_of
) -> Callable[[Frame, Given], Found | None]:
    """Call a method once for all frames of a function, or once per frame if its result depends on the frame's caller.

    The result must not hold a frame. While it is computed it is None, which ends cycles.
    """

    @functools.wraps(find)
    def find_once(self: Frame, given: Given) -> Found | None:
        results = self._results.get(find)
        if results is None:
            shared = self.function.results.setdefault((find, self.instance_of), {})
            results = self._results[find] = (shared, {})
        found: Found | None
        shared, own = results
        where = place(given)
        if where in shared:
            found = shared[where]
        elif where in own:
            Frame.caller_asked += 1
            found = own[where]
        else:
            asked, own[where] = Frame.caller_asked, None
            found = own[where] = find(self, given)
            if Frame.caller_asked == asked:
                shared[where] = found
        return found

    return find_once


def once_per_node(find: Callable[[Frame, Given], Found | None]) -> Callable[[Frame, Given], Found | None]:
    """Call as ``once_per_function``, but for each occurrence of a name, or for what is not a node."""
    return once_per_function(find, place=lambda given: given)


class Frame:
    """One function in one calling context."""

    # How often a result depended on the caller of a frame, or was asked for while it was computed.
    caller_asked = 0

    def __init__(
        self,
        function: FunctionOutline,
        lookup: Project,
        caller: Frame | None = None,
        arguments: dict[str, ast.expr] | None = None,
        instance_of: ClassOutline | None = None,
        call: ast.Call | None = None,
    ) -> None:
        self.function, self.outline = function, function.outline
        self.call, self.lookup, self.caller = call, lookup, caller
        self.arguments = arguments or {}
        self.instance_of: ClassOutline | None
        self.instance_of = instance_of or function.owner or (None if caller is None else caller.instance_of)
        self._values: dict[ast.expr | str, list[PossibleValue]] = {}  # an empty list: the node itself
        self._depend_on_caller: set[ast.expr | str] = set()  # keys of ``_values``
        self._known: dict[object, dict[Any, Any]] = collections.defaultdict(dict)  # results of ``once_per_argument``
        self._results: dict[object, tuple[dict[Any, Any], dict[Any, Any]]] = {}  # of ``once_per_function``

    def callers(self) -> list[Frame]:
        """Return this frame and its callers, innermost first."""
        frames = [self]
        while frames[-1].caller is not None:
            frames.append(frames[-1].caller)
        return frames

    @once_per_function
    def qualified(self, node: ast.expr) -> str | None:
        """Return the full name of what ``node`` refers to, through imports and ``autocast = torch.autocast``."""
        found = self._unshadowed(node)
        if found is None and isinstance(node, ast.Name | ast.Attribute):
            for value, frame in self.values(node):
                if value is not node and isinstance(value, ast.Name | ast.Attribute):
                    found = frame._unshadowed(value)
                    if found is not None:
                        break
        return found

    def _unshadowed(self, node: ast.expr) -> str | None:
        """Return a full name by the imports alone; None if a parameter or local name hides the import."""
        found = self.outline.imports.qualified(node)
        if found is None or self.function.parent is None:  # module-level names hide nothing
            return found
        while isinstance(node, ast.Attribute):
            node = node.value
        home = self.function.home_of(node.id) if isinstance(node, ast.Name) else None
        return found if home is None or home.parent is None else None

    # -- identity -----------------------------------------------------------------------------------------

    @once_per_function
    def key(self, node: ast.expr) -> str | None:
        """Return a key for the object that ``node`` refers to, the same under all of its names."""
        if isinstance(node, ast.Name):
            return self._key_of_name(node.id)
        if isinstance(node, ast.Attribute):
            return self.key(node.value) if node.attr in TRANSPARENT else self._key_of_attribute(node)
        base = self.key(node.value) if isinstance(node, ast.Subscript) else None
        return f"{base}[{code_of(node.slice)}]" if base and isinstance(node, ast.Subscript) else base

    def _key_of_name(self, name: str) -> str | None:
        home = self._home(name)
        if home is None:
            return self.outline.imports.names.get(name) or f"?{self.outline.path}:{name}"
        frame, function = home
        bindings = function.bindings.get(name, ())
        found = None
        if name in function.params:
            Frame.caller_asked += 1
        if name in frame.arguments and frame.caller is not None and not bindings:
            found = frame.caller.key(frame.arguments[name])
        if found is None and name not in function.params and len(bindings) == 1:
            alias = bindings[0].value
            found = frame.key(alias) if isinstance(alias, ast.Name | ast.Attribute) else None
        return found or f"{function.outline.path}:{id(function):x}:{name}"

    def _key_of_attribute(self, node: ast.Attribute) -> str | None:
        owner = self.class_of(node.value)
        if owner is None:
            base = self.key(node.value)
            return base and f"{base}.{node.attr}"
        bindings = self.attribute_bindings(owner, node.attr)
        alias = bindings[0].value if len(bindings) == 1 else None
        found = self.key(alias) if isinstance(alias, ast.Attribute) else None
        return found or f"{owner.outline.path}:{owner.name}.self.{node.attr}"

    def _home(self, name: str) -> tuple[Frame, FunctionOutline] | None:
        """Return the scope that defines ``name``, with its frame, which is a caller's if there is one."""
        function = self.function.home_of(name)
        if function is None or function is self.function:
            return (self, function) if function is not None else None
        Frame.caller_asked += function.parent is not None
        frame = self.caller
        while frame is not None and frame.function is not function:
            frame = frame.caller
        return (frame or self.lookup.frame(function, self.instance_of)), function

    # -- values -------------------------------------------------------------------------------------------

    def values(self, node: ast.expr) -> list[PossibleValue]:
        """Return the expressions that ``node`` may hold, with names replaced by what was assigned to them."""
        place = place_of(node)
        known = self._values.get(place)
        if known is None:
            unknown = self._values[place] = [PossibleValue(None, self)]
            self._depend_on_caller.add(place)
            asked = Frame.caller_asked
            if isinstance(node, ast.Name):
                known = self._values_of_name(node)
            elif isinstance(node, ast.Attribute):
                known = self._values_of_attribute(node)
            elif isinstance(node, ast.IfExp):
                known = [*self.values(node.body), *self.values(node.orelse)]
            elif isinstance(node, ast.BoolOp):
                known = [value for part in node.values for value in self.values(part)]
            else:
                known = [PossibleValue(node, self)]
            known = known if len(known) <= MOST_VALUES else unknown
            self._values[place] = [] if len(known) == 1 and known[0].node is node else known
            if Frame.caller_asked == asked:
                self._depend_on_caller.remove(place)
        elif place in self._depend_on_caller:
            Frame.caller_asked += 1
        return known or [PossibleValue(node, self)]

    def makers(self, node: ast.expr) -> set[str | None]:
        """Return the full names of the functions whose results ``node`` may hold; None for anything else."""
        return {frame.qualified(call.func) if isinstance(call, ast.Call) else None for call, frame in self.values(node)}

    def _values_of_name(self, node: ast.Name) -> list[PossibleValue]:
        home = self._home(node.id)
        if home is None:
            return [PossibleValue(node, self)]
        frame, function = home
        found: list[PossibleValue] = []
        if node.id in function.params:
            found += frame._values_of_parameter(node.id)
        for binding in function.bindings.get(node.id, ()):
            found += [PossibleValue(None, frame)] if binding.value is None else frame.values(binding.value)
        return found

    def _values_of_parameter(self, name: str) -> list[PossibleValue]:
        Frame.caller_asked += 1
        if name in self.arguments and self.caller is not None:
            return self.caller.values(self.arguments[name])
        unknown, default = PossibleValue(None, self), self.function.defaults.get(name)
        if default is None:
            return [unknown]
        call = self.call
        is_open = call is not None and (
            any(isinstance(argument, ast.Starred) for argument in call.args)
            or any(word.arg is None for word in call.keywords)
        )
        if self.caller is not None and not is_open:  # called without it
            return self.values(default)
        return [unknown, *self.values(default)]

    def _values_of_attribute(self, node: ast.Attribute) -> list[PossibleValue]:
        owner = self.class_of(node.value)
        bindings = self.attribute_bindings(owner, node.attr) if owner else []
        if not bindings and isinstance(node.value, ast.Name):
            home = self._home(node.value.id)
            bindings = home[1].bindings.get(f"{node.value.id}.{node.attr}", []) if home else []
        if not bindings:
            return [PossibleValue(node, self)]
        found = []
        for binding in bindings:
            frame = self if binding.function is self.function else self.lookup.frame(binding.function, owner)
            found += [PossibleValue(None, frame)] if binding.value is None else frame.values(binding.value)
            # What the constructor got may also be what the only construction in the file gives it.
            is_given = isinstance(binding.value, ast.Name) and binding.value.id in binding.function.params
            made = self.lookup.construction(owner, binding.function) if owner is not None and is_given else None
            if made is not None and binding.value is not None:
                found += [value for value in made.values(binding.value) if value.node is not None]
        return found

    def attribute_bindings(self, owner: ClassOutline, attribute: str) -> list[Binding]:
        """Return the assignments to an attribute of a class, in its methods and those of its bases."""
        return [binding for cls in self.ancestry(owner) for binding in cls.attributes.get(attribute, ())]

    # -- classes and functions ----------------------------------------------------------------------------

    def class_of(self, node: ast.expr) -> ClassOutline | None:
        """Return the class of an object, if a checked file defines it."""
        if isinstance(node, ast.Name):
            for function in self.function.scopes:
                if function.owner is not None and function.self_name == node.id:
                    return self.instance_of if self.instance_of is not None else function.owner
        return self._class_made(node)

    @once_per_function
    def _class_made(self, node: ast.expr) -> ClassOutline | None:
        """Return the class whose constructor made an object; None if it may be torch's scaler, with a stand-in."""
        found = None
        for maker, frame in (
            find_constructors(node, self) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else ()
        ):
            if not isinstance(maker, ast.Call):
                continue
            if frame.qualified(maker.func) in GRAD_SCALERS:
                return None
            made = frame.definition(maker.func)
            found = found or (made if isinstance(made, ClassOutline) else None)
        return found or self._class_annotated(node)

    def _class_annotated(self, node: ast.expr) -> ClassOutline | None:
        """Return the class that an annotation gives: of a parameter, a local name, or what a function returns."""
        home = self.function.home_of(node.id) if isinstance(node, ast.Name) else None
        if home is None or home.parent is None or not isinstance(node, ast.Name):
            return None
        bindings = [binding.node for binding in home.bindings.get(node.id, ())]
        annotations = [home.annotations[node.id]] if node.id in home.annotations and not bindings else []
        annotations += [one.annotation for one in bindings if isinstance(one, ast.AnnAssign)]
        if len(annotations) == 1:
            named = self.lookup.frame(home).definition(annotations[0])
            return named if isinstance(named, ClassOutline) and not self._is_interface(named) else None
        made = bindings[0].value if len(bindings) == 1 and isinstance(bindings[0], ast.Assign) else None
        callee = self.callee(made) if isinstance(made, ast.Call) and home is self.function else None
        returned = callee[0].returns if callee is not None and callee[0].name != "__init__" else []
        if callee is None or len(returned) != 1 or not isinstance(returned[0], ast.Name):
            return None
        return self.lookup.frame(callee[0], callee[1])._class_annotated(returned[0])

    def _is_interface(self, owner: ClassOutline) -> bool:
        """Return whether a class only says which methods others have."""
        bases = [base for cls in self.ancestry(owner) for base in cls.node.bases]
        return any(last_name(base) in INTERFACES for base in bases)

    @once_per_function
    def class_of_settings(self, node: ast.expr) -> ClassOutline | None:
        """Return the class whose fields ``node.field`` may be: an object's, ``Config`` itself or ``config: Config``."""
        owner = self.class_of(node)
        if owner is not None or not isinstance(node, ast.Name):
            return owner
        named = self.definition(node)
        home = self.function.home_of(node.id)
        if named is None and home is not None and home.parent is not None and node.id in home.params:
            frame = self.lookup.frame(home)
            annotation = home.annotations.get(node.id)
            named = frame.definition(annotation) if annotation is not None else None
        return named if isinstance(named, ClassOutline) else None

    def ancestry(self, owner: ClassOutline) -> list[ClassOutline]:
        """Return a class and its bases, as far as checked files define them."""
        if owner.ancestry is None:
            found: dict[ClassOutline, None] = {}
            pending = [owner]
            for cls in pending:
                if cls not in found and len(found) < MOST_BASES:
                    found[cls] = None
                    home = self.lookup.frame(cls.outline.module)
                    bases = [home.definition(base) for base in cls.node.bases[:MOST_BASES]]
                    pending += [base for base in bases if isinstance(base, ClassOutline)]
            owner.ancestry = list(found)
        return owner.ancestry

    def method(self, owner: ClassOutline, name: str) -> FunctionOutline | None:
        return next((cls.methods[name] for cls in self.ancestry(owner) if name in cls.methods), None)

    def definition(self, node: ast.expr) -> FunctionOutline | ClassOutline | None:
        """Return the function or class that a name refers to, if a checked file defines it."""
        known, place = self.function.definitions, place_of(node)  # the same for all callers
        if place not in known:
            known[place] = self._find_definition(node)
        return known[place]

    def _find_definition(self, node: ast.expr) -> FunctionOutline | ClassOutline | None:
        if isinstance(node, ast.Name):
            imported = self.outline.imports.names.get(node.id)
            if imported in GRAD_SCALERS or imported in AUTOCASTS:
                return None  # a class of this name is its stand-in under `except ImportError`
            for scope in self.function.scopes:
                if node.id in scope.functions:
                    return scope.functions[node.id]
                if node.id in scope.params or node.id in scope.bindings:
                    return None
            if node.id in self.outline.classes:
                return self.outline.classes[node.id]
        qualified = self.outline.imports.qualified(node)
        return self.lookup.find(qualified, self.outline) if qualified else None

    @once_per_function
    def callee(self, call: ast.Call) -> Callee | None:
        """Return the function that a call runs, and the class of its ``self``; None if no checked file defines it."""
        func = call.func
        target = self.definition(func)
        if isinstance(target, FunctionOutline):
            return target, None
        if isinstance(target, ClassOutline):
            made = self.method(target, "__init__")
            return (made, target) if made else None
        if isinstance(func, ast.Attribute):
            if isinstance(func.value, ast.Call) and dotted_text(func.value.func) == "super" and self.instance_of:
                above = self.ancestry(self.function.owner)[1:] if self.function.owner else []
                found = next((cls.methods[func.attr] for cls in above if func.attr in cls.methods), None)
                return (found, self.instance_of) if found else None
            owner = self.class_of(func.value)
            found = self.method(owner, func.attr) if owner else None
            if found is not None and not (found.is_abstract and self._class_annotated(func.value) is owner):
                return found, owner
        held = self.values(func) if isinstance(func, ast.Name | ast.Attribute) else []
        if len(held) == 1 and held[0].node is func:
            return None
        # loss_scaler(loss, optimizer), if loss_scaler is a callable object
        cls = self._class_made(func)
        found = (self.method(cls, "__call__") or self.method(cls, "forward")) if cls else None
        if found is not None:
            return found, cls
        for value, frame in held:
            function = frame._function_held(value) if value is not func else None
            if function is not None:
                return function
        return None

    def _function_held(self, node: ast.expr | None, depth: int = 0) -> Callee | None:
        """Return the function that a value is: by another name, a bound method, compiled, or in a ``partial``."""
        if isinstance(node, ast.Call) and node.args and last_name(node.func) in HOLD_FUNCTIONS and depth < MOST_HOLDERS:
            return self._function_held(node.args[0], depth + 1)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        target = self.definition(node)
        if isinstance(target, FunctionOutline):
            return target, None
        owner = self.class_of(node.value) if isinstance(node, ast.Attribute) else None
        found = self.method(owner, node.attr) if owner is not None and isinstance(node, ast.Attribute) else None
        return (found, owner) if found is not None else None

    def enter(self, function: FunctionOutline, call: ast.Call, instance_of: ClassOutline | None) -> Frame:
        """Return the frame of ``function`` as called here."""
        bound: dict[str, ast.expr] = {}
        if not isinstance(function.node, ast.Module):
            arguments = function.node.args
            names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
            partial = self._partial(call.func)
            given_first = partial.args[1:] if partial is not None else []
            positional = [*given_first, *call.args]
            for name, given in zip(names if function.self_name is None else names[1:], positional, strict=False):
                if isinstance(given, ast.Starred):
                    break  # the following arguments go to unknown parameters
                bound[name] = given
            known = set(function.params)
            words = [*(partial.keywords if partial is not None else ()), *call.keywords]
            bound.update({word.arg: word.value for word in words if word.arg in known and word.arg})
        return Frame(function, self.lookup, self, bound, instance_of, call)

    def _partial(self, func: ast.expr) -> ast.Call | None:
        """Return the call of ``partial`` that made a function here, whose arguments come before those of a call."""
        values = self.values(func) if isinstance(func, ast.Name | ast.Attribute) else []
        made, frame = values[0] if len(values) == 1 else (None, self)
        if not isinstance(made, ast.Call) or not made.args or last_name(made.func) not in PARTIALS:
            return None
        # Its arguments must mean the same here: they do in the same function, and at the top of the file.
        return made if frame is self or frame.function.parent is None else None

    # -- roles --------------------------------------------------------------------------------------------

    @once_per_node  # a comprehension's variable is known by its place
    def role(self, node: ast.expr) -> str | None:
        """Return scaler, optimizer, scheduler or None: by the object's constructor, else by its name."""
        keys = []
        while isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            keys += [] if key in TRANSPARENT else [key]  # entry["scheduler"]["module"]
            node = node.value
        if keys and isinstance(keys[0], str) and not SETTINGS.search(dotted_text(node) or ""):
            indexed = role_of_name(keys[0])  # state["optimizer"], but not config["train"]["optimizer"]
            if indexed is not None:
                return indexed
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        made = [frame.role_of_call(value) for value, frame in self.values(node) if isinstance(value, ast.Call)]
        roles = [role for role in made if role is not None]
        if roles:  # a scaler, or else a class of the script that stands in for one; "" means certainly none of them
            return SCALER if SCALER in roles else roles[0] or None
        named = role_of_name(dotted_text(node) or "")
        if named is not None or not isinstance(node, ast.Name):
            return named
        # In `for s in self.schedulers: s.step()` the list has the name.
        iterated = self.iterated(node)
        if isinstance(iterated, ast.Call):
            return role_of_name(last_name(iterated.func))
        return self.role(iterated) if iterated is not None else None

    def iterated(self, node: ast.Name) -> ast.expr | None:
        """Return the list, or the member of a ``zip``, that the variable of a loop or a comprehension runs over."""
        home = self.function.home_of(node.id)
        if home is not None:
            loops = [one.node for one in home.bindings.get(node.id, []) if home is self.function]
            if not all(isinstance(loop, ast.For) for loop in loops):
                return None
            around = [one for one in loops if one.lineno <= node.lineno <= (one.end_lineno or 0)]  # type: ignore[attr-defined]
            loop = around[-1] if around else loops[0] if len(loops) == 1 else None
            return _member(loop.target, loop.iter, node.id) if isinstance(loop, ast.For) else None
        outer: ast.AST | None = self.outline.script.parents.get(node)
        while isinstance(outer, ast.expr | ast.comprehension | ast.keyword):
            for part in getattr(outer, "generators", ()):
                found = _member(part.target, part.iter, node.id)
                if found is not None:
                    return found
            outer = self.outline.script.parents.get(outer)
        return None

    @once_per_function
    def role_of_call(self, call: ast.Call) -> str | None:
        """Return the role of what a call makes; "" if certainly none, None if unknown."""
        # The dotted path counts only for imports, not for attributes such as `optimizer.zero_grad`.
        name = self.qualified(call.func) or last_name(call.func)
        last = name.rpartition(".")[2]
        if NOT_A_GRAD_SCALER.search(name) or last in ARGUMENT_PARSERS:
            return ""
        own = self.definition(call.func)
        if isinstance(own, ClassOutline) and "scale" in own.methods:
            bases = [base for cls in self.ancestry(own) for base in cls.node.bases]
            derives = any((own.outline.imports.qualified(base) or "") in GRAD_SCALERS for base in bases)
            return SCALER if derives else ""
        role = role_of_constructor(name)
        if role == SCALER:
            for word in call.keywords:
                if word.arg == "enabled" and isinstance(word.value, ast.Constant) and word.value.value is False:
                    return ""  # a disabled scaler does nothing
        return SCALER if role is None and last.endswith("Scaler") else role


def _member(target: ast.expr, iterated: ast.expr, name: str) -> ast.expr | None:
    """Return what ``name`` runs over in ``for target in iterated``, through ``zip``, ``enumerate`` and ``items``."""
    if isinstance(iterated, ast.Call):
        called, parts = last_name(iterated.func), target.elts if isinstance(target, ast.Tuple) else []
        if called == "zip" and len(parts) == len(iterated.args):
            found = [_member(part, given, name) for part, given in zip(parts, iterated.args, strict=True)]
            return next((one for one in found if one is not None), None)
        if called in ("enumerate", "items") and len(parts) == 2:
            target = parts[1]
        if called in ("enumerate", "reversed", "list", "tuple") and iterated.args:
            return _member(target, iterated.args[0], name)
        if called in ("items", "values") and isinstance(iterated.func, ast.Attribute):
            iterated = iterated.func.value
    if not isinstance(target, ast.Name) or target.id != name:
        return None
    return iterated.elts[0] if isinstance(iterated, ast.List | ast.Tuple) and iterated.elts else iterated
