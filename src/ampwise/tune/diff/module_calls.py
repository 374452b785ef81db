"""Follow a run: module calls, numbered and nested, with the tensors each receives and returns, and every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.numbers.emulation.emulated_matmuls import NOT_EMULATED
from ampwise.numbers.op_families import base_name, family_of
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.recorder import UndoMode, tensors_in, written_arguments
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.step_difference import FUNCTION
from ampwise.tune.diff.tensor_store import BatchRows, TensorStore

GIVEN, RETURNED = "given", "returned"
# Functions with a discontinuous derivative: rounding across the jump changes it completely.
KINKED = frozenset(
    {"relu", "leaky_relu", "prelu", "rrelu_with_noise", "threshold", "hardtanh", "hardsigmoid", "hardswish", "abs"}
    | {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "amax", "amin", "topk", "sort"}
    | {"max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "sign", "round"}
)
CONSTANTS = frozenset(
    {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full", "arange"}
    | {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "scalar_tensor", "zero"}
)


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
    module: Module | None
    ops: int = 0  # rounding operations of its own code, so far
    has_modules: bool = False  # whether it called modules
    takes_tensors: bool = False
    keys: Counter[str] = field(default_factory=Counter)  # counts of its operations, by name

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def label(self) -> str:
        """Name shown to the user."""
        if self.module is None:
            return self.kind
        return f"{self.name or self.kind}{f' (call {self.number + 1})' if self.number else ''}"

    def place(self, role: str, path: str) -> TensorPlace:
        return TensorPlace(self.name, self.number, role, path)

    def maker(self, role: str) -> ModuleCall:
        """Return the call whose own code made a tensor: for what is given to a module, that of its caller."""
        return self.parent if role == GIVEN and self.parent is not None else self


class OpTraits(NamedTuple):
    """What matters here about an operation."""

    name: str
    returns_views: bool  # only views of existing memory
    draws: bool  # random numbers
    is_cast: bool
    is_constant: bool
    is_kinked: bool
    is_whole: bool  # with matmuls inside, which are not emulated


@lru_cache(maxsize=8192)
def traits_of(func: Any) -> OpTraits:
    name = base_name(str(func))
    aliased = [each.alias_info for each in func._schema.returns]
    return OpTraits(
        name=name,
        returns_views=bool(aliased) and all(info is not None and not info.is_write for info in aliased),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        is_cast=family_of(str(func)) == "cast",
        is_constant=name in CONSTANTS,
        is_kinked=name in KINKED,
        is_whole=func.overloadpacket.__name__ in NOT_EMULATED,
    )


class ModuleCalls:
    """Follows a forward pass; subclasses see its tensors. Recomputation during the backward pass is ignored.

    ``kept``: tensors of an earlier run, which are copied before something writes into their memory.
    """

    def __init__(self, names: ModuleNames, kept: TensorStore | None = None) -> None:
        self.names, self.kept = names, kept
        self.calls: list[ModuleCall] = []
        self.whole_kernels: dict[str, None] = {}  # modules whose matmuls run inside one fused kernel
        self._counts: Counter[str] = Counter()
        self._handles = ExitStack()
        self.rows: BatchRows | None = None
        self.top = self._begin(FUNCTION, FUNCTION, None, None)
        self._stack = [self.top]

    def begin_rows(self, rows: BatchRows) -> None:
        """Begin a part of the batch: the function is called again, and so is each module."""
        self.rows = rows
        self._counts.clear()
        self.top = self._begin(FUNCTION, FUNCTION, None, None)
        self._stack = [self.top]

    # Hooks for subclasses

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        """A module receives or returns a tensor."""

    def computed_again(self, module: Module, output: Any) -> None:
        """A module has returned while being recomputed during the backward pass."""

    def before_write(self, tensor: Tensor) -> None:
        """An operation is about to write into this tensor."""
        if self.kept is not None:
            self.kept.before_write(tensor)

    def begins(self, func: Any, args: Any) -> Any:
        """An operation is about to run; the return value is passed to ``ends``."""
        if traits_of(func).is_whole:
            self.whole_kernels[self.here.name or self.here.kind] = None

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        """An operation has run."""

    # Tracking

    @property
    def here(self) -> ModuleCall:
        """The innermost running call."""
        return self._stack[-1]

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
        self.here.has_modules = True
        call = self._begin(self.names.of(module), type(module).__name__, self.here, module)
        self._stack.append(call)
        self._visit(call, GIVEN, named_tensors(lambda *given, **named: None, args, kwargs))

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
        call = ModuleCall(len(self.calls), name, kind, self._counts[name], parent, module)
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


def _parts_of(output: Any) -> dict[str, Tensor]:
    found = named_tensors(lambda result: None, (output,), {})
    return {path.removeprefix("result"): tensor for path, tensor in found.items()}


class DiffMode(UndoMode):
    """Sees every operation of a run: undoes writes, makes both sides draw alike, and reports to the calls."""

    def __init__(self, calls: ModuleCalls, draws: SharedRandom) -> None:
        super().__init__()
        self.calls, self._draws = calls, draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(args):
            self.note_leaf(tensor)
        if traits_of(func).returns_views:
            return func(*args, **kwargs)
        begun = self.calls.begins(func, args)
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
        for tensor in tensors_in(written):
            with _disable_current_modes():
                self.calls.before_write(tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.ends(begun, func, args, result)
        return result

    def note_leaf(self, tensor: Tensor) -> None:
        """Clear a leaf's gradient, so that it holds that of this run only."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.leaves:
            super().note_leaf(tensor)
            tensor.grad = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_backward():
            self.calls.here.ops += 1
        return self._draws(func, args, kwargs) if traits_of(func).draws else func(*args, **kwargs)
