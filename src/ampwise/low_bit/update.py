"""Any optimizer's step on BF16 weights, without losing what is too small for them.

The optimizer is given stand-ins in FP32: a chunk of the parameters at a time, with their gradients and with what it
keeps of them. It runs its own code on these, fused kernels and all, and the results are rounded back. A parameter
itself is only written to, so that whatever holds on to it (DDP, CUDA graphs, hooks) does not notice.
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
from ampwise.low_bit.pure import PURE, Pure
from ampwise.low_bit.rounding import Noise, join_, round_, split_
from ampwise.low_bit.wide import Layout, Wide, layout_of, local

__all__ = ["CHUNK", "Update", "takes_each_alone"]

CHUNK = 2**24  # elements that are FP32 at a time, at least one parameter: 64 MiB each of weights, gradients and noise
Step = Callable[..., Any]


class Held(NamedTuple):
    """A parameter that has a gradient, and the group that it is of."""

    parameter: Parameter
    group: int


class Update:
    """Steps of optimizers on BF16 weights, and what has to be remembered from one to the next."""

    def __init__(self, pure: Pure) -> None:
        self.pure = pure
        self.noise = Noise()
        self.rests: dict[Parameter, Tensor] = {}  # with "kahan": what BF16 does not hold of a weight

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """While inside, ``optimizer.step`` is done on stand-ins."""
        own = vars(optimizer).get("step")
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
            raise BadInput(
                f"{PURE}: {type(optimizer).__name__}.step was replaced on this very optimizer, and here it is called "
                "for a part of the parameters at a time. Use register_step_pre_hook() or register_step_post_hook()."
            )
        optimizer.step = MethodType(Optimizer.profile_hook_step(self._step), optimizer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del optimizer.step
            if own is not None:
                optimizer.step = own  # type: ignore[method-assign]

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of the optimizer's own, between its hooks."""
        if any(given is not None for given in (*args, *kwargs.values())):
            raise BadInput(f"{PURE}: step() takes no closure here; gradients are computed before it.")
        step, groups = _without_hooks(optimizer), optimizer.param_groups
        before = [group["params"] for group in groups]
        optimizer._opt_called = True  # what schedulers go by
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
            Held(parameter, place)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        wide, narrow = _by_width(held)
        _refuse_sparse(narrow)
        # One that is not torch's may look at parameters together, or count its calls.
        at_a_time = CHUNK if self.pure.elementwise or takes_each_alone(optimizer) else None
        for some in _cut(narrow, at_a_time) or [[]]:
            yield _Chunk(self, optimizer, some, wide)
            wide = []


class _Chunk:
    """Some BF16 parameters, with FP32 stand-ins for them, and others besides. Inside of it, they take their step."""

    def __init__(self, update: Update, optimizer: Any, narrow: Sequence[Held], others: Sequence[Held]) -> None:
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

    def __init__(self, update: Update, optimizer: Any, held: Sequence[Held]) -> None:
        self._update, self._optimizer = update, optimizer
        self._parameters = [each.parameter for each in held]
        self._layout = layout_of([local(each) for each in self._parameters])
        self._weights = Wide(self._layout).read(self._parameters)
        if update.pure.kahan:
            self._add_rests()
        gradients = Wide(self._layout).read([each.grad for each in self._parameters if each.grad is not None])
        self.stand_ins = []
        for each, weight, gradient in zip(held, self._weights.parts, gradients.parts, strict=True):
            self.stand_ins.append(Held(_stand_in(each.parameter, weight, gradient), each.group))
        self._kept = _States(optimizer, self._layout)
        for parameter, stand_in in self._pairs():
            self._kept.widen(parameter, stand_in)

    def give_back(self) -> None:
        """What the optimizer keeps is of the parameters themselves again."""
        for parameter, stand_in in self._pairs():
            self._kept.give_back(parameter, stand_in)
            stand_in.grad = None  # whose memory serves again

    def round(self) -> None:
        """The results, into the parameters."""
        if not takes_each_alone(self._optimizer):
            for (_, stand_in), weight in zip(self._pairs(), self._weights.parts, strict=True):
                result = local(stand_in)
                if result.untyped_storage()._cdata != weight.untyped_storage()._cdata:
                    weight.copy_(result)  # which it has put elsewhere
        if self._update.pure.kahan:
            self._keep_rests()
        else:
            round_(self._weights.flat, self._update.noise.like(self._weights.flat))
        self._weights.write(self._parameters)
        if self._update.pure.bf16_states:
            self._kept.narrow(self._parameters, self._update.noise)

    def _pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        return ((one, other.parameter) for one, other in zip(self._parameters, self.stand_ins, strict=True))

    def _add_rests(self) -> None:
        rests = self._update.rests
        for parameter in self._parameters:
            if parameter not in rests:
                rests[parameter] = torch.zeros_like(local(parameter), dtype=torch.int16)
        gathered = Wide(self._layout, torch.int16).read([rests[each] for each in self._parameters])
        join_(self._weights.flat, gathered.flat)

    def _keep_rests(self) -> None:
        split = Wide(self._layout, torch.int16)
        split.flat.copy_(split_(self._weights.flat))
        split.write([self._update.rests[each] for each in self._parameters])


