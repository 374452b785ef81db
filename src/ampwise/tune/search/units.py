"""What is chosen for: the modules that compute matrix products of their own, found by looking at a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.emulation.products import MATRICES
from ampwise.engine.precision.policy import named_modules
from ampwise.errors import BadInput, UnknownName
from ampwise.randomness import captured, restore_random
from ampwise.tune.search.state import Unchanged, told_if_it_fails

__all__ = ["REST", "Unit", "model_called", "selected", "units_of"]

REST = ""  # the name of what is in no other unit: products of the model's own forward, and of the function around it

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """A module with the products that it computes itself, not in modules inside it."""

    name: str
    module: Module
    kind: str
    flops: float  # of its products in a forward pass
    emulated: bool = True  # whether its products can be: those outside of any module cannot

    @property
    def shown(self) -> str:
        """The name, also of what has none."""
        return self.name or "(the model itself)"


def units_of(model: Module, forward: Callable[[], object]) -> list[Unit]:
    """The modules of a model in which ``forward()`` computes products, in the order of the first ones."""
    names: dict[Module, str] = {}
    for name, module in named_modules(model).items():
        names.setdefault(module, name)
    looking = _Looking()
    with _entered(names, looking), sdpa_kernel(SDPBackend.MATH), looking:
        forward()
    outside = looking.flops.pop(None, 0.0)
    own = looking.flops.pop(model, 0.0)
    found = [
        Unit(name=names[module], module=module, kind=type(module).__name__, flops=flops)
        for module, flops in looking.flops.items()
        if module is not None
    ]
    if own or outside:
        found.append(
            Unit(name=REST, module=model, kind=type(model).__name__, flops=own + outside, emulated=own >= outside)
        )
    if not found:
        raise BadInput(
            "search(): no matrix product was seen in this function: there is nothing to choose a format for."
        )
    return found


def selected(units: Sequence[Unit], patterns: Iterable[str]) -> list[Unit]:
    """Those whose name, or the name of a module around them, matches one of the patterns; all where there are none."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    if not wanted:
        return list(units)
    chosen: set[Unit] = set()
    for pattern in wanted:
        matched = {unit for unit in units if any(fnmatchcase(name, pattern) for name in _upwards(unit.name))}
        if not matched:
            raise UnknownName(
                "module",
                pattern,
                [unit.name for unit in units if unit.name],
                listing="It matches no module with matrix products; * matches any part of a name, dots too.",
            )
        chosen |= matched
    return [unit for unit in units if unit in chosen]


def model_called(forward: Callable[[], object], device: torch.device) -> Module:
    """The one module that a function calls, and that has parameters. Nothing is changed by the call."""
    called: dict[Module, Unchanged] = {}
    depth = 0

    def enters(module: Module, args: Any) -> None:
        nonlocal depth
        if not depth and module not in called and next(module.parameters(), None) is not None:
            called[module] = Unchanged(module, device)
        depth += 1

    def leaves(module: Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    random = captured(device)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enters).remove)
        stack.callback(register_module_forward_hook(leaves, always_call=True).remove)
        stack.enter_context(told_if_it_fails())
        forward()
    for kept in called.values():
        kept.put_back()
    restore_random(random, device)
    if len(called) == 1:
        return next(iter(called))
    seen = ", ".join(type(module).__name__ for module in called) or "no module with parameters"
    raise BadInput(f"search(): the function calls {seen}; say which module is the model: search(..., model=model).")


class _Looking(TorchDispatchMode):
    """Counts the FLOPs of products by the innermost module they are in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[Module] = []
        self.flops: dict[Module | None, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = _flops(func, args, result)
        if flops:
            where = self.inside[-1] if self.inside else None
            self.flops[where] = self.flops.get(where, 0.0) + flops
        return result


def _flops(func: Any, args: Any, result: Any) -> float:
    if func in MATRICES:
        first: Tensor = args[MATRICES[func][0]]
        return 2.0 * int(result.numel()) * first.shape[-1]
    if func is not aten.convolution.default:
        return 0.0
    places: Tensor = args[0] if args[6] else result  # of a transposed one those of the input
    weight: Tensor = args[1]
    return 2.0 * places.numel() * weight[0].numel()


@contextmanager
def _entered(modules: Iterable[Module], looking: _Looking) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            enter = module.register_forward_pre_hook(lambda module, args: looking.inside.append(module), prepend=True)
            leave = module.register_forward_hook(lambda module, args, out: _drop(looking.inside), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


def _drop(inside: list[Module]) -> None:
    inside.pop()


def _upwards(name: str) -> Iterator[str]:
    """The name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield REST
