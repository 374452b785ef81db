"""``precision="bf16-pure"``: BF16 weights and gradients, without losing small updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ampwise.errors import BadInput
from ampwise.train.low_bit.bf16_update import Bf16Update, is_per_element_state, local_tensor
from ampwise.train.low_bit.bf16_weights import bf16_parameters, find_wrapper, parameters_to_convert, to_bf16_, to_fp32_
from ampwise.train.low_bit.optimizers import PROTECTED_OPTIMIZERS, has_stochastic_rounding
from ampwise.train.low_bit.pure_bf16 import PURE, PureBf16
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.train.precision_plugin import PrecisionPlugin

__all__ = ["PureBf16Plugin"]


class PureBf16Plugin(PrecisionPlugin):
    """Keeps the model's weights in BF16 while installed, except those that the policy keeps.

    When uninstalled, it converts all weights to FP32: with a plain update rule, BF16 weights would stop changing.
    """

    def __init__(
        self, models: Sequence[Module], policy: Policy, optimizers: Sequence[Optimizer], pure: PureBf16
    ) -> None:
        for optimizer in optimizers:
            name = type(optimizer).__name__
            if any(group.get("differentiable") for group in optimizer.param_groups):
                raise BadInput(
                    f"Engine(precision={pure.text!r}) does not work with {name}(differentiable=True): updates run on "
                    "copies, outside the autograd graph. Use another precision."
                )
            if pure.bf16_states and has_stochastic_rounding(optimizer):
                raise BadInput(
                    f"Engine(precision={pure.text!r}): {name} already keeps its state in fewer bits. "
                    f"Remove bf16-states: precision={PureBf16(kahan=pure.kahan).text!r}."
                )
        whole = models[0] if len(models) == 1 else ModuleList(models)
        named = named_modules(whole)
        # The weights of modules that the policy runs in FP32 or FP16 stay FP32.
        kept = [named[name] for name, precision in policy.modules(whole).items() if precision != "bf16"]
        self._models, self._optimizers = models, optimizers
        self._weights = parameters_to_convert(models, kept)
        self._was_narrow = False  # the model, with its buffers, was BF16 before
        self._update = Bf16Update(pure)
        self._hooks: list[RemovableHandle] = []
        self._by_themselves: list[tuple[Any, bool]] = []  # optimizers that can round stochastically; the old setting

    def install(self) -> None:
        self._was_narrow = bool(bf16_parameters(self._models))
        self._update.rests = to_bf16_(self._weights, set(self._parameters) if self._update.pure.kahan else ())
        optimizer: Any
        for optimizer in self._optimizers:
            PROTECTED_OPTIMIZERS.add(optimizer)
            self._hooks += _keep_saved_dtypes(optimizer)
            if self._left_to_itself(optimizer):
                self._by_themselves.append((optimizer, optimizer.bf16_stochastic_round))
                optimizer.bf16_stochastic_round = True

    def uninstall(self) -> None:
        changed = bf16_parameters(self._models)
        to_fp32_(changed, self._update.rests)
        for buffer in chain.from_iterable(model.buffers() for model in self._models):
            if self._was_narrow and buffer.dtype == torch.bfloat16:
                buffer.data = buffer.detach().to(torch.float32)
        for handle in self._hooks:
            handle.remove()
        for optimizer, before in self._by_themselves:
            optimizer.bf16_stochastic_round = before
        for optimizer in self._optimizers:
            PROTECTED_OPTIMIZERS.discard(optimizer)
            for parameter in changed:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if is_per_element_state(value, parameter) and value.dtype == torch.bfloat16:
                        state[key] = value.float()

    @property
    def locked_because(self) -> str:
        wrapper = find_wrapper(self._models, self._parameters)
        if wrapper is None:
            return ""
        return (
            f"{wrapper} was created for BF16 weights, which cannot become FP32 inside it. Save a checkpoint, and "
            "resume with FP32 weights in a new process."
        )

    def step_context(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        if self._left_to_itself(optimizer):
            return self._alike_on_ranks(optimizer)
        return self._update.around(optimizer)

    def state(self) -> dict[str, Any]:
        found = [self._update.rests.get(each) for each in self._parameters] if self._update.pure.kahan else []
        rests = [None if rest is None else rest.clone() for rest in found]  # copies, as the originals keep changing
        return {"drawn": self._update.noise.drawn, "rests": rests}

    def load(self, state: Mapping[str, Any]) -> None:
        drawn, rests = state.get("drawn", self._update.noise.drawn), state.get("rests", [])
        parameters = self._parameters if rests else []
        if not isinstance(drawn, int) or len(rests) != len(parameters):
            raise BadInput(f"load_state_dict(): the {PURE} state belongs to a different set of weights.")
        found = {each: rest for each, rest in zip(parameters, rests, strict=True) if rest is not None}
        for parameter, rest in found.items():
            if not isinstance(rest, Tensor) or rest.dtype != torch.int16:
                raise BadInput(f"load_state_dict(): the {PURE} state is damaged: expected int16 tensors.")
            if rest.numel() != local_tensor(parameter).numel():
                raise BadInput(f"load_state_dict(): the {PURE} state belongs to a different set of weights.")
        self._update.noise.drawn = drawn
        self._update.rests = {each: rest.to(each.device, copy=True) for each, rest in found.items()}

    @property
    def rests(self) -> Sequence[Tensor]:
        """Low halves of FP32 weights, which BF16 does not hold ("kahan")."""
        return list(self._update.rests.values())

    @property
    def _parameters(self) -> list[Parameter]:
        return [each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]]

    def _left_to_itself(self, optimizer: Any) -> bool:
        return has_stochastic_rounding(optimizer) and not self._update.pure.kahan

    @contextmanager
    def _alike_on_ranks(self, optimizer: Any) -> Iterator[None]:
        """Seed torch's random numbers for one step with a seed that every rank shares, then restore them.

        The optimizer's stochastic rounding draws from torch's generators; the user's stream is not affected.
        """
        noise = self._update.noise
        devices = {each.device.index for each in self._parameters if each.device.type == "cuda"}
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(noise.drawn)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(noise.drawn)
            noise.drawn += 1
            yield


def _keep_saved_dtypes(optimizer: Optimizer) -> list[RemovableHandle]:
    """Make ``load_state_dict`` keep the saved dtypes from now on; torch itself casts to the dtype of the weights."""
    given: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        given[:] = [state]

    def after(loaded: Optimizer) -> None:
        state = given.pop()
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            present = loaded.state.get(parameter, {})
            for key, saved in state["state"].get(number, {}).items():
                now = present.get(key)
                if isinstance(saved, Tensor) and isinstance(now, Tensor) and now.dtype != saved.dtype:
                    present[key] = saved.to(now.device, copy=True)

    return [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]