class _States:
    """What an optimizer keeps of parameters, moved to their stand-ins and back."""

    def __init__(self, optimizer: Any, layout: Layout) -> None:
        self._state, self._layout = optimizer.state, layout
        self._narrow: dict[tuple[Parameter, str], Tensor] = {}  # BF16 tensors, to be written to again

    def widen(self, parameter: Parameter, stand_in: Parameter) -> None:
        if parameter not in self._state:
            return
        state = self._state[stand_in] = self._state.pop(parameter)
        for key, value in state.items():
            if is_kept_of(value, parameter) and value.dtype == torch.bfloat16:
                self._narrow[parameter, key] = value
                state[key] = value.float()

    def give_back(self, parameter: Parameter, stand_in: Parameter) -> None:
        if stand_in in self._state:
            self._state[parameter] = self._state.pop(stand_in)

    def narrow(self, parameters: Sequence[Parameter], noise: Noise) -> None:
        """In BF16, rounded by chance: of a moment that moves by a thousandth a step, nearest would keep nothing."""
        for key in sorted({key for each in parameters for key in self._state.get(each, ())}):
            found = [self._state.get(each, {}).get(key) for each in parameters]
            if not all(is_kept_of(value, each) for value, each in zip(found, parameters, strict=True)):
                continue
            wide = Wide(self._layout).read(found)
            round_(wide.flat, noise.like(wide.flat))
            for parameter, value in zip(parameters, found, strict=True):
                narrow = self._narrow.get((parameter, key))
                self._state[parameter][key] = value.to(torch.bfloat16) if narrow is None else narrow
            wide.write([self._state[parameter][key] for parameter in parameters])


def is_kept_of(value: Any, parameter: Tensor) -> bool:
    """Whether it has a number for each of the parameter's, and is no count of steps."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and type(value) in (Tensor, type(parameter.data))  # and none that is coded in some way of its own
        and value.shape == parameter.shape
        and value.dim() > 0
    )


def takes_each_alone(optimizer: Any) -> bool:
    """Torch's and torchao's treat each parameter by itself, and keep counts by parameter; of others nobody knows."""
    return type(optimizer).__module__.startswith(("torch.optim.", "torchao.optim."))


def _stand_in(parameter: Any, weight: Tensor, gradient: Tensor) -> Parameter:
    made = Parameter(_like(parameter, weight), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # marks that optimizers go by
    made.grad = _like(parameter.grad, gradient)
    return made


def _like(whole: Any, part: Tensor) -> Tensor:
    """This process's part, as the whole is: a DTensor of a DTensor."""
    if not hasattr(whole, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _hand(held: Sequence[Held], optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The optimizer has these parameters and no others, and no group without one."""
    for place, group in enumerate(groups):
        group["params"] = [each.parameter for each in held if each.group == place]
    optimizer.param_groups = [group for group in groups if group["params"]]


def _without_hooks(optimizer: Any) -> Step:
    """The step that its class has; hooks have their turn once, around all chunks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _by_width(held: Sequence[Held]) -> tuple[list[Held], list[Held]]:
    """Those that are stepped as they are, and those in BF16, one device after the other."""
    narrow = [each for each in held if each.parameter.dtype == torch.bfloat16]
    wide = [each for each in held if each.parameter.dtype != torch.bfloat16]
    return wide, sorted(narrow, key=lambda each: str(each.parameter.device))


def _cut(held: Sequence[Held], at_a_time: int | None) -> list[list[Held]]:
    """In their order, so many elements at a time, or more if a parameter has more; None: all at once."""
    if at_a_time is None or not held:
        return [[*held]] if held else []
    chunks, taken = [[held[0]]], local(held[0].parameter).numel()
    for each in held[1:]:
        size = local(each.parameter).numel()
        if taken + size > at_a_time or _device(each) != _device(chunks[-1][-1]):
            chunks.append([])
            taken = 0
        chunks[-1].append(each)
        taken += size
    return chunks


def _device(held: Held) -> torch.device:
    return held.parameter.device


def _refuse_sparse(held: Sequence[Held]) -> None:
    for each in held:
        if each.parameter.grad is not None and each.parameter.grad.layout != torch.strided:
            raise BadInput(
                f"{PURE}: a parameter of shape {tuple(each.parameter.shape)} has a sparse gradient. Make its "
                "embedding with sparse=False, or keep it: Policy('bf16-pure').keep('fp32', name)."
            )
