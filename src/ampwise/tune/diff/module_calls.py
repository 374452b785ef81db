"""Track module calls in a forward pass: numbered and nested, with the tensors each receives and returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.trace.call_arguments import named_tensors
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.step_difference import FUNCTION

__all__ = ["GIVEN", "RETURNED", "ModuleCall", "ModuleCalls", "TensorPlace", "is_backward"]

GIVEN, RETURNED = "given", "returned"
WRAPPED = "result"  # name of a module's result while its tensors are listed


class TensorPlace(NamedTuple):
    """Where a tensor appears; the same on both sides."""

    name: str  # of the module; empty for the function itself
    number: int  # which call of this module
    role: str
    path: str  # in the arguments or in the result: "[0]"; "" for a single tensor


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module."""

    index: int  # among all calls; 0 is the function itself
    name: str
    kind: str
    number: int
    parent: ModuleCall | None
    depth: int
    module: Module | None
    ops: int = 0  # rounding operations of its own code, so far
    has_modules: bool = False  # whether it called modules
    takes_tensors: bool = False
    keys: Counter[str] = field(default_factory=Counter)  # counts of its operations, by name

    def place(self, role: str, path: str) -> TensorPlace:
        return TensorPlace(self.name, self.number, role, path)


class ModuleCalls:
    """Follows a forward pass; subclasses see its tensors. Recomputation during the backward pass is ignored."""

    def __init__(self, names: ModuleNames) -> None:
        self.names = names
        self.calls: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._handles = ExitStack()
        self.top = self._begin(FUNCTION, FUNCTION, None, None)
        self._stack = [self.top]

    # Hooks for subclasses

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        """A module receives or returns a tensor."""

    def computed_again(self, module: Module, output: Any) -> None:
        """A module has returned while being recomputed during the backward pass."""

    def before_write(self, tensor: Tensor) -> None:
        """An operation is about to write into this tensor."""

    def begins(self, func: Any, args: Any) -> Any:
        """An operation is about to run; the return value is passed to ``ends``."""
        return None

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        """An operation has run."""

    # Tracking

    @property
    def here(self) -> ModuleCall:
        """The innermost running call."""
        return self._stack[-1]

    def count_operation(self) -> None:
        self._stack[-1].ops += 1

    def finished(self, result: Any) -> None:
        """Record what the function itself returned."""
        self._visit(self.top, RETURNED, _parts_of(result))

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._handles as handles:
            for model in self.names.roots:
                self._hook(model)
            if not self.names.parameters():  # else the trained model is known
                handles.callback(register_module_forward_pre_hook(self._before_any_module).remove)
            yield

    def _hook(self, model: Module) -> None:
        for module in self.names.watched(model):
            if isinstance(module, torch.jit.ScriptModule):  # it does not support such hooks
                continue
            before = module.register_forward_pre_hook(self._on_enter, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(self._on_leave, with_kwargs=True, always_call=True)
            self._handles.callback(before.remove)
            self._handles.callback(after.remove)

    def _before_any_module(self, module: Module, args: Any) -> None:
        """Before any module runs: treat an unknown outermost module as a model.

        One without parameters is code like any other, such as a loss function created anew each time.
        """
        if module in self.names or len(self._stack) > 1 or is_backward() or next(module.parameters(), None) is None:
            return
        self.names.learn(module)
        self._hook(module)
        if module in set(self.names.watched(module)):
            self._on_enter(module, args, {})  # the hook just registered comes too late for this call

    def _on_enter(self, module: Module, args: Any, kwargs: Any) -> None:
        if is_backward():
            return
        parent = self._stack[-1]
        parent.has_modules = True
        call = self._begin(self.names.of(module), type(module).__name__, parent, module)
        self._stack.append(call)
        self._visit(call, GIVEN, named_tensors(_arguments, args, kwargs))

    def _on_leave(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_backward():
            self.computed_again(module, output)
            return
        if not any(call.module is module for call in self._stack):
            return
        while (call := self._stack.pop()).module is not module:  # calls that ended with an exception
            pass
        self._visit(call, RETURNED, _parts_of(output))

    def _begin(self, name: str, kind: str, parent: ModuleCall | None, module: Module | None) -> ModuleCall:
        call = ModuleCall(
            index=len(self.calls),
            name=name,
            kind=kind,
            number=self._counts[name],
            parent=parent,
            depth=0 if parent is None else parent.depth + 1,
            module=module,
        )
        self._counts[name] += 1
        self.calls.append(call)
        return call

    def _visit(self, call: ModuleCall, role: str, tensors: dict[str, Tensor]) -> None:
        with _disable_current_modes(), torch.no_grad():
            for path, tensor in tensors.items():
                call.takes_tensors |= role == GIVEN
                self.met(call, role, path, tensor)


def is_backward() -> bool:
    """Whether a backward pass is running, which recomputes checkpointed parts."""
    return torch._C._current_autograd_node() is not None


def _arguments(*given: Any, **named: Any) -> None:
    """Signature whose parameter names are used for the arguments."""


def _result(result: Any) -> None:
    """Signature whose parameter name is used for the result."""


def _parts_of(output: Any) -> dict[str, Tensor]:
    found = named_tensors(_result, (output,), {})
    return {path.removeprefix(WRAPPED): tensor for path, tensor in found.items()}
