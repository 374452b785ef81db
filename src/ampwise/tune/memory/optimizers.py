"""Optimizers by name: torch's own, and stand-ins that keep as much state as others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import UnknownName
from ampwise.train.low_bit.optimizers import QUANTIZED_OPTIMIZERS, TORCHAO_OPTIMIZERS, QuantizedMoments
from ampwise.tune import train_case as step


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

    bf16_stochastic_round = False

    def __init__(self, coded: QuantizedMoments, parameters: Iterable[Parameter]) -> None:
        def moments(parameter: Parameter) -> dict[str, Tensor]:
            """Return tensors of as many bytes as the moments."""
            nbytes = coded.moment_bytes(parameter.numel(), parameter.element_size())
            return {name: parameter.new_empty(nbytes, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}

        super().__init__(parameters, moments)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # both moments in FP32, from which they are quantized again
                    _ = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]


def _state_beside_muon(parameter: Parameter) -> dict[str, Tensor]:
    """Return what Muon keeps of a matrix, and AdamW of the parameters that it does not take."""
    names = ("momentum_buffer",) if parameter.dim() == 2 else ("exp_avg", "exp_avg_sq")
    return {name: torch.empty_like(parameter) for name in names}


# By the names that Engine takes. Adam keeps the same state as AdamW: only weight decay differs.
CODES: dict[str, QuantizedMoments] = {
    name: QUANTIZED_OPTIMIZERS[name if name in QUANTIZED_OPTIMIZERS else name.replace("adam", "adamw")]
    for name in TORCHAO_OPTIMIZERS
}
MAKERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    **{name: partial(step.make_optimizer, name, fused=True) for name in step.OPTIMIZERS},
    **{name: partial(CodedMoments, coded) for name, coded in CODES.items()},
    "lion": lambda parameters: StateOnlyOptimizer(parameters, lambda each: {"exp_avg": torch.empty_like(each)}),
    "muon": lambda parameters: StateOnlyOptimizer(parameters, _state_beside_muon),
    "adafactor": torch.optim.Adafactor,
}
NAMES = tuple(MAKERS)
# Optimizers that torch lacks or that are used with another, and the state they are assumed to keep.
MODELLED = {
    **{name: f"torchao's, {coded.text}" for name, coded in CODES.items()},
    "lion": "one moment in FP32",
    "muon": "one moment in FP32 for each matrix, and two (AdamW's) for other parameters",
}


def checked_optimizer(name: str) -> str:
    """Return the name if it is known; else raise UnknownName."""
    if name not in MAKERS:
        raise UnknownName("optimizer", name, NAMES, listing=f"--optimizer takes {', '.join(NAMES)}.")
    return name


def make_optimizer(name: str, parameters: Iterable[Parameter]) -> Optimizer:
    """Make an optimizer as it would be on CUDA, where torch's own are fused."""
    return MAKERS[checked_optimizer(name)](list(parameters))
