"""Optimizers by name: torch's own, and stand-ins that keep as much state as others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import UnknownName
from ampwise.train.low_bit.optimizers import TORCHAO_OPTIMIZERS
from ampwise.train.low_bit.quantized_state import QUANTIZED_OPTIMIZERS, QuantizedMoments
from ampwise.tune import training_step as step

__all__ = ["MODELLED", "NAMES", "checked_optimizer", "make_optimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class StateOnlyOptimizer(Optimizer):
    """Stand-in for optimizers that torch lacks: creates their state, and updates nothing."""

    def __init__(self, parameters: Iterable[Parameter], keep: Callable[[Parameter], dict[str, Any]]) -> None:
        super().__init__(parameters, {})
        self.keep = keep

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self.keep(parameter)


class CodedMoments(StateOnlyOptimizer):
    """Stand-in for torchao's optimizers: two quantized moments, with an option to round BF16 weights stochastically."""

    def __init__(self, parameters: Iterable[Parameter], coded: QuantizedMoments) -> None:
        super().__init__(parameters, lambda parameter: {name: _moment(parameter, coded) for name in MOMENTS})
        self.bf16_stochastic_round = False


def _moment(parameter: Parameter, coded: QuantizedMoments) -> Tensor:
    """Return a tensor of as many bytes as the moment."""
    if not coded.codes(parameter.numel()):
        return torch.empty_like(parameter)
    return parameter.new_empty(coded.moment_bytes(parameter.numel(), parameter.element_size()), dtype=torch.uint8)


def _coded(coded: QuantizedMoments) -> Callable[[list[Parameter]], Optimizer]:
    return lambda parameters: CodedMoments(parameters, coded)


def _one_moment(parameter: Parameter) -> dict[str, Any]:
    return {"exp_avg": torch.empty_like(parameter)}


def _fused(name: str) -> Callable[[list[Parameter]], Optimizer]:
    return lambda parameters: step.make_optimizer(name, parameters, fused=True)


# By the names that Engine takes. Adam keeps the same state as AdamW: only weight decay differs.
CODES: dict[str, QuantizedMoments] = {
    name: QUANTIZED_OPTIMIZERS[name if name in QUANTIZED_OPTIMIZERS else name.replace("adam", "adamw")]
    for name in TORCHAO_OPTIMIZERS
}
MAKERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    **{name: _fused(name) for name in step.OPTIMIZERS},
    **{name: _coded(coded) for name, coded in CODES.items()},
    "lion": lambda parameters: StateOnlyOptimizer(parameters, _one_moment),
    "adafactor": torch.optim.Adafactor,
}
NAMES = tuple(MAKERS)
# Optimizers that torch lacks, and the state they are assumed to keep.
MODELLED = {**{name: f"torchao's, {coded.text}" for name, coded in CODES.items()}, "lion": "one moment in FP32"}


def checked_optimizer(name: str) -> str:
    """Return the name if it is known; else raise UnknownName."""
    if name not in MAKERS:
        raise UnknownName("optimizer", name, NAMES, listing=f"--optimizer takes {', '.join(NAMES)}.")
    return name


def make_optimizer(name: str, parameters: Iterable[Parameter]) -> Optimizer:
    """Make an optimizer as it would be on CUDA, where torch's own are fused."""
    return MAKERS[checked_optimizer(name)](list(parameters))
