"""torch's entry points, each with a word to the tracker before and after: what the script calls stays what it was.

All telling is done ``_quietly``: if we are wrong about something, the script must not learn of it.
"""

from __future__ import annotations

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

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong."""


class EntryPoints:
    """Wraps torch's entry points, until the patches are undone and the hooks removed."""

    def __init__(self, patches: Patches, tracker: Tracker, listener: Listener) -> None:
        self._patches, self._tracker, self._listener = patches, tracker, listener
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

    def _followed(self, original: Function, watched: Function) -> Function:
        """The watched way where the call is one to follow, else the original as it is."""
        follows, watched = self._follows, unseen(watched)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not follows():  # the first by itself, as it may be traced
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is ours, and training goes on
            self._listener.failed(error)

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

        return self._followed(original, backward)

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
                with self._quietly():
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
                self._listener.optimizer_made(optimizer)

        return self._followed(original, init)

    def _zeroing(self, original: Function) -> Function:
        def zero_grad(thing: Any, *args: Any, **kwargs: Any) -> Any:
            with self._quietly():
                self._tracker.zeroed(thing)
            return original(thing, *args, **kwargs)

        return self._followed(original, zero_grad)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._follows():
            return
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
            self._step_is_over(optimizer, None, ran=True)

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

            return self._followed(original, clip)

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

        return self._followed(original, step)

    # Autocast and checkpoints

    def _entering(self, original: Function) -> Function:
        def enter(region: Any) -> Any:
            result = original(region)
            if region._enabled:
                with self._quietly():
                    self._tracker.region_entered(PRECISIONS.get(region.fast_dtype, "other"))
            return result

        return self._followed(original, enter)

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
