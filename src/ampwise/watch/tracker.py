"""The story of a training script, told call by call: who scaled, unscaled, clipped and stepped, in which order.

Nothing here touches the script's objects, and nothing waits for a device. What is told is an ``Event`` of
``ampwise.evidence.conduct``, with the state of things as it was when the call was made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

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
    Site,
    Unscale,
    Update,
)
from ampwise.watch.graphs import read_loss
from ampwise.watch.site import caller
from ampwise.watch.state import PRECISIONS, PROBES, Known, OptimizerState, Pass, ScalerState, SchedulerState

__all__ = ["Tracker"]

HALVES = {"fp16", "bf16"}


class Tracker:
    """Told of calls, tells of events."""

    def __init__(self, tell: Callable[[Event, int], None]) -> None:
        self._tell = tell
        self.optimizers: Known[OptimizerState] = Known()
        self.scalers: Known[ScalerState] = Known()
        self._schedulers: Known[SchedulerState] = Known()
        self.conduct = Conduct()
        self.stepping: set[int] = set()  # optimizers that compute gradients within their steps
        self._forwards = 0
        self._running = 0  # models
        self._precisions: dict[str, None] = {}  # since the last step, in order
        self._since_backward: set[str] = set()
        self._mixed_forward = False
        self._idle_region: Site | None = None
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

    def region_entered(self, precision: str) -> None:
        """Autocast, enabled."""
        if torch.is_grad_enabled():
            self._precisions[precision] = None
            self._since_backward.add(precision)
            self._idle_region = None if self._running else caller()

    def region_left(self) -> None:
        if self._idle_region is not None:  # no model has run in it
            regions = self.conduct.idle_regions
            regions[self._idle_region] = regions.get(self._idle_region, 0) + 1
            self._idle_region = None

    def model_begins(self, model: nn.Module, *_: Any) -> None:
        self._running += 1
        if self._running > 1:  # part of another
            return
        training = torch.is_grad_enabled() and model.training
        self._idle_region = None
        device = next((each.device.type for each in model.parameters()), "cpu")
        precision = autocast_precision(device) or "fp32"
        other = None
        if training:
            self._forwards += 1
            self._precisions[precision] = None
            self._since_backward.add(precision)
            other = next((each for each in self._precisions if each in HALVES and each != precision), None)
            other = other if precision in HALVES else None
            self._mixed_forward |= other is not None
        event = Forward(
            site=caller(),
            training=training,
            precision=precision,
            device=device,
            model=type(_inner(model)).__name__,
            other_half=other,
        )
        self.conduct.forwards[event] = self.conduct.forwards.get(event, 0) + 1
        self._tell(event, self._step())

    def model_ends(self, *_: Any) -> None:
        self._running = max(self._running - 1, 0)

    # Backward

    def backward_begins(self, tensors: Any) -> Pass | None:
        """What is to be known before the pass; None if it is no loss's."""
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None) if _is_list(tensors) else None
        if not isinstance(root, Tensor) or root.grad_fn is None:
            return None
        loss = read_loss(root)
        enabled = [(scaler, state) for scaler, state in self.scalers.pairs() if scaler.is_enabled()]
        event = Backward(
            site=caller(),
            scaled=loss.scaled,
            scaled_by_constant=loss.constant,
            autocast=autocast_precision(root.device.type),
            precision=_narrowest(self._since_backward),
            loss_is_mean=loss.is_mean,
            scaler=any(state.steps for _, state in enabled),
        )
        self._since_backward = set()
        self._probed = [(each, state, _probe(each)) for each, state in self.optimizers.pairs()]
        # A copy, as the script may go on to write to its loss.
        plain = root.detach().reshape(()).clone() if root.numel() == 1 else None
        return Pass(event, self._forwards, plain, loss.scaler)

    def backward_ended(self, made: Pass) -> None:
        alone = len(self._probed) == 1
        reached = [(state, before) for each, state, before in self._probed if alone or _probe(each) != before]
        onto = False
        for state, before in reached:
            if not any(before):  # dropped by hand
                state.forget()
            if made.event.scaled and state.unscaled_at is not None and state.pending:
                state.midway, onto = state.unscaled_at, True
            state.add(made)
        self._probed = []
        self._tell(replace(made.event, onto_unscaled=True) if onto else made.event, self._step([s for s, _ in reached]))

    def zeroed(self, thing: Any) -> None:
        """``zero_grad`` of an optimizer, or of a model."""
        if isinstance(thing, nn.Module):
            states = [each for _, each in self._owners_of(thing.parameters())]
        else:
            states = [self.state_of(thing)]
        for each in states:
            if each.pending and each.index not in self.stepping:
                each.dropped_at = caller()
            each.forget()

    # Gradients looked at or changed

    def clipped(self, function: str, parameters: Any, *, only_measured: bool = False) -> list[Any]:
        """Returns the optimizers whose gradients these are."""
        owners = self._owners_of(parameters)
        scaled = next((event for _, state in owners if (event := state.scaled) is not None), None)
        kind = Measured if only_measured else Clip
        backward = None if scaled is None else scaled.site
        clip = kind(site=caller(), function=function, scaled=scaled is not None, backward=backward)
        self._tell(clip, self._step([state for _, state in owners]))
        return [optimizer for optimizer, _ in owners]

    def _owners_of(self, parameters: Any) -> list[tuple[Any, OptimizerState]]:
        given = {id(each) for each in parameters}
        return [
            (optimizer, state)
            for optimizer, state in self.optimizers.pairs()
            if any(id(each) in given for group in optimizer.param_groups for each in group["params"][:PROBES])
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
                undivided=_undivided(state.pending),
                scaled_by_constant=None if first is None else first.scaled_by_constant,
                precisions=tuple(self._precisions),
                mixed_forward=self._mixed_forward,
                scaler=any(scaler.is_enabled() for scaler, _ in self.scalers.pairs()),
                parameters=precisions_of(optimizer),
                eps=_eps(optimizer),
                backward=None if first is None else first.site,
                plain=state.plain,
            ),
            self._step([state]),
        )

    def optimizer_stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        state = self.state_of(optimizer)
        if state.dropped_at is not None:
            self.conduct.dropped[state.dropped_at] = self.conduct.dropped.get(state.dropped_at, 0) + 1
        state.bare = not by_scaler and bool(state.pending)
        state.by_scaler = by_scaler
        state.took()
        self.conduct.steps += 1
        self._precisions, self._mixed_forward = {}, False

    # Scalers

    def scaler_made(self, scaler: Any) -> None:
        site = caller()
        self.scalers.add(scaler, ScalerState(ScalerMade(site=site, enabled=scaler.is_enabled())))

    def scaler_state(self, scaler: Any) -> ScalerState:
        known = self.scalers.get(scaler)
        return known or self.scalers.add(scaler, ScalerState(ScalerMade(enabled=scaler.is_enabled())))

    def scaler_used(self, scaler: Any) -> None:
        state = self.scaler_state(scaler)
        state.used = True
        state.threads.add(threading.get_ident())

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        state = self.state_of(optimizer)
        stage = stage_of(scaler, optimizer)
        site = caller()
        self._tell(
            Unscale(
                site=site,
                again=stage is OptState.UNSCALED,
                after_step=stage is OptState.STEPPED,
                half_parameters="fp16" in precisions_of(optimizer),
            ),
            self._step([state]),
        )
        state.unscaled_at = site

    def scaler_steps(self, scaler: Any, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        state, of_scaler = self.state_of(optimizer), self.scaler_state(scaler)
        of_scaler.used = True
        of_scaler.threads.add(threading.get_ident())
        of_scaler.precisions.update(self._precisions)
        self._tell(
            ScalerStep(
                site=caller(),
                optimizer=state.name,
                again=stage_of(scaler, optimizer) is OptState.STEPPED,
                backwards=len(state.pending),
                unscaled=tuple(dict.fromkeys(each.event for each in state.pending if not each.event.scaled)),
                undivided=_undivided(state.pending),
                closure=callable(kwargs.get("closure")) or bool(args and callable(args[0])),
                half_parameters="fp16" in precisions_of(optimizer),
                eps=_eps(optimizer),
                precisions=tuple(self._precisions),
                mixed_forward=self._mixed_forward,
                fsdp=_is_plain_torch(scaler) and _has_fsdp1(optimizer),
                bare=state.bare and not state.pending,
                unscaled_midway=state.midway,
                threads=len(of_scaler.threads),
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
        others = [each for _, each in self.optimizers.pairs() if each.index in state.optimizers or not state.optimizers]
        # Optimizers that take turns: the update after the first of them is one too many.
        now, before = state.since_update, state.before_update
        order = list(state.optimizers)
        turns = bool(now and before) and now == state.before_that and order.index(now[0]) < order.index(before[0])
        site = caller()
        self._tell(
            Update(
                site=site,
                steps=len(state.since_update),
                pending=any(each.scaled or each.unscaled_at for each in others if each.pending),
                optimizers=tuple(state.since_update),
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
        rhythm = 2 * known.each_step > known.moves
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


def autocast_precision(device_type: str) -> str | None:
    """What autocast is set to, where it is on."""
    try:
        if not torch.is_autocast_enabled(device_type):
            return None
        return PRECISIONS.get(torch.get_autocast_dtype(device_type), "other")
    except RuntimeError:  # a device without autocast
        return None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def stage_of(scaler: Any, optimizer: Any) -> OptState | None:
    states = getattr(scaler, "_per_optimizer_states", {})
    known = states.get(id(optimizer)) if hasattr(states, "get") else None
    return None if known is None else known["stage"]


def states_in(thing: Any, depth: int = 4) -> tuple[bool, bool]:
    """Whether an optimizer's state, and a scaler's, is among what is saved."""
    if not isinstance(thing, dict):
        return False, False
    keys = {key for key in thing if isinstance(key, str)}
    if {"state", "param_groups"} <= keys:
        return True, False
    if {"scale", "growth_factor", "growth_interval"} <= keys:
        return False, True
    found = [states_in(value, depth - 1) for value in list(thing.values())[:100] if depth and isinstance(value, dict)]
    # A list of states: of several optimizers, as Lightning has them.
    lists = [value for value in thing.values() if isinstance(value, list | tuple) and len(value) < PROBES]
    found += [states_in(each, depth - 1) for value in lists for each in value if depth and isinstance(each, dict)]
    return any(one for one, _ in found), any(other for _, other in found)


def _is_list(tensors: Any) -> bool:
    return isinstance(tensors, list | tuple)


def _narrowest(precisions: set[str]) -> str:
    return next((each for each in ("fp16", "bf16") if each in precisions), "fp32")


def _probe(optimizer: Any) -> list[Any]:
    """What changes when some of its parameters get gradients."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        params = group["params"]
        for each in params[:: max(len(params) // PROBES, 1)]:
            grad = each.grad
            found.append(None if grad is None else (id(grad), grad._version))
    return found


def _undivided(passes: Sequence[Pass]) -> tuple[Backward, ...]:
    """Passes of one line, each of a forward of its own, whose losses are means that nothing divided."""
    first = passes[0].event if passes else None
    alike = [each for each in passes if first is not None and each.event.site == first.site and each.event.loss_is_mean]
    batches = {each.forwards for each in alike}
    return (alike[0].event,) if 1 < len(batches) == len(alike) == len(passes) else ()


def precisions_of(optimizer: Any) -> tuple[str, ...]:
    dtypes = {each.dtype for group in optimizer.param_groups for each in group["params"]}
    return tuple(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))


def _eps(optimizer: Any) -> float | None:
    eps = optimizer.param_groups[0].get("eps") if optimizer.param_groups else None
    return float(eps) if isinstance(eps, int | float) else None


def _is_plain_torch(scaler: Any) -> bool:
    return type(scaler).__name__ != "ShardedGradScaler" and type(scaler).__module__.startswith("torch")


def _has_fsdp1(optimizer: Any) -> bool:
    """Flat parameters are FSDP1's own."""
    return any(
        type(each).__name__ == "FlatParameter" or hasattr(each, "_is_flat_param")
        for group in optimizer.param_groups
        for each in group["params"][:PROBES]
    )


def _inner(model: nn.Module) -> nn.Module:
    """The user's own, inside of what it was wrapped in."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if type(model).__name__ in ("DistributedDataParallel", "DataParallel") else None
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner
