"""The calls of modules in a forward pass: numbered, inside each other, with what each is given and returns."""

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

from ampwise.evidence.difference import FUNCTION
from ampwise.trace.names import named_tensors
from ampwise.tune.diff.names import Names

__all__ = ["GIVEN", "RETURNED", "Call", "Calls", "Place", "is_backward"]

GIVEN, RETURNED = "given", "returned"
WRAPPED = "result"  # what the result of a module is called while one looks for the tensors in it


class Place(NamedTuple):
    """Where a tensor is met: the same on both sides."""

    name: str  # of the module; the function itself has none
    number: int  # of the call of this module
    role: str
    path: str  # in the arguments, or in what is returned: "[0]"; "" of a tensor by itself


@dataclass(slots=True, eq=False)
class Call:
    """A module that runs."""

    index: int  # among all calls; 0 is the function itself
    name: str
    kind: str
    number: int
    parent: Call | None
    depth: int
    module: Module | None
    ops: int = 0  # operations of its own code that round, so far
    has_modules: bool = False  # that were called in it
    takes_tensors: bool = False
    keys: Counter[str] = field(default_factory=Counter)  # of its operations, by name

    def place(self, role: str, path: str) -> Place:
        return Place(self.name, self.number, role, path)


class Calls:
    """Follows a forward pass; subclasses see the tensors. What a backward pass computes again is not followed."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.calls: list[Call] = []
        self._counts: Counter[str] = Counter()
        self._handles = ExitStack()
        self.top = self._begin(FUNCTION, FUNCTION, None, None)
        self._stack = [self.top]

    # What subclasses do

    def met(self, call: Call, role: str, path: str, tensor: Tensor) -> None:
        """A tensor that a module is given, or returns."""

    def computed_again(self, module: Module, output: Any) -> None:
        """A module has returned in the midst of a backward pass."""

    def before_write(self, tensor: Tensor) -> None:
        """An operation is about to write into this tensor."""

    def begins(self, func: Any, args: Any) -> Any:
        """An operation is about to run; what is returned comes back when it has."""
        return None

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        """It has run."""

    # What happens

    @property
    def here(self) -> Call:
        """The innermost that runs."""
        return self._stack[-1]

    def count_operation(self) -> None:
        self._stack[-1].ops += 1

    def finished(self, result: Any) -> None:
        """What the function itself has returned."""
        self._look(self.top, RETURNED, _parts_of(result))

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._handles as handles:
            for model in self.names.roots:
                self._hook(model)
            if not self.names.parameters():  # else the model that is trained is known
                handles.callback(register_module_forward_pre_hook(self._meets).remove)
            yield

    def _hook(self, model: Module) -> None:
        for module in self.names.watched(model):
            if isinstance(module, torch.jit.ScriptModule):  # which takes no such hooks
                continue
            before = module.register_forward_pre_hook(self._enters, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(self._leaves, with_kwargs=True, always_call=True)
            self._handles.callback(before.remove)
            self._handles.callback(after.remove)

    def _meets(self, module: Module, args: Any) -> None:
        """Any module is about to run: one that nobody knew of is a model of its own, if it is the outermost.

        Without parameters it is code like any other: a loss function that is made anew each time.
        """
        if module in self.names or len(self._stack) > 1 or is_backward() or next(module.parameters(), None) is None:
            return
        self.names.learn(module)
        self._hook(module)
        if module in set(self.names.watched(module)):
            self._enters(module, args, {})  # the hook that was just put on comes too late

    def _enters(self, module: Module, args: Any, kwargs: Any) -> None:
        if is_backward():
            return
        parent = self._stack[-1]
        parent.has_modules = True
        call = self._begin(self.names.of(module), type(module).__name__, parent, module)
        self._stack.append(call)
        self._look(call, GIVEN, named_tensors(_arguments, args, kwargs))

    def _leaves(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_backward():
            self.computed_again(module, output)
            return
        if not any(call.module is module for call in self._stack):
            return
        while (call := self._stack.pop()).module is not module:  # those that ended with an exception
            pass
        self._look(call, RETURNED, _parts_of(output))

    def _begin(self, name: str, kind: str, parent: Call | None, module: Module | None) -> Call:
        call = Call(
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

    def _look(self, call: Call, role: str, tensors: dict[str, Tensor]) -> None:
        with _disable_current_modes(), torch.no_grad():
            for path, tensor in tensors.items():
                call.takes_tensors |= role == GIVEN
                self.met(call, role, path, tensor)


def is_backward() -> bool:
    """Whether this is in the midst of a backward pass: a checkpointed part is computed again."""
    return torch._C._current_autograd_node() is not None


def _arguments(*given: Any, **named: Any) -> None:
    """A function that has the names that arguments get."""


def _result(result: Any) -> None:
    """And one for what is returned."""


def _parts_of(output: Any) -> dict[str, Tensor]:
    found = named_tensors(_result, (output,), {})
    return {path.removeprefix(WRAPPED): tensor for path, tensor in found.items()}
