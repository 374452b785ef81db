"""What is chosen for: the modules that compute matrix products of their own, found by looking at a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch.utils._pytree import tree_flatten

from ampwise.emulation.products import MATRICES
from ampwise.engine.precision.policy import named_modules, upwards
from ampwise.errors import BadInput, UnknownName
from ampwise.randomness import captured, restore_random
from ampwise.tune.search.state import Unchanged, told_if_it_fails

__all__ = ["REST", "Unit", "model_called", "selected", "units_of"]

REST = ""  # the name of what is in no other unit: products of the model's own forward, and of the function around it

aten: Any = torch.ops.aten

# A whole nn.LSTM, or a layer of it, in one operation: of an input, and of the weights after it.
RECURRENT = (aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, aten.miopen_rnn.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """A module with the products that it computes itself, not in modules inside it."""

    name: str
    module: Module
    kind: str
    flops: float  # of its products in a forward pass
    emulated: bool = True  # whether its products can be: not those outside of any module, nor those of an nn.LSTM

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
    with looking:  # torch imports half of itself for a first mode; in a pass that leaves cycles which keep its graph
        torch.empty(())
    with _entered(names, looking), sdpa_kernel(SDPBackend.MATH), looking:
        forward()
    _refuse_16_bits(looking.in_16_bits, names)
    outside = looking.flops.pop(None, 0.0)
    own = looking.flops.pop(model, 0.0)
    found = [
        _unit(names[module], module, flops, module not in looking.whole)
        for module, flops in looking.flops.items()
        if module is not None
    ]
    if own or outside:
        found.append(_unit(REST, model, own + outside, own >= outside and model not in looking.whole))
    if not found:
        raise BadInput(
            "search(): no matrix product in FP32 was seen in this function: there is nothing to choose a format for."
        )
    return found


def _unit(name: str, module: Module, flops: float, emulated: bool) -> Unit:
    return Unit(name=name, module=module, kind=type(module).__name__, flops=flops, emulated=emulated)


def _refuse_16_bits(found: Mapping[Module | None, torch.dtype], names: Mapping[Module, str]) -> None:
    for module, dtype in found.items():
        name = "the function" if module is None else names[module] or "the model itself"
        raise BadInput(
            f"search(): a product in {name} is {str(dtype).removeprefix('torch.')} where all is to be FP32, to compare "
            "with. Take autocast out of the function, and call model.float(): the search puts formats on by itself."
        )


def selected(units: Sequence[Unit], patterns: Iterable[str]) -> list[Unit]:
    """Those whose name, or the name of a module around them, matches one of the patterns; all where there are none."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    if not wanted:
        return list(units)
    chosen: set[Unit] = set()
    for pattern in wanted:
        matched = {unit for unit in units if any(fnmatchcase(name, pattern) for name in _with_rest(unit.name))}
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
    called: list[Module] = []
    depth = 0

    def enters(module: Module, args: Any) -> None:
        nonlocal depth
        if not depth and module not in called and next(module.parameters(), None) is not None:
            called.append(module)
            stack.callback(Unchanged(module, device).put_back)
        depth += 1

    def leaves(module: Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        stack.callback(restore_random, captured(device), device)
        stack.callback(register_module_forward_pre_hook(enters).remove)
        stack.callback(register_module_forward_hook(leaves, always_call=True).remove)
        stack.enter_context(told_if_it_fails())
        forward()
    if len(called) == 1:
        return called[0]
    seen = ", ".join(type(module).__name__ for module in called) or "no module with parameters"
    raise BadInput(f"search(): the function calls {seen}; say which module is the model: search(..., model=model).")


class _Looking(TorchDispatchMode):
    """Counts the FLOPs of products by the innermost module they are in. Those of FP64 or of integers stay what they
    are, whatever format a module has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[Module] = []
        self.flops: dict[Module | None, float] = {}
        self.in_16_bits: dict[Module | None, torch.dtype] = {}
        self.whole: set[Module | None] = set()  # modules that torch computes in one operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = _flops(func, args, result)
        if flops:
            self._count(flops, args[0].dtype, is_whole=func in RECURRENT)
        return result

    def _count(self, flops: float, dtype: torch.dtype, *, is_whole: bool) -> None:
        where = self.inside[-1] if self.inside else None
        if dtype in (torch.float16, torch.bfloat16):
            self.in_16_bits[where] = dtype
        elif dtype == torch.float32:
            self.flops[where] = self.flops.get(where, 0.0) + flops
            if is_whole:
                self.whole.add(where)


def _flops(func: Any, args: Any, result: Any) -> float:
    if func in MATRICES:
        first: Tensor = args[MATRICES[func][0]]
        return 2.0 * int(result.numel()) * first.shape[-1]
    if func in RECURRENT:
        weights = [each for each in tree_flatten(args[1:5])[0] if isinstance(each, Tensor) and each.ndim == 2]
        rows: Tensor = args[0][..., 0]
        return 2.0 * rows.numel() * sum(each.numel() for each in weights)
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


def _with_rest(name: str) -> Iterator[str]:
    """The name, those of the modules around it, and what is in none of them."""
    yield from upwards(name)
    yield REST
