"""ScriptLoop: a training loop of the script's own, or of a framework, as the guard sees it.

Hooks on the optimizers check the gradients before each step. If one is not finite, they are dropped, and an optimizer
without gradients changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.errors import BadInput
from ampwise.finding import Finding, Place
from ampwise.finding.registry import find_rule
from ampwise.guard.training import LossScale
from ampwise.train.accumulator import Accumulator
from ampwise.train.arguments import (
    checked_clipping,
    checked_loss,
    checked_models,
    checked_optimizers,
    checked_size,
    model_device,
)
from ampwise.train.batches import WindowedBatches
from ampwise.train.buffer_snapshot import BufferSnapshot
from ampwise.train.callback import Callback
from ampwise.train.engine_state import VERSION, restore_rng, rng_state
from ampwise.train.precision.policy import Policy
from ampwise.train.ranks import Ranks
from ampwise.train.scaler.grad_scaler import GradScaler
from ampwise.train.scaler.grad_stats import clip_in_memory_
from ampwise.train.scaler.gradients import collect_gradients
from ampwise.train.scaler.step_result import StepResult
from ampwise.train.schedulers import SchedulerSet
from ampwise.train.step import Step

SCRIPTS_OWN = "script"  # the precision, in checkpoints
FLOOR = 2.0**-14  # lowest useful scale of torch's scaler, which has no limit of its own: as of ampwise.GradScaler

FINITE, NOT_FINITE, LEFT_OUT = range(3)  # gradients of an optimizer on one rank; the worst decides on all


@dataclass(slots=True)
class LoopResult(StepResult):
    """Result of a step that the host knows."""

    after: tuple[float, float, float] = (math.nan, 1.0, math.nan)  # norm, scale, loss

    def values(self) -> tuple[bool, float, float, float]:
        return bool(self.skipped_on_host), *self.after


class TorchScale:
    """Loss scale of torch's GradScaler, or of none."""

    collapses = False
    min_scale = FLOOR

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def is_enabled(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())


