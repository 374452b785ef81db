"""A function in one calling context: what its names refer to there.

Following ``train(model, opt, scaler)`` into ``def train(net, optimizer, grad_scaler)`` needs the parameters
bound to the caller's arguments. A ``Frame`` holds these bindings. Its ``key`` identifies an object, so that two
names of the same object, in two functions, get the same key; its ``values`` are the expressions a name may hold.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampwise.check.source.constructors import find_constructors
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding, ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.torch_names import GRAD_SCALERS, NOT_A_GRAD_SCALER, SCALER, role_of_constructor, role_of_name

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Protocol

    class ProjectLookup(Protocol):
        """Interface of the project that frames use: functions and classes that other checked files define."""

        def find(self, qualified: str, importer: FileOutline) -> FunctionOutline | ClassOutline | None: ...

        def frame(self, function: FunctionOutline, instance_of: ClassOutline | None = None) -> Frame: ...

        def is_worth_following(self, function: FunctionOutline, caller: FileOutline) -> bool: ...

        def may_lose_precision(self, function: FunctionOutline) -> bool: ...


__all__ = ["Frame", "PossibleValue"]

MOST_VALUES = 40  # a name with more possible values is treated as unknown
MOST_BASES = 64  # base classes of a class
# Attributes that refer to the same object.
TRANSPARENT = frozenset(("module", "_orig_mod", "data"))


class PossibleValue:
    """Expression that a name may hold, and the frame to evaluate it in; the node is None if it is unknown."""

    __slots__ = ("frame", "node")

    def __init__(self, node: ast.expr | None, frame: Frame) -> None:
        self.node = node
        self.frame = frame


class Frame:
    """One function in one calling context."""

    def __init__(
        self,
        function: FunctionOutline,
        lookup: ProjectLookup,
        caller: Frame | None = None,
        arguments: dict[str, ast.expr] | None = None,
        instance_of: ClassOutline | None = None,
        call: ast.Call | None = None,
    ) -> None:
        self.function = function
        self.call = call
        self.lookup = lookup
        self.caller = caller
        self.arguments = arguments or {}
        self.instance_of: ClassOutline | None = (
            instance_of or function.owner or (None if caller is None else caller.instance_of)
        )
        # Results by node; while one is computed it is "unknown", which ends cycles.
        self._roles: dict[ast.expr, str | None] = {}
        self._keys: dict[ast.expr, str | None] = {}
        self._values: dict[ast.expr, list[PossibleValue]] = {}
        self._classes: dict[ast.expr, ClassOutline | None] = {}
        self._homes: dict[str, tuple[Frame, FunctionOutline] | None] = {}
        self._callees: dict[ast.Call, tuple[FunctionOutline, ClassOutline | None] | None] = {}

    @property
    def outline(self) -> FileOutline:
        return self.function.outline

    @functools.cached_property
    def open_ended(self) -> bool:
        """Whether the call has ``*args`` or ``**kwargs``, so that any parameter may be given."""
        if self.call is None:
            return False
        starred = any(isinstance(argument, ast.Starred) for argument in self.call.args)
        return starred or any(word.arg is None for word in self.call.keywords)

    def depth(self) -> int:
        return 0 if self.caller is None else 1 + self.caller.depth()

    def callers(self) -> Iterator[Frame]:
        """Yield this frame and its callers, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.caller

    def qualified(self, node: ast.expr) -> str | None:
        """Return the full name of what ``node`` refers to, through imports and ``autocast = torch.autocast``."""
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
        """Whether a parameter or local name hides an import; module-level names are ignored."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            return False
        inner = (scope for scope in self.function.chain() if scope.parent is not None)
        return any(scope.holds(node.id) for scope in inner)

    # -- identity -----------------------------------------------------------------------------------------

    def key(self, node: ast.expr) -> str | None:
        """Return a key for the object that ``node`` refers to, the same under all of its names."""
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

    def _home(self, name: str) -> tuple[Frame, FunctionOutline] | None:
        """Return the scope that defines ``name``, with its frame, which is a caller's if there is one."""
        if name not in self._homes:
            self._homes[name] = self._find_home(name)
        return self._homes[name]

    def _find_home(self, name: str) -> tuple[Frame, FunctionOutline] | None:
        for function in self.function.chain():
            if function.holds(name):
                frame = next((frame for frame in self.callers() if frame.function is function), None)
                return (frame or self.lookup.frame(function, self.instance_of)), function
        return None

    # -- values -------------------------------------------------------------------------------------------

    def values(self, node: ast.expr) -> list[PossibleValue]:
        """Return the expressions that ``node`` may hold, with names replaced by what was assigned to them."""
        if node not in self._values:
            self._values[node] = [PossibleValue(None, self)]
            found = self._find_values(node)
            self._values[node] = found if len(found) <= MOST_VALUES else [PossibleValue(None, self)]
        return self._values[node]

    def makers(self, node: ast.expr) -> set[str | None]:
        """Return the full names of the functions whose results ``node`` may hold; None for anything else."""
        made = ((value.node, value.frame) for value in self.values(node))
        return {frame.qualified(call.func) if isinstance(call, ast.Call) else None for call, frame in made}

    def _find_values(self, node: ast.expr) -> list[PossibleValue]:
        if isinstance(node, ast.IfExp):
            return [*self.values(node.body), *self.values(node.orelse)]
        if isinstance(node, ast.BoolOp):
            return [value for part in node.values for value in self.values(part)]
        if isinstance(node, ast.Name):
            return self._values_of_name(node)
        if isinstance(node, ast.Attribute):
            return self._values_of_attribute(node)
        return [PossibleValue(node, self)]

    def _values_of_name(self, node: ast.Name) -> list[PossibleValue]:
        home = self._home(node.id)
        if home is None:
            return [PossibleValue(node, self)]
        frame, function = home
        found: list[PossibleValue] = []
        if node.id in function.params:
            found += frame._values_of_parameter(node.id)
        for binding in function.bindings.get(node.id, ()):
            found += _values_of_binding(binding, frame)
        return found

    def _values_of_parameter(self, name: str) -> list[PossibleValue]:
        if name in self.arguments and self.caller is not None:
            return self.caller.values(self.arguments[name])
        default = self.function.defaults.get(name)
        if self.caller is not None and default is not None and not self.open_ended:  # called without it
            return self.values(default)
        return [PossibleValue(None, self)] if default is None else [PossibleValue(None, self), *self.values(default)]

    def _values_of_attribute(self, node: ast.Attribute) -> list[PossibleValue]:
        owner = self.class_of(node.value)
        bindings = self._attribute_bindings(owner, node.attr) if owner else []
        if not bindings and isinstance(node.value, ast.Name):
            home = self._home(node.value.id)
            bindings = home[1].bindings.get(f"{node.value.id}.{node.attr}", []) if home else []
        if not bindings:
            return [PossibleValue(node, self)]
        found = []
        for binding in bindings:
            frame = self if binding.function is self.function else self.lookup.frame(binding.function, owner)
            found += _values_of_binding(binding, frame)
        return found

    def _attribute_bindings(self, owner: ClassOutline, attribute: str) -> list[Binding]:
        return [binding for cls in self.ancestry(owner) for binding in cls.attributes.get(attribute, ())]

    # -- classes and functions ----------------------------------------------------------------------------

    def class_of(self, node: ast.expr) -> ClassOutline | None:
        """Return the class of an object, if a checked file defines it."""
        if isinstance(node, ast.Name):
            for function in self.function.chain():
                if function.owner is not None and function.self_name == node.id:
                    return self.instance_of if self.instance_of is not None else function.owner
        for maker, frame in (
            find_constructors(node, self) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else ()
        ):
            if isinstance(maker, ast.Call):
                made = frame.definition(maker.func)
                if isinstance(made, ClassOutline):
                    return made
        return None

    def ancestry(self, owner: ClassOutline) -> list[ClassOutline]:
        """Return a class and its bases, as far as checked files define them."""
        if owner.ancestry is None:
            found: dict[ClassOutline, None] = {}
            pending = [owner]
            for cls in pending:
                if cls not in found and len(found) < MOST_BASES:
                    found[cls] = None
                    home = self.lookup.frame(cls.outline.module)
                    bases = (home.definition(base) for base in cls.node.bases[:MOST_BASES])
                    pending += [base for base in bases if isinstance(base, ClassOutline)]
            owner.ancestry = list(found)
        return owner.ancestry

    def method(self, owner: ClassOutline, name: str) -> FunctionOutline | None:
        return next((cls.methods[name] for cls in self.ancestry(owner) if name in cls.methods), None)

    def definition(self, node: ast.expr) -> FunctionOutline | ClassOutline | None:
        """Return the function or class that a name refers to, if a checked file defines it."""
        known = self.function.definitions  # the same for all callers
        if node not in known:
            known[node] = self._find_definition(node)
        return known[node]

    def _find_definition(self, node: ast.expr) -> FunctionOutline | ClassOutline | None:
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

    def callee(self, call: ast.Call) -> tuple[FunctionOutline, ClassOutline | None] | None:
        """Return the function that a call runs, and the class of its ``self``; None if no checked file defines it."""
        if call not in self._callees:
            self._callees[call] = None
            self._callees[call] = self._find_callee(call)
        return self._callees[call]

    def _find_callee(self, call: ast.Call) -> tuple[FunctionOutline, ClassOutline | None] | None:
        target = self.definition(call.func)
        if isinstance(target, FunctionOutline):
            return target, None
        if isinstance(target, ClassOutline):
            made = self.method(target, "__init__")
            return (made, target) if made else None
        if isinstance(call.func, ast.Attribute):
            return self._bound_method(call.func)
        return self._called_instance(call.func)

    def _bound_method(self, func: ast.Attribute) -> tuple[FunctionOutline, ClassOutline | None] | None:
        if isinstance(func.value, ast.Call) and dotted_text(func.value.func) == "super" and self.instance_of:
            own = self.function.owner
            above = [cls for cls in self.ancestry(own)[1:] if func.attr in cls.methods] if own else []
            return (above[0].methods[func.attr], self.instance_of) if above else None
        owner = self.class_of(func.value)
        found = self.method(owner, func.attr) if owner else None
        if found is not None:
            return found, owner
        return self._called_instance(func)

    def _called_instance(self, func: ast.expr) -> tuple[FunctionOutline, ClassOutline | None] | None:
        """Return the method behind ``loss_scaler(loss, optimizer)`` if loss_scaler is a callable object."""
        for node, frame in (
            find_constructors(func, self) if isinstance(func, ast.Name | ast.Attribute | ast.Call) else ()
        ):
            if isinstance(node, ast.Call):
                made = frame.definition(node.func)
                if isinstance(made, ClassOutline):
                    found = self.method(made, "__call__") or self.method(made, "forward")
                    return (found, made) if found else None
        return None

    def enter(self, function: FunctionOutline, call: ast.Call, instance_of: ClassOutline | None) -> Frame:
        """Return the frame of ``function`` as called here."""
        return Frame(function, self.lookup, self, _bound_arguments(function, call), instance_of, call)

    # -- roles --------------------------------------------------------------------------------------------

    def role(self, node: ast.expr) -> str | None:
        """Return scaler, optimizer, scheduler or None: by the object's constructor, else by its name."""
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
                return role or None  # "" means certainly none of them
        return role_of_name(name)

    def role_of_call(self, call: ast.Call) -> str | None:
        """Return the role of what a call makes; "" if certainly none, None if unknown."""
        last = (dotted_text(call.func) or "").rpartition(".")[2]
        # The dotted path counts only for imports, not for attributes such as `optimizer.zero_grad`.
        name = self.qualified(call.func) or last
        last = name.rpartition(".")[2]
        if NOT_A_GRAD_SCALER.search(name) or last in ("parse_args", "parse_known_args", "ArgumentParser"):
            return ""
        own = self.definition(call.func)
        if isinstance(own, ClassOutline) and "scale" in own.methods:
            return SCALER if self._derives_from_scaler(own) else ""
        role = role_of_constructor(name)
        if role == SCALER and any(word.arg == "enabled" and _is_false(word.value) for word in call.keywords):
            return ""  # a disabled scaler does nothing
        return SCALER if role is None and last.endswith("Scaler") else role

    def _derives_from_scaler(self, owner: ClassOutline) -> bool:
        bases = (base for cls in self.ancestry(owner) for base in cls.node.bases)
        return any((owner.outline.imports.qualified(base) or "") in GRAD_SCALERS for base in bases)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _values_of_binding(binding: Binding, frame: Frame) -> list[PossibleValue]:
    return [PossibleValue(None, frame)] if binding.value is None else frame.values(binding.value)


def _only_alias(bindings: list[Binding] | tuple[()]) -> ast.expr | None:
    """Return the name that another name is an alias of: bound once, to a plain name or attribute."""
    if len(bindings) != 1 or not isinstance(bindings[0].value, ast.Name | ast.Attribute):
        return None
    return bindings[0].value


def _bound_arguments(function: FunctionOutline, call: ast.Call) -> dict[str, ast.expr]:
    node = function.node
    if isinstance(node, ast.Module):
        return {}
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    if function.self_name is not None:
        names = names[1:]
    bound: dict[str, ast.expr] = {}
    for name, argument in zip(names, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break  # the following arguments go to unknown parameters
        bound[name] = argument
    known = set(function.params)
    bound.update({word.arg: word.value for word in call.keywords if word.arg in known and word.arg})
    return bound
