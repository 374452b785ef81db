"""Draw the same random numbers on both sides.

Torch draws different numbers for another dtype or device: dropout in BF16 would drop other values than in FP32. So all
numbers are drawn in FP32, on one device, and then converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.numbers.op_families import base_name

LIKE_THE_DEFAULT = ("rand", "randn", "normal")  # factory functions, in torch's default dtype


class SharedRandom:
    """Draws for both sides; ``device`` is the one on which both draw, None for the device of the operation."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.any = False
        self.masked_inside = False  # by a kernel of attention or a recurrent layer, which draws its own masks

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``func``, which draws random numbers."""
        name = base_name(str(func))
        if name == "native_dropout":
            self.any = True
            return self._dropout(func, *args)
        share = _dropped_inside(func, args, kwargs)
        self.any |= share != 0.0
        if share is not None or len(func._schema.returns) != 1:
            self.masked_inside |= bool(share)
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._into(func, args, kwargs)
        return self._sample(func, name, args, kwargs)

    def _dropout(self, func: Any, given: Tensor, share: float, train: bool | None) -> tuple[Tensor, Tensor]:
        elsewhere = self._elsewhere(given.device)
        if train is False or (elsewhere is None and given.dtype == torch.float32):
            return func(given, share, train)  # type: ignore[no-any-return]
        if elsewhere is None:
            _, mask = func(given.float(), share, train)
        else:  # draw as the CPU does
            drawn = torch.empty_like(given, dtype=torch.float32, device=elsewhere)
            mask = drawn.bernoulli_(1 - share).to(given.device).bool()
        wide = given if given.dtype == torch.float64 else given.float()
        return (wide * mask / (1 - share)).to(given.dtype), mask

    def _into(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, *rest = args
        elsewhere = self._elsewhere(target.device)
        if elsewhere is None and (target.dtype == torch.float32 or not target.is_floating_point()):
            return func(*args, **kwargs)
        dtype = torch.float32 if target.is_floating_point() else target.dtype
        # With the same layout: a tensor is filled in the order of its memory.
        drawn = torch.empty_like(target, dtype=dtype, device=elsewhere or target.device)
        func(drawn, *[self._given(each) for each in rest], **kwargs)
        return target.copy_(drawn)

    def _sample(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        first = next((each for each in args if isinstance(each, Tensor)), None)
        default = torch.get_default_dtype() if name in LIKE_THE_DEFAULT else None
        dtype = kwargs.get("dtype") or (first.dtype if first is not None else default)
        device = torch.device(kwargs.get("device") or (first.device if first is not None else "cpu"))
        elsewhere = self._elsewhere(device)
        narrow = dtype is not None and dtype.is_floating_point and dtype != torch.float32
        if elsewhere is None and not narrow:
            return func(*args, **kwargs)
        named = {argument.name for argument in func._schema.arguments}
        wanted = {"dtype": torch.float32} if narrow and "dtype" in named else {}
        placed = {"device": elsewhere} if elsewhere is not None and "device" in named else {}
        made = func(*[self._given(each) for each in args], **kwargs | wanted | placed)
        return made.to(device, dtype if narrow and made.is_floating_point() else made.dtype)

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wide = value.float() if value.is_floating_point() else value
        return wide if self._device is None else wide.to(self._device)

    def _elsewhere(self, device: torch.device) -> torch.device | None:
        """Return the device to draw on, if it is another one."""
        return None if self._device is None or self._device.type == device.type else self._device


def _dropped_inside(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return the dropout probability of a fused kernel; None for kernels without dropout."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return float(args[place] if place < len(args) else kwargs.get(argument.name, 0.0))
    return None
