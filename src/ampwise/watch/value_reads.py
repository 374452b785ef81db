"""Notice that the script looks at a loss or a gradient that is not finite: it may never get to a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isfinite
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampwise.trace.call_site import code_owner
from ampwise.trace.replay import is_finite
from ampwise.trace.value_ranges import readable_values
from ampwise.watch.patches import Patches

if TYPE_CHECKING:
    from ampwise.watch.step_watch import StepWatch

__all__ = ["Guard", "ValueReads"]

Function = Callable[..., Any]


class ValueReads:
    """Wrappers of the functions that read, compare or replace values. follow_again: ends a series of skipped steps."""

    def __init__(self, patches: Patches, watch: StepWatch, guard: Guard, follow_again: Callable[[], None]) -> None:
        self._watch, self._skipper, self._guard = watch, watch.skipper, guard
        self._follows, self._follow_again = watch.tracker.follows, follow_again
        for name in ("item", "__float__"):
            patches.replace(Tensor, name, self._wrapped_read)
        for name in ("isnan", "isinf", "isfinite"):
            patches.replace(torch, name, self._wrapped_question)
            patches.replace(Tensor, name, self._wrapped_question)
        for name in ("__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
            patches.replace(Tensor, name, self._wrapped_comparison)
        patches.replace(Tensor, "numpy", self._wrapped_question)
        for name in ("nan_to_num", "nan_to_num_"):
            patches.replace(torch, name, self._wrapped_replacement)
            patches.replace(Tensor, name, self._wrapped_replacement)

    def _read_by(self, frame: FrameType, tensor: Tensor) -> None:
        """Explain a value that is not finite, if the script itself reads it."""
        if code_owner(frame.f_code.co_filename) != "own":
            return
        if self._skipper.on:
            self._follow_again()
        with self._guard, self._follows.paused():
            if tensor.grad_fn is None:  # perhaps the norm of the gradients
                self._watch.bad_steps.any_gradients_unusable()
            self._watch.bad_steps.loss_read(frame, tensor)

    def _wrapped_read(self, original: Function) -> Function:
        """Return a function that reads a value of a tensor, and looks at it if it is not finite."""
        follows = self._follows

        def read(tensor: Tensor, *args: Any) -> Any:
            value = original(tensor, *args)
            is_number = isinstance(value, int | float)  # not a symbol, as in a trace with unknown values
            if (
                is_number
                and value - value != 0
                and torch.is_grad_enabled()
                and not torch.compiler.is_compiling()
                and follows()
            ):
                self._read_by(sys._getframe(1), tensor)
            return value

        return read

    def _wrapped_question(self, original: Function) -> Function:
        """Return a function such as ``torch.isnan`` that looks at a loss that is not finite."""
        follows = self._follows

        def ask(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            answer = original(tensor, *args, **kwargs)
            if isinstance(tensor, Tensor) and not torch.compiler.is_compiling() and follows():
                if tensor.numel() == 1:
                    is_bad = _is_bad(tensor)
                else:  # the rows of a loss, perhaps, of which the script drops some; infinities may be a mask
                    value = readable_values(tensor) if tensor.grad_fn is not None and tensor.is_cpu else None
                    is_bad = value is not None and bool(value.isnan().any())
                if is_bad:
                    self._read_by(sys._getframe(1), tensor)
            return answer

        return ask

    def _wrapped_comparison(self, original: Function) -> Function:
        """Return a comparison, such as ``loss != loss``, that looks at a loss that is not finite."""
        follows = self._follows

        def compare(tensor: Tensor, other: Any) -> Any:
            answer = original(tensor, other)
            if (
                tensor.numel() == 1
                and tensor.is_cpu  # elsewhere this would sync
                and tensor.is_floating_point()
                and (tensor.requires_grad or _is_same(tensor, other))
                and not torch.compiler.is_compiling()
                and follows()
                and _is_bad(tensor)
            ):
                self._read_by(sys._getframe(1), tensor)
            return answer

        return compare

    def _wrapped_replacement(self, original: Function) -> Function:
        """Return a function such as ``torch.nan_to_num`` that notes NaN in a loss or a gradient."""
        follows = self._follows

        def replace(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not isinstance(tensor, Tensor) or not tensor.is_cpu or not follows():
                return original(tensor, *args, **kwargs)  # on a GPU looking at it would sync
            with self._guard:
                is_loss = tensor.numel() == 1 and tensor.requires_grad
                if (is_loss or not tensor.requires_grad) and not is_finite(tensor.detach()):
                    if is_loss or self._watch.loop.is_gradient(tensor):
                        self._watch.loop.nan_replaced("loss" if is_loss else "gradient")
                    if is_loss:
                        self._read_by(sys._getframe(1), tensor)
            return original(tensor, *args, **kwargs)

        return replace


def _is_bad(tensor: Tensor) -> bool:
    """Whether a single value is not finite; False if it cannot be read, as in vmap or a trace without values."""
    value = readable_values(tensor)
    return value is not None and value.numel() == 1 and not isfinite(value)


def _is_same(tensor: Tensor, other: Any) -> bool:
    """Whether a value is compared with itself, as only NaN differs from itself: ``loss.data != loss.data``."""
    return other is tensor or (isinstance(other, Tensor) and other.is_cpu and other.data_ptr() == tensor.data_ptr())


class Guard:
    """Context that measures the time spent in it, and reports its errors to the watch: training goes on."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch, self._skipper = watch, watch.skipper
        self._began: list[float] = []  # a stack, as contexts may be nested

    def __enter__(self) -> None:
        self._began.append(self._skipper.clock())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        skipper = self._skipper
        try:
            if isinstance(error, Exception):
                self._watch.failed(error)
                return True
            return False
        finally:
            skipper.spent += skipper.clock() - self._began.pop()
