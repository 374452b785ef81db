"""Wrap torch's entry points, such that calls are reported to the tracker and the watch before and after.

Reports are made in the context ``_guard``: an error of ampwise must not reach the script.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from math import isfinite
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.distributions import Distribution
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils.data import dataloader

from ampwise.trace.call_site import calling_site, code_owner
from ampwise.train.scaler.gradients import first_device
from ampwise.watch.drawn_samples import REPARAMETRISED
from ampwise.watch.gradients import is_ours
from ampwise.watch.inspection import PRECISIONS, mark_scaled, unwrapped
from ampwise.watch.patches import Patches, hidden_from_warnings
from ampwise.watch.value_reads import Guard, ValueReads

if TYPE_CHECKING:
    from ampwise.watch.step_watch import StepWatch

__all__ = ["EntryPoints"]

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
TENSOR_BACKWARD = Tensor.backward.__code__
Function = Callable[..., Any]


class EntryPoints:
    """Wrappers of torch's entry points, until the patches are undone and ``remove`` is called.

    Most methods are what runs instead of the function of torch that they are named after; they are given the original.
    """

    def __init__(self, patches: Patches, watch: StepWatch) -> None:
        self._patches, self._watch, self._tracker, self._skipper = patches, watch, watch.tracker, watch.skipper
        self._follows, self._guard = watch.tracker.follows, Guard(watch)
        self._running: list[tuple[str, int]] = []  # calls that are followed, by ``once`` and object
        self._targets: list[int] = []  # ids of optimizers that scalers are stepping
        self._ran: set[int] = set()  # ids of those whose own step was called
        self._stepping: list[int] = []  # ids of optimizers that are stepping without a scaler
        self._in_compiled_step = self._removed = False
        # Tensor.backward looks it up at each call, so this one patch is enough.
        patches.replace(torch.autograd, "backward", self._wrapped_backward)
        patches.replace(torch.autograd, "grad", self._wrapped_grad)
        ValueReads(patches, watch, self._guard, self.follow_again)
        self._follow(GradScaler, "__init__", self.scaler_init)
        self.wrap_scaler(GradScaler)
        self._follow(Optimizer, "__init__", self.optimizer_init)
        for owner in (Optimizer, nn.Module):
            self._follow(owner, "zero_grad", self.zero_grad, skips=True)
        for name in CLIPPING:
            for module in (clip_grad, nn.utils):  # the script may use either name
                self._follow(module, name, partial(self.clip, name), once="clip")
        self._follow(lr_scheduler.LRScheduler, "__init__", self.scheduler_init)
        for kind in list(vars(lr_scheduler).values()):
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                self._wrap_scheduler(kind)
        self._follow(autocast, "__enter__", self.autocast_enter, skips=True)
        self._follow(torch, "save", self.save)
        self._follow(Optimizer, "add_param_group", self.add_param_group)
        watched_calls: tuple[tuple[Any, str, Function], ...] = (
            (nn.Module, "eval", self.switch_to_eval),
            (nn.Module, "load_state_dict", self.load_weights),
            (nn.Module, "register_parameter", self.register_parameter),
            (nn.Module, "to", self.convert),
            (nn.Module, "half", self.convert),
            (nn.Module, "bfloat16", self.convert),
            (dataloader.DataLoader, "__iter__", self.loader_starts),
        )
        self._follow(nn.Parameter, "__deepcopy__", self.copy_parameter, claims=False)
        self._follow(swa_utils.AveragedModel, "__init__", self.averaged_model_init, claims=False)
        self._follow(swa_utils.AveragedModel, "update_parameters", self.average, claims=False)
        self._follow(torch, "set_default_dtype", self.set_default_dtype, claims=False)
        self._follow(torch, "manual_seed", self.set_seed, claims=False)
        self._follow(checkpoint, "check_backward_validity", self.checkpoint_begins, claims=False)
        for kind, name, watched in watched_calls:
            self._follow(kind, name, watched, claims=False)
        for kind in (Distribution, *REPARAMETRISED):
            if "sample" in vars(kind):
                self._follow(kind, "sample", self.sample, skips=True, claims=False)
            if kind is not Distribution:
                self._follow(kind, "rsample", self.rsample, skips=True, claims=False)
                self._follow(kind, "log_prob", self.log_prob, skips=True, claims=False)
        self._hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def remove(self) -> None:
        self._removed = True
        for hook in self._hooks:
            hook.remove()

    def wrap_scaler(self, kind: type) -> None:
        """Wrap the methods of a scaler class, also those that a subclass overrides."""
        for each in [each for each in kind.__mro__ if issubclass(each, GradScaler)]:
            wrappers = {"unscale_": self.unscale, "step": self.scaler_step, "update": self.update}
            for name, wrapper in wrappers.items():
                if not getattr(vars(each).get(name), "_ampwise", name not in vars(each)):
                    self._follow(each, name, wrapper, once=name)
            if not getattr(vars(each).get("scale"), "_ampwise", "scale" not in vars(each)):
                self._patches.replace(each, "scale", self._wrapped_scale)

    def _wrap_scheduler(self, kind: type) -> None:
        for each in kind.__mro__:
            method = vars(each).get("step")
            if issubclass(each, lr_scheduler.LRScheduler) and method is not None and not hasattr(method, "_ampwise"):
                self._follow(each, "step", self.scheduler_step, skips=True, once="scheduler")

    def _follow(
        self, owner: Any, name: str, watched: Function, *, skips: bool = False, once: str = "", claims: bool = True
    ) -> None:
        """Replace a function by one that calls ``watched(original, ...)`` if the call is followed."""
        self._patches.replace(owner, name, lambda original: self._followed(original, watched, skips, once, claims))

    def _followed(
        self, original: Function, watched: Function, skips: bool = False, once: str = "", claims: bool = True
    ) -> Function:
        """Return a function that calls ``watched`` if the call is followed, and the original otherwise.

        skips: it is not followed in skipped steps. once: a call within another of this name is not followed, as when a
        method calls that of its base class; calls of two scalers are separate. claims: a thread that makes this call
        trains; otherwise it may just build a model.
        """
        follows = self._follows if claims else self._follows.may_be_this
        skipper, running = self._skipper, self._running
        hidden_from_warnings(watched)

        def call(*args: Any, **kwargs: Any) -> Any:
            # is_compiling() comes before follows(), which must not be traced. A script that compiles skips no steps.
            if (skips and skipper.on) or torch.compiler.is_compiling() or not follows():
                return original(*args, **kwargs)
            if not once:
                return watched(original, *args, **kwargs)
            key = (once, id(args[0]) if args and isinstance(args[0], GradScaler) else 0)
            if key in running:
                return original(*args, **kwargs)
            running.append(key)
            try:
                return watched(original, *args, **kwargs)
            finally:
                running.remove(key)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    def follow_again(self) -> None:
        """Follow again, from the middle of a step on, as something unusual has happened."""
        with self._guard:
            self._skipper.follow_next_steps()
            self._watch.follow_again()

    # Backward

    def _wrapped_backward(self, original: Function) -> Function:
        # Activation checkpointing calls backward within backward.
        watched, skipper = (
            hidden_from_warnings(self._followed(original, self.backward, once="backward")),
            self._skipper,
        )

        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if skipper.on:
                # Other threads are not followed. Reading a loss on a device would sync: its step is followed instead.
                try:
                    is_ordinary = get_ident() != skipper.thread or (tensors.is_cpu and isfinite(tensors.item()))
                except Exception:  # several losses, or one of several elements
                    is_ordinary = True
                if is_ordinary:
                    frame: FrameType | None = sys._getframe(1)
                    if frame is not None and frame.f_code is TENSOR_BACKWARD:  # it will have ended when it is needed
                        frame = frame.f_back
                    if frame is not None and type(tensors) is Tensor:
                        skipper.last_backward = frame, frame.f_lasti, tensors.detach()  # without its graph
                    return original(tensors, *args, **kwargs)
                self.follow_again()
            return watched(tensors, *args, **kwargs)

        call._ampwise = True  # type: ignore[attr-defined]
        return call

    def backward(self, original: Function, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        backward_pass, kept, weights = None, None, grad_tensors
        if isinstance(weights, tuple | list) and all(each is None for each in weights):  # as torch passes it
            weights = None
        with self._guard:
            self._watch.cleaned.forget()
            self._watch.learning.backward_begins(tensors, partly=kwargs.get("inputs") is not None or len(args) > 3)
        with self._guard:  # of its own: what cannot be looked at must not hide the pass
            backward_pass = self._tracker.backward_begins(tensors, weights)
            if backward_pass is not None:
                kept = self._watch.backward_begins(sys._getframe(1), backward_pass.loss)
        try:
            result = original(tensors, grad_tensors, *args, **kwargs)
        except RuntimeError as error:
            if kept is not None and "returned nan values" in str(error):  # torch's anomaly detection
                with self._guard, self._follows.paused():
                    self._watch.bad_steps.explain_now(kept, kept.value, raised=True)
            raise
        if backward_pass is not None:
            with self._guard:
                self._tracker.backward_ended(backward_pass)
                self._watch.learning.backward_ended()
                if kept is not None:
                    self._watch.bad_steps.backward_ended(kept)
        return result

    def _wrapped_grad(self, original: Function) -> Function:
        """Return ``autograd.grad`` that looks at the gradients of parameters, with which a script updates by hand."""
        follows = self._follows

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(outputs, inputs, *args, **kwargs)
            if torch.compiler.is_compiling() or not follows():
                return found
            with_graph = bool(kwargs.get("create_graph") or any(args[2:3]))
            if not self._skipper.on:
                with self._guard:
                    self._watch.learning.differentiated(outputs, inputs, with_graph=with_graph)
            if with_graph:
                return found
            loss = outputs if isinstance(outputs, Tensor) else outputs[0] if len(outputs) == 1 else None
            every = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
            is_plain = bool(every) and isinstance(every[0], Tensor) and every[0].is_leaf  # a weight outside of modules
            if loss is not None and loss.numel() == 1 and every and (isinstance(every[0], nn.Parameter) or is_plain):
                if self._skipper.on:
                    self.follow_again()
                with self._guard, self._follows.paused():
                    self._watch.bad_steps.gradients_computed(sys._getframe(1), loss, found)
            return found

        return grad

    # Scalers

    def scaler_init(self, original: Function, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        with self._guard:
            self.wrap_scaler(type(scaler))  # a subclass of the script's, perhaps
            self._tracker.scaler_made(scaler)

    def _wrapped_scale(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler._enabled and not torch.compiler.is_compiling():
                if self._skipper.on:
                    self.follow_again()
                with self._guard:
                    self._skipper.allowed = False
                    self._tracker.scaler_used(scaler)
                    mark_scaled(scaled, scaler)
            return scaled

        scale._ampwise = True  # type: ignore[attr-defined] # in all threads: sharing a scaler is a bug
        return scale

    def unscale(self, original: Function, scaler: Any, optimizer: Any) -> Any:
        if scaler._enabled and not self._targets:
            with self._guard:
                state = self._tracker.state_of(optimizer)
                self._watch.gradients_ready(optimizer, state, scaler)
                self._tracker.unscales(scaler, optimizer, state)
        return original(scaler, optimizer)

    def scaler_step(self, original: Function, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (scaler._enabled or is_ours(scaler)):
            return original(scaler, optimizer, *args, **kwargs)
        with self._guard:
            state = self._tracker.state_of(optimizer)
            self._watch.gradients_ready(optimizer, state, scaler)
            if scaler._enabled:
                self._tracker.scaler_steps(scaler, optimizer, state, args, kwargs)
            else:
                self._tracker.optimizer_steps(optimizer, state)
        inner = id(unwrapped(optimizer))
        self._ran.discard(inner)
        self._targets.append(inner)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._targets.remove(inner)
        with self._guard:
            self._step_is_over(optimizer, scaler, ran=inner in self._ran)
        return result

    def update(self, original: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler._enabled:
            with self._guard:
                self._tracker.updates(scaler)
        return original(scaler, *args, **kwargs)

    def _step_is_over(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        state, by_scaler = self._tracker.state_of(optimizer), scaler is not None and scaler._enabled
        self._watch.step_taken(optimizer, state, scaler, ran=ran)
        if by_scaler:
            self._tracker.scaler_stepped(scaler, state)
        self._tracker.optimizer_stepped(optimizer, state, by_scaler=by_scaler)

    # Optimizers

    def optimizer_init(self, original: Function, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        with self._guard:
            self._watch.follow_again()
            self._watch.optimizer_made(optimizer, calling_site())

    def add_param_group(self, original: Function, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        with self._guard:
            self._watch.learning.holds(optimizer.param_groups[-1]["params"])
        return result

    def zero_grad(self, original: Function, thing: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            for optimizer, state in self._tracker.zeroes(thing):  # a script that drops them may have a reason
                if first_device([optimizer]).type == "cpu":  # on a GPU this would sync
                    self._watch.bad_steps.gradients_unusable(optimizer, state)
            self._tracker.zeroed(thing)
            self._watch.cleaned.forget()
        return original(thing, *args, **kwargs)

    def followed_step(self, optimizer: Any, compiled: Function) -> Function:
        """Return a compiled step with what its hooks do around it: inside of compiled code they do nothing."""
        refer = weakref.ref(optimizer)

        @wraps(compiled)
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer = refer()
            if optimizer is None or self._in_compiled_step or self._removed:
                return compiled(*args, **kwargs)
            self.before_step(optimizer, (optimizer, *args), kwargs)
            self._in_compiled_step = True  # parts of it, or all, may run eagerly
            try:
                result = compiled(*args, **kwargs)
            finally:
                self._in_compiled_step = False
            self.after_step(optimizer, (optimizer, *args), kwargs)
            return result

        return step

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._skipper.on and len(args) == 1 and not kwargs and _first_is_finite(optimizer):
            return
        if torch.compiler.is_compiling() or self._in_compiled_step or not self._follows():
            return
        if self._skipper.on:  # the argument may be a closure
            self._skipper.allowed = False
            self.follow_again()
        if self._targets:  # within a scaler's step, of this optimizer or of its wrapper
            self._ran.update(self._targets)
        elif self._stepping in ([], [id(optimizer)]):  # the same optimizer: its last step has failed
            self._stepping = [id(optimizer)]
            with self._guard:
                state = self._tracker.state_of(optimizer)
                if _has_closure(args, kwargs):
                    self._tracker.stepping.add(state.index)
                else:
                    self._watch.gradients_ready(optimizer, state, None)
                    self._tracker.optimizer_steps(optimizer, state)
        with self._guard:
            self._watch.step_begins(optimizer, self._tracker.state_of(optimizer))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        skipper = self._skipper
        if skipper.on:  # kept short, as this runs at every step
            if get_ident() != skipper.thread:
                return
            key = id(optimizer)
            if key in skipper.skipped:  # otherwise the optimizer is new
                skipper.skipped[key] += 1
                if key != skipper.leader or skipper.skipped[key] < skipper.leader_steps:
                    return
            with self._guard:
                self._watch.follow_again()
            return
        if torch.compiler.is_compiling() or self._in_compiled_step or not self._follows():
            return
        if self._targets or self._stepping != [id(optimizer)]:  # within another optimizer's step
            return
        self._stepping.clear()
        with self._guard:
            if _has_closure(args, kwargs):  # gradients were computed within the step
                state = self._tracker.state_of(optimizer)
                self._tracker.stepping.discard(state.index)
                self._watch.gradients_ready(optimizer, state, None)
                self._tracker.optimizer_steps(optimizer, state)
                skipper.allowed = False
            self._step_is_over(optimizer, None, ran=True)
        with self._guard:
            self._watch.step_over(optimizer)

    # Clipping, schedulers, autocast and checkpoints

    def clip(self, name: str, original: Function, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._skipper.on:
            try:
                return original(parameters, *args, **kwargs)
            except RuntimeError:  # error_if_nonfinite=True
                self.follow_again()
                with self._guard:
                    self._watch.bad_steps.any_gradients_unusable()
                raise
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator
        with self._guard:
            limit = next(iter([*args, *kwargs.values()]), None)
            number = float(limit) if isinstance(limit, int | float) else None
            owners = self._tracker.clipped(name, given, number)
            for optimizer, state in owners:
                self._watch.gradients_ready(optimizer, state, None)
            if number != math.inf:
                self._watch.loop.clipped(given, owners, number)
                if name == "clip_grad_norm_":
                    self._watch.learning.clipped(given, owners, number)
        try:
            return original(given, *args, **kwargs)
        except RuntimeError:  # error_if_nonfinite=True
            with self._guard:
                self._watch.bad_steps.any_gradients_unusable()
            raise

    def scheduler_init(self, original: Function, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        with self._guard:
            self._wrap_scheduler(type(scheduler))
        self._running.append(("scheduler", 0))  # its constructor makes a step
        try:
            original(scheduler, *args, **kwargs)
        finally:
            self._running.remove(("scheduler", 0))
        with self._guard:
            self._watch.loop.scheduler_made(scheduler)

    def scheduler_step(self, original: Function, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler, *args, **kwargs)  # this may step other schedulers
        with self._guard:
            self._watch.scheduler_moved(scheduler)
            self._watch.loop.scheduler_moved(scheduler)
        return result

    # Modes, data and replaced values

    def switch_to_eval(self, original: Function, model: Any) -> Any:
        result = original(model)
        with self._guard:
            self._watch.loop.switched_to_eval(model)
            self._watch.frozen.switched_to_eval(model)
            if code_owner(sys._getframe(2).f_code.co_filename) == "library":  # it has probably loaded the model
                self._watch.learning.loaded(model)
        return result

    def load_weights(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            self._watch.saved_states.loaded(model, args[0] if args else kwargs.get("state_dict"))
        result = original(model, *args, **kwargs)
        with self._guard:
            self._watch.learning.state_loaded(model, result)
            for health in self._watch.healths.values():  # a target network, perhaps, on which losses depend
                health.losses.restart()
            self._watch.learning.loaded(model)
        return result

    def register_parameter(self, original: Function, module: Any, name: Any, parameter: Any) -> None:
        before = vars(module).get("_parameters", {}).get(name)
        original(module, name, parameter)
        if parameter is not None:
            with self._guard:
                self._watch.ties.registered(module, name, before, parameter)
                self._watch.casts.made(parameter)
                if before is not None:
                    self._watch.stale.replaced(before)
                if not parameter.requires_grad:
                    self._watch.frozen.parameter_made(parameter)
                if self._watch.learning.training_changed() and self._skipper.on:
                    self.follow_again()

    def convert(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        wide: list[Tensor] = []
        with self._guard:
            wide = self._watch.casts.wide_ones(model)
        result = original(model, *args, **kwargs)
        with self._guard:
            self._watch.averages.converted(model)
            self._watch.casts.converted(wide)
        return result

    def sample(self, original: Function, distribution: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = original(distribution, *args, **kwargs)
        with self._guard:
            if isinstance(distribution, REPARAMETRISED):
                self._watch.learning.drawn.drawn(distribution, drawn)
        return drawn

    def rsample(self, original: Function, distribution: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # else it is called by ``sample()``
            with self._guard:
                self._watch.learning.drawn.trained_otherwise(distribution)
        return original(distribution, *args, **kwargs)

    def log_prob(self, original: Function, distribution: Any, value: Any) -> Any:
        with self._guard:
            self._watch.learning.drawn.trained_otherwise(distribution, value)
        return original(distribution, value)

    def set_seed(self, original: Function, seed: Any) -> Any:
        generator = original(seed)
        with self._guard:
            if self._watch.seeds.seeded(calling_site(), seed, self._tracker.steps) and self._skipper.on:
                self.follow_again()
        return generator

    def checkpoint_begins(self, original: Function, inputs: Any) -> Any:
        """Note an activation checkpoint of the old kind whose inputs need no gradient: it gives none to its weights."""
        result = original(inputs)
        with self._guard:
            if not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
                self._watch.learning.checkpoint_cuts(sys._getframe(1), training=self._watch.calls.is_running)
        return result

    def copy_parameter(self, original: Function, parameter: Any, memo: Any) -> Any:
        is_first = id(parameter) not in memo
        copy = original(parameter, memo)
        if is_first:
            with self._guard:
                self._watch.stale.copied(parameter, copy)
        return copy

    def averaged_model_init(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        with self._guard:
            self._watch.stale.averaged_model_made(model)

    def average(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            self._watch.stale.averaged_model_updated(model)
        return original(model, *args, **kwargs)

    def set_default_dtype(self, original: Function, dtype: Any) -> None:
        original(dtype)
        with self._guard:
            self._watch.casts.default_set()

    def loader_starts(self, original: Function, loader: Any) -> Any:
        iterator = original(loader)
        with self._guard:
            self._watch.loop.loader_starts(loader, iterator)
        return iterator

    def batch_drawn(self, iterator: Any, batch: Any) -> None:
        """Note a batch that a DataLoader has returned, in any thread."""
        with self._guard:
            self._watch.bad_steps.draws.batch_returned(iterator, batch)
            if batch is not None and self._follows.may_be_this():
                self._watch.loop.batch_drawn(iterator, batch)

    def autocast_enter(self, original: Function, region: Any) -> Any:
        is_outermost = not torch.is_autocast_enabled(region.device)
        result = original(region)
        if region._enabled:
            with self._guard:
                if is_outermost:
                    self._watch.loop.autocast_entered(region.device)
                self._tracker.region_entered(PRECISIONS.get(region.fast_dtype, "other"))
        return result

    def save(self, original: Function, obj: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            self._tracker.saved(obj)
        return original(obj, *args, **kwargs)


def _first_is_finite(optimizer: Any) -> bool:
    """Return whether the first gradient is finite: most of what goes wrong in a backward pass reaches it."""
    gradient = optimizer.param_groups[0]["params"][0].grad
    if gradient is None or not gradient.is_cpu or gradient.layout != torch.strided:
        return True
    total = gradient.sum().tolist()  # not patched
    return total - total == 0 or bool(gradient.isfinite().all())


def _has_closure(args: Any, kwargs: Any) -> bool:
    return callable(kwargs.get("closure")) or any(map(callable, args[1:2]))
