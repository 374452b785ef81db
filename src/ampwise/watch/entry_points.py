"""torch's entry points, each with a word to the tracker before and after: what the script calls stays what it was.

All telling is done ``_quietly``: if we are wrong about something, the script must not learn of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampwise.watch.asking import unwrapped
from ampwise.watch.graphs import mark_scaled
from ampwise.watch.outcomes import is_ours
from ampwise.watch.patches import Patches, unseen
from ampwise.watch.rest import Rest
from ampwise.watch.state import PRECISIONS
from ampwise.watch.tracker import Tracker

__all__ = ["EntryPoints", "Listener"]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
Function = Callable[..., Any]


class Listener(Protocol):
    """Who wants to know of gradients before they are changed or used, and of steps."""

    def optimizer_made(self, optimizer: Any) -> None: ...

    def gradients_ready(self, optimizer: Any, scaler: Any | None) -> None:
        """The gradients of a step are complete, and not yet unscaled, clipped or used."""

    def step_begins(self, optimizer: Any) -> None:
        """Weights are about to change."""

    def step_taken(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        """The step is over. ran: the optimizer's own step was called."""

    def scheduler_moved(self, scheduler: Any) -> None: ...

    def step_over(self, optimizer: Any) -> None:
        """All has been told of a step: the next may be passed over."""

    def follow_again(self) -> None:
        """Steps were passed over, and no more are."""

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong."""


class EntryPoints:
    """Wraps torch's entry points, until the patches are undone and the hooks removed."""

    def __init__(self, patches: Patches, tracker: Tracker, listener: Listener, rest: Rest) -> None:
        self._patches, self._tracker, self._listener, self._rest = patches, tracker, listener, rest
        self._follows = tracker.follows
        self._running: list[tuple[str, int]] = []  # calls by name and object: one that calls its parent's is one call
        self._targets: list[int] = []  # optimizers that scalers are stepping
        self._ran: set[int] = set()  # those of them whose own step was called
        self._within: list[int] = []  # optimizers that are stepping by themselves
        self._wrap_backward()
        self.wrap_scaler(GradScaler)
        patches.replace(GradScaler, "__init__", self._making_scaler)
        self._wrap_optimizers()
        self._wrap_clipping()
        self._wrap_schedulers()
        patches.replace(autocast, "__enter__", self._entering)
        patches.replace(torch, "save", self._saving)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _followed(self, original: Function, watched: Function, *, rests: bool = False) -> Function:
        """The watched way where the call is one to follow, else the original as it is.

        rests: it is none in steps that are passed over.
        """
        follows, rest, watched = self._follows, self._rest, unseen(watched)

        def call(*args: Any, **kwargs: Any) -> Any:
            # The second by itself, as it may be traced. Of a script that compiles nothing is passed over.
            if (rests and rest.on) or torch.compiler.is_compiling() or not follows():
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        rest = self._rest
        began = rest.clock()
        try:
            yield
        except Exception as error:  # whatever it is, it is ours, and training goes on
            self._listener.failed(error)
        finally:
            rest.spent += rest.clock() - began

    @contextmanager
    def _call(self, name: str, thing: Any) -> Iterator[bool]:
        """Whether this is the outermost call of its kind on this object."""
        key = (name, id(thing))
        outermost = key not in self._running
        self._running.append(key)
        try:
            yield outermost
        finally:
            self._running.remove(key)

    # Backward

    def _wrap_backward(self) -> None:
        # Tensor.backward looks it up at each call, so one place is enough.
        self._patches.replace(torch.autograd, "backward", self._going_back)

    def _going_back(self, original: Function) -> Function:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = None
            with self._call("backward", None) as outermost:  # checkpointing calls it again, within
                if outermost:
                    with self._quietly():
                        made = self._tracker.backward_begins(tensors, _given(grad_tensors))
                result = original(tensors, grad_tensors, *args, **kwargs)
            if made is not None:
                with self._quietly():
                    self._tracker.backward_ended(made)
            return result

        watched = unseen(self._followed(original, backward))
        rest = self._rest

        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if rest.on:
                # Losses of other threads are none of ours; one on a device could not be looked at without waiting.
                single = isinstance(tensors, Tensor) and tensors.numel() == 1
                if not single or threading.get_ident() != rest.thread:
                    return original(tensors, *args, **kwargs)
                if tensors.is_cpu and math.isfinite(tensors.item()):
                    return original(tensors, *args, **kwargs)
                self._wake()
            return watched(tensors, *args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    def _wake(self) -> None:
        """Follow again from the middle of a step on: something is out of the ordinary."""
        with self._quietly():
            self._rest.out_of_the_ordinary()
            self._listener.follow_again()

    # Scalers

    def _making_scaler(self, original: Function) -> Function:
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            with self._quietly():
                self.wrap_scaler(type(scaler))  # which the script may have defined only now
                self._tracker.scaler_made(scaler)

        return self._followed(original, init)

    def wrap_scaler(self, kind: type) -> None:
        """Follow the methods of a class of scalers, those that it overrides, too."""
        wrappers = {
            "scale": self._scaling,
            "unscale_": self._unscaling,
            "step": self._stepping,
            "update": self._updating,
        }
        for each in kind.__mro__:
            for name, wrapper in wrappers.items() if issubclass(each, GradScaler) else ():
                if not getattr(vars(each).get(name), "_ampwise", name not in vars(each)):
                    self._patches.replace(each, name, wrapper)

    def _scaling(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler._enabled and not torch.compiler.is_compiling():
                if self._rest.on:
                    self._wake()
                with self._quietly():
                    self._rest.never_again()
                    self._tracker.scaler_used(scaler)
                    if isinstance(scaled, Tensor | list | tuple):  # an iterator would be used up
                        mark_scaled(scaled, scaler)
            return scaled

        scale._ampwise = True  # type: ignore[attr-defined] # of all threads: a scaler is not to be shared
        return scale

    def _unscaling(self, original: Function) -> Function:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            with self._call("unscale", scaler) as outermost:
                if outermost and scaler._enabled and not self._targets:
                    with self._quietly():
                        self._listener.gradients_ready(optimizer, scaler)
                        self._tracker.unscales(scaler, optimizer)
                return original(scaler, optimizer)

        return self._followed(original, unscale_)

    def _stepping(self, original: Function) -> Function:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._call("step", scaler) as outermost:
                if not outermost or not (scaler._enabled or is_ours(scaler)):
                    return original(scaler, optimizer, *args, **kwargs)
                with self._quietly():
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
            with self._quietly():
                self._step_is_over(optimizer, scaler, ran=id(inner) in self._ran)
            return result

        return self._followed(original, step)

    def _step_is_over(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        self._listener.step_taken(optimizer, scaler, ran=ran)
        if scaler is not None and scaler._enabled:
            self._tracker.scaler_stepped(scaler, optimizer)
        self._tracker.optimizer_stepped(optimizer, by_scaler=scaler is not None and scaler._enabled)

    def _updating(self, original: Function) -> Function:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._call("update", scaler) as outermost:
                if outermost and scaler._enabled:
                    with self._quietly():
                        self._tracker.updates(scaler)
                return original(scaler, *args, **kwargs)

        return self._followed(original, update)

    # Optimizers

    def _wrap_optimizers(self) -> None:
        self._patches.replace(Optimizer, "__init__", self._making_optimizer)
        self._patches.replace(Optimizer, "zero_grad", self._zeroing)
        self._patches.replace(nn.Module, "zero_grad", self._zeroing)

    def _making_optimizer(self, original: Function) -> Function:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            with self._quietly():
                self._listener.follow_again()
                self._listener.optimizer_made(optimizer)

        return self._followed(original, init)

    def _zeroing(self, original: Function) -> Function:
        def zero_grad(thing: Any, *args: Any, **kwargs: Any) -> Any:
            with self._quietly():
                self._tracker.zeroed(thing)
            return original(thing, *args, **kwargs)

        return self._followed(original, zero_grad, rests=True)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._rest.on and not (kwargs or args[1:]):
            return
        if torch.compiler.is_compiling() or not self._follows():
            return
        if self._rest.on:  # it may be a closure
            self._rest.never_again()
            self._wake()
        if self._targets:  # a scaler's step, of this one or of what wraps it
            self._ran.update(self._targets)
        elif self._within in ([], [id(optimizer)]):  # the same again: its last step has failed
            self._within = [id(optimizer)]
            with self._quietly():
                if _has_closure(args, kwargs):
                    self._tracker.stepping.add(self._tracker.state_of(optimizer).index)
                else:
                    self._listener.gradients_ready(optimizer, None)
                    self._tracker.optimizer_steps(optimizer)
        with self._quietly():
            self._listener.step_begins(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._rest.on:
            if threading.get_ident() == self._rest.thread and self._rest.step_passed(optimizer):
                with self._quietly():
                    self._listener.follow_again()
            return
        if torch.compiler.is_compiling() or not self._follows():
            return
        if self._targets or self._within != [id(optimizer)]:  # within another's
            return
        self._within.clear()
        with self._quietly():
            if _has_closure(args, kwargs):  # it has computed gradients only within the step
                self._tracker.stepping.discard(self._tracker.state_of(optimizer).index)
                self._listener.gradients_ready(optimizer, None)
                self._tracker.optimizer_steps(optimizer)
                self._rest.never_again()
            self._step_is_over(optimizer, None, ran=True)
        with self._quietly():
            self._listener.step_over(optimizer)

    # Clipping

    def _wrap_clipping(self) -> None:
        for name in CLIPPING:
            for owner in (clip_grad, nn.utils):  # a function goes by both names, whichever the script uses
                self._patches.replace(owner, name, self._clipping(name))

    def _clipping(self, name: str) -> Callable[[Function], Function]:
        def wrapper(original: Function) -> Function:
            def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                given = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # maybe a generator
                with self._call("clip", None) as outermost:
                    if outermost:
                        with self._quietly():
                            limit = next(iter([*args, *kwargs.values()]), None)
                            number = float(limit) if isinstance(limit, int | float) else None
                            for each in self._tracker.clipped(name, given, number):
                                self._listener.gradients_ready(each, None)
                    return original(given, *args, **kwargs)

            return self._followed(original, clip, rests=True)

        return wrapper

    # Schedulers

    def _wrap_schedulers(self) -> None:
        self._patches.replace(lr_scheduler.LRScheduler, "__init__", self._making_scheduler)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                self._wrap_scheduler(kind)

    def _wrap_scheduler(self, kind: type) -> None:
        for each in kind.__mro__:
            method = vars(each).get("step")
            if issubclass(each, lr_scheduler.LRScheduler) and method is not None and not hasattr(method, "_ampwise"):
                self._patches.replace(each, "step", self._moving)

    def _making_scheduler(self, original: Function) -> Function:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            with self._quietly():
                self._wrap_scheduler(type(scheduler))
            with self._call("schedule", None):  # it moves once, when it is made
                original(scheduler, *args, **kwargs)

        return self._followed(original, init)

    def _moving(self, original: Function) -> Function:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._call("schedule", None) as outermost:  # one may move others
                result = original(scheduler, *args, **kwargs)
            if outermost:
                with self._quietly():
                    self._listener.scheduler_moved(scheduler)
            return result

        return self._followed(original, step, rests=True)

    # Autocast and checkpoints

    def _entering(self, original: Function) -> Function:
        def enter(region: Any) -> Any:
            result = original(region)
            if region._enabled:
                with self._quietly():
                    self._tracker.region_entered(PRECISIONS.get(region.fast_dtype, "other"))
            return result

        return self._followed(original, enter, rests=True)

    def _saving(self, original: Function) -> Function:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            with self._quietly():
                self._tracker.saved(obj)
            return original(obj, *args, **kwargs)

        return self._followed(original, save)


def _given(weights: Any) -> Any:
    """What a backward pass was told to weigh its roots by, if anything: torch passes on a tuple of None."""
    return None if isinstance(weights, tuple | list) and all(each is None for each in weights) else weights


def _has_closure(args: Any, kwargs: Any) -> bool:
    return callable(kwargs.get("closure")) or any(callable(each) for each in args[1:2])
