"""Notice that the script looks at a loss or a gradient that is not finite: it may never get to a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import isfinite
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from ampwise.trace.call_site import calling_site, code_owner
from ampwise.trace.replay import is_finite
from ampwise.trace.value_ranges import readable_values
from ampwise.watch.loss_code import own_caller
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
            patches.replace(torch, name, partial(self._wrapped_question, bad_is=name != "isfinite"))
            patches.replace(Tensor, name, partial(self._wrapped_question, bad_is=name != "isfinite"))
        for name in ("__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
            patches.replace(Tensor, name, partial(self._wrapped_comparison, name))
        patches.replace(Tensor, "numpy", self._wrapped_question)
        patches.replace(Distribution, "__init__", self._wrapped_distribution)
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

    def _asked_about(self, frame: FrameType, tensor: Tensor) -> None:
        """Note that the script itself asks about values, of which some are not finite: perhaps of a gradient."""
        if code_owner(frame.f_code.co_filename) != "own":
            return
        with self._guard, self._follows.paused():
            is_gradient = self._watch.cleaned.is_gradient(tensor)
        if is_gradient:
            if self._skipper.on:
                self._follow_again()
            with self._guard:
                self._watch.cleaned.asked(tensor)
            self._look_into_gradients()

    def _look_into_gradients(self) -> None:
        """Explain gradients that are not finite while they are as the backward pass has left them."""
        with self._guard, self._follows.paused():
            if torch._C._current_autograd_node() is None:  # not in a hook: the pass is over
                self._watch.bad_steps.any_gradients_unusable()

    def _wrapped_question(self, original: Function, bad_is: bool | None = None) -> Function:
        """Return a function such as ``torch.isnan`` that looks at a loss or a gradient that is not finite.

        bad_is: what the function answers for values that are not finite.
        """
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
                elif bad_is is not None and _may_be_gradient(tensor) and _is_bad_somewhere(answer, bad_is=bad_is):
                    self._asked_about(sys._getframe(1), tensor)
            return answer

        return ask

    def _wrapped_comparison(self, name: str, original: Function) -> Function:
        """Return a comparison, such as ``loss != loss``, that looks at a loss that is not finite."""
        follows = self._follows

        def compare(tensor: Tensor, other: Any) -> Any:
            answer = original(tensor, other)
            if tensor is other and name == "__ne__" and tensor.numel() > 1:  # true for NaN only
                is_seen = _may_be_gradient(tensor) and not torch.compiler.is_compiling() and follows()
                if is_seen and _is_bad_somewhere(answer, bad_is=True):
                    self._asked_about(sys._getframe(1), tensor)
            elif (
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

    def _wrapped_distribution(self, original: Function) -> Function:
        """Return the constructor of a distribution, which refuses parameters that are not finite."""
        follows = self._follows

        def make(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(distribution, *args, **kwargs)
            except ValueError:
                if not torch.compiler.is_compiling() and follows():
                    given = [each for each in vars(distribution).values() if isinstance(each, Tensor)]
                    refused = [each for each in given if each.grad_fn is not None and not is_finite(each.detach())]
                    frame = own_caller(sys._getframe(1))
                    if refused and frame is not None:
                        self._read_by(frame, refused[0])
                raise

        return make

    def _wrapped_replacement(self, original: Function) -> Function:
        """Return a function such as ``torch.nan_to_num`` that notes NaN in a loss or a gradient."""
        follows = self._follows

        def replace(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not isinstance(tensor, Tensor) or not tensor.is_cpu or not follows():
                return original(tensor, *args, **kwargs)  # on a GPU looking at it would sync
            with self._guard:
                if not is_finite(tensor.detach()):
                    is_loss = tensor.numel() == 1 and tensor.requires_grad
                    is_gradient = not tensor.requires_grad and self._watch.cleaned.is_gradient(tensor)
                    if is_loss or is_gradient:
                        what, step = "loss" if is_loss else "gradient", self._watch.tracker.steps + 1
                        self._watch.cleaned.replaced(calling_site(), what, step)
                    if is_gradient:
                        self._look_into_gradients()
                    elif is_loss or (tensor.grad_fn is not None and bool(tensor.detach().isnan().any())):
                        self._read_by(sys._getframe(1), tensor)
            return original(tensor, *args, **kwargs)

        return replace


def _is_bad(tensor: Tensor) -> bool:
    """Whether a single value is not finite; False if it cannot be read, as in vmap or a trace without values."""
    value = readable_values(tensor)
    return value is not None and value.numel() == 1 and not isfinite(value)


def _may_be_gradient(tensor: Tensor) -> bool:
    """Whether a tensor may be a gradient that can be looked at without a sync."""
    return tensor.grad_fn is None and tensor.is_cpu and not tensor.requires_grad and readable_values(tensor) is not None


def _is_bad_somewhere(answer: Tensor, *, bad_is: bool) -> bool:
    """Whether an answer for each value says for any that it is not finite."""
    return bool(answer.any()) if bad_is else not answer.all()


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
