"""Optimizers by name: torch's own, and models of others that keep as much state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import UnknownName
from ampwise.low_bit.kept import CODED, Coded
from ampwise.low_bit.optimizers import TORCHAOS
from ampwise.tune import step

__all__ = ["MODELLED", "NAMES", "checked_optimizer", "make_optimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")


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


class CodedMoments(Kept):
    """One of torchao's: two moments in codes. It may be told to round BF16 weights by chance."""

    def __init__(self, parameters: Iterable[Parameter], coded: Coded) -> None:
        super().__init__(parameters, lambda parameter: {name: _moment(parameter, coded) for name in MOMENTS})
        self.bf16_stochastic_round = False


def _moment(parameter: Parameter, coded: Coded) -> Tensor:
    """As many bytes."""
    if not coded.codes(parameter.numel()):
        return torch.empty_like(parameter)
    return parameter.new_empty(coded.moment_bytes(parameter.numel(), parameter.element_size()), dtype=torch.uint8)


def _coded(coded: Coded) -> Callable[[list[Parameter]], Optimizer]:
    return lambda parameters: CodedMoments(parameters, coded)


def _one_moment(parameter: Parameter) -> dict[str, Any]:
    return {"exp_avg": torch.empty_like(parameter)}


def _fused(name: str) -> Callable[[list[Parameter]], Optimizer]:
    return lambda parameters: step.make_optimizer(name, parameters, fused=True)


# By the names that an engine takes. Adam keeps what AdamW does: only the decay of weights is another.
CODES: dict[str, Coded] = {name: CODED[name if name in CODED else name.replace("adam", "adamw")] for name in TORCHAOS}
MAKERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    **{name: _fused(name) for name in step.OPTIMIZERS},
    **{name: _coded(coded) for name, coded in CODES.items()},
    "lion": lambda parameters: Kept(parameters, _one_moment),
    "adafactor": torch.optim.Adafactor,
}
NAMES = tuple(MAKERS)
# Those that torch does not have, and what they are taken to keep.
MODELLED = {**{name: f"torchao's, {coded.text}" for name, coded in CODES.items()}, "lion": "one moment in FP32"}


def checked_optimizer(name: str) -> str:
    """The name of one that is known."""
    if name not in MAKERS:
        raise UnknownName("optimizer", name, NAMES, listing=f"--optimizer takes {', '.join(NAMES)}.")
    return name


def make_optimizer(name: str, parameters: Iterable[Parameter]) -> Optimizer:
    """As it would be on CUDA; torch's own are fused there."""
    return MAKERS[checked_optimizer(name)](list(parameters))