class ScriptLoop:
    """Model, optimizer, scheduler and scaler of a loop that the script, or a framework, writes itself."""

    precision = SCRIPTS_OWN
    precision_locked_because = "the script chooses it, with its own autocast"

    def __init__(
        self, model: Any, optimizer: Any, *, scheduler: Any, scaler: Any, clip_norm: Any, accumulate: Any
    ) -> None:
        self.models = checked_models(model, "Guard")
        every = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        inner = [getattr(each, "optimizer", each) for each in every]  # Accelerate wraps them
        self.optimizers: list[Optimizer] = checked_optimizers(inner, self.models, "Guard")
        given = [] if scheduler is None else list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
        for each in given:
            if isinstance(each, type) or not callable(getattr(each, "load_state_dict", None)):
                raise BadInput(f"Guard(scheduler=...): expected a scheduler, got {getattr(each, '__name__', each)!r}.")
        if scaler is not None and not callable(getattr(scaler, "unscale_", None)):
            raise BadInput(f"Guard(scaler=...): expected a GradScaler, got {type(scaler).__name__}.")
        self._scaler = scaler
        self.scaler: LossScale = scaler if isinstance(scaler, GradScaler) else TorchScale(scaler)
        self._schedules = SchedulerSet(None, self.optimizers)
        self._schedules.schedulers = given
        self._clip_norm, _ = checked_clipping(clip_norm, None, "Guard")
        self._window = Accumulator(checked_size(accumulate, "Guard"))
        self.device = model_device(self.models)
        self.ranks = Ranks(self.models)
        self.policy = Policy()
        self.callbacks: tuple[Callback, ...] = ()
        self.applied_steps = self.skipped_steps = 0
        self._hands_out = False  # the guard hands out the batches, and so knows when a step begins
        self.closures = False  # optimizers get closures; what runs in them calls ``check``
        self.accumulating = False  # a batch was handed out, and the step that it belongs to has not ended
        self.explained: list[Finding] = []
        self.findings: list[Finding] = []
        self.fp8_layers: list[str] = []
        self._buffers = BufferSnapshot(self.models)
        self._batches: list[Any] = []  # of the current step
        self.bad = False  # some gradients of the current step were not finite, and were dropped
        self._stepped: set[int] = set()  # optimizers that have stepped in the current step
        self.worst_of_ranks: Callable[[int], int] | None = None  # the guard's exchange, if there are several ranks
        self._left_out: list[Finding] = []
        self._hooks: list[Any] = []

    # Steps

    def add_callback(self, callback: Callback) -> None:
        """Begin to check the gradients."""
        self.callbacks = (callback,)
        self._buffers.remember()
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def remove_callback(self, callback: Callback) -> None:
        """Leave the optimizers to the script."""
        self.callbacks = ()
        while self._hooks:
            self._hooks.pop().remove()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; before each step, back up the buffers that its forward passes change."""
        self._hands_out = True
        for placed in WindowedBatches(loader, self._window, self._flush):
            if not self.accumulating:
                self._buffers.remember()
            self.accumulating = True
            self._batches.append(placed)
            yield placed
        self.accumulating = False

    def train_on(self, loss: Tensor) -> Step:
        """Run a micro-batch, and after the last of a step: unscale, clip, step, update, schedulers, zero_grad."""
        checked_loss(loss, "guard.step() was given")
        window = self._window
        window.factor(None, float)
        share = loss if window.divisor == 1 else loss / window.divisor
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        window.add(share.detach())
        if not window.end_micro_batch():
            return Step(self.applied_steps + self.skipped_steps + 1, SCRIPTS_OWN, window.loss)
        return self._take_step()

    def _flush(self) -> None:
        if self._window.count:  # the script left out a batch of the last window
            for callback in self.callbacks:
                callback.after_step(self._take_step())

    def _take_step(self) -> Step:
        window, scaler, norm = self._window, self._scaler, math.nan
        correction, loss = window.correction(), window.loss
        assert loss is not None
        stepping = [each for each in self.optimizers if len(collect_gradients(each))]
        if not stepping:
            window.reset()
            raise BadInput("guard.step(loss): the backward pass reached none of the optimizer's parameters.")
        if scaler is not None and (self._clip_norm is not None or correction is not None):
            for optimizer in stepping:
                scaler.unscale_(optimizer)
        if correction is not None:
            for optimizer in stepping:
                torch._foreach_div_(collect_gradients(optimizer).values, float(correction))
            loss = loss / correction
        if self._clip_norm is not None:
            norm = _clip(stepping, self._clip_norm)
        for optimizer in stepping:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)  # noqa: AMP110 (each optimizer once)
        if scaler is not None:
            scaler.update()
        window.close()
        step = self.end_step(loss, norm=norm)
        if not step.skipped:
            for scheduler in self._schedules.schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):  # which the script steps, with its metric
                    scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return step

    def end_step(self, loss: Tensor | float, *, norm: float = math.nan) -> Step:
        """End a step that the script has taken: restore the buffers if it was skipped, and count it."""
        if self.worst_of_ranks is not None:
            for _ in range(len(self.optimizers) - len(self._stepped)):  # ranks that do step wait in ``check``
                self.worst_of_ranks(LEFT_OUT)
        skipped, number = self.skips, float(loss.detach() if isinstance(loss, Tensor) else loss)
        self._buffers.end_window(skipped)
        self.explained = self._left_out
        if not self.explained and (skipped or not math.isfinite(number)):
            self.explained = _bad_batch(self._batches)
        self._batches.clear()
        self._stepped.clear()
        self._left_out = []
        self.bad = self.accumulating = False
        self.skipped_steps += skipped
        self.applied_steps += not skipped
        if not self._hands_out:
            self._buffers.remember()
        scale = float(self._scaler.get_scale()) if self.scaler.is_enabled() else 1.0
        lrs = [float(group["lr"]) for each in self.optimizers for group in each.param_groups if "lr" in group]
        result = LoopResult(None, skipped, after=(norm, scale, number))
        return Step(self.applied_steps + self.skipped_steps, SCRIPTS_OWN, result=result, lrs=lrs)

    # Gradients

    @property
    def skips(self) -> bool:
        """Whether the optimizers have left out the step that is about to end."""
        return self.bad or not self._stepped

    def _before_optimizer_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.before_update(self.applied_steps + self.skipped_steps + 1, None)
        if [*args[1:2], kwargs.get("closure")][0] is None:  # args begin with the optimizer
            self.check(optimizer)
        elif not self.closures:
            raise BadInput(
                "Guard: optimizer.step(closure) computes gradients that the guard cannot check. Compute them first."
            )

    def check(self, optimizer: Optimizer) -> None:
        """Drop the gradients if one is not finite, on any rank; syncs with the device."""
        gradients = [each for each in collect_gradients(optimizer).values if each.numel()]
        # The largest magnitude, as a sum of squares may overflow; it is NaN if one is.
        found = NOT_FINITE if gradients and not math.isfinite(float(get_total_norm(gradients, math.inf))) else FINITE
        if self.worst_of_ranks is not None:
            found = self.worst_of_ranks(found)
        if found != FINITE:
            self.bad = True
            if found == LEFT_OUT:
                text = "a rank left out `optimizer.step()`, which others called: their weights would differ"
                self._left_out = [find_rule("replicas-differ").at(Place(), text)]
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))

    # State

    def save_bad_steps(self, capsules: Any, *, streak: int = 1) -> None:
        """Do nothing: a step of a script's own cannot be run again."""

    def change_precision(self, precision: Policy) -> None:
        raise BadInput(f"Guard(model=...): the guard cannot change the precision: {self.precision_locked_because}.")

    def state_dict(self) -> dict[str, Any]:
        """Return all state but that of model and optimizer, as an engine's."""
        return {
            "version": VERSION,
            "precision": SCRIPTS_OWN,
            "policy": self.policy.as_dict(),
            "scaler": self._scaler.state_dict() if self.scaler.is_enabled() else {},
            "schedulers": self._schedules.state(),
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "rng": rng_state(self.device),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_precision: bool = False) -> None:
        """Restore what ``state_dict`` returned. Raise BadInput if it does not fit."""
        try:
            if state["precision"] != SCRIPTS_OWN or len(state["schedulers"]) != len(self._schedules):
                raise ValueError(f"it has {len(state['schedulers'])} schedulers, and this loop {len(self._schedules)}")
            self.applied_steps, self.skipped_steps = int(state["applied_steps"]), int(state["skipped_steps"])
            self._schedules.load(state["schedulers"])
            if self.scaler.is_enabled() and state["scaler"]:
                self._scaler.load_state_dict(state["scaler"])
            restore_rng(state["rng"], self.device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"the state of the loop is damaged ({type(error).__name__}: {error}).") from error
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.ranks.drop_unsynced()
        self._window.reset()
        self._batches.clear()
        self._stepped.clear()
        self.bad = self.accumulating = False
        self._buffers.remember()

    def __repr__(self) -> str:
        names = ", ".join(type(each).__name__ for each in (*self.models, *self.optimizers))
        return f"<loop of {names} on {self.device}>"


def _clip(optimizers: list[Optimizer], limit: float) -> float:
    """Clip unscaled gradients as torch does, and return their norm; torch's own clip fails where a shard is empty."""
    trained = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if any(hasattr(each, "placements") for each in trained):
        return float(clip_in_memory_(optimizers, limit, 2.0, None))
    return float(clip_grad_norm_(trained, limit))


def _bad_batch(batches: Iterable[Any]) -> list[Finding]:
    """Return a finding if the batches of a bad step contain NaN or inf themselves."""
    pending: list[tuple[str, Any]] = [("batch", batch) for _, batch in batches]
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, Tensor):
            if (value.is_floating_point() or value.is_complex()) and value.layout == torch.strided:
                bad = int((~value.isfinite()).sum())
                if bad:
                    text = f"`{name}` has {bad:,} NaN or inf among {value.numel():,} values"
                    return [find_rule("bad-batch").at(Place(), text)]
        elif isinstance(value, Mapping):
            pending += [(f"{name}[{key!r}]", each) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}[{place}]", each) for place, each in enumerate(value)]
    return []
