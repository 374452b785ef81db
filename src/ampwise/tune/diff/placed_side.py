"""Apply a side: weights, batch and torch's settings while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.attention import sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.trace.replay import autocast_forced_to
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.diff.side import ATTENTION, Side

__all__ = ["PlacedSide"]


class PlacedSide:
    """A side, applied to the models of a function."""

    def __init__(self, side: Side, home: torch.device, scale: float = 1.0) -> None:
        self.side = side
        self.device = side.device or home
        self.scale = scale
        self._moves = side.is_wider or side.device is not None
        self._arithmetic = PrecisionContexts(side.arithmetic, self.device.type)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled if the side says so."""
        if not self.side.compiled:
            return function
        return torch.compile(function, dynamic=False, backend=self.side.compiled)

    def arguments(self, tree: Any) -> Any:
        """Return the arguments as this side takes them."""
        return tree_map(self._moved, tree) if self._moves else tree

    @contextmanager
    def in_place(self, models: Sequence[Module], main: Module | None) -> Iterator[None]:
        """Convert and move weights, and set torch's switches, for forward and backward."""
        side = self.side
        with ExitStack() as stack:
            if self._moves:
                stack.enter_context(self._models_moved(models))
            if side.is_wider:
                stack.enter_context(_default_dtype(torch.float64))
            if side.policy is not None:
                for model in models if main is None else (main,):
                    stack.enter_context(side.policy.apply(model))
            stack.enter_context(self._arithmetic.pass_context())
            if side.attention:
                stack.enter_context(sdpa_kernel(ATTENTION[side.attention]))
            stack.enter_context(_compiled() if side.compiled else run_eagerly())
            if side.compiled:
                stack.enter_context(_same_random_numbers())
            yield

    @contextmanager
    def computed(self, models: Sequence[Module]) -> Iterator[None]:
        """Emulate matmuls in formats that torch lacks."""
        with ExitStack() as stack:
            if self.side.recipe is not None:
                for model in models:
                    stack.enter_context(emulated(model, {model: self.side.recipe}))
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Apply autocast, or turn off any that the function enters itself."""
        overrules = self.side.policy is None and not self.side.compiled
        name = self.side.arithmetic.name if self.side.arithmetic.name in PRECISIONS else "fp32"
        with self._arithmetic.forward(), autocast_forced_to(name if overrules else None, self.device):
            yield

    def backward(self) -> AbstractContextManager[Any]:
        """Turn autocast off."""
        return self._arithmetic.backward()

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_wide = self.side.is_wider and leaf.is_floating_point()
        moved = leaf.detach().to(self.device, torch.float64 if is_wide else leaf.dtype)
        return moved.requires_grad_(leaf.requires_grad) if leaf.requires_grad else moved

    @contextmanager
    def _models_moved(self, models: Sequence[Module]) -> Iterator[None]:
        """Move weights by replacing their data: references to the parameters stay valid."""
        weights = list(dict.fromkeys(each for model in models for each in model.parameters() if not is_lazy(each)))
        buffers = [
            (module, name, buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        before = [weight.data for weight in weights]
        try:
            for weight in weights:
                weight.data = self._moved(weight.data)
            for module, name, buffer in buffers:
                module._buffers[name] = self._moved(buffer)
            yield
        finally:
            _restore(weights, before)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer


def _restore(weights: Sequence[Parameter], before: Sequence[Tensor]) -> None:
    for weight, data in zip(weights, before, strict=True):
        weight.grad = None  # its dtype or device would not match the restored weight
        weight.data = data


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _same_random_numbers() -> AbstractContextManager[Any]:
    """Make compiled code draw random numbers as eager code does."""
    import torch._inductor.config as config  # only needed for compiled code

    patched: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return patched


def _compiled() -> AbstractContextManager[Any]:
    """Enable torch.compile, whatever stance the user has set."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("default")
    return stance
