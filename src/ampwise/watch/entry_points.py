"""Wrap torch's entry points, such that calls are reported to the tracker before and after.

Reports are made in ``_guarded`` contexts: an error of ampwise must not reach the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampwise.watch.inspection import unwrapped
from ampwise.watch.loss_graph import mark_scaled
from ampwise.watch.patches import Patches, hidden_from_warnings
from ampwise.watch.step_outcomes import is_ours
from ampwise.watch.step_skipper import StepSkipper
from ampwise.watch.tracked_objects import PRECISIONS
from ampwise.watch.tracker import CallTracker

__all__ = ["EntryPoints", "Listener"]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
Function = Callable[..., Any]


class Listener(Protocol):
    """Object that is notified of gradients before they are changed or used, and of steps."""

    def optimizer_made(self, optimizer: Any) -> None: ...

    def gradients_ready(self, optimizer: Any, scaler: Any | None) -> None:
        """Called when the gradients of a step are complete, before they are unscaled, clipped or used."""

    def step_begins(self, optimizer: Any) -> None:
        """Called before weights change."""

    def step_taken(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        """Called after a step. ran: the optimizer's own step was called."""

    def scheduler_moved(self, scheduler: Any) -> None: ...

    def step_over(self, optimizer: Any) -> None:
        """Called last for a step: the next one may be skipped."""

    def follow_again(self) -> None:
        """Called when no more steps are skipped."""

    def failed(self, error: Exception) -> None:
        """Called with an error of ampwise's own."""


