"""A function as it is called from somewhere: what its names stand for there.

Following ``train(model, opt, scaler)`` into ``def train(net, optimizer, grad_scaler)`` needs the parameters
tied to the caller's arguments. A ``Frame`` does that tying. Its ``key`` names an object so that two spellings
of the same object, in two functions, get the same key; its ``values`` are the expressions a name may hold.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.source.instances import makers
from ampwise.source.names import dotted_text
from ampwise.source.outline import Binding, Class, Function, Outline
from ampwise.source.vocabulary import GRAD_SCALERS, NOT_A_GRAD_SCALER, SCALER, role_of_constructor, role_of_name

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Protocol

    class Lookup(Protocol):
        """What a frame asks of the project: functions and classes that other given files define."""

        def find(self, qualified: str, importer: Outline) -> Function | Class | None: ...

        def frame(self, function: Function, instance_of: Class | None = None) -> Frame: ...

        def is_worth_following(self, function: Function, asker: Outline) -> bool: ...

        def computes(self, function: Function) -> bool: ...


__all__ = ["Frame", "Value"]

MOST_VALUES = 40  # a name that may be more than this may be anything
MOST_BASES = 64  # classes above a class
# Attributes that are the same object in other clothes.
TRANSPARENT = frozenset(("module", "_orig_mod", "data"))


class Value:
    """An expression that a name may hold, and the frame to read it in; None when it cannot be known."""

    __slots__ = ("frame", "node")

    def __init__(self, node: ast.expr | None, frame: Frame) -> None:
        self.node = node
        self.frame = frame


class Frame:
    """One function in one calling context."""

    def __init__(
        self,
        function: Function,
        lookup: Lookup,
        caller: Frame | None = None,
        arguments: dict[str, ast.expr] | None = None,
        instance_of: Class | None = None,
        call: ast.Call | None = None,
    ) -> None:
        self.function = function
        self.call = call
        self.lookup = lookup
        self.caller = caller
        self.arguments = arguments or {}
        self.instance_of: Class | None = (
            instance_of or function.owner or (None if caller is None else caller.instance_of)
        )
        # Answers by node; a question under way answers "unknown", which ends cycles.
        self._roles: dict[ast.expr, str | None] = {}
        self._keys: dict[ast.expr, str | None] = {}
        self._values: dict[ast.expr, list[Value]] = {}
        self._classes: dict[ast.expr, Class | None] = {}
        self._homes: dict[str, tuple[Frame, Function] | None] = {}
        self._callees: dict[ast.Call, tuple[Function, Class | None] | None] = {}

    @property
    def outline(self) -> Outline:
        return self.function.outline

    @functools.cached_property
    def open_ended(self) -> bool:
        """Called with ``*args`` or ``**kwargs``, so that any parameter may be given."""
        if self.call is None:
            return False
        starred = any(isinstance(argument, ast.Starred) for argument in self.call.args)
        return starred or any(word.arg is None for word in self.call.keywords)

    def depth(self) -> int:
        return 0 if self.caller is None else 1 + self.caller.depth()

    def callers(self) -> Iterator[Frame]:
        """This frame and those it was called from, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.caller

    def qualified(self, node: ast.expr) -> str | None:
        """The full name of what ``node`` refers to, through imports and ``autocast = torch.autocast``."""
        found = self.outline.imports.qualified(node)
        if found is not None and not self._shadowed(node):
            return found
        if isinstance(node, ast.Name | ast.Attribute):
            for value in self.values(node):
                inner = value.node
                if inner is not None and inner is not node and isinstance(inner, ast.Name | ast.Attribute):
                    target = value.frame.outline.imports.qualified(inner)
                    if target is not None and not value.frame._shadowed(inner):
                        return target
        return None

    def _shadowed(self, node: ast.expr) -> bool:
        """Whether a parameter or a local name hides the import; at module level both are mostly one thing."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            return False
        inner = (scope for scope in self.function.chain() if scope.parent is not None)
        return any(scope.holds(node.id) for scope in inner)

    # -- identity -----------------------------------------------------------------------------------------

    def key(self, node: ast.expr) -> str | None:
        """A name for the object ``node`` refers to, the same wherever it is called something else."""
        if node not in self._keys:
            self._keys[node] = None
            self._keys[node] = self._key(node)
        return self._keys[node]

    def _key(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._key_of_name(node)
        if isinstance(node, ast.Attribute):
            if node.attr in TRANSPARENT:
                return self.key(node.value)
            return self._key_of_attribute(node)
        if isinstance(node, ast.Subscript):
            base = self.key(node.value)
            return base and f"{base}[{ast.unparse(node.slice)}]"
        return None

    def _key_of_name(self, node: ast.Name) -> str | None:
        name = node.id
        home = self._home(name)
        if home is None:
            return self.outline.imports.names.get(name) or f"?{self.outline.path}:{name}"
        frame, function = home
        if name in frame.arguments and frame.caller is not None and name not in function.bindings:
            found = frame.caller.key(frame.arguments[name])
            if found is not None:
                return found
        alias = _only_alias(function.bindings.get(name, ()))
        if alias is not None and name not in function.params:
            found = frame.key(alias)
            if found is not None:
                return found
        return f"{function.outline.path}:{id(function):x}:{name}"

    def _key_of_attribute(self, node: ast.Attribute) -> str | None:
        owner = self.class_of(node.value)
        if owner is None:
            base = self.key(node.value)
            return base and f"{base}.{node.attr}"
        alias = _only_alias(self._attribute_bindings(owner, node.attr))
        if alias is not None and isinstance(alias, ast.Attribute):
            found = self.key(alias)
            if found is not None:
                return found
        return f"{owner.outline.path}:{owner.name}.self.{node.attr}"

    def _home(self, name: str) -> tuple[Frame, Function] | None:
        """The scope that holds ``name``, with the frame it runs in when that is among the callers."""
        if name not in self._homes:
            self._homes[name] = self._find_home(name)
        return self._homes[name]

    def _find_home(self, name: str) -> tuple[Frame, Function] | None:
        for function in self.function.chain():
            if function.holds(name):
                frame = next((frame for frame in self.callers() if frame.function is function), None)
                return (frame or self.lookup.frame(function, self.instance_of)), function
        return None

    # -- values -------------------------------------------------------------------------------------------

    def values(self, node: ast.expr) -> list[Value]:
        """What ``node`` may be once names are followed to what was assigned to them."""
        if node not in self._values:
            self._values[node] = [Value(None, self)]
            found = self._find_values(node)
            self._values[node] = found if len(found) <= MOST_VALUES else [Value(None, self)]
        return self._values[node]

    def _find_values(self, node: ast.expr) -> list[Value]:
        if isinstance(node, ast.IfExp):
            return [*self.values(node.body), *self.values(node.orelse)]
        if isinstance(node, ast.BoolOp):
            return [value for part in node.values for value in self.values(part)]
        if isinstance(node, ast.Name):
            return self._values_of_name(node)
        if isinstance(node, ast.Attribute):
            return self._values_of_attribute(node)
        return [Value(node, self)]

    def _values_of_name(self, node: ast.Name) -> list[Value]:
        home = self._home(node.id)
        if home is None:
            return [Value(node, self)]
        frame, function = home
        found: list[Value] = []
        if node.id in function.params:
            found += frame._values_of_parameter(node.id)
        for binding in function.bindings.get(node.id, ()):
            found += _values_of_binding(binding, frame)
        return found

    def _values_of_parameter(self, name: str) -> list[Value]:
        if name in self.arguments and self.caller is not None:
            return self.caller.values(self.arguments[name])
        default = self.function.defaults.get(name)
        if self.caller is not None and default is not None and not self.open_ended:  # called without it
            return self.values(default)
        return [Value(None, self)] if default is None else [Value(None, self), *self.values(default)]

    def _values_of_attribute(self, node: ast.Attribute) -> list[Value]:
        owner = self.class_of(node.value)
        bindings = self._attribute_bindings(owner, node.attr) if owner else []
        if not bindings and isinstance(node.value, ast.Name):
            home = self._home(node.value.id)
            bindings = home[1].bindings.get(f"{node.value.id}.{node.attr}", []) if home else []
        if not bindings:
            return [Value(node, self)]
        found = []
        for binding in bindings:
            frame = self if binding.function is self.function else self.lookup.frame(binding.function, owner)
            found += _values_of_binding(binding, frame)
        return found

    def _attribute_bindings(self, owner: Class, attribute: str) -> list[Binding]:
        return [binding for cls in self.ancestry(owner) for binding in cls.attributes.get(attribute, ())]

    # -- classes and functions ----------------------------------------------------------------------------

    def class_of(self, node: ast.expr) -> Class | None:
        """The class of an object, when a given file defines it."""
        if isinstance(node, ast.Name):
            for function in self.function.chain():
                if function.owner is not None and function.self_name == node.id:
                    return self.instance_of if self.instance_of is not None else function.owner
        for maker, frame in makers(node, self) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else ():
            if isinstance(maker, ast.Call):
                made = frame.definition(maker.func)
                if isinstance(made, Class):
                    return made
        return None

    def ancestry(self, owner: Class) -> list[Class]:
        """A class and its bases, as far as the given files define them."""
        if owner.ancestry is None:
            found: dict[Class, None] = {}
            pending = [owner]
            for cls in pending:
                if cls not in found and len(found) < MOST_BASES:
                    found[cls] = None
                    home = self.lookup.frame(cls.outline.module)
                    bases = (home.definition(base) for base in cls.node.bases[:MOST_BASES])
                    pending += [base for base in bases if isinstance(base, Class)]
            owner.ancestry = list(found)
        return owner.ancestry

    def method(self, owner: Class, name: str) -> Function | None:
        return next((cls.methods[name] for cls in self.ancestry(owner) if name in cls.methods), None)

    def definition(self, node: ast.expr) -> Function | Class | None:
        """The function or class a name refers to, when a given file defines it."""
        known = self.function.definitions  # the same whoever calls
        if node not in known:
            known[node] = self._find_definition(node)
        return known[node]

    def _find_definition(self, node: ast.expr) -> Function | Class | None:
        if isinstance(node, ast.Name):
            for function in self.function.chain():
                if node.id in function.functions:
                    return function.functions[node.id]
                if node.id in function.params or node.id in function.bindings:
                    return None
            if node.id in self.outline.classes:
                return self.outline.classes[node.id]
        qualified = self.outline.imports.qualified(node)
        return self.lookup.find(qualified, self.outline) if qualified else None

    def callee(self, call: ast.Call) -> tuple[Function, Class | None] | None:
        """The function a call runs, and the class of its ``self``; None when no given file defines it."""
        if call not in self._callees:
            self._callees[call] = None
            self._callees[call] = self._find_callee(call)
        return self._callees[call]

    def _find_callee(self, call: ast.Call) -> tuple[Function, Class | None] | None:
        target = self.definition(call.func)
        if isinstance(target, Function):
            return target, None
        if isinstance(target, Class):
            made = self.method(target, "__init__")
            return (made, target) if made else None
        if isinstance(call.func, ast.Attribute):
            return self._bound_method(call.func)
        return self._called_instance(call.func)

    def _bound_method(self, func: ast.Attribute) -> tuple[Function, Class | None] | None:
        if isinstance(func.value, ast.Call) and dotted_text(func.value.func) == "super" and self.instance_of:
            own = self.function.owner
            above = [cls for cls in self.ancestry(own)[1:] if func.attr in cls.methods] if own else []
            return (above[0].methods[func.attr], self.instance_of) if above else None
        owner = self.class_of(func.value)
        found = self.method(owner, func.attr) if owner else None
        if found is not None:
            return found, owner
        return self._called_instance(func)

    def _called_instance(self, func: ast.expr) -> tuple[Function, Class | None] | None:
        """``loss_scaler(loss, optimizer)`` where loss_scaler is an object of a class that can be called."""
        for node, frame in makers(func, self) if isinstance(func, ast.Name | ast.Attribute | ast.Call) else ():
            if isinstance(node, ast.Call):
                made = frame.definition(node.func)
                if isinstance(made, Class):
                    found = self.method(made, "__call__") or self.method(made, "forward")
                    return (found, made) if found else None
        return None

    def enter(self, function: Function, call: ast.Call, instance_of: Class | None) -> Frame:
        """The frame of ``function`` as called here."""
        return Frame(function, self.lookup, self, _bound_arguments(function, call), instance_of, call)

    # -- roles --------------------------------------------------------------------------------------------

    def role(self, node: ast.expr) -> str | None:
        """Scaler, optimizer, scheduler or None: by what made the object, else by what it is called."""
        if node not in self._roles:
            self._roles[node] = None
            self._roles[node] = self._role(node)
        return self._roles[node]

    def _role(self, node: ast.expr) -> str | None:
        while isinstance(node, ast.Subscript):
            node = node.value
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        made = [value for value in self.values(node) if isinstance(value.node, ast.Call)]
        name = dotted_text(node) or ""
        for value in made:
            assert isinstance(value.node, ast.Call)
            role = value.frame.role_of_call(value.node)
            if role is not None:
                return role or None  # "" says: certainly none of them
        return role_of_name(name)

    def role_of_call(self, call: ast.Call) -> str | None:
        """What a call makes; "" when certainly nothing of ours, None when it cannot be told."""
        last = (dotted_text(call.func) or "").rpartition(".")[2]
        # The path of an object (`optimizer.zero_grad`) says nothing, that of an import does.
        name = self.qualified(call.func) or last
        last = name.rpartition(".")[2]
        if NOT_A_GRAD_SCALER.search(name) or last in ("parse_args", "parse_known_args", "ArgumentParser"):
            return ""
        own = self.definition(call.func)
        if isinstance(own, Class) and "scale" in own.methods:
            return SCALER if self._derives_from_scaler(own) else ""
        role = role_of_constructor(name)
        if role == SCALER and any(word.arg == "enabled" and _is_false(word.value) for word in call.keywords):
            return ""  # does nothing whatever it is asked
        return SCALER if role is None and last.endswith("Scaler") else role

    def _derives_from_scaler(self, owner: Class) -> bool:
        bases = (base for cls in self.ancestry(owner) for base in cls.node.bases)
        return any((owner.outline.imports.qualified(base) or "") in GRAD_SCALERS for base in bases)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _values_of_binding(binding: Binding, frame: Frame) -> list[Value]:
    return [Value(None, frame)] if binding.value is None else frame.values(binding.value)


def _only_alias(bindings: list[Binding] | tuple[()]) -> ast.expr | None:
    """The name another name stands for: bound once, to a plain name or attribute."""
    if len(bindings) != 1 or not isinstance(bindings[0].value, ast.Name | ast.Attribute):
        return None
    return bindings[0].value


def _bound_arguments(function: Function, call: ast.Call) -> dict[str, ast.expr]:
    node = function.node
    if isinstance(node, ast.Module):
        return {}
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    if function.self_name is not None:
        names = names[1:]
    bound: dict[str, ast.expr] = {}
    for name, argument in zip(names, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break  # what follows goes to parameters we cannot count
        bound[name] = argument
    known = set(function.params)
    bound.update({word.arg: word.value for word in call.keywords if word.arg in known and word.arg})
    return bound
