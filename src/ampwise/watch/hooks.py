"""Hooks on the script's own models, which must not affect them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ampwise.watch.model_calls import AutocastState
from ampwise.watch.step_skipper import StepSkipper

__all__ = ["ForwardEnds", "ForwardStarts", "Hook"]


class Hook:
    """Hook that calls ``on_call``. Copies of a model share it; a pickled model has a harmless function instead.

    It does nothing while torch.compile traces, or graphs would break.
    """

    __name__ = "ampwise_hook"

    def __init__(self, on_call: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._on_call, self._failed = on_call, failed

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._on_call(*args)
        except Exception as error:  # must not reach the script
            self._failed(error)

    def __deepcopy__(self, memo: object) -> Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes any arguments and does nothing: loading needs no ampwise.
        return getattr, (contextlib.nullcontext(), "__exit__")


class TimedHook(Hook):
    """A hook that adds the time it takes to ``skipper.spent``. Its subclasses do next to nothing in skipped steps."""

    def __init__(self, on_call: Callable[..., None], failed: Callable[[Exception], None], skipper: StepSkipper) -> None:
        super().__init__(on_call, failed)
        self._skipper = skipper

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        skipper = self._skipper
        try:
            began = skipper.clock()
            self._on_call(*args)
            skipper.spent += skipper.clock() - began
        except Exception as error:
            self._failed(error)


class ForwardStarts(TimedHook):
    """Hook before a model's forward pass. In skipped steps it keeps what a replay of the last training call needs.

    All in one function, as it runs at every step. It reads ``skipper.on`` first: a script that compiles skips no steps.
    """

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        skipper = self._skipper
        if not skipper.on:
            return super().__call__(model, args, kwargs)
        try:
            if not torch.is_grad_enabled():
                if skipper.follows_evaluation():
                    self._on_call(model, args, kwargs)
            elif skipper.running is None and get_ident() == skipper.thread:
                skipper.running = model
                autocast = AutocastState.here("cpu") if torch.is_autocast_enabled("cpu") else None
                random = torch.default_generator.get_state() if type(model) in skipper.random_models else None
                skipper.last_call = (model, args, kwargs, autocast, random)
        except Exception as error:
            self._failed(error)


class ForwardEnds(TimedHook):
    """Hook after a model's forward pass."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        skipper = self._skipper
        if skipper.running is model:
            skipper.running = None
        elif not skipper.on:
            super().__call__(model, args, output)
        else:
            try:
                self._on_call(model, args, output)
            except Exception as error:
                self._failed(error)
