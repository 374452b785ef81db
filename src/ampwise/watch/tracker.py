"""The story of a training script, told call by call: who scaled, unscaled, clipped and stepped, in which order.

Nothing here touches the script's objects, and nothing waits for a device. What is told is an ``Event`` of
``ampwise.evidence.conduct``, with the state of things as it was when the call was made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.evidence.conduct import (
    Backward,
    Clip,
    Conduct,
    Event,
    Forward,
    Measured,
    OptimizerStep,
    Saved,
    ScalerMade,
    ScalerStep,
    Scheduled,
    Unscale,
    Update,
)
from ampwise.low_bit.care import small_updates_count
from ampwise.site import caller
from ampwise.watch.asking import (
    autocast_precision,
    eps_of,
    has_fsdp1,
    inner_model,
    is_plain_torch,
    parameters_of,
    precisions_of,
    probe,
    runs_in,
    stage_of,
    states_in,
    unwrapped,
)
from ampwise.watch.following import Following
from ampwise.watch.graphs import read_losses
from ampwise.watch.state import Known, OptimizerState, Pass, ScalerState, SchedulerState

__all__ = ["Tracker"]

HALVES = {"fp16", "bf16"}


class Tracker:
    """Told of calls, tells of events."""

    def __init__(self, tell: Callable[[Event, int], None]) -> None:
        self._tell = tell
        self.follows = Following()
        self.optimizers: Known[OptimizerState] = Known()
        self.scalers: Known[ScalerState] = Known()
        self._schedulers: Known[SchedulerState] = Known()
        self.conduct = Conduct()
        self.stepping: set[int] = set()  # optimizers that compute gradients within their steps
        self._models: MutableMapping[nn.Module, tuple[int, list[OptimizerState]]] = WeakIdKeyDictionary()
        self._in_training_mode: set[int] = set()  # models that have been
        self._forwards = 0  # that were seen
        self._running: list[nn.Module] = []  # models, one within the other
        self._regions: dict[str, None] = {}  # precisions of autocast since the last step
        self._probed: list[tuple[Any, OptimizerState, list[Any]]] = []

    def _step(self, states: Sequence[OptimizerState] = ()) -> int:
        """The number of the step that is being prepared: of these optimizers, or of the one that is furthest."""
        every = states or [state for _, state in self.optimizers.pairs()]
        return 1 + max((state.steps for state in every), default=0)

    @property
    def steps(self) -> int:
        """Of the optimizer that is furthest."""
        return max((state.steps for state in self.optimizers.states()), default=0)

    # Models and precision

    def trains(self, model: nn.Module, state: OptimizerState) -> None:
        """The model's parameters are the optimizer's."""
        _, states = self._models.setdefault(model, (len(self._models), []))
        if state not in states:
            states.append(state)

    def region_entered(self, precision: str) -> None:
        """Autocast, enabled."""
        if torch.is_grad_enabled():
            self._regions[precision] = None
            for state in self._trained_by(self._running[0]) if self._running else ():  # by the model itself, within
                state.precisions[precision] = None

    def model_begins(self, model: nn.Module, *_: Any) -> tuple[Forward, list[OptimizerState]] | None:
        """Returns the pass, and those that it trains for; None if it is part of another, or not followed."""
        if not self.follows():  # a replica of DataParallel's
            return None
        self._running.append(model)
        if len(self._running) > 1:  # part of another
            return None
        learning = torch.is_grad_enabled()
        # Some are trained in evaluation mode all along: those that never were in the other.
        self._in_training_mode |= {id(model)} if learning and model.training else set()
        training = learning and (model.training or id(model) not in self._in_training_mode)
        device, precision = runs_in(model)
        states = self._trained_by(model) if training else []
        others = [each for state in states for each in state.precisions if each in HALVES and each != precision]
        other = others[0] if others and precision in HALVES else None
        for state in states:
            state.precisions[precision] = None
            state.mixed |= other is not None
        self._forwards += training
        event = Forward(
            site=caller(),
            training=training,
            precision=precision,
            device=device,
            model=type(inner_model(model)).__name__,
            number=self._models[model][0] if model in self._models else None,
            other_half=other,
        )
        self.conduct.forwards[event] = self.conduct.forwards.get(event, 0) + 1
        self._tell(event, self._step())
        return event, (states or self._trained_by(inner_model(model))) if training else []

    def model_ends(self, model: nn.Module, *_: Any) -> bool:
        """Whether it was the outermost."""
        if self._running and self._running[-1] is model:
            self._running.pop()
            return not self._running
        return False

    def last_pass_of(self, model: nn.Module) -> tuple[Forward, list[int]] | None:
        """The last training pass of a model that was followed, and the optimizers that it trains for."""
        number = self._models[model][0] if model in self._models else None
        passes = (each for each in reversed(self.conduct.forwards) if each.training and each.number == number)
        event = None if number is None else next(passes, None)
        return None if event is None else (event, [state.index for state in self._trained_by(model)])

    def _trained_by(self, model: nn.Module) -> list[OptimizerState]:
        known = self._models.get(model)
        return [] if known is None else known[1]

    def precisions_since_step(self, state: OptimizerState) -> tuple[str, ...]:
        """That an optimizer's models have run in; where none was seen to run, what autocast was set to."""
        unseen = not state.precisions and not self._forwards
        return tuple(self._regions if unseen else state.precisions)

    # Backward

    def backward_begins(self, tensors: Any, weights: Any = None) -> Pass | None:
        """What is to be known before the pass; None if it is no loss's. weights: what it was given besides."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors) if isinstance(tensors, list | tuple) else []
        roots = [each for each in given if isinstance(each, Tensor) and each.grad_fn is not None]
        if not roots:
            return None
        loss = read_losses(roots)
        event = Backward(
            site=caller(),
            scaled=loss.scaled,
            partly=loss.partly,
            scaled_by_constant=loss.constant,
            autocast=autocast_precision(roots[0].device.type),
            loss_is_mean=loss.is_mean if weights is None else None,
        )
        self._probed = [(each, state, probe(each)) for each, state in self.optimizers.pairs()]
        # A copy, as the script may go on to write to its loss.
        single = len(roots) == 1 and roots[0].numel() == 1
        plain = roots[0].detach().reshape(()).clone() if single else None
        return Pass(event, self._forwards, plain, loss.scaler)

    def backward_ended(self, made: Pass) -> None:
        reached = []
        for optimizer, state, before in self._probed:
            after = probe(optimizer)
            if after != before:
                reached.append(state)
                self._add(made, state, before, after)
        self._probed = []
        self._tell(made.event, self._step(reached))

    def _add(self, made: Pass, state: OptimizerState, before: list[Any], after: list[Any]) -> None:
        if not any(before):  # dropped by hand
            state.forget()
        if state.pending and state.unscaled_at is not None and made.event.scaled:
            state.midway = state.unscaled_at
        if state.pending and state.updated_at is not None:
            self._tell(Update(site=state.updated_at, pending=True), self._step([state]))
            state.updated_at = None
        state.add(made)
        state.left = after

    def zeroed(self, thing: Any) -> None:
        """``zero_grad`` of an optimizer, or of a model: for all whose gradients these are."""
        if isinstance(thing, nn.Module):
            parameters = list(thing.parameters())
        else:
            self.state_of(thing)
            parameters = parameters_of(thing)
        given = {id(each) for each in parameters}
        for optimizer, state in self._owners_of(parameters):
            if all(id(each) in given for each in parameters_of(optimizer) if each.grad is not None):
                if state.pending and state.index not in self.stepping:
                    state.dropped_at, state.dropped_pass = caller(), state.pending[-1].event.site
                state.forget()

    # Gradients looked at or changed

    def clipped(self, function: str, parameters: Any, limit: float | None) -> list[Any]:
        """Returns the optimizers whose gradients these are."""
        owners = self._owners_of(parameters)
        for _, state in owners:
            state.clipped |= limit != math.inf
        scaled = next((event for _, state in owners if (event := state.scaled) is not None), None)
        seen: dict[str, Any] = {
            "site": caller(),
            "function": function,
            "scaled": scaled is not None,
            "backward": None if scaled is None else scaled.site,
        }
        # A clip to infinity is how one asks for the norm.
        self._tell(
            Measured(**seen) if limit == math.inf else Clip(**seen, limit=limit),
            self._step([state for _, state in owners]),
        )
        return [optimizer for optimizer, _ in owners]

    def _owners_of(self, parameters: Any) -> list[tuple[Any, OptimizerState]]:
        given = {id(each) for each in parameters}
        return [
            (optimizer, state)
            for optimizer, state in self.optimizers.pairs()
            if any(id(each) in given for each in parameters_of(optimizer))
        ]

    # Optimizers

    def state_of(self, optimizer: Any) -> OptimizerState:
        optimizer = unwrapped(optimizer)
        state = self.optimizers.get(optimizer)
        if state is None:
            plain = type(optimizer).__module__.startswith("torch.optim")
            state = OptimizerState(self.optimizers.count, type(optimizer).__name__, plain)
            self.optimizers.add(optimizer, state)
        return state

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """By itself, not by a scaler."""
        state = self.state_of(optimizer)
        scaled = any(each.event.scaled for each in state.pending)
        first = state.pending[0].event if state.pending else None
        self._tell(
            OptimizerStep(
                site=caller(),
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
                plain=state.plain and not small_updates_count(optimizer),
            ),
            self._step([state]),
        )

    def optimizer_stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        state = self.state_of(optimizer)
        if state.dropped_at is not None and any(each.event.site == state.dropped_pass for each in state.pending):
            self.conduct.dropped[state.dropped_at] = self.conduct.dropped.get(state.dropped_at, 0) + 1
        state.bare = not by_scaler and bool(state.pending)
        state.by_scaler = by_scaler
        for _, sharing in self._owners_of(parameters_of(optimizer)):  # itself, and one that wraps it, say
            sharing.begin_anew()
        state.begin_anew()
        state.steps += 1
        self.conduct.steps += 1
        self._regions = {}

    def passed_over(self, steps: Mapping[int, int]) -> None:
        """So many steps, by optimizer, that nobody has told of."""
        for scheduler, known in self._schedulers.pairs():
            state = self.optimizers.get(unwrapped(scheduler.optimizer))
            known.at_step += 0 if state is None else steps.get(state.index, 0)
        for state in self.optimizers.states():
            state.begin_anew()
            state.steps += steps.get(state.index, 0)
        self.conduct.steps += sum(steps.values())
        self._regions, self._running, self._probed = {}, [], []

    # Scalers

    def scaler_made(self, scaler: Any) -> None:
        self.scalers.add(scaler, ScalerState(ScalerMade(site=caller(), enabled=scaler.is_enabled())))

    def scaler_state(self, scaler: Any) -> ScalerState:
        known = self.scalers.get(scaler)
        return known or self.scalers.add(scaler, ScalerState(ScalerMade(enabled=scaler.is_enabled())))

    def scaler_used(self, scaler: Any) -> None:
        state = self.scaler_state(scaler)
        state.used_by(threading.get_ident())

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        state = self.state_of(optimizer)
        stage = stage_of(scaler, optimizer)
        site = caller()
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
                site=caller(),
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
            if before:  # one of the same line has scaled for this optimizer
                self._tell(replace(of_scaler.made, times=len(before) + 1, stepped_before=True), self._step([state]))
            before.append(of_scaler)

    def updates(self, scaler: Any) -> None:
        state = self.scaler_state(scaler)
        site = caller()
        for each in (each for _, each in self.optimizers.pairs() if not state.since_update):
            each.updated_at = site if each.pending and any(made.event.scaled for made in each.pending) else None
        # Optimizers that take turns: the update after the first of them is one too many.
        now, before = state.since_update, state.before_update
        order = list(state.optimizers)
        turns = bool(now and before) and now == state.before_that and order.index(now[0]) < order.index(before[0])
        turns &= site != state.updated_at
        self._tell(
            Update(
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

    def scheduled(self, scheduler: Any) -> tuple[OptimizerState, Scheduled] | None:
        """A move of a scheduler, without what is known late: whether the step before was skipped."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or isinstance(scheduler, ReduceLROnPlateau):
            return None
        state = self.optimizers.get(unwrapped(optimizer))
        if state is None:
            return None
        known = self._schedulers.get(scheduler) or self._schedulers.add(scheduler, SchedulerState())
        known.each_step += state.steps - known.at_step == 1
        known.moves += 1
        known.at_step = state.steps
        rhythm = 2 * known.each_step >= known.moves
        return state, Scheduled(site=caller(), scheduler=type(scheduler).__name__, per_step=rhythm, after_skip=False)

    def saved(self, thing: Any) -> None:
        optimizer, scaler = states_in(thing)
        if optimizer or scaler:
            event = Saved(site=caller(), optimizer=optimizer, scaler=scaler)
            self.conduct.saves[event] = self.conduct.saves.get(event, 0) + 1

    # The end

    def whole(self) -> Conduct:
        """The run, as it went."""
        states = self.scalers.states()
        made = [replace(each.made, precisions=tuple(sorted(each.precisions))) for each in states]
        self.conduct.scalers = [each for each, state in zip(made, states, strict=True) if state.steps]
        self.conduct.unused_scalers = [
            each for each, state in zip(made, states, strict=True) if not state.used and each.enabled
        ]
        return self.conduct


def _is_unscaled(backward: Backward) -> bool:
    """In whole or in part. Someone who multiplies by ``get_scale()`` has scaled it."""
    return backward.partly or not (backward.scaled or backward.scaled_by_constant)


def _undivided(optimizer: Any, state: OptimizerState) -> tuple[Backward, ...]:
    """Passes of one line, each of a forward of its own, whose losses are means that nothing divided."""
    passes = state.pending
    first = passes[0].event if passes else None
    alike = [each for each in passes if first is not None and each.event.site == first.site and each.event.loss_is_mean]
    batches = {each.forwards for each in alike}
    if not 1 < len(batches) == len(alike) == len(passes):
        return ()
    by_hand = not state.clipped and state.unscaled_at is None and probe(optimizer) != state.left
    return () if by_hand else (alike[0].event,)
