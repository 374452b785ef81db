"""FP8 linear layers by torchao, put into a model for a while: they have the same parameters."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ampwise.hardware.torch_facts import read_device

__all__ = ["AROUND", "FP8", "Float8Layers", "why_no_float8"]

FP8 = "fp8"
AROUND = "bf16"  # what the other layers run in
LIBRARY = "torchao"
MULTIPLE = 16  # of both sizes of a layer, without which the matrix units take no FP8


def why_no_float8(device: torch.device) -> str | None:
    """Why there is no FP8 on this device, as a sentence; None where there is."""
    if device.type != "cuda":
        return f"there are no FP8 matrix units on {device.type}."
    found = read_device(torch, torch.cuda.current_device() if device.index is None else device.index)
    if not found.has_matrix_units(FP8):
        return f"{found.name} has no FP8 matrix units."
    if importlib.util.find_spec(LIBRARY) is None:
        return f"FP8 layers are {LIBRARY}'s, which is not installed: pip install {LIBRARY}."
    return None


class Float8Layers:
    """The model's linear layers in FP8, each beside the one whose parameters it has."""

    def __init__(self, model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._around = around  # entered with them in the model
        before = _children(model)
        convert: Any = importlib.import_module(f"{LIBRARY}.float8").convert_to_float8_training
        convert(model, module_filter_fn=_takes_float8)
        after = _children(model)
        self._pairs = [(*place, before[place], after[place]) for place in before if after[place] is not before[place]]
        self._put(fp8=False)

    def __len__(self) -> int:
        return len(self._pairs)

    @contextmanager
    def on(self) -> Iterator[None]:
        """While inside, the model has them."""
        self._put(fp8=True)
        try:
            with self._around():
                yield
        finally:
            self._put(fp8=False)

    def _put(self, *, fp8: bool) -> None:
        for parent, name, plain, narrow in self._pairs:
            parent._modules[name] = narrow if fp8 else plain


def _children(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Module]:
    """Where each module stands."""
    return {
        (parent, name): child
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None
    }


def _takes_float8(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
