"""Optimizers by name: torch's own, and models of others that keep as much state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import UnknownName
from ampwise.tune import step

__all__ = ["MODELLED", "NAMES", "checked_optimizer", "make_optimizer"]

QUANTISED_FROM = 4096  # elements: bitsandbytes keeps the state of smaller tensors in FP32
SCALE_BLOCK = 256  # elements that share a scale


class Kept(Optimizer):
    """Keeps what an optimizer keeps, and updates in place: for those that torch does not have."""

    def __init__(self, parameters: Iterable[Parameter], keep: Callable[[Parameter], dict[str, Any]]) -> None:
        super().__init__(parameters, {})
        self.keep = keep

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self.keep(parameter)


def _two_moments_in_8_bits(parameter: Parameter) -> dict[str, Any]:
    if parameter.numel() < QUANTISED_FROM:
        return {name: torch.empty_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    blocks = -(-parameter.numel() // SCALE_BLOCK)
    return {
        name: (torch.empty_like(parameter, dtype=torch.uint8), parameter.new_empty(blocks, dtype=torch.float32))
        for name in ("exp_avg", "exp_avg_sq")
    }


def _one_moment(parameter: Parameter) -> dict[str, Any]:
    return {"exp_avg": torch.empty_like(parameter)}


def _fused(name: str) -> Callable[[list[Parameter]], Optimizer]:
    return lambda parameters: step.make_optimizer(name, parameters, fused=True)


MAKERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    **{name: _fused(name) for name in step.OPTIMIZERS},
    "adamw8bit": lambda parameters: Kept(parameters, _two_moments_in_8_bits),
    "lion": lambda parameters: Kept(parameters, _one_moment),
    "adafactor": torch.optim.Adafactor,
}
NAMES = tuple(MAKERS)
# Those that torch does not have, and what they are taken to keep.
MODELLED = {
    "adamw8bit": f"two moments of 1 byte, and a scale for every {SCALE_BLOCK} of them; "
    f"in FP32 for tensors of fewer than {QUANTISED_FROM} elements",
    "lion": "one moment in FP32",
}


def checked_optimizer(name: str) -> str:
    """The name of one that is known."""
    if name not in MAKERS:
        raise UnknownName("optimizer", name, NAMES, listing=f"--optimizer takes {', '.join(NAMES)}.")
    return name


def make_optimizer(name: str, parameters: Iterable[Parameter]) -> Optimizer:
    """As it would be on CUDA; torch's own are fused there."""
    return MAKERS[checked_optimizer(name)](list(parameters))
