"""The largest magnitude that each module of a model puts out, kept on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.engine.scaling.facts import Posted
from ampwise.watch.asking import floats_in
from ampwise.watch.hook import Hook
from ampwise.watch.models import UNTOUCHED, within

__all__ = ["Activations", "Ranges"]


@dataclass(slots=True)
class Ranges:
    """Of one step, in the order in which modules ran. They arrive by themselves."""

    names: list[str]
    dtypes: list[str]
    posted: Posted

    def read(self) -> list[tuple[str, str, float]]:
        """Module, dtype, largest magnitude: NaN if there was one."""
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
        """From now on, look at what its modules put out."""
        if id(model) not in self._handles:
            # Innermost first, as they run: the module that made a bad value comes before those it is a part of.
            self._handles[id(model)] = [
                module.register_forward_hook(Hook(partial(self._look, name or type(model).__name__), self._failed))
                for name, module in within(model, lambda module: isinstance(module, UNTOUCHED))
            ]

    def end(self) -> None:
        for handle in (each for handles in self._handles.values() for each in handles):
            handle.remove()
        self._handles = {}

    def collect(self) -> Ranges | None:
        """What was seen since the last time, on its way to the host."""
        if not self._largest:
            return None
        home = self._largest[0].device
        there = [each.to(home, non_blocking=True) for each in self._largest]
        ranges = Ranges(self._names, self._dtypes, Posted(torch.stack(there)))
        self._names, self._dtypes, self._largest = [], [], []
        return ranges

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in floats_in(output):
            if not tensor.numel() or tensor.layout != torch.strided:
                continue
            with torch.no_grad():
                self._largest.append(tensor.detach().abs().amax().float())
            self._names.append(name)
            self._dtypes.append(str(tensor.dtype).removeprefix("torch."))