class EntryPoints:
    """Wrappers of torch's entry points, until the patches are undone and ``remove`` is called."""

    def __init__(self, patches: Patches, tracker: CallTracker, listener: Listener, skipper: StepSkipper) -> None:
        self._patches, self._tracker, self._listener, self._skipper = patches, tracker, listener, skipper
        self._follows = tracker.follows
        self._running: list[
            tuple[str, int]
        ] = []  # calls by name and object: a method and its super() method are one call
        self._targets: list[int] = []  # ids of optimizers that scalers are stepping
        self._ran: set[int] = set()  # ids of those whose own step was called
        self._stepping: list[int] = []  # ids of optimizers that are stepping without a scaler
        self._wrap_backward()
        self.wrap_scaler(GradScaler)
        patches.replace(GradScaler, "__init__", self._wrapped_scaler_init)
        self._wrap_optimizers()
        self._wrap_clipping()
        self._wrap_schedulers()
        patches.replace(autocast, "__enter__", self._wrapped_autocast_enter)
        patches.replace(torch, "save", self._wrapped_save)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _followed(self, original: Function, watched: Function, *, skips: bool = False) -> Function:
        """Return a function that calls ``watched`` if the call is followed, and the original otherwise.

        skips: it is not followed in skipped steps.
        """
        follows, skipper, watched = self._follows, self._skipper, hidden_from_warnings(watched)

        def call(*args: Any, **kwargs: Any) -> Any:
            # is_compiling() comes before follows(), which must not be traced. A script that compiles skips no steps.
            if (skips and skipper.on) or torch.compiler.is_compiling() or not follows():
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    def _guarded(self) -> _Guarded:
        return _Guarded(self._skipper, self._listener)

    @contextmanager
    def _outermost(self, name: str, thing: Any) -> Iterator[bool]:
        """Yield whether this is the outermost call of this method on this object."""
        key = (name, id(thing))
        outermost = key not in self._running
        self._running.append(key)
        try:
            yield outermost
        finally:
            self._running.remove(key)

    # Backward

    def _wrap_backward(self) -> None:
        # Tensor.backward looks it up at each call, so this one patch is enough.
        self._patches.replace(torch.autograd, "backward", self._wrapped_backward)

    def _wrapped_backward(self, original: Function) -> Function:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            backward_pass = None
            with self._outermost(
                "backward", None
            ) as outermost:  # activation checkpointing calls backward within backward
                if outermost:
                    with self._guarded():
                        backward_pass = self._tracker.backward_begins(tensors, _grad_tensors(grad_tensors))
                result = original(tensors, grad_tensors, *args, **kwargs)
            if backward_pass is not None:
                with self._guarded():
                    self._tracker.backward_ended(backward_pass)
            return result

        watched = hidden_from_warnings(self._followed(original, backward))
        skipper = self._skipper

        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if skipper.on:
                # Other threads are not followed. Reading a loss on a device would sync: its step is followed instead.
                try:
                    is_ordinary = get_ident() != skipper.thread or (tensors.is_cpu and isfinite(tensors.item()))
                except Exception:  # several losses, or one of several elements
                    is_ordinary = True
                if is_ordinary:
                    return original(tensors, *args, **kwargs)
                self._follow_again()
            return watched(tensors, *args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    def _follow_again(self) -> None:
        """Follow again, from the middle of a step on, as something unusual has happened."""
        with self._guarded():
            self._skipper.follow_next_steps()
            self._listener.follow_again()

    # Scalers

    def _wrapped_scaler_init(self, original: Function) -> Function:
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            with self._guarded():
                self.wrap_scaler(type(scaler))  # a subclass of the script's, perhaps
                self._tracker.scaler_made(scaler)

        return self._followed(original, init)

    def wrap_scaler(self, kind: type) -> None:
        """Wrap the methods of a scaler class, also those that a subclass overrides."""
        wrappers = {
            "scale": self._wrapped_scale,
            "unscale_": self._wrapped_unscale,
            "step": self._wrapped_scaler_step,
            "update": self._wrapped_update,
        }
        for each in kind.__mro__:
            for name, wrapper in wrappers.items() if issubclass(each, GradScaler) else ():
                if not getattr(vars(each).get(name), "_ampwise", name not in vars(each)):
                    self._patches.replace(each, name, wrapper)

    def _wrapped_scale(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler._enabled and not torch.compiler.is_compiling():
                if self._skipper.on:
                    self._follow_again()
                with self._guarded():
                    self._skipper.never_skip_again()
                    self._tracker.scaler_used(scaler)
                    if isinstance(scaled, Tensor | list | tuple):  # an iterator would be consumed
                        mark_scaled(scaled, scaler)
            return scaled

        scale._ampwise = True  # type: ignore[attr-defined] # in all threads: sharing a scaler is a bug
        return scale

    def _wrapped_unscale(self, original: Function) -> Function:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            with self._outermost("unscale", scaler) as outermost:
                if outermost and scaler._enabled and not self._targets:
                    with self._guarded():
                        self._listener.gradients_ready(optimizer, scaler)
                        self._tracker.unscales(scaler, optimizer)
                return original(scaler, optimizer)

        return self._followed(original, unscale_)

    def _wrapped_scaler_step(self, original: Function) -> Function:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._outermost("step", scaler) as outermost:
                if not outermost or not (scaler._enabled or is_ours(scaler)):
                    return original(scaler, optimizer, *args, **kwargs)
                with self._guarded():
                    self._listener.gradients_ready(optimizer, scaler)
                    if scaler._enabled:
                        self._tracker.scaler_steps(scaler, optimizer, args, kwargs)
                    else:
                        self._tracker.optimizer_steps(optimizer)
                inner = unwrapped(optimizer)
                self._ran.discard(id(inner))
                self._targets.append(id(inner))
                try:
                    result = original(scaler, optimizer, *args, **kwargs)
                finally:
                    self._targets.remove(id(inner))
            with self._guarded():
                self._step_is_over(optimizer, scaler, ran=id(inner) in self._ran)
            return result

        return self._followed(original, step)

    def _step_is_over(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        self._listener.step_taken(optimizer, scaler, ran=ran)
        if scaler is not None and scaler._enabled:
            self._tracker.scaler_stepped(scaler, optimizer)
        self._tracker.optimizer_stepped(optimizer, by_scaler=scaler is not None and scaler._enabled)

    def _wrapped_update(self, original: Function) -> Function:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._outermost("update", scaler) as outermost:
                if outermost and scaler._enabled:
                    with self._guarded():
                        self._tracker.updates(scaler)
                return original(scaler, *args, **kwargs)

        return self._followed(original, update)

    # Optimizers

    def _wrap_optimizers(self) -> None:
        self._patches.replace(Optimizer, "__init__", self._wrapped_optimizer_init)
        self._patches.replace(Optimizer, "zero_grad", self._wrapped_zero_grad)
        self._patches.replace(nn.Module, "zero_grad", self._wrapped_zero_grad)

    def _wrapped_optimizer_init(self, original: Function) -> Function:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            with self._guarded():
                self._listener.follow_again()
                self._listener.optimizer_made(optimizer)

        return self._followed(original, init)

    def _wrapped_zero_grad(self, original: Function) -> Function:
        def zero_grad(thing: Any, *args: Any, **kwargs: Any) -> Any:
            with self._guarded():
                self._tracker.zeroed(thing)
            return original(thing, *args, **kwargs)

        return self._followed(original, zero_grad, skips=True)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._skipper.on and len(args) == 1 and not kwargs:
            return
        if torch.compiler.is_compiling() or not self._follows():
            return
        if self._skipper.on:  # the argument may be a closure
            self._skipper.never_skip_again()
            self._follow_again()
        if self._targets:  # within a scaler's step, of this optimizer or of its wrapper
            self._ran.update(self._targets)
        elif self._stepping in ([], [id(optimizer)]):  # the same optimizer: its last step has failed
            self._stepping = [id(optimizer)]
            with self._guarded():
                if _has_closure(args, kwargs):
                    self._tracker.stepping.add(self._tracker.state_of(optimizer).index)
                else:
                    self._listener.gradients_ready(optimizer, None)
                    self._tracker.optimizer_steps(optimizer)
        with self._guarded():
            self._listener.step_begins(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        skipper = self._skipper
        if skipper.on:  # kept short, as this runs at every step
            if get_ident() != skipper.thread:
                return
            key = id(optimizer)
            if key in skipper.skipped:  # otherwise the optimizer is new
                skipper.skipped[key] += 1
                if key != skipper.leader or skipper.skipped[key] < skipper.leader_steps:
                    return
            with self._guarded():
                self._listener.follow_again()
            return
        if torch.compiler.is_compiling() or not self._follows():
            return
        if self._targets or self._stepping != [id(optimizer)]:  # within another optimizer's step
            return
        self._stepping.clear()
        with self._guarded():
            if _has_closure(args, kwargs):  # gradients were computed within the step
                self._tracker.stepping.discard(self._tracker.state_of(optimizer).index)
                self._listener.gradients_ready(optimizer, None)
                self._tracker.optimizer_steps(optimizer)
                self._skipper.never_skip_again()
            self._step_is_over(optimizer, None, ran=True)
        with self._guarded():
            self._listener.step_over(optimizer)

    # Clipping

    def _wrap_clipping(self) -> None:
        for name in CLIPPING:
            for owner in (clip_grad, nn.utils):  # the script may use either name
                self._patches.replace(owner, name, self._wrapped_clip(name))

    def _wrapped_clip(self, name: str) -> Callable[[Function], Function]:
        def wrapper(original: Function) -> Function:
            def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                given = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator
                with self._outermost("clip", None) as outermost:
                    if outermost:
                        with self._guarded():
                            limit = next(iter([*args, *kwargs.values()]), None)
                            number = float(limit) if isinstance(limit, int | float) else None
                            for each in self._tracker.clipped(name, given, number):
                                self._listener.gradients_ready(each, None)
                    return original(given, *args, **kwargs)

            return self._followed(original, clip, skips=True)

        return wrapper

    # Schedulers

    def _wrap_schedulers(self) -> None:
        self._patches.replace(lr_scheduler.LRScheduler, "__init__", self._wrapped_scheduler_init)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                self._wrap_scheduler(kind)

    def _wrap_scheduler(self, kind: type) -> None:
        for each in kind.__mro__:
            method = vars(each).get("step")
            if issubclass(each, lr_scheduler.LRScheduler) and method is not None and not hasattr(method, "_ampwise"):
                self._patches.replace(each, "step", self._wrapped_scheduler_step)

    def _wrapped_scheduler_init(self, original: Function) -> Function:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            with self._guarded():
                self._wrap_scheduler(type(scheduler))
            with self._outermost("schedule", None):  # its constructor makes a step
                original(scheduler, *args, **kwargs)

        return self._followed(original, init)

    def _wrapped_scheduler_step(self, original: Function) -> Function:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._outermost("schedule", None) as outermost:  # a scheduler may step others
                result = original(scheduler, *args, **kwargs)
            if outermost:
                with self._guarded():
                    self._listener.scheduler_moved(scheduler)
            return result

        return self._followed(original, step, skips=True)

    # Autocast and checkpoints

    def _wrapped_autocast_enter(self, original: Function) -> Function:
        def enter(region: Any) -> Any:
            result = original(region)
            if region._enabled:
                with self._guarded():
                    self._tracker.region_entered(PRECISIONS.get(region.fast_dtype, "other"))
            return result

        return self._followed(original, enter, skips=True)

    def _wrapped_save(self, original: Function) -> Function:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            with self._guarded():
                self._tracker.saved(obj)
            return original(obj, *args, **kwargs)

        return self._followed(original, save)


class _Guarded:
    """Context that measures the time spent in it, and reports its errors to the listener: training goes on."""

    __slots__ = ("_began", "_listener", "_skipper")

    def __init__(self, skipper: StepSkipper, listener: Listener) -> None:
        self._skipper, self._listener = skipper, listener

    def __enter__(self) -> None:
        self._began = self._skipper.clock()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        skipper = self._skipper
        try:
            if isinstance(error, Exception):
                self._listener.failed(error)
                return True
            return False
        finally:
            skipper.spent += skipper.clock() - self._began


def _grad_tensors(weights: Any) -> Any:
    """Return the ``grad_tensors`` argument; None if it is a tuple of None, as torch passes it."""
    return None if isinstance(weights, tuple | list) and all(each is None for each in weights) else weights


def _has_closure(args: Any, kwargs: Any) -> bool:
    return callable(kwargs.get("closure")) or any(callable(each) for each in args[1:2])
