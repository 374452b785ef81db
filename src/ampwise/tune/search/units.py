"""Units of a search: modules that compute matmuls of their own, found by running a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.emulation.emulated_matmuls import MATMUL_OPERANDS
from ampwise.train.precision.policy import name_and_parents, named_modules

REST = ""  # name of the rest: matmuls of the model's own forward, and of the function that calls it

aten: Any = torch.ops.aten

# A whole nn.LSTM, or a layer of it, in one operation; the input comes first, then the weights.
RECURRENT = (aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, aten.miopen_rnn.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchUnit:
    """A module with the matmuls that it computes itself, not in its submodules."""

    name: str
    module: Module
    kind: str
    flops: float  # of its matmuls in a forward pass
    emulated: bool = True  # whether its matmuls can be emulated: not outside of modules, nor in an nn.LSTM


def find_units(model: Module, forward: Callable[[], object]) -> list[SearchUnit]:
    """Return the modules in which ``forward()`` computes matmuls, in order of first use."""
    names: dict[Module, str] = {}
    for name, module in named_modules(model).items():
        names.setdefault(module, name)
    counter = _MatmulCounter()
    with counter:  # the first mode imports much of torch; during a pass that would leave cycles that hold its graph
        torch.empty(())
    with ExitStack() as stack:
        for module in names:
            enter = module.register_forward_pre_hook(counter.enter, prepend=True)
            leave = module.register_forward_hook(counter.leave, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        with sdpa_kernel(SDPBackend.MATH), counter:
            forward()
    for where, dtype in counter.in_16_bits.items():
        shown = "the function" if where is None else names[where] or "the model itself"
        raise BadInput(
            f"search(): a matmul in {shown} is {str(dtype).removeprefix('torch.')}; expected FP32, to compare with. "
            "Remove autocast from the function, and call model.float(): the search applies formats itself."
        )
    outside, own = counter.flops.pop(None, 0.0), counter.flops.pop(model, 0.0)
    found = [
        SearchUnit(
            name=names[module],
            module=module,
            kind=type(module).__name__,
            flops=flops,
            emulated=module not in counter.whole,
        )
        for module, flops in counter.flops.items()
        if module is not None
    ]
    if own or outside:
        is_emulated = own >= outside and model not in counter.whole
        kind = type(model).__name__
        found.append(SearchUnit(name=REST, module=model, kind=kind, flops=own + outside, emulated=is_emulated))
    if not found:
        raise BadInput("search(): the function computes no FP32 matmul, so there is nothing to choose a format for.")
    return found


def select_units(units: Sequence[SearchUnit], patterns: Iterable[str]) -> list[SearchUnit]:
    """Return the units whose name, or that of an enclosing module, matches a pattern; all without patterns."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    if not wanted:
        return list(units)
    chosen: set[SearchUnit] = set()
    for pattern in wanted:
        matched = {
            unit for unit in units if any(fnmatchcase(name, pattern) for name in (*name_and_parents(unit.name), REST))
        }
        if not matched:
            raise UnknownName(
                "module",
                pattern,
                [unit.name for unit in units if unit.name],
                listing="It matches no module with matmuls; * matches any part of a name, including dots.",
            )
        chosen |= matched
    return [unit for unit in units if unit in chosen]


class _MatmulCounter(TorchDispatchMode):
    """Counts FLOPs of matmuls by the innermost module. FP64 and integer matmuls are ignored, as no format applies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside: list[Module] = []
        self.flops: dict[Module | None, float] = {}
        self.in_16_bits: dict[Module | None, torch.dtype] = {}
        self.whole: set[Module | None] = set()  # modules that torch computes in one operation

    def enter(self, module: Module, args: Any) -> None:
        self._inside.append(module)

    def leave(self, module: Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = _flops(func, args, result)
        if flops:
            where, dtype = self._inside[-1] if self._inside else None, args[0].dtype
            if dtype in (torch.float16, torch.bfloat16):
                self.in_16_bits[where] = dtype
            elif dtype == torch.float32:
                self.flops[where] = self.flops.get(where, 0.0) + flops
                if func in RECURRENT:
                    self.whole.add(where)
        return result


def _flops(func: Any, args: Any, result: Any) -> float:
    if func in MATMUL_OPERANDS:
        first: Tensor = args[MATMUL_OPERANDS[func][0]]
        return 2.0 * int(result.numel()) * first.shape[-1]
    if func in RECURRENT:
        weights = [each for each in tree_flatten(args[1:5])[0] if isinstance(each, Tensor) and each.ndim == 2]
        rows: Tensor = args[0][..., 0]
        return 2.0 * rows.numel() * sum(each.numel() for each in weights)
    if func is not aten.convolution.default:
        return 0.0
    places: Tensor = args[0] if args[6] else result  # for a transposed convolution, those of the input
    weight: Tensor = args[1]
    return 2.0 * places.numel() * weight[0].numel()
