"""Run any optimizer's step on BF16 weights, without losing small updates.

The optimizer works on temporary FP32 parameters (stand-ins): a chunk of the parameters at a time, with their gradients
and optimizer state. It runs its own code on these, including fused kernels, and the results are rounded back. The
parameters themselves are written in place, so that references to them (DDP, CUDA graphs, hooks) stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.low_bit.pure_bf16 import PURE, PureBf16
from ampwise.train.low_bit.rounding import RoundingNoise, join_bf16_, split_bf16_, stochastic_round_

__all__ = ["CHUNK", "Bf16Update", "is_elementwise", "is_per_element_state", "local_tensor"]

CHUNK = 2**24  # elements in FP32 at a time (at least one parameter): 64 MiB each for weights, gradients and noise
ALIGNMENT = 64  # elements: every tensor in a block of memory starts aligned for vector loads


class GroupedParameter(NamedTuple):
    """A parameter with a gradient, and the index of its group."""

    parameter: Parameter
    group: int

    @property
    def device(self) -> torch.device:
        return self.parameter.device


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
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # hooks run once, around all chunks
        groups = optimizer.param_groups
        before = [group["params"] for group in groups]
        optimizer._opt_called = True  # schedulers check this
        try:
            wide, chunks = self._chunks(optimizer)
            for chunk in chunks:
                parts = [
                    _DevicePart(self, optimizer, list(some)) for _, some in groupby(chunk, key=lambda each: each.device)
                ]
                held = [*wide, *(each for part in parts for each in part.stand_ins)]
                wide = []
                for place, group in enumerate(groups):
                    group["params"] = [each.parameter for each in held if each.group == place]
                optimizer.param_groups = [group for group in groups if group["params"]]
                try:
                    step(optimizer)
                finally:
                    for part in parts:
                        part.give_back()
                for part in parts:
                    part.round()
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _chunks(self, optimizer: Any) -> tuple[list[GroupedParameter], list[list[GroupedParameter]]]:
        """Return the parameters that are not BF16, and at least one chunk of those that are, possibly empty.

        A chunk has at most CHUNK elements or one parameter, on one device. Other optimizers than torch's may use
        several parameters together, or count their calls: they get all in one chunk.
        """
        held = [
            GroupedParameter(parameter, place)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        wide = [each for each in held if each.parameter.dtype != torch.bfloat16]
        narrow = [each for each in held if each.parameter.dtype == torch.bfloat16]
        narrow.sort(key=lambda each: str(each.device))
        divides = self.pure.elementwise or is_elementwise(optimizer)
        chunks: list[list[GroupedParameter]] = [[]]
        taken = 0
        for each in narrow:
            if each.parameter.grad is not None and each.parameter.grad.layout != torch.strided:
                raise BadInput(
                    f"{PURE}: a parameter of shape {tuple(each.parameter.shape)} has a sparse gradient. Create its "
                    "embedding with sparse=False, or keep it in FP32: Policy('bf16-pure').keep('fp32', name)."
                )
            size = local_tensor(each.parameter).numel()
            last = chunks[-1]
            if divides and last and (taken + size > CHUNK or each.device != last[-1].device):
                chunks.append([])
                taken = 0
            chunks[-1].append(each)
            taken += size
        return wide, chunks


class _DevicePart:
    """The BF16 parameters of a chunk that are on one device, with FP32 stand-ins."""

    def __init__(self, update: Bf16Update, optimizer: Any, held: Sequence[GroupedParameter]) -> None:
        self._update, self._optimizer = update, optimizer
        self._parameters = [each.parameter for each in held]
        self._layout = _FlatLayout([local_tensor(each) for each in self._parameters])
        self._weights = _FlatTensors(self._layout).read(self._parameters)
        if update.pure.kahan:
            for each in self._parameters:
                if each not in update.rests:
                    update.rests[each] = torch.zeros_like(local_tensor(each), dtype=torch.int16)
            rests = _FlatTensors(self._layout, torch.int16).read([update.rests[each] for each in self._parameters])
            join_bf16_(self._weights.flat, rests.flat)
        gradients = _FlatTensors(self._layout).read([each.grad for each in self._parameters if each.grad is not None])
        self.stand_ins = []
        self._narrow_state: dict[tuple[Parameter, str], Tensor] = {}  # BF16 tensors, to be written to again
        for (parameter, group), weight, gradient in zip(held, self._weights.parts, gradients.parts, strict=True):
            made = Parameter(_like(parameter, weight), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # attributes that optimizers may read
            made.grad = _like(parameter.grad, gradient)
            self.stand_ins.append(GroupedParameter(made, group))
            if parameter in optimizer.state:
                state = optimizer.state[made] = optimizer.state.pop(parameter)
                for key, value in state.items():
                    if is_per_element_state(value, parameter) and value.dtype == torch.bfloat16:
                        self._narrow_state[parameter, key] = value
                        state[key] = value.float()

    def give_back(self) -> None:
        """Move the optimizer's state back from the stand-ins to the parameters."""
        state = self._optimizer.state
        for parameter, (stand_in, _) in zip(self._parameters, self.stand_ins, strict=True):
            if stand_in in state:
                state[parameter] = state.pop(stand_in)
            stand_in.grad = None  # to reuse its memory

    def round(self) -> None:
        """Round the results into the parameters."""
        weights, noise = self._weights, self._update.noise
        if not is_elementwise(self._optimizer):
            for (stand_in, _), weight in zip(self.stand_ins, weights.parts, strict=True):
                result = local_tensor(stand_in)
                if result.untyped_storage()._cdata != weight.untyped_storage()._cdata:
                    weight.copy_(result)  # the optimizer wrote it to other memory
        if self._update.pure.kahan:
            split = _FlatTensors(self._layout, torch.int16)
            split.flat.copy_(split_bf16_(weights.flat))
            split.write([self._update.rests[each] for each in self._parameters])
        else:
            stochastic_round_(weights.flat, noise.like(weights.flat))
        weights.write(self._parameters)
        if self._update.pure.bf16_states:
            self._round_state(noise)

    def _round_state(self, noise: RoundingNoise) -> None:
        """Round the state stochastically to BF16: rounding to nearest would lose moments that change by 0.1% a step."""
        states, parameters = self._optimizer.state, self._parameters
        for key in sorted({key for each in parameters for key in states.get(each, ())}):
            found = [states.get(each, {}).get(key) for each in parameters]
            if not all(is_per_element_state(value, each) for value, each in zip(found, parameters, strict=True)):
                continue
            wide = _FlatTensors(self._layout).read(found)
            stochastic_round_(wide.flat, noise.like(wide.flat))
            for parameter, value in zip(parameters, found, strict=True):
                narrow = self._narrow_state.get((parameter, key))
                states[parameter][key] = value.to(torch.bfloat16) if narrow is None else narrow
            wide.write([states[parameter][key] for parameter in parameters])


class _FlatLayout:
    """Shapes, strides and offsets of tensors in one block of memory on their device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.total = 0  # elements
        self.device = tensors[0].device
        for tensor in tensors:
            # Of a dense tensor like this: optimizer kernels need weights and state in the same layout.
            strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
            self.places.append((tensor.shape, strides, self.total))
            self.total += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


class _FlatTensors:
    """Several tensors in one block of memory, so that rounding all of them takes only a few launches."""

    def __init__(self, layout: _FlatLayout, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.empty(layout.total, dtype=dtype, device=layout.device)
        self.parts = [self.flat.as_strided(*place) for place in layout.places]

    def read(self, tensors: Sequence[Tensor]) -> _FlatTensors:
        """Copy from tensors of any type."""
        torch._foreach_copy_(self.parts, [local_tensor(tensor) for tensor in tensors])
        return self

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy to tensors of any type."""
        torch._foreach_copy_([local_tensor(tensor) for tensor in tensors], self.parts)


def local_tensor(tensor: Any) -> Tensor:
    """Return the local part of a tensor."""
    held: Tensor = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held


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


def _like(whole: Any, part: Tensor) -> Tensor:
    """Wrap a local tensor as a DTensor if ``whole`` is one."""
    if not hasattr(whole, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
