"""``precision="bf16-pure"``: BF16 weights and gradients, and updates that are not lost in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.policy import Policy, named_modules
from ampwise.errors import BadInput
from ampwise.low_bit.care import looked_after, rounds_by_chance
from ampwise.low_bit.loading import load_as_saved
from ampwise.low_bit.pure import PURE, Pure
from ampwise.low_bit.update import Update, is_kept_of
from ampwise.low_bit.weights import (
    narrow_,
    narrow_buffers,
    narrow_ones,
    to_narrow,
    widen_,
    widen_buffers_,
    wrapper_of,
)

__all__ = ["PureFitting"]


class PureFitting(Fitting):
    """The model's weights in BF16 while it is on, but for those that the policy keeps.

    When it is taken off they are FP32, all of them: BF16 weights without this care would stand still.
    """

    def __init__(self, models: Sequence[Module], policy: Policy, optimizers: Sequence[Optimizer], pure: Pure) -> None:
        whole = models[0] if len(models) == 1 else ModuleList(models)
        self._models, self._optimizers = models, optimizers
        self._weights = to_narrow(models, _kept_wide(whole, policy))
        self._was_narrow = False  # the model was BF16 before, with its buffers
        self._update = Update(pure)
        self._hooks: list[RemovableHandle] = []
        self._by_themselves: list[tuple[Any, bool]] = []  # those that round by chance, and whether they did before
        for optimizer in optimizers:
            _refuse(optimizer, pure)

    def put_on(self) -> None:
        self._was_narrow = bool(narrow_ones(self._models))
        self._update.rests = narrow_(self._weights, set(self._parameters) if self._update.pure.kahan else ())
        optimizer: Any
        for optimizer in self._optimizers:
            looked_after.add(optimizer)
            self._hooks += load_as_saved(optimizer)
            if self._left_to_itself(optimizer):
                self._by_themselves.append((optimizer, optimizer.bf16_stochastic_round))
                optimizer.bf16_stochastic_round = True

    def take_off(self) -> None:
        changed = narrow_ones(self._models)
        widen_(changed, self._update.rests)
        widen_buffers_(narrow_buffers(self._models) if self._was_narrow else ())
        for handle in self._hooks:
            handle.remove()
        for optimizer, before in self._by_themselves:
            optimizer.bf16_stochastic_round = before
        for optimizer in self._optimizers:
            looked_after.discard(optimizer)
            for parameter in changed:
                _widen_state(optimizer.state.get(parameter, {}), parameter)

    @property
    def stays(self) -> str:
        wrapper = wrapper_of(self._models, self._parameters)
        if wrapper is None:
            return ""
        return (
            f"{wrapper} was made for BF16 weights, and they cannot become FP32 under it. Save, and go on from FP32 "
            "weights in a new process."
        )

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        if self._left_to_itself(optimizer):
            return self._alike_on_ranks(optimizer)
        return self._update.around(optimizer)

    def state(self) -> dict[str, Any]:
        found = [self._update.rests.get(each) for each in self._parameters] if self._update.pure.kahan else []
        rests = [None if rest is None else rest.clone() for rest in found]  # which go on being written to
        return {"drawn": self._update.noise.drawn, "rests": rests}

    def load(self, state: Mapping[str, Any]) -> None:
        drawn, rests = state.get("drawn", self._update.noise.drawn), state.get("rests", [])
        parameters = self._parameters if rests else []
        if not isinstance(drawn, int) or len(rests) != len(parameters):
            raise BadInput(f"load_state_dict(): what {PURE} has kept of weights is of other weights than these.")
        found = {each: rest for each, rest in zip(parameters, rests, strict=True) if rest is not None}
        for parameter, rest in found.items():
            if not isinstance(rest, Tensor) or rest.dtype != torch.int16:
                raise BadInput(f"load_state_dict(): what {PURE} has kept of weights is damaged.")
            if rest.numel() != _held(parameter):
                raise BadInput(f"load_state_dict(): what {PURE} has kept of weights is of other weights than these.")
        self._update.noise.drawn = drawn
        self._update.rests = {each: rest.to(each.device, copy=True) for each, rest in found.items()}

    @property
    def rests(self) -> Sequence[Tensor]:
        """What is kept of weights that BF16 does not hold."""
        return list(self._update.rests.values())

    @property
    def _parameters(self) -> list[Parameter]:
        return [each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]]

    def _left_to_itself(self, optimizer: Any) -> bool:
        return rounds_by_chance(optimizer) and not self._update.pure.kahan

    @contextmanager
    def _alike_on_ranks(self, optimizer: Any) -> Iterator[None]:
        """Its random numbers are torch's: for the time of a step, from a seed that every rank has.

        And afterwards torch's go on as if there had been none.
        """
        noise = self._update.noise
        devices = {each.device.index for each in self._parameters if each.device.type == "cuda"}
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(noise.drawn)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(noise.drawn)
            noise.drawn += 1
            yield


def _kept_wide(model: Module, policy: Policy) -> list[Module]:
    """A region in FP32 or FP16 has no use for BF16 weights."""
    named = named_modules(model)
    return [named[name] for name, precision in policy.modules(model).items() if precision != "bf16"]


def _refuse(optimizer: Any, pure: Pure) -> None:
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput(
            f"Engine(precision={pure.text!r}): {name}(differentiable=True) keeps the graph of its updates, and these "
            "are done on copies. Use another precision."
        )
    if pure.bf16_states and rounds_by_chance(optimizer):
        raise BadInput(
            f"Engine(precision={pure.text!r}): {name} keeps its state in fewer bits already. "
            f"Leave out bf16-states: precision={Pure(kahan=pure.kahan).text!r}."
        )


def _widen_state(state: dict[str, Any], parameter: Parameter) -> None:
    for key, value in state.items():
        if is_kept_of(value, parameter) and value.dtype == torch.bfloat16:
            state[key] = value.float()


def _held(parameter: Any) -> int:
    """How many values this process has of it."""
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())
