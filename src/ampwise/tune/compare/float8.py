"""FP8 linear layers, installed temporarily, as by ``Engine(precision="fp8")``, with its default recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ampwise.errors import BadInput
from ampwise.hardware.torch_info import read_device
from ampwise.train.float8.backends import make_forward
from ampwise.train.float8.kernel_check import refuse_wrong_kernels
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.layer_forward import install_forward, remove_forward
from ampwise.train.float8.recipe import Fp8

__all__ = ["FP8", "OTHER_LAYERS", "Float8Layers", "why_no_float8"]

FP8 = "fp8"
OTHER_LAYERS = "bf16"  # the precision of the other layers
RECIPE = Fp8()


def why_no_float8(device: torch.device) -> str | None:
    """Return why this device has no FP8, as a sentence; None if it has."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores."
    found = read_device(torch, torch.cuda.current_device() if device.index is None else device.index)
    if not found.has_tensor_cores(FP8):
        return f"{found.name} has no FP8 tensor cores."
    return None


class Float8Layers:
    """The linear layers of a model that run in FP8 by default."""

    def __init__(self, model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._other_context = around  # entered while the layers are installed
        found = choose_layers(model, {}, RECIPE)
        for device in {module.weight.device for module in found}:
            refuse_wrong_kernels(RECIPE, device)
        self._layers = {
            module: make_forward(module, RECIPE) for module, choice in found.items() if choice.recipe == RECIPE.recipe
        }
        if not self._layers:
            why = next((f": {choice.name or 'the model itself'}: {choice.why}" for choice in found.values()), "")
            raise BadInput(f"fp8: no linear layer of this model can run in FP8{why}. Leave fp8 out of the comparison.")

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run these layers in FP8 while inside."""
        for module, how in self._layers.items():
            install_forward(module, how)
        try:
            with self._other_context():
                yield
        finally:
            for module in self._layers:
                remove_forward(module)
