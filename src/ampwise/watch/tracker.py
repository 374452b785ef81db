"""Track a training script call by call: scaling, unscaling, clipping, steps, and their order.

Nothing here changes the script's objects or syncs with a device. Each call is reported as a ``RunEvent`` of
``ampwise.watch.run_events``, with the state at the time of the call.
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
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.trace.call_site import calling_site
from ampwise.train.low_bit.optimizers import keeps_small_updates
from ampwise.train.ranks import Fsdp2Dtypes, fsdp2_dtypes
from ampwise.watch import run_events as events
from ampwise.watch.casts import HalfCasts
from ampwise.watch.inspection import (
    HALVES,
    WeakStates,
    autocast_precision,
    device_and_precision,
    dtype_name,
    eps_of,
    found_overflow,
    has_fsdp1,
    inner_model,
    leaves_of,
    nonzero_in_gradients,
    parameters_of,
    precisions_of,
    probe,
    probed_parameters,
    read_losses,
    stage_of,
    states_in,
    unwrapped,
)
from ampwise.watch.tracked import BackwardPass, FollowedThread, TrackedOptimizer, TrackedScaler, TrackedScheduler

__all__ = ["CallTracker"]

CHECKED_CLEARING = 32  # steps after which it is checked whether the script clears the gradients
FEW_OPTIMIZERS = 8  # of more, only those whose parameters are in the graph are looked at


class CallTracker:
    """Turn calls into events. tell: called with each event and its step."""

    def __init__(self, tell: Callable[[events.RunEvent, int], None]) -> None:
        self._tell = tell
        self.follows, self.casts = FollowedThread(), HalfCasts()
        self.optimizers: WeakStates[TrackedOptimizer] = WeakStates()
        self.scalers: WeakStates[TrackedScaler] = WeakStates()
        self._schedulers: WeakStates[TrackedScheduler] = WeakStates()
        self.run_events = events.RunEvents()
        self.stepping: set[int] = set()  # indices of optimizers whose running step computes gradients in a closure
        self._models: MutableMapping[nn.Module, tuple[int, list[TrackedOptimizer]]] = WeakIdKeyDictionary()
        self._in_training_mode: set[int] = set()  # ids of models that have ever been
        self._forwards = 0  # training passes so far
        self._fsdp2: MutableMapping[nn.Module, Fsdp2Dtypes | None] = WeakIdKeyDictionary()
        self._fsdp_output: str | None = None  # of the last training pass
        self._running: list[nn.Module] = []  # nested models, the outermost first
        self._regions: dict[str, None] = {}  # autocast precisions since the last step
        # Before a backward pass: parameters of all optimizers in one list, as there may be hundreds, their probes, and
        # the range of each optimizer's.
        self._probed: list[Any] = []
        self._probes: list[Any] = []
        self._ranges: list[tuple[TrackedOptimizer, int, int]] = []

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that has the most."""
        return max([state.steps for state in self.optimizers.states()], default=0)

    def _next_step(self) -> int:
        """Return the number of the next step of the living optimizer that has the most."""
        return 1 + max([state.steps for _, state in self.optimizers.pairs()], default=0)

    # Models and precision

    def trains(self, model: nn.Module, state: TrackedOptimizer) -> None:
        """Note that the optimizer trains the model."""
        _, states = self._models.setdefault(model, (len(self._models), []))
        if state not in states:
            states.append(state)

    def trained_by(self, model: nn.Module) -> list[TrackedOptimizer]:
        """Return the optimizers of a model's parameters."""
        return self._numbered(model)[1]

    def _numbered(self, model: nn.Module) -> tuple[int | None, list[TrackedOptimizer]]:
        """Return the number and the optimizers of a model, or of the one that its wrapper calls."""
        return self._models.get(model) or self._models.get(inner_model(model)) or (None, [])

    def region_entered(self, precision: str) -> None:
        """Note that an enabled autocast region was entered."""
        if torch.is_grad_enabled():
            self._regions[precision] = None
            for state in self.trained_by(self._running[0]) if self._running else ():  # entered by the model itself
                state.precisions[precision] = None

    def model_begins(self, model: nn.Module) -> tuple[events.ForwardCall, list[TrackedOptimizer]] | None:
        """Return the pass and the optimizers it trains for; None if it is part of another pass, or not followed."""
        if not self.follows():  # e.g. a replica of DataParallel
            return None
        self._running.append(model)
        if len(self._running) > 1:  # part of another
            return None
        training = torch.is_grad_enabled()
        if training and model.training:
            self._in_training_mode.add(id(model))
        elif id(model) in self._in_training_mode:  # others are trained in evaluation mode
            training = False
        device, precision = device_and_precision(model)
        dtypes = self.fsdp2_dtypes(model)
        gathered = None if dtypes is None or dtypes.compute is None else dtype_name(dtypes.compute)
        if gathered is not None and autocast_precision(device) is None:
            precision = gathered
        if training:
            self._fsdp_output = None if dtypes is None or dtypes.output is None else dtype_name(dtypes.output)
        number, states = self._numbered(model)
        states = states if training else []
        other = None  # the other 16-bit format, if an earlier model ran in it
        if precision in HALVES:
            others = [each for state in states for each in state.precisions if each in HALVES and each != precision]
            other = others[0] if others else None
        for state in states:
            state.precisions[precision] = None
            state.mixed |= other is not None
        self._forwards += training
        inner = inner_model(model)
        event = events.ForwardCall(
            site=calling_site(),
            training=training,
            precision=precision,
            device=device,
            model=type(inner).__name__,
            number=number,
            other_half=other,
            gathered=gathered,
        )
        self.run_events.forwards[event] += 1
        self._tell(event, self._next_step())
        return event, (states or self.trained_by(inner)) if training else []

    def fsdp2_dtypes(self, model: nn.Module) -> Fsdp2Dtypes | None:
        """Return the dtypes in which FSDP2 runs a model; looked up once, as it is about to run."""
        if model not in self._fsdp2:
            self._fsdp2[model] = fsdp2_dtypes(model)
        return self._fsdp2[model]

    def model_ends(self, model: nn.Module) -> bool:
        """Note the end of a pass. Return whether it was the outermost."""
        if self._running and self._running[-1] is model:
            self._running.pop()
            return not self._running
        return False

    def last_pass_of(self, model: nn.Module) -> tuple[events.ForwardCall, list[int]] | None:
        """Return a model's last followed training pass, and the indices of the optimizers it trains for."""
        number, states = self._numbered(model)
        passes = (each for each in reversed(self.run_events.forwards) if each.training and each.number == number)
        event = None if number is None else next(passes, None)
        return None if event is None else (event, [state.index for state in states])

    def precisions_since_step(self, state: TrackedOptimizer) -> tuple[str, ...]:
        """Return the precisions of an optimizer's models since its last step; autocast's if no model call was seen."""
        unseen = not state.precisions and not self._forwards
        return tuple(self._regions if unseen else state.precisions)

    # Backward

    def backward_begins(self, tensors: Any, weights: Any = None) -> BackwardPass | None:
        """Return the state before a backward pass; None without gradients. weights: its ``grad_tensors``."""
        given = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, list | tuple) else []
        given = [each for each in given if isinstance(each, Tensor)]
        roots = [each for each in given if each.grad_fn is not None]
        if not roots:
            return None
        loss = read_losses(roots)
        event = events.Backward(
            site=calling_site(),
            scaled=loss.scaler is not None,
            partly=loss.partly,
            scaled_by_constant=loss.constant,
            autocast=autocast_precision(roots[0].device.type),
            loss_is_mean=loss.is_mean if weights is None else None,
            loss=loss.precision,
            fsdp_output=self._fsdp_output,
        )
        reached = self.optimizers.pairs()  # perhaps
        leaves = leaves_of(given) if len(reached) > FEW_OPTIMIZERS else None
        self._probed, self._ranges = [], []
        for optimizer, state in reached if leaves is None else _sharing(reached, leaves):
            first = len(self._probed)
            self._probed += probed_parameters(optimizer)
            self._ranges.append((state, first, len(self._probed)))
        self._probes = probe(self._probed)
        for state, first, end in self._ranges:
            is_there = bool(state.used) and state.used == self._probes[first:end]
            state.left_over = nonzero_in_gradients(self._probed[first:end]) if is_there else None
        # A copy, as the script may modify its loss.
        single = len(roots) == 1 and roots[0].numel() == 1
        plain = roots[0].detach().reshape(()).clone() if single else None
        return BackwardPass(event, self._forwards, plain, loss.scaler)

    def backward_ended(self, backward_pass: BackwardPass) -> None:
        """Add the pass to each optimizer that has got gradients."""
        event, scaled, step = backward_pass.event, backward_pass.event.scaled, 0
        before, after = self._probes, probe(self._probed)
        for state, first, end in self._ranges if before != after else ():
            if before[first:end] == after[first:end]:
                continue
            step = max(step, state.steps + 1)
            state.passes += 1
            if state.used:
                state.added_to = state.left_over
            elif state.pending and state.left != before[first:end]:
                state.added_to = None  # the script has changed them
            state.used, state.left_over, state.used_up = [], None, False
            if not any(before[first:end]):  # the script set them to None
                state.forget()
            if state.pending and state.unscaled_at is not None and scaled:
                state.midway = state.unscaled_at
            if state.pending and state.updated_at is not None:
                self._tell(events.ScalerUpdate(site=state.updated_at, pending=True), state.steps + 1)
                state.updated_at = None
            state.pending.append(backward_pass)
            state.read = False
            if (loss := backward_pass.loss) is not None:
                state.losses[scaled] = state.losses[scaled] + loss if scaled in state.losses else loss
            state.left = after[first:end]
        self._probed, self._probes, self._ranges = [], [], []
        self._tell(event, step or self._next_step())

    def zeroes(self, thing: Any) -> list[tuple[Any, TrackedOptimizer]]:
        """Return the optimizers that have gradients of a whole step, which ``zero_grad`` is about to drop."""
        many = thing.parameters() if isinstance(thing, nn.Module) else parameters_of(thing)
        pending = [(optimizer, state) for optimizer, state in self.optimizers.pairs() if state.pending]
        return _sharing(pending, {id(each) for each in many}) if pending else []

    def zeroed(self, thing: Any) -> None:
        """Note a ``zero_grad`` of an optimizer or a model, for all optimizers with these parameters."""
        if isinstance(thing, nn.Module):
            given = {id(each) for each in thing.parameters()}
        else:
            self.state_of(thing)
            given = {id(each) for group in thing.param_groups for each in group["params"]}
        for optimizer, state in _sharing(self.optimizers.pairs(), given):
            left = [each for each in parameters_of(optimizer) if each.grad is not None and id(each) not in given]
            if not left:
                state.added_to = None
                if state.pending and state.index not in self.stepping:
                    state.dropped_at, state.dropped_pass = calling_site(), state.pending[-1].event.site
                    state.zeroed[state.dropped_at] += 1
                state.forget()

    def clipped(self, function: str, parameters: Any, limit: float | None) -> list[tuple[Any, TrackedOptimizer]]:
        """Report clipping. Return the optimizers of the parameters."""
        owners = _sharing(self.optimizers.pairs(), {id(each) for each in parameters})
        for _, state in owners:
            state.clipped |= limit != math.inf
        scaled = next((found for _, state in owners if (found := state.scaled) is not None), None)
        seen: dict[str, Any] = {
            "site": calling_site(),
            "function": function,
            "scaled": scaled is not None,
            "backward": None if scaled is None else scaled.site,
        }
        # Clipping to infinity only computes the norm.
        event = events.GradNormRead(**seen) if limit == math.inf else events.Clip(**seen, limit=limit)
        self._tell(event, max([state.steps + 1 for _, state in owners], default=0) or self._next_step())
        return owners

    # Optimizers

    def state_of(self, optimizer: Any) -> TrackedOptimizer:
        optimizer = unwrapped(optimizer)
        state = self.optimizers.get(optimizer)
        if state is None:
            plain = type(optimizer).__module__.startswith("torch.optim")
            state = TrackedOptimizer(self.optimizers.count, type(optimizer).__name__, plain)
            self.optimizers.add(optimizer, state)
        return state

    def optimizer_steps(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Report a step that is not made by a scaler."""
        pending = [each.event for each in state.pending]
        scaled = any(event.scaled for event in pending)
        self._tell(
            events.OptimizerStep(
                site=calling_site(),
                optimizer=state.name,
                scaled=scaled,
                unscaled=scaled and state.unscaled_at is not None,
                again=not pending and state.by_scaler,
                backwards=len(pending),
                undivided=state.undivided(optimizer),
                scaled_by_constant=pending[0].scaled_by_constant if pending else None,
                precisions=self.precisions_since_step(state),
                mixed_forward=state.mixed,
                scaler=any(scaler.is_enabled() for scaler, _ in self.scalers.pairs()),
                parameters=precisions_of(optimizer),
                eps=eps_of(optimizer),
                backward=pending[0].site if pending else None,
                plain=state.plain and not keeps_small_updates(optimizer),
                cast_at=self.casts.site_of_first(optimizer),
            ),
            state.steps + 1,
        )

    def optimizer_stepped(self, optimizer: Any, state: TrackedOptimizer, *, by_scaler: bool) -> None:
        if state.dropped_at is not None and any(each.event.site == state.dropped_pass for each in state.pending):
            self.run_events.dropped[state.dropped_at] += 1
        state.bare = not by_scaler and bool(state.pending)
        state.by_scaler = by_scaler
        if state.pending and state.steps and state.cleared + len(state.kept) < CHECKED_CLEARING:
            if state.added_to is not None:
                state.kept.append(state.added_to)
            else:
                state.cleared += 1
        state.added_to = None
        given, probed = {id(each) for each in parameters_of(optimizer)}, probed_parameters(optimizer)
        for _, sharing in _sharing(self.optimizers.pairs(), given):  # itself, and e.g. its wrapper
            sharing.reset()
        state.used_up = any(each.grad is not None for each in probed)
        state.used = probe(probed) if state.used_up and state.cleared + len(state.kept) < CHECKED_CLEARING else []
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
            state.used = []
            state.steps += steps.get(state.index, 0)
            state.unread |= state.index in steps and not state.poisoned  # the gradients of skipped steps were not read
        self.run_events.steps += sum(steps.values())
        self._regions, self._running, self._probed, self._probes, self._ranges = {}, [], [], [], []

    # Scalers

    def scaler_made(self, scaler: Any) -> None:
        self.scalers.add(scaler, TrackedScaler(events.ScalerCreated(site=calling_site(), enabled=scaler.is_enabled())))

    def scaler_state(self, scaler: Any) -> TrackedScaler:
        known = self.scalers.get(scaler)
        return known or self.scalers.add(scaler, TrackedScaler(events.ScalerCreated(enabled=scaler.is_enabled())))

    def scaler_used(self, scaler: Any) -> TrackedScaler:
        """Note that this thread uses the scaler."""
        state, thread = self.scaler_state(scaler), threading.get_ident()
        state.used = True
        if thread in state.threads:
            state.shared |= state.threads[-1] != thread
            state.threads.remove(thread)
        state.threads.append(thread)
        return state

    def unscales(self, scaler: Any, optimizer: Any, state: TrackedOptimizer) -> None:
        event = events.Unscale(site=calling_site(), half_parameters="fp16" in precisions_of(optimizer))
        unscaled = self.scaler_state(scaler).unscaled
        if stage_of(scaler, optimizer) is OptState.UNSCALED:
            earlier, passes = unscaled.get(state.index, (None, state.passes))
            new_pass = state.passes > passes
            left = new_pass and state.unscaled_at is None and found_overflow(scaler, optimizer)
            event = replace(event, again=True, earlier=earlier, new_pass=new_pass, left_overflow=left)
        self._tell(event, state.steps + 1)
        state.unscaled_at = event.site
        unscaled[state.index] = event.site, state.passes

    def scaler_steps(
        self, scaler: Any, optimizer: Any, state: TrackedOptimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Report a step that a scaler makes."""
        of_scaler, precisions = self.scaler_used(scaler), self.precisions_since_step(state)
        of_scaler.precisions.update(precisions)
        # Passes whose loss, or a part of it, is not scaled. A factor such as ``get_scale()`` counts as scaled.
        passes = [each.event for each in state.pending]
        unscaled = [each for each in passes if each.partly or not (each.scaled or each.scaled_by_constant)]
        is_torchs = type(scaler).__name__ != "ShardedGradScaler" and type(scaler).__module__.startswith("torch")
        self._tell(
            events.ScalerStep(
                site=calling_site(),
                optimizer=state.name,
                again=stage_of(scaler, optimizer) is OptState.STEPPED,
                backwards=len(passes),
                unscaled=tuple(dict.fromkeys(unscaled)),
                undivided=state.undivided(optimizer),
                closure=callable(kwargs.get("closure")) or bool(args and callable(args[0])),
                half_parameters="fp16" in precisions_of(optimizer),
                eps=eps_of(optimizer),
                precisions=precisions,
                mixed_forward=state.mixed,
                fsdp=is_torchs and has_fsdp1(optimizer),
                bare=state.bare and not passes,
                unscaled_midway=state.midway,
                threads=len(of_scaler.threads) if of_scaler.shared else 1,
            ),
            state.steps + 1,
        )

    def scaler_stepped(self, scaler: Any, state: TrackedOptimizer) -> None:
        of_scaler = self.scaler_state(scaler)
        of_scaler.steps += 1
        of_scaler.since_update.append(state.index)
        if state.index not in of_scaler.optimizers:
            of_scaler.optimizers[state.index] = None
            before = state.scaled_by.setdefault(of_scaler.made.site, [])
            if before:  # a scaler made at the same line has stepped this optimizer
                event = replace(of_scaler.made, times=len(before) + 1, stepped_before=True)
                self._tell(event, state.steps + 1)
            before.append(of_scaler)

    def updates(self, scaler: Any) -> None:
        state, site = self.scaler_state(scaler), calling_site()
        for each in [each for _, each in self.optimizers.pairs() if not state.since_update]:
            each.updated_at = site if any(made.event.scaled for made in each.pending) else None
        # Optimizers step in turns: an update after the first of them is one too many.
        now, before = state.since_update, state.before_update
        order = list(state.optimizers)
        turns = bool(now and before) and now == state.before_that and order.index(now[0]) < order.index(before[0])
        turns &= site != state.updated_at
        self._tell(
            events.ScalerUpdate(
                site=site,
                steps=len(now),
                earlier=tuple(before) if turns else (),
                earlier_site=state.updated_at if turns else None,
            ),
            max(self._next_step() - 1, 1),
        )
        state.before_that, state.before_update, state.since_update = before, now, []
        state.updated_at = site

    # Schedulers, checkpoints and the end

    def scheduled(self, scheduler: Any) -> tuple[TrackedOptimizer, events.SchedulerStep] | None:
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
        per_step, name = 2 * known.each_step >= known.moves, type(scheduler).__name__
        return state, events.SchedulerStep(site=calling_site(), scheduler=name, per_step=per_step, after_skip=False)

    def saved(self, thing: Any) -> None:
        optimizer, scaler = states_in(thing)
        if optimizer or scaler:
            event = events.CheckpointSaved(site=calling_site(), optimizer=optimizer, scaler=scaler)
            self.run_events.saves[event] += 1

    def finish(self) -> events.RunEvents:
        """Return the events of the finished run."""
        every = [
            (replace(each.made, precisions=tuple(sorted(each.precisions))), each) for each in self.scalers.states()
        ]
        self.run_events.scalers = [made for made, state in every if state.steps]
        # Those made before the watch began may have been used before.
        unused = (made for made, state in every if not state.used)
        self.run_events.unused_scalers = [made for made in unused if made.enabled and made.site.file is not None]
        return self.run_events


def _sharing(pairs: Sequence[tuple[Any, TrackedOptimizer]], ids: set[int]) -> list[tuple[Any, TrackedOptimizer]]:
    """Return the optimizers that have a parameter among these ids."""
    found = []
    for optimizer, state in pairs:  # there may be hundreds: no function call for each
        for group in optimizer.param_groups:
            if not ids.isdisjoint(map(id, group["params"])):
                found.append((optimizer, state))
                break
    return found
