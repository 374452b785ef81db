"""GradScaler: torch's, with a single read of the gradients, scale limits, skipping without a scale, and statistics."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.train.scaler.collapse import SKIPS_BEFORE_WARNING, collapse_error, warn_about_skips
from ampwise.train.scaler.grad_stats import (
    NO_CLIPPING,
    WITH_LOSS,
    CheckedGradients,
    GradStats,
    check_gradients,
    clip_in_memory_,
    named_census,
)
from ampwise.train.scaler.gradients import (
    OptimizerGradients,
    collect_gradients,
    first_device,
    refuse_half,
    to_device,
    versions_of,
)
from ampwise.train.scaler.loss_scale import (
    COUNT_KEYS,
    ScaleLimits,
    UpdateField,
    checked_state,
    is_number,
    new_counters,
    update_scale_,
)
from ampwise.train.scaler.optimizer_step import (
    has_closure,
    refuse_closure,
    steps_on_device,
    take_step,
    takes_grad_scaler,
)
from ampwise.train.scaler.step_result import AsyncScalars, StepCounts, StepResult

__all__ = ["GradScaler"]

NOT_PICKLED = (
    "_entries", "_stepped", "_iteration_over", "_unchecked_steps", "_loss", "_skip_bad_loss", "_divisor", "_last",
    "_posted", "_tally", "_unscaled_counts", "_warned", "_process_group",
)  # fmt: skip
MAX_DEVICES = 16  # a smaller integer is a GPU index, not a scale


class ScalerOptimizerState:
    """State of one optimizer: its checked gradients in this iteration, and the result of its last step."""

    def __init__(self, optimizer: Any, forget: Callable[[Any], object]) -> None:
        self.key = id(optimizer)  # which torch's scaler uses too: optimizers need not be hashable
        self.weakly = True
        self.optimizer: Callable[[], Any]  # None once it is deleted
        try:
            self.optimizer = weakref.ref(optimizer, forget)
        except TypeError:
            self.optimizer, self.weakly = lambda: optimizer, False
        self.checked: CheckedGradients | None = None  # the gradients as checked in this iteration
        self.flags: list[Tensor] = []  # found_inf as published in torch's per-optimizer state
        self.flag_versions: list[int] | None = []
        self.unscaled = False  # unscale_() was called, with scaling off
        self.trusted = False  # the gradients have not changed since they were checked
        self.stats: GradStats | None = None  # statistics of the last step, for ``census``
        self.result: StepResult | None = None

    def reset(self) -> None:
        """Reset for the next iteration."""
        self.checked, self.unscaled, self.trusted = None, False, False

    def shows(self, flags: Sequence[Tensor]) -> bool:
        """Return whether these are the published flags, unchanged."""
        same = len(flags) == len(self.flags) and all(map(is_, flags, self.flags))
        return same and versions_of(flags) == self.flag_versions


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that reads the gradients only once per step.

    A drop-in replacement: same arguments, methods, errors and state. With a fused optimizer, unscaling, the check for
    inf and NaN, clipping (``clip_``) and the counts by parameter (``census``) take one read, and nothing syncs with the
    GPU. A step with a gradient that is not finite is skipped in any precision, with ``enabled=False`` too.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in ``torch.amp.GradScaler``.
        min_scale, max_scale: the scale stays between them. An overflow at ``min_scale`` raises ScaleCollapsed.
        hysteresis: the first n - 1 overflows in a row do not lower the scale; from the n-th on, each does.
        guard: with ``enabled=False``, still skip steps whose gradients are not finite, and warn if it continues.
        process_group: the ranks over which plain gradients are sharded (FSDP1, custom sharding), so that they skip and
            clip together. Not needed with DDP and FSDP2.

    Raises:
        BadInput: an argument does not fit.
        ScaleCollapsed: by ``update``: an overflow at ``min_scale``.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> scaler = GradScaler("cpu")
    >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    >>> norm = scaler.clip_(optimizer, max_norm=1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.skipped, scaler.applied_steps, scaler.census(model)["weight"].amax
    (False, 1, 2.0)
    """

    def __init__(
        self,
        device: str | torch.device | float = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-14,  # FP16's smallest normal number: a loss of 1 scaled by less loses bits
        max_scale: float | None = None,
        hysteresis: int = 1,
        guard: bool = True,
        process_group: Any | None = None,
    ) -> None:
        if not isinstance(device, str | torch.device):
            init_scale, device = _old_order(device, init_scale), "cuda"
        self._limits = ScaleLimits.checked(
            init_scale,
            min_scale,
            max_scale,
            hysteresis,
            growth=growth_factor,
            backoff=backoff_factor,
            interval=growth_interval,
        )
        try:
            device_type = torch.device(device).type
        except RuntimeError:
            raise BadInput(f"GradScaler({device!r}): unknown device. Use 'cuda' or 'cpu'.") from None
        super().__init__(device_type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._guard = guard
        self._process_group = process_group
        self.collapses = True  # raise ScaleCollapsed; off with a guard, which handles it
        self._saved_tally = (0, 0, 0)
        self._begin()

    def _begin(self) -> None:
        """Initialise the state of this process."""
        self._entries: dict[int, ScalerOptimizerState] = {}
        self._stepped: list[ScalerOptimizerState] = []  # optimizers stepped in this iteration
        self._iteration_over = False  # the iteration is over; the next check belongs to a new one
        self._unchecked_steps = 0  # steps whose gradients were not checked
        self._loss: Tensor | None = None  # to be copied to the host with the numbers of this iteration
        self._skip_bad_loss = False
        self._divisor: Tensor | None = None  # what to divide gradients by in this iteration, besides the scale
        self._forget()

    def _forget(self) -> None:
        """Forget past steps."""
        in_a_row, applied, skipped = self._saved_tally
        self._tally: Tensor | None = None
        self._unscaled_counts = StepCounts(applied, skipped, in_a_row)  # with scaling off
        self._warned = False  # that all steps are skipped
        self._last: StepResult | None = None
        self._posted: AsyncScalars | None = None

    def _entry(self, optimizer: Any) -> ScalerOptimizerState:
        """Return the optimizer's state, created on first use."""
        key, entries = id(optimizer), self._entries
        entry = entries.get(key)
        if entry is None or entry.optimizer() is not optimizer:
            entry = entries[key] = ScalerOptimizerState(optimizer, lambda gone: entries.pop(key, None))
        return entry

    # The step

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale now, in memory, to read or change them before the step.

        Optional: ``step`` does it otherwise. Does not sync with the device.

        Args:
            optimizer: whose gradients to divide.
        """
        entry = self._entry(optimizer)
        if not self._enabled:
            checked = self._check_without_scale(entry)
            if checked is not None:
                checked.unscale_and_clip_()  # clipping requested before
            entry.unscaled = True
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        checked = self._current_check(entry)
        if checked is None:
            self._check_alone(entry, unscale=True)
        else:
            refuse_half(checked.gradients)
            checked.unscale_and_clip_()  # clipping requested before
        state["stage"] = OptState.UNSCALED

    def clip_(self, optimizer: Optimizer | Iterable[Optimizer], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of the optimizer's unscaled gradients; return the norm before clipping.

        Before ``unscale_``, nothing is written: gradients stay scaled in memory until the step, which unscales and
        clips at once. After it, they are clipped in memory. With several optimizers, the norm of all gradients together
        is clipped; with several calls, the lowest limit counts. The coefficient is that of
        ``torch.nn.utils.clip_grad_norm_``, from a norm summed in FP64: weights agree with torch's to the last digits,
        not to the last bit.

        Args:
            optimizer: one, or several.
            max_norm: the limit.
            norm_type: 2.0, or another p of the p-norm.

        Returns:
            the norm, on the device.

        Raises:
            BadInput: an argument does not fit.
            RuntimeError: after ``step``.
        """
        optimizers: list[Optimizer] = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        if not optimizers or any(map(torch.is_tensor, optimizers)):
            raise BadInput("clip_() takes the optimizer, not its parameters: scaler.clip_(optimizer, max_norm).")
        if not is_number(max_norm) or not max_norm > 0:
            raise BadInput(f"clip_(max_norm={max_norm!r}): expected a number above 0; float('inf') only measures.")
        if not is_number(norm_type):
            raise BadInput(f"clip_(norm_type={norm_type!r}): expected a number, such as 2.0 or float('inf').")
        if self._enabled:
            self._check_scale_growth_tracker("clip_")
        entries = dict.fromkeys(map(self._entry, optimizers))  # without duplicates
        stages = [self._stage(entry) for entry in entries]
        if OptState.STEPPED in stages:
            raise RuntimeError("clip_() is being called after step(). Was update() missing in the last iteration?")
        if norm_type == 2.0 and OptState.UNSCALED not in stages:
            norm = self._clip_at_step(entries, float(max_norm))
            if norm is not None:
                return norm
        alive = [entry.optimizer() for entry in entries]
        for each, stage in zip(alive, stages, strict=True):
            if stage is OptState.READY:
                self.unscale_(each)
        return clip_in_memory_(alive, float(max_norm), float(norm_type), self._process_group)

    def _clip_at_step(self, entries: Iterable[ScalerOptimizerState], max_norm: float) -> Tensor | None:
        """Check the gradients, to be clipped at the step; return the norm.

        None if some are to be clipped with another group already: then one clipping has to follow the other, in memory.
        """
        found: dict[ScalerOptimizerState, OptimizerGradients] = {}
        for entry in entries:
            gradients = collect_gradients(entry.optimizer())
            if gradients.values or self._process_group is not None:
                found[entry] = gradients
        if not found:
            return torch.zeros((), dtype=torch.float32, device=first_device([entry.optimizer() for entry in entries]))
        for entry in found:
            checked = None if entry.checked is None else self._current_check(entry)
            if checked is not None:
                if checked.joint_with != {each.key for each in found}:
                    return None
                max_norm = min(max_norm, checked.max_norm)
        checked = self._check_together(list(found), list(found.values()), max_norm)
        return checked.decision.norm.clone()  # a copy, as the caller may write to it

    def check(
        self,
        optimizers: Sequence[Optimizer],
        max_norm: float = NO_CLIPPING,
        *,
        divisor: Tensor | None = None,
        loss: Tensor | None = None,
        skip_bad_loss: bool = False,
        unscale: bool = False,
    ) -> None:
        """Check the gradients of these optimizers together before their steps: all of them are applied, or none.

        The first call of an iteration, and optional; the steps follow at once. max_norm: the steps clip, by the norm of
        all gradients. divisor: what to divide gradients by in addition to the scale, such as a number of tokens. loss:
        copied to the host with the results of the steps. skip_bad_loss: skip them also if only the loss is not finite;
        it must be the same on all ranks. unscale: divide gradients in memory now, to change them before
        the steps; else they must not change. No sync.
        """
        self._loss, self._skip_bad_loss, self._divisor = loss, skip_bad_loss, divisor
        if not (self._enabled or self._guard or divisor is not None or max_norm != NO_CLIPPING or unscale):
            return
        entries, every = list(map(self._entry, optimizers)), list(map(collect_gradients, optimizers))
        if unscale and self._enabled:
            for gradients in every:
                refuse_half(gradients)
        self._check_together(entries, every, max_norm, unscale=unscale)
        for entry in entries:
            entry.trusted = True
            if unscale:
                entry.unscaled = True
                if self._enabled:
                    self._per_optimizer_states[entry.key]["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless a gradient is inf or NaN: then nothing changes.

        A fused optimizer decides on the device. For any other, this syncs with the device, as torch does.

        Args:
            optimizer: to step.
            *args: passed to ``optimizer.step``.
            **kwargs: likewise, by name.

        Returns:
            what ``optimizer.step`` returns; None if it was skipped on the host.

        Raises:
            RuntimeError: a second time before ``update``.
        """
        entry = self._entry(optimizer)
        if not self._enabled:
            # A closure computes the gradients later.
            checked = None
            if not (args or kwargs) or not has_closure(args, kwargs):
                checked = self._check_without_scale(entry)
            if checked is None:
                result = optimizer.step(*args, **kwargs)  # noqa: AMP109
                self._unchecked_steps += 1
                self._last = entry.result = StepResult(None, skipped_on_host=False)
            else:
                result = self._take_step(entry, checked, args, kwargs)
                self._close_unscaled(entry.result)
            entry.reset()
            return result
        refuse_closure(optimizer, args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once, after the last step() of "
                "each iteration."
            )
        on_device = steps_on_device(optimizer)
        if on_device and takes_grad_scaler(optimizer):
            result = super().step(optimizer, *args, **kwargs)
            self._last = entry.result = StepResult(self._numbers_found(entry))
            self._count(entry, state)
            return result
        checked = entry.checked
        if state["stage"] is not OptState.UNSCALED:
            checked = self._current_check(entry) or self._check_alone(entry)
        if checked is None:
            # A fused optimizer without gradients does nothing; for any other raise torch's error.
            if not on_device or len(collect_gradients(optimizer)):
                raise AssertionError(
                    "No inf checks were recorded for this optimizer. None of its parameters has a gradient: was "
                    "backward() called, on a loss that depends on them, after the last zero_grad() and before "
                    "unscale_()?"
                )
            result = optimizer.step(*args, **kwargs)
        else:
            if checked.scaled and not on_device:
                refuse_half(checked.gradients)
            flags = list(state["found_inf_per_device"].values())
            if not entry.shows(flags):  # the user has added to them, which torch allows
                checked.decision = checked.decision.or_found(flags)
            result = self._take_step(entry, checked, args, kwargs)
            self._count(entry, state)
        state["stage"] = OptState.STEPPED
        return result

    def _take_step(
        self, entry: ScalerOptimizerState, checked: CheckedGradients, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result, skipped = take_step(entry.optimizer(), checked, args, kwargs)
        checked.gradients = OptimizerGradients()  # so that the next backward pass can free them
        self._last = entry.result = StepResult(checked.decision.numbers, skipped, on_host=checked.decision.on_host)
        return result

    def _count(self, entry: ScalerOptimizerState, state: dict[str, Any]) -> None:
        """Count this step in the iteration, unless an optimizer hook has ended the iteration meanwhile."""
        if state is self._per_optimizer_states.get(entry.key):
            self._stepped.append(entry)

    def update(self, new_scale: float | Tensor | None = None, *, loss: Tensor | None = None) -> None:
        """End the iteration: update the scale, or set it.

        Args:
            new_scale: the scale to set; by default it is updated.
            loss: the unscaled loss of the step. If it is inf or NaN itself, as after a bad batch, the overflow says
                nothing about the scale, which stays, for up to 30 such steps in a row. Without it, each overflow lowers
                the scale, as in torch. With several ranks, pass the same on all of them, such as their sum. No sync.

        Raises:
            ScaleCollapsed: after an overflow with the scale at ``min_scale``: on a GPU one call later, when the numbers
                have arrived, so that nothing syncs. Steps in between are skipped like any other.
        """
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise BadInput(f"update(loss={loss!r}): expected the loss of the step, a tensor with one number.")
        stepped = self._stepped
        further: list[Tensor] = []  # found_inf flags that lower the scale too
        if self._enabled:
            self._check_scale_growth_tracker("update")
            ours, checked = {entry.key: entry for entry in stepped}, False
            for key, state in self._per_optimizer_states.items():
                flags = list(state["found_inf_per_device"].values())
                checked = checked or bool(flags)
                if key not in ours or not ours[key].shows(flags):  # not stepped, or the user has added to them
                    further += flags
            if new_scale is not None:
                super().update(self._limits.checked_scale(new_scale))
            elif not checked:
                raise AssertionError(
                    "No inf checks were recorded prior to update. No optimizer was stepped since the last update(): "
                    "when accumulating gradients, call step() and update() together."
                )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._stepped = []
        for entry in list(self._entries.values()):
            entry.reset()
            if not entry.weakly and entry not in stepped:
                del self._entries[entry.key]
        self._iteration_over, self._divisor = True, None
        if self._enabled:
            self._close(stepped, further, move=new_scale is None, loss=loss)
        self._loss = None

    def abandon(self) -> None:
        """Abandon the iteration, after an error in a step: the next ``step`` begins a new one."""
        if self._enabled:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for entry in self._entries.values():
            entry.reset()
        self._stepped, self._iteration_over, self._divisor, self._loss = [], True, None, None
        self._skip_bad_loss = False

    def undo_backoff(self, result: StepResult) -> None:
        """Between iterations: undo the backoff of this step, and restore the growth tracker from before it.

        The step's numbers have arrived, and the scale is written on the device: no sync.

        Args:
            result: of the step.
        """
        if result.backoff <= 1 or self._scale is None or self._growth_tracker is None:
            return
        self._scale.mul_(result.backoff)
        self._growth_tracker.add_(result.clean_steps).clamp_(max=self._growth_interval - 1)

    # What happened

    @property
    def skipped(self) -> bool:
        """Whether the last ``step`` was skipped: ``if not scaler.skipped: scheduler.step()``.

        This is about the optimizer stepped last; ``skipped_for`` takes one of several. Syncs if the step is not
        finished.
        """
        return self._last is not None and self._last.skipped

    @property
    def min_scale(self) -> float:
        """Minimum of the scale."""
        return self._limits.floor

    @property
    def scale_tensor(self) -> Tensor | None:
        """The loss scale on its device, to copy or compute with: no sync. None if scaling is off or not begun."""
        return self._scale if self.is_enabled() else None

    def skipped_for(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's last step was skipped, for loops with several optimizers."""
        result = self.result_of(optimizer)
        return result is not None and result.skipped

    def result_of(self, optimizer: Optimizer) -> StepResult | None:
        """Return the result of the optimizer's last step: numbers that may still be on the device."""
        return self._entry(optimizer).result

    def stats_of(self, optimizer: Optimizer) -> GradStats | None:
        """Return the statistics of the gradients of the optimizer's last step, on the device; None without any."""
        return self._entry(optimizer).stats

    @property
    def grad_norm(self) -> float:
        """Norm of the last step's unscaled gradients before clipping; NaN before the first step."""
        return math.nan if self._last is None else self._last.norm

    @property
    def applied_steps(self) -> int:
        """How many optimizer steps changed the weights, up to the last ``update``."""
        return self._counts()[1]

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped, up to the last ``update``."""
        return self._counts()[2]

    def census(self, model: Module | None = None) -> DeviceCensus:
        """Return the census of the last step's gradients by parameter, unscaled and before clipping.

        Names are the model's, if it is given; or those the optimizer was created with; or "group.index". FP64 gradients
        are not counted, nor those on devices without a kernel.
        """
        if model is not None and not isinstance(model, Module):
            raise BadInput(f"census(): expected the model whose names to use, got {type(model).__name__}.")
        entries = list(self._entries.values())
        return named_census([(entry.optimizer(), entry.stats) for entry in entries if entry.stats is not None], model)

    def __repr__(self) -> str:
        # Printing must not sync with the device.
        if not self._enabled:
            return f"<GradScaler on {self._device}, scaling off, {'guarded' if self._guard else 'not guarded'}>"
        return f"<GradScaler on {self._device}, scale from {self._init_scale:g}, at least {self._limits.floor:g}>"

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries, which torch can load, and the step counts. Empty with scaling off."""
        if not self._enabled:
            return {}
        return super().state_dict() | dict(zip(COUNT_KEYS, self._counts(), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of torch's; if it is invalid, raise BadInput and change nothing.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            BadInput: it is invalid; nothing has changed.
        """
        if not self._enabled:
            return
        if not state_dict:
            super().load_state_dict({})  # raises torch's error
        checked = checked_state(state_dict, self._limits)
        super().load_state_dict(checked)
        in_a_row, applied, skipped = (int(checked.get(key, 0)) for key in COUNT_KEYS)
        self._saved_tally = (in_a_row, applied, skipped)
        self._unchecked_steps = 0
        # Steps since the last update() keep their result: as in torch, it updates the scale that is loaded here.
        for entry in self._entries.values():
            if entry not in self._stepped:
                entry.result = None
        last = self._last if self._stepped else None
        self._forget()
        self._last = last

    def __getstate__(self) -> dict[str, Any]:
        counts = self._counts()
        state = super().__getstate__()
        state["_saved_tally"] = counts
        # Past steps belong to this process's optimizers and are not pickled. Neither are process groups.
        for name in NOT_PICKLED:
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process_group = None
        self._begin()

    # Internals

    def _stage(self, entry: ScalerOptimizerState) -> OptState:
        if not self._enabled:
            return OptState.UNSCALED if entry.unscaled else OptState.READY
        state = self._per_optimizer_states.get(entry.key)
        return OptState.READY if state is None else state["stage"]

    def _check_without_scale(self, entry: ScalerOptimizerState) -> CheckedGradients | None:
        """With scaling off: return the earlier check of the gradients, or check them now if the guard is on."""
        checked, optimizer = entry.checked, entry.optimizer()
        if entry.trusted:
            return checked
        # After unscale_ the user may clip, which spreads a NaN and hides an inf: the check before that counts.
        if checked is not None and (not entry.unscaled or checked.gradients.are_all_replaced_in(optimizer)):
            checked = self._current_check(entry)
        if checked is None and (self._guard or self._divisor is not None) and hasattr(optimizer, "param_groups"):
            checked = self._check_alone(entry)
        return checked

    def _current_check(self, entry: ScalerOptimizerState) -> CheckedGradients | None:
        """Return the check made by ``clip_`` if gradients are unchanged since; check again if they are not."""
        checked, optimizer = entry.checked, entry.optimizer()
        if checked is None or entry.trusted or checked.gradients.are_unchanged_in(optimizer):
            return checked
        if checked.gradients.are_all_replaced_in(optimizer):  # the requested clipping was for those
            entry.checked = None
            return None
        if self._enabled and not checked.scaled:  # already unscaled by a step that then failed
            return checked
        if checked.alone:
            return self._check_together([entry], [collect_gradients(optimizer)], checked.max_norm)
        raise RuntimeError(
            "gradients changed after clip_(), which covers other ranks or optimizers too. Call clip_() last."
        )

    def _check_alone(self, entry: ScalerOptimizerState, *, unscale: bool = False) -> CheckedGradients | None:
        """Check the gradients; None without any. In a process group, a rank without gradients must take part too."""
        gradients = collect_gradients(entry.optimizer())
        if not gradients.values and self._process_group is None:
            return None
        if unscale:
            refuse_half(gradients)  # before they are written to
        return self._check_together([entry], [gradients], unscale=unscale)

    def _check_together(
        self,
        entries: Sequence[ScalerOptimizerState],
        every: Sequence[OptimizerGradients],
        max_norm: float = NO_CLIPPING,
        *,
        unscale: bool = False,
    ) -> CheckedGradients:
        """Check gradients of one or several optimizers. Earlier statistics are freed first, to reuse their memory."""
        for entry in self._entries.values() if self._iteration_over else entries:
            entry.stats = None
        self._iteration_over = False
        scale = self._scale if self._enabled else None
        if self._divisor is not None:
            scale = self._divisor if scale is None else scale * to_device(self._divisor, scale.device)
        home = first_device([entry.optimizer() for entry in entries]) if scale is None else scale.device
        group = self._process_group
        all_checked = check_gradients(
            every, scale, max_norm, home=home, process_group=group, unscale=unscale, loss=self._loss,
            skip_bad_loss=self._skip_bad_loss,
        )  # fmt: skip
        together = frozenset([entry.key for entry in entries])
        for entry, checked in zip(entries, all_checked, strict=True):
            entry.checked, entry.stats, checked.joint_with = checked, checked.stats, together
            if self._enabled:
                values = checked.gradients.values
                found_inf = checked.decision.found_inf
                if checked.gradients.ordinary and values[0].device == found_inf.device:
                    flags = {found_inf.device: found_inf}
                else:
                    flags = {device: to_device(found_inf, device) for device in {each.device for each in values}}
                    flags = flags or {home: found_inf}
                self._per_optimizer_states[entry.key]["found_inf_per_device"] = flags
                entry.flags, entry.flag_versions = list(flags.values()), versions_of(flags.values())
        return all_checked[0]

    def _numbers_found(self, entry: ScalerOptimizerState) -> Tensor:
        """Return norm and found_inf for an optimizer that took the scaler itself, as far as it used it."""
        if entry.checked is not None:
            return entry.checked.decision.numbers
        scale, _ = self._check_scale_growth_tracker("step")
        found = [each.to(scale) for each in self._found_inf_per_device(entry.optimizer()).values()]
        worst = torch.stack(found).max() if found else torch.zeros_like(scale)
        return torch.stack([torch.full_like(scale, math.nan), worst])

    def _close(
        self, stepped: list[ScalerOptimizerState], further: Sequence[Tensor], *, move: bool, loss: Tensor | None
    ) -> None:
        """Count steps, update the scale, and start copying the results. ``further``: further found_inf flags."""
        results, rows = [], []
        for entry in stepped:
            if entry.result is not None:
                results.append(entry.result)
                if entry.result.numbers is not None:
                    rows.append(entry.result.numbers[:2])
        rows += [torch.stack([torch.full_like(found, math.nan), found]) for found in further]
        if not rows:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if self._tally is None:
            self._tally = new_counters(scale.device, *self._saved_tally)
        if len(rows) == 1:
            numbers = to_device(rows[0], scale.device).unsqueeze(0)
        else:
            numbers = torch.stack([to_device(row, scale.device) for row in rows])
        limits = replace(  # torch has setters for these three
            self._limits, growth=self._growth_factor, backoff=self._backoff_factor, interval=self._growth_interval
        )
        forgives = loss is not None
        loss = self._loss if loss is None else loss
        if loss is not None:
            loss = to_device(loss.detach(), scale.device)
        facts = update_scale_(
            scale, tracker, self._tally, numbers, len(results), limits, move=move, loss=loss, forgives=forgives
        )
        written_from = None if facts.device == scale.device else scale.device
        before, self._posted = self._posted, AsyncScalars(facts, written_from=written_from)
        for index, result in enumerate(results):
            result.posted, result.place, result.scaled = self._posted, UpdateField.FIRST_OPTIMIZER + 2 * index, True
        # Raise if the scale collapsed; on a GPU by the previous step, whose numbers have arrived on all ranks.
        if self.collapses and not self._posted.captured:
            settled = before if self._posted.lags else self._posted
            if settled is not None and settled.read()[UpdateField.STUCK]:
                in_a_row = int(settled.read()[UpdateField.IN_A_ROW])
                raise collapse_error(self._limits.floor, in_a_row, self.census())

    def _close_unscaled(self, result: StepResult | None) -> None:
        """Without scaling: start copying the result, and count the steps that have arrived. No sync."""
        assert result is not None
        assert result.numbers is not None
        loss = None if len(result.numbers) == WITH_LOSS else self._loss
        if loss is not None and loss.device != result.numbers.device:
            loss = to_device(loss, result.numbers.device)
        if result.on_host is not None and loss is None:
            result.posted = AsyncScalars(result.on_host, written_from=result.numbers.device)
        else:
            result.posted = AsyncScalars(result.numbers) if loss is None else AsyncScalars(result.numbers, loss)
        if result.posted.captured:  # steps of a CUDA graph are not counted: the host does not see its replays
            return
        if self._unscaled_counts.add(result):
            in_a_row = self._unscaled_counts.in_a_row
            if in_a_row < SKIPS_BEFORE_WARNING:
                self._warned = False
            elif not self._warned:
                self._warned = True
                warn_about_skips(in_a_row, self.census())

    def _counts(self) -> tuple[int, int, int]:
        """Return overflows in a row, steps applied, steps skipped."""
        if not self._enabled:
            counts = self._unscaled_counts.settle()
            return counts.in_a_row, counts.applied + self._unchecked_steps, counts.skipped
        in_a_row, applied, skipped = self._saved_tally
        if self._posted is not None:
            facts = self._posted.read()
            in_a_row, applied, skipped = (
                int(facts[f]) for f in (UpdateField.IN_A_ROW, UpdateField.APPLIED, UpdateField.SKIPPED)
            )
        return in_a_row, applied + self._unchecked_steps, skipped


def _old_order(first: float, second: float) -> float:
    """Return the scale from arguments in the order of torch.cuda.amp.GradScaler, where it came first."""
    if not is_number(first) or (isinstance(first, int) and first < MAX_DEVICES):
        raise BadInput(f"GradScaler({first!r}): the first argument is a device, such as 'cuda', 'cuda:0' or 'cpu'.")
    if second != 2.0**16:
        raise BadInput("GradScaler(init_scale, growth_factor, ...) in torch.cuda.amp's order: use keyword arguments.")
    warnings.warn(
        f"GradScaler({first!r}): the first argument is the device, as in torch.amp. Use GradScaler('cuda', {first!r}).",
        FutureWarning,
        stacklevel=3,
    )
    return float(first)
