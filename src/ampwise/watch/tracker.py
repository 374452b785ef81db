"""Track a training script call by call: scaling, unscaling, clipping, steps, and their order.

Nothing here changes the script's objects or syncs with a device. Each call is reported as a ``RunEvent`` of
``ampwise.watch.run_events``, with the state at the time of the call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.trace.call_site import calling_site
from ampwise.train.low_bit.safe_updates import keeps_small_updates
from ampwise.watch.followed_thread import FollowedThread
from ampwise.watch.inspection import (
    autocast_precision,
    device_and_precision,
    eps_of,
    has_fsdp1,
    inner_model,
    is_plain_torch,
    parameters_of,
    precisions_of,
    probe,
    probed_parameters,
    stage_of,
    states_in,
    unwrapped,
)
from ampwise.watch.loss_graph import leaves_of, read_losses
from ampwise.watch.run_events import (
    Backward,
    CheckpointSaved,
    Clip,
    ForwardCall,
    GradNormRead,
    OptimizerStep,
    RunEvent,
    RunEvents,
    ScalerCreated,
    ScalerStep,
    ScalerUpdate,
    SchedulerStep,
    Unscale,
)
from ampwise.watch.tracked_objects import BackwardPass, TrackedOptimizer, TrackedScaler, TrackedScheduler, WeakStates

__all__ = ["CallTracker"]

HALVES = {"fp16", "bf16"}
FEW_OPTIMIZERS = 8  # of more, only those whose parameters are in the graph are looked at


class CallTracker:
    """Turn calls into events. tell: called with each event and its step."""

    def __init__(self, tell: Callable[[RunEvent, int], None]) -> None:
        self._tell = tell
        self.follows = FollowedThread()
        self.optimizers: WeakStates[TrackedOptimizer] = WeakStates()
        self.scalers: WeakStates[TrackedScaler] = WeakStates()
        self._schedulers: WeakStates[TrackedScheduler] = WeakStates()
        self.run_events = RunEvents()
        self.stepping: set[int] = set()  # indices of optimizers whose running step computes gradients in a closure
        self._models: MutableMapping[nn.Module, tuple[int, list[TrackedOptimizer]]] = WeakIdKeyDictionary()
        self._in_training_mode: set[int] = set()  # ids of models that have ever been
        self._forwards = 0  # training passes so far
        self._running: list[nn.Module] = []  # nested models, the outermost first
        self._regions: dict[str, None] = {}  # autocast precisions since the last step
        self._probes = _Probes()

    def _step(self, states: Sequence[TrackedOptimizer] = ()) -> int:
        """Return the number of the next step: of these optimizers, or of the one with the most steps."""
        every = states or [state for _, state in self.optimizers.pairs()]
        return 1 + max((state.steps for state in every), default=0)

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that has the most."""
        return max((state.steps for state in self.optimizers.states()), default=0)

    # Models and precision

    def trains(self, model: nn.Module, state: TrackedOptimizer) -> None:
        """Note that the optimizer trains the model."""
        _, states = self._models.setdefault(model, (len(self._models), []))
        if state not in states:
            states.append(state)

    def region_entered(self, precision: str) -> None:
        """Note that an enabled autocast region was entered."""
        if torch.is_grad_enabled():
            self._regions[precision] = None
            for state in self._trained_by(self._running[0]) if self._running else ():  # entered by the model itself
                state.precisions[precision] = None

    def model_begins(self, model: nn.Module, *_: Any) -> tuple[ForwardCall, list[TrackedOptimizer]] | None:
        """Return the pass and the optimizers it trains for; None if it is part of another pass, or not followed."""
        if not self.follows():  # e.g. a replica of DataParallel
            return None
        self._running.append(model)
        if len(self._running) > 1:  # part of another
            return None
        grad_enabled = torch.is_grad_enabled()
        # Some models are trained in evaluation mode: those that never were in training mode.
        self._in_training_mode |= {id(model)} if grad_enabled and model.training else set()
        training = grad_enabled and (model.training or id(model) not in self._in_training_mode)
        device, precision = device_and_precision(model)
        states = self._trained_by(model) if training else []
        others = [each for state in states for each in state.precisions if each in HALVES and each != precision]
        other = others[0] if others and precision in HALVES else None
        for state in states:
            state.precisions[precision] = None
            state.mixed |= other is not None
        self._forwards += training
        event = ForwardCall(
            site=calling_site(),
            training=training,
            precision=precision,
            device=device,
            model=type(inner_model(model)).__name__,
            number=self._models[model][0] if model in self._models else None,
            other_half=other,
        )
        self.run_events.forwards[event] = self.run_events.forwards.get(event, 0) + 1
        self._tell(event, self._step())
        return event, (states or self._trained_by(inner_model(model))) if training else []

    def model_ends(self, model: nn.Module, *_: Any) -> bool:
        """Note the end of a pass. Return whether it was the outermost."""
        if self._running and self._running[-1] is model:
            self._running.pop()
            return not self._running
        return False

    def last_pass_of(self, model: nn.Module) -> tuple[ForwardCall, list[int]] | None:
        """Return a model's last followed training pass, and the indices of the optimizers it trains for."""
        number = self._models[model][0] if model in self._models else None
        passes = (each for each in reversed(self.run_events.forwards) if each.training and each.number == number)
        event = None if number is None else next(passes, None)
        return None if event is None else (event, [state.index for state in self._trained_by(model)])

    def _trained_by(self, model: nn.Module) -> list[TrackedOptimizer]:
        known = self._models.get(model)
        return [] if known is None else known[1]

    def precisions_since_step(self, state: TrackedOptimizer) -> tuple[str, ...]:
        """Return the precisions of an optimizer's models since its last step; autocast's if no model call was seen."""
        unseen = not state.precisions and not self._forwards
        return tuple(self._regions if unseen else state.precisions)

    # Backward

    def backward_begins(self, tensors: Any, weights: Any = None) -> BackwardPass | None:
        """Return the state before a backward pass; None without gradients. weights: its ``grad_tensors``."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors) if isinstance(tensors, list | tuple) else []
        roots = [each for each in given if isinstance(each, Tensor) and each.grad_fn is not None]
        if not roots:
            return None
        loss = read_losses(roots)
        event = Backward(
            site=calling_site(),
            scaled=loss.scaled,
            partly=loss.partly,
            scaled_by_constant=loss.constant,
            autocast=autocast_precision(roots[0].device.type),
            loss_is_mean=loss.is_mean if weights is None else None,
        )
        self._probes = _Probes(self._may_get_gradients([each for each in given if isinstance(each, Tensor)]))
        # A copy, as the script may modify its loss.
        single = len(roots) == 1 and roots[0].numel() == 1
        plain = roots[0].detach().reshape(()).clone() if single else None
        return BackwardPass(event, self._forwards, plain, loss.scaler)

    def _may_get_gradients(self, roots: Sequence[Tensor]) -> list[tuple[Any, TrackedOptimizer]]:
        """Return the optimizers that a backward pass may reach: all of them, unless there are many."""
        pairs = self.optimizers.pairs()
        leaves = leaves_of(roots) if len(pairs) > FEW_OPTIMIZERS else None
        return pairs if leaves is None else _sharing(pairs, leaves)

    def backward_ended(self, backward_pass: BackwardPass) -> None:
        reached = []
        for state, before, after in self._probes.changed():
            reached.append(state)
            self._add(backward_pass, state, before, after)
        self._probes = _Probes()
        self._tell(backward_pass.event, self._step(reached))

    def _add(self, backward_pass: BackwardPass, state: TrackedOptimizer, before: list[Any], after: list[Any]) -> None:
        if not any(before):  # the script set them to None
            state.forget()
        if state.pending and state.unscaled_at is not None and backward_pass.event.scaled:
            state.midway = state.unscaled_at
        if state.pending and state.updated_at is not None:
            self._tell(ScalerUpdate(site=state.updated_at, pending=True), self._step([state]))
            state.updated_at = None
        state.add(backward_pass)
        state.left = after

    def zeroed(self, thing: Any) -> None:
        """Note a ``zero_grad`` of an optimizer or a model, for all optimizers with these parameters."""
        if isinstance(thing, nn.Module):
            parameters = list(thing.parameters())
        else:
            self.state_of(thing)
            parameters = parameters_of(thing)
        given = {id(each) for each in parameters}
        for optimizer, state in self._owners_of(parameters):
            if all(id(each) in given for each in parameters_of(optimizer) if each.grad is not None):
                if state.pending and state.index not in self.stepping:
                    state.dropped_at, state.dropped_pass = calling_site(), state.pending[-1].event.site
                state.forget()

    # Gradients read or changed

    def clipped(self, function: str, parameters: Any, limit: float | None) -> list[Any]:
        """Report clipping. Return the optimizers of the parameters."""
        owners = self._owners_of(parameters)
        for _, state in owners:
            state.clipped |= limit != math.inf
        scaled = next((event for _, state in owners if (event := state.scaled) is not None), None)
        seen: dict[str, Any] = {
            "site": calling_site(),
            "function": function,
            "scaled": scaled is not None,
            "backward": None if scaled is None else scaled.site,
        }
        # Clipping to infinity only computes the norm.
        self._tell(
            GradNormRead(**seen) if limit == math.inf else Clip(**seen, limit=limit),
            self._step([state for _, state in owners]),
        )
        return [optimizer for optimizer, _ in owners]

    def _owners_of(self, parameters: Any) -> list[tuple[Any, TrackedOptimizer]]:
        return _sharing(self.optimizers.pairs(), {id(each) for each in parameters})

    # Optimizers

    def state_of(self, optimizer: Any) -> TrackedOptimizer:
        optimizer = unwrapped(optimizer)
        state = self.optimizers.get(optimizer)
        if state is None:
            plain = type(optimizer).__module__.startswith("torch.optim")
            state = TrackedOptimizer(self.optimizers.count, type(optimizer).__name__, plain)
            self.optimizers.add(optimizer, state)
        return state

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Report a step that is not made by a scaler."""
        state = self.state_of(optimizer)
        scaled = any(each.event.scaled for each in state.pending)
        first = state.pending[0].event if state.pending else None
        self._tell(
            OptimizerStep(
                site=calling_site(),
                optimizer=state.name,
                scaled=scaled,
                unscaled=scaled and state.unscaled_at is not None,
                again=not state.pending and state.by_scaler,
                backwards=len(state.pending),
                undivided=_undivided(optimizer, state),
                scaled_by_constant=None if first is None else first.scaled_by_constant,
                precisions=self.precisions_since_step(state),
                mixed_forward=state.mixed,
                scaler=any(scaler.is_enabled() for scaler, _ in self.scalers.pairs()),
                parameters=precisions_of(optimizer),
                eps=eps_of(optimizer),
                backward=None if first is None else first.site,
                plain=state.plain and not keeps_small_updates(optimizer),
            ),
            self._step([state]),
        )

    def optimizer_stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        state = self.state_of(optimizer)
        if state.dropped_at is not None and any(each.event.site == state.dropped_pass for each in state.pending):
            self.run_events.dropped[state.dropped_at] = self.run_events.dropped.get(state.dropped_at, 0) + 1
        state.bare = not by_scaler and bool(state.pending)
        state.by_scaler = by_scaler
        for _, sharing in self._owners_of(parameters_of(optimizer)):  # itself, and e.g. its wrapper
            sharing.reset()
        state.reset()
        state.steps += 1
        self.run_events.steps += 1
        self._regions = {}

    def add_skipped_steps(self, steps: Mapping[int, int]) -> None:
        """Add skipped steps, by optimizer index."""
        for scheduler, known in self._schedulers.pairs():
            state = self.optimizers.get(unwrapped(scheduler.optimizer))
            known.at_step += 0 if state is None else steps.get(state.index, 0)
        for state in self.optimizers.states():
            state.reset()
            state.steps += steps.get(state.index, 0)
        self.run_events.steps += sum(steps.values())
        self._regions, self._running, self._probes = {}, [], _Probes()

    # Scalers

    def scaler_made(self, scaler: Any) -> None:
        self.scalers.add(scaler, TrackedScaler(ScalerCreated(site=calling_site(), enabled=scaler.is_enabled())))

    def scaler_state(self, scaler: Any) -> TrackedScaler:
        known = self.scalers.get(scaler)
        return known or self.scalers.add(scaler, TrackedScaler(ScalerCreated(enabled=scaler.is_enabled())))

    def scaler_used(self, scaler: Any) -> None:
        state = self.scaler_state(scaler)
        state.used_by(threading.get_ident())

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        state = self.state_of(optimizer)
        stage = stage_of(scaler, optimizer)
        site = calling_site()
        self._tell(
            Unscale(
                site=site,
                again=stage is OptState.UNSCALED,
                half_parameters="fp16" in precisions_of(optimizer),
            ),
            self._step([state]),
        )
        state.unscaled_at = site

    def scaler_steps(self, scaler: Any, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        state, of_scaler = self.state_of(optimizer), self.scaler_state(scaler)
        of_scaler.used_by(threading.get_ident())
        of_scaler.precisions.update(self.precisions_since_step(state))
        self._tell(
            ScalerStep(
                site=calling_site(),
                optimizer=state.name,
                again=stage_of(scaler, optimizer) is OptState.STEPPED,
                backwards=len(state.pending),
                unscaled=tuple(dict.fromkeys(each.event for each in state.pending if _is_unscaled(each.event))),
                undivided=_undivided(optimizer, state),
                closure=callable(kwargs.get("closure")) or bool(args and callable(args[0])),
                half_parameters="fp16" in precisions_of(optimizer),
                eps=eps_of(optimizer),
                precisions=self.precisions_since_step(state),
                mixed_forward=state.mixed,
                fsdp=is_plain_torch(scaler) and has_fsdp1(optimizer),
                bare=state.bare and not state.pending,
                unscaled_midway=state.midway,
                threads=len(of_scaler.threads) if of_scaler.shared else 1,
            ),
            self._step([state]),
        )

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        of_scaler, state = self.scaler_state(scaler), self.state_of(optimizer)
        of_scaler.steps += 1
        of_scaler.since_update.append(state.index)
        if state.index not in of_scaler.optimizers:
            of_scaler.optimizers[state.index] = None
            before = state.scaled_by.setdefault(of_scaler.made.site, [])
            if before:  # a scaler made at the same line has stepped this optimizer
                self._tell(replace(of_scaler.made, times=len(before) + 1, stepped_before=True), self._step([state]))
            before.append(of_scaler)

    def updates(self, scaler: Any) -> None:
        state = self.scaler_state(scaler)
        site = calling_site()
        for each in (each for _, each in self.optimizers.pairs() if not state.since_update):
            each.updated_at = site if any(made.event.scaled for made in each.pending) else None
        # Optimizers step in turns: an update after the first of them is one too many.
        now, before = state.since_update, state.before_update
        order = list(state.optimizers)
        turns = bool(now and before) and now == state.before_that and order.index(now[0]) < order.index(before[0])
        turns &= site != state.updated_at
        self._tell(
            ScalerUpdate(
                site=site,
                steps=len(state.since_update),
                earlier=tuple(state.before_update) if turns else (),
                earlier_site=state.updated_at if turns else None,
            ),
            max(self._step() - 1, 1),
        )
        state.before_that, state.before_update, state.since_update = state.before_update, state.since_update, []
        state.updated_at = site

    # Schedulers and checkpoints

    def scheduled(self, scheduler: Any) -> tuple[TrackedOptimizer, SchedulerStep] | None:
        """Return a scheduler's step as an event, without ``after_skip``, which is known only later."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or isinstance(scheduler, ReduceLROnPlateau):
            return None
        state = self.optimizers.get(unwrapped(optimizer))
        if state is None:
            return None
        known = self._schedulers.get(scheduler) or self._schedulers.add(scheduler, TrackedScheduler())
        known.each_step += state.steps - known.at_step == 1
        known.moves += 1
        known.at_step = state.steps
        per_step = 2 * known.each_step >= known.moves
        return state, SchedulerStep(
            site=calling_site(), scheduler=type(scheduler).__name__, per_step=per_step, after_skip=False
        )

    def saved(self, thing: Any) -> None:
        optimizer, scaler = states_in(thing)
        if optimizer or scaler:
            event = CheckpointSaved(site=calling_site(), optimizer=optimizer, scaler=scaler)
            self.run_events.saves[event] = self.run_events.saves.get(event, 0) + 1

    # The end

    def finish(self) -> RunEvents:
        """Return the events of the finish run."""
        states = self.scalers.states()
        made = [replace(each.made, precisions=tuple(sorted(each.precisions))) for each in states]
        self.run_events.scalers = [each for each, state in zip(made, states, strict=True) if state.steps]
        self.run_events.unused_scalers = [
            each for each, state in zip(made, states, strict=True) if not state.used and each.enabled
        ]
        return self.run_events


class _Probes:
    """Probes of all optimizers' gradients before a backward pass, in one list, as there may be hundreds."""

    def __init__(self, optimizers: Sequence[tuple[Any, TrackedOptimizer]] = ()) -> None:
        self._parameters: list[Any] = []
        self._ranges: list[tuple[TrackedOptimizer, int, int]] = []  # range of each optimizer's parameters
        end = 0
        for optimizer, state in optimizers:
            self._parameters += probed_parameters(optimizer)
            first, end = end, len(self._parameters)
            self._ranges.append((state, first, end))
        self._before = probe(self._parameters)

    def changed(self) -> Iterator[tuple[TrackedOptimizer, list[Any], list[Any]]]:
        """Yield each optimizer that has got gradients since, with its probes before and after."""
        before, now = self._before, probe(self._parameters)
        if before == now:
            return
        places = [place for place, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
        at = 0
        for state, first, end in self._ranges:
            while at < len(places) and places[at] < first:
                at += 1
            if at == len(places):
                return
            if places[at] < end:
                yield state, before[first:end], now[first:end]


def _sharing(pairs: Sequence[tuple[Any, TrackedOptimizer]], ids: set[int]) -> list[tuple[Any, TrackedOptimizer]]:
    """Return the optimizers that have a parameter among these ids."""
    found = []
    for optimizer, state in pairs:  # there may be hundreds: no function call for each
        for group in optimizer.param_groups:
            if not ids.isdisjoint(map(id, group["params"])):
                found.append((optimizer, state))
                break
    return found


def _is_unscaled(backward: Backward) -> bool:
    """Whether the loss, or a part of it, is not scaled. A factor such as ``get_scale()`` counts as scaled."""
    return backward.partly or not (backward.scaled or backward.scaled_by_constant)


def _undivided(optimizer: Any, state: TrackedOptimizer) -> tuple[Backward, ...]:
    """Return the first of several passes at one line, of different forwards, whose mean losses were not divided."""
    passes = state.pending
    first = passes[0].event if passes else None
    alike = [each for each in passes if first is not None and each.event.site == first.site and each.event.loss_is_mean]
    batches = {each.forwards for each in alike}
    if not 1 < len(batches) == len(alike) == len(passes):
        return ()
    divided = not state.clipped and state.unscaled_at is None and probe(probed_parameters(optimizer)) != state.left
    return () if divided else (alike[0].event,)
