"""The largest magnitude among each module's outputs, computed and kept on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.watch.hooks import Hook
from ampwise.watch.inspection import floats_in
from ampwise.watch.models import NEVER_HOOKED, modules_without

__all__ = ["ActivationRanges", "Activations"]


@dataclass(slots=True)
class ActivationRanges:
    """Largest magnitudes of one step, in the order in which modules ran. They are copied to the host without a sync."""

    names: list[str]
    dtypes: list[str]
    posted: AsyncScalars

    def read(self) -> list[tuple[str, str, float]]:
        """Return (module, dtype, largest magnitude) for each output; NaN if the output has one."""
        return list(zip(self.names, self.dtypes, self.posted.read(), strict=True))


class Activations:
    """Hooks on the modules of a model, from ``begin`` to ``end``."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._handles: dict[int, list[Any]] = {}  # by model
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._largest: list[Tensor] = []

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def begin(self, model: nn.Module) -> None:
        """Measure the outputs of the model's modules from now on."""
        if id(model) not in self._handles:
            # Inner modules end first: the module that made a bad value comes before the modules that contain it.
            self._handles[id(model)] = [
                module.register_forward_hook(Hook(partial(self._measure, name or type(model).__name__), self._failed))
                for name, module in modules_without(model, lambda module: isinstance(module, NEVER_HOOKED))
            ]

    def end(self) -> None:
        for handle in (each for handles in self._handles.values() for each in handles):
            handle.remove()
        self._handles = {}

    def collect(self) -> ActivationRanges | None:
        """Return what was measured since the last call, and start its copy to the host."""
        if not self._largest:
            return None
        home = self._largest[0].device
        there = [each.to(home, non_blocking=True) for each in self._largest]
        ranges = ActivationRanges(self._names, self._dtypes, AsyncScalars(torch.stack(there)))
        self._names, self._dtypes, self._largest = [], [], []
        return ranges

    def _measure(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in floats_in(output):
            if not tensor.numel() or tensor.layout != torch.strided:
                continue
            with torch.no_grad():
                self._largest.append(tensor.detach().abs().amax().float())
            self._names.append(name)
            self._dtypes.append(str(tensor.dtype).removeprefix("torch."))
