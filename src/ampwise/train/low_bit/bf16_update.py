"""Run any optimizer's step on BF16 weights, without losing small updates.

The optimizer works on temporary FP32 parameters (stand-ins): a chunk of the parameters at a time, with their gradients
and optimizer state. It runs its own code on these, including fused kernels, and the results are rounded back. The
parameters themselves are written in place, so that references to them (DDP, CUDA graphs, hooks) stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.low_bit.flat_tensors import FlatLayout, FlatTensors, flat_layout, local_tensor
from ampwise.train.low_bit.pure_bf16 import PURE, PureBf16
from ampwise.train.low_bit.rounding import RoundingNoise, join_bf16_, split_bf16_, stochastic_round_

__all__ = ["CHUNK", "Bf16Update", "is_elementwise"]

CHUNK = 2**24  # elements in FP32 at a time (at least one parameter): 64 MiB each for weights, gradients and noise
StepFunction = Callable[..., Any]


class GroupedParameter(NamedTuple):
    """A parameter with a gradient, and the index of its group."""

    parameter: Parameter
    group: int


class Bf16Update:
    """Runs optimizer steps on BF16 weights, and keeps noise position and remainders between steps."""

    def __init__(self, pure: PureBf16) -> None:
        self.pure = pure
        self.noise = RoundingNoise()
        self.rests: dict[Parameter, Tensor] = {}  # with "kahan": rounding remainders of weights

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """Make ``optimizer.step`` work on FP32 copies inside this context."""
        own = vars(optimizer).get("step")
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
            raise BadInput(
                f"{PURE}: the step method of this {type(optimizer).__name__} was replaced, but it must run on some of "
                "the parameters at a time. Use register_step_pre_hook() or register_step_post_hook() instead."
            )
        optimizer.step = MethodType(Optimizer.profile_hook_step(self._step), optimizer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del optimizer.step
            if own is not None:
                optimizer.step = own  # type: ignore[method-assign]

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Replace the optimizer's own step, between its hooks."""
        if any(given is not None for given in (*args, *kwargs.values())):
            raise BadInput(f"{PURE}: step() takes no closure. Compute the gradients before it.")
        step, groups = _without_hooks(optimizer), optimizer.param_groups
        before = [group["params"] for group in groups]
        optimizer._opt_called = True  # schedulers check this
        try:
            for chunk in self._chunks(optimizer):
                _hand(chunk.stand_ins, optimizer, groups)
                with chunk:
                    step(optimizer)
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _chunks(self, optimizer: Any) -> Iterator[_Chunk]:
        held = [
            GroupedParameter(parameter, place)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        wide, narrow = _by_width(held)
        _refuse_sparse(narrow)
        # Other optimizers than torch's may use several parameters together, or count their calls.
        at_a_time = CHUNK if self.pure.elementwise or is_elementwise(optimizer) else None
        for some in _cut(narrow, at_a_time) or [[]]:
            yield _Chunk(self, optimizer, some, wide)
            wide = []


class _Chunk:
    """BF16 parameters with FP32 stand-ins, and parameters that are not BF16. The step runs inside this context."""

    def __init__(
        self, update: Bf16Update, optimizer: Any, narrow: Sequence[GroupedParameter], others: Sequence[GroupedParameter]
    ) -> None:
        self._parts = [_Part(update, optimizer, list(some)) for _, some in groupby(narrow, key=_device)]
        self.stand_ins = [*others, *(each for part in self._parts for each in part.stand_ins)]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        for part in self._parts:
            part.give_back()
            if kind is None:
                part.round()


class _Part:
    """The BF16 parameters of a chunk that are on one device."""

    def __init__(self, update: Bf16Update, optimizer: Any, held: Sequence[GroupedParameter]) -> None:
        self._update, self._optimizer = update, optimizer
        self._parameters = [each.parameter for each in held]
        self._layout = flat_layout([local_tensor(each) for each in self._parameters])
        self._weights = FlatTensors(self._layout).read(self._parameters)
        if update.pure.kahan:
            self._add_rests()
        gradients = FlatTensors(self._layout).read([each.grad for each in self._parameters if each.grad is not None])
        self.stand_ins = []
        for each, weight, gradient in zip(held, self._weights.parts, gradients.parts, strict=True):
            self.stand_ins.append(GroupedParameter(_stand_in(each.parameter, weight, gradient), each.group))
        self._kept = _States(optimizer, self._layout)
        for parameter, stand_in in self._pairs():
            self._kept.widen(parameter, stand_in)

    def give_back(self) -> None:
        """Move the optimizer's state back from the stand-ins to the parameters."""
        for parameter, stand_in in self._pairs():
            self._kept.give_back(parameter, stand_in)
            stand_in.grad = None  # to reuse its memory

    def round(self) -> None:
        """Round the results into the parameters."""
        if not is_elementwise(self._optimizer):
            for (_, stand_in), weight in zip(self._pairs(), self._weights.parts, strict=True):
                result = local_tensor(stand_in)
                if result.untyped_storage()._cdata != weight.untyped_storage()._cdata:
                    weight.copy_(result)  # the optimizer wrote it to other memory
        if self._update.pure.kahan:
            self._keep_rests()
        else:
            stochastic_round_(self._weights.flat, self._update.noise.like(self._weights.flat))
        self._weights.write(self._parameters)
        if self._update.pure.bf16_states:
            self._kept.narrow(self._parameters, self._update.noise)

    def _pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        return ((one, other.parameter) for one, other in zip(self._parameters, self.stand_ins, strict=True))

    def _add_rests(self) -> None:
        rests = self._update.rests
        for parameter in self._parameters:
            if parameter not in rests:
                rests[parameter] = torch.zeros_like(local_tensor(parameter), dtype=torch.int16)
        gathered = FlatTensors(self._layout, torch.int16).read([rests[each] for each in self._parameters])
        join_bf16_(self._weights.flat, gathered.flat)

    def _keep_rests(self) -> None:
        split = FlatTensors(self._layout, torch.int16)
        split.flat.copy_(split_bf16_(self._weights.flat))
        split.write([self._update.rests[each] for each in self._parameters])


class _States:
    """Optimizer state of parameters, moved to their stand-ins and back."""

    def __init__(self, optimizer: Any, layout: FlatLayout) -> None:
        self._state, self._layout = optimizer.state, layout
        self._narrow: dict[tuple[Parameter, str], Tensor] = {}  # BF16 tensors, to be written to again

    def widen(self, parameter: Parameter, stand_in: Parameter) -> None:
        if parameter not in self._state:
            return
        state = self._state[stand_in] = self._state.pop(parameter)
        for key, value in state.items():
            if is_per_element_state(value, parameter) and value.dtype == torch.bfloat16:
                self._narrow[parameter, key] = value
                state[key] = value.float()

    def give_back(self, parameter: Parameter, stand_in: Parameter) -> None:
        if stand_in in self._state:
            self._state[parameter] = self._state.pop(stand_in)

    def narrow(self, parameters: Sequence[Parameter], noise: RoundingNoise) -> None:
        """Round the state stochastically to BF16: rounding to nearest would lose moments that change by 0.1% a step."""
        for key in sorted({key for each in parameters for key in self._state.get(each, ())}):
            found = [self._state.get(each, {}).get(key) for each in parameters]
            if not all(is_per_element_state(value, each) for value, each in zip(found, parameters, strict=True)):
                continue
            wide = FlatTensors(self._layout).read(found)
            stochastic_round_(wide.flat, noise.like(wide.flat))
            for parameter, value in zip(parameters, found, strict=True):
                narrow = self._narrow.get((parameter, key))
                self._state[parameter][key] = value.to(torch.bfloat16) if narrow is None else narrow
            wide.write([self._state[parameter][key] for parameter in parameters])


def is_per_element_state(value: Any, parameter: Tensor) -> bool:
    """Return whether this is state with one number per element of the parameter, such as a moment."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and type(value) in (Tensor, type(parameter.data))  # not a quantized subclass
        and value.shape == parameter.shape
        and value.dim() > 0
    )


def is_elementwise(optimizer: Any) -> bool:
    """Return whether it treats each parameter separately, as torch's and torchao's optimizers are known to do."""
    return type(optimizer).__module__.startswith(("torch.optim.", "torchao.optim."))


def _stand_in(parameter: Any, weight: Tensor, gradient: Tensor) -> Parameter:
    made = Parameter(_like(parameter, weight), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes that optimizers may read
    made.grad = _like(parameter.grad, gradient)
    return made


def _like(whole: Any, part: Tensor) -> Tensor:
    """Wrap a local tensor as a DTensor if ``whole`` is one."""
    if not hasattr(whole, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _hand(held: Sequence[GroupedParameter], optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Give the optimizer only these parameters, without empty groups."""
    for place, group in enumerate(groups):
        group["params"] = [each.parameter for each in held if each.group == place]
    optimizer.param_groups = [group for group in groups if group["params"]]


def _without_hooks(optimizer: Any) -> StepFunction:
    """Return the step of its class without hooks, which run once, around all chunks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _by_width(held: Sequence[GroupedParameter]) -> tuple[list[GroupedParameter], list[GroupedParameter]]:
    """Return the parameters that are not BF16, and those that are, sorted by device."""
    narrow = [each for each in held if each.parameter.dtype == torch.bfloat16]
    wide = [each for each in held if each.parameter.dtype != torch.bfloat16]
    return wide, sorted(narrow, key=lambda each: str(each.parameter.device))


def _cut(held: Sequence[GroupedParameter], at_a_time: int | None) -> list[list[GroupedParameter]]:
    """Split parameters, in order, into chunks of at most this many elements or one parameter; None: one chunk."""
    if at_a_time is None or not held:
        return [[*held]] if held else []
    chunks, taken = [[held[0]]], local_tensor(held[0].parameter).numel()
    for each in held[1:]:
        size = local_tensor(each.parameter).numel()
        if taken + size > at_a_time or _device(each) != _device(chunks[-1][-1]):
            chunks.append([])
            taken = 0
        chunks[-1].append(each)
        taken += size
    return chunks


def _device(held: GroupedParameter) -> torch.device:
    return held.parameter.device


def _refuse_sparse(held: Sequence[GroupedParameter]) -> None:
    for each in held:
        if each.parameter.grad is not None and each.parameter.grad.layout != torch.strided:
            raise BadInput(
                f"{PURE}: a parameter of shape {tuple(each.parameter.shape)} has a sparse gradient. Create its "
                "embedding with sparse=False, or keep it in FP32: Policy('bf16-pure').keep('fp32', name)."
            )
