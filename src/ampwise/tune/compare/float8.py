"""FP8 linear layers, on a model for a while: those of ``Engine(precision="fp8")``, with its default recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ampwise.errors import BadInput
from ampwise.float8.checking import refuse_wrong_kernels
from ampwise.float8.choosing import choices
from ampwise.float8.layer import fit, unfit
from ampwise.float8.layers import made
from ampwise.float8.recipe import Fp8
from ampwise.hardware.torch_facts import read_device

__all__ = ["AROUND", "FP8", "Float8Layers", "why_no_float8"]

FP8 = "fp8"
AROUND = "bf16"  # what the other layers run in
RECIPE = Fp8()


def why_no_float8(device: torch.device) -> str | None:
    """Why there is no FP8 on this device, as a sentence; None where there is."""
    if device.type != "cuda":
        return f"there are no FP8 matrix units on {device.type}."
    found = read_device(torch, torch.cuda.current_device() if device.index is None else device.index)
    if not found.has_matrix_units(FP8):
        return f"{found.name} has no FP8 matrix units."
    return None


class Float8Layers:
    """The linear layers of a model that become FP8 by default."""

    def __init__(self, model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._around = around  # entered with them in the model
        found = choices(model, {}, RECIPE)
        for device in {module.weight.device for module in found}:
            refuse_wrong_kernels(RECIPE, device)
        self._layers = {
            module: made(module, RECIPE) for module, choice in found.items() if choice.recipe == RECIPE.recipe
        }
        if not self._layers:
            why = next((f": {choice.name or 'the model itself'}: {choice.why}" for choice in found.values()), "")
            raise BadInput(f"fp8: no linear layer of this model becomes FP8{why}. Leave it out of the comparison.")

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def on(self) -> Iterator[None]:
        """While inside, they run in FP8."""
        for module, how in self._layers.items():
            fit(module, how)
        try:
            with self._around():
                yield
        finally:
            for module in self._layers:
                unfit(module)
