"""GradScaler: torch's, with a single read of the gradients, scale limits, skipping without a scale, and statistics."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.train.scaler.checked_gradients import CheckedGradients, check_gradients, clip_in_memory_, zero_norm
from ampwise.train.scaler.collapse import SKIPS_BEFORE_WARNING, collapse_error, warn_about_skips
from ampwise.train.scaler.gradients import (
    OptimizerGradients,
    collect_gradients,
    first_device,
    refuse_half,
    to_device,
    versions_of,
)
from ampwise.train.scaler.loss_scale import ScaleLimits, UpdateField, is_number, new_counters, update_scale_
from ampwise.train.scaler.optimizer_state import ScalerOptimizerState, ScalerOptimizerStates
from ampwise.train.scaler.optimizer_step import (
    has_closure,
    refuse_closure,
    supports_amp_scaling,
    take_step,
    takes_grad_scaler,
)
from ampwise.train.scaler.parameter_names import named_census
from ampwise.train.scaler.scaler_state import COUNT_KEYS, checked_state
from ampwise.train.scaler.step_decision import NO_CLIPPING
from ampwise.train.scaler.step_result import StepCounts, StepResult

__all__ = ["GradScaler"]

NOT_PICKLED = (
    "_entries", "_stepped", "_iteration_over", "_unchecked_steps", "_extra_scalar", "_extra_factor", "_last",
    "_posted", "_tally", "_unscaled_counts", "_warned", "_process_group",
)  # fmt: skip
MAX_DEVICES = 16  # a smaller integer is a GPU index, not a scale


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that reads the gradients only once per step.

    A drop-in replacement: same arguments, methods, errors and state. With a fused optimizer, unscaling, the check for
    inf and NaN, clipping (``clip_``) and the counts by parameter (``census``) take one read, and nothing syncs with the
    GPU. A step with a gradient that is not finite is skipped in any precision, with ``enabled=False`` too.

    min_scale, max_scale: the scale stays between them. An overflow at ``min_scale`` raises ScaleCollapsed.
    hysteresis: the first n - 1 overflows in a row do not lower the scale; from the n-th on, each does.
    guard: with ``enabled=False``, still skip steps whose gradients are not finite, and warn if it continues.
    process_group: the ranks over which plain gradients are sharded (FSDP1, custom sharding), so that they skip
        and clip together. Not needed with DDP and FSDP2.

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
        super().__init__(_type_of(device), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._guard = guard
        self._process_group = process_group
        self.collapses = True  # raise ScaleCollapsed; off with a guard, which handles it
        self._saved_tally = (0, 0, 0)
        self._begin()

    def _begin(self) -> None:
        """Initialise the state of this process."""
        self._entries = ScalerOptimizerStates()
        self._stepped: list[ScalerOptimizerState] = []  # optimizers stepped in this iteration
        self._iteration_over = False  # the iteration is over; the next check belongs to a new one
        self._unchecked_steps = 0  # steps whose gradients were not checked
        self._extra_scalar: Tensor | None = None  # an extra number to copy to the host with the others
        self._extra_factor: Tensor | None = None  # a factor on this iteration's gradients, in addition to the scale
        self._forget()

    def _forget(self) -> None:
        """Forget past steps."""
        self._tally: Tensor | None = None
        self._unscaled_counts = _counted(self._saved_tally)  # with scaling off
        self._warned = False  # that all steps are skipped
        self._last: StepResult | None = None
        self._posted: AsyncScalars | None = None

    # The step

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale now, in memory, to read or change them before the step.

        Optional: ``step`` does it otherwise. Does not sync with the device.
        """
        entry = self._entries.of(optimizer)
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
            self._check_gradients(entry, unscale=True)
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
        """
        optimizers = _checked_optimizers(optimizer)
        max_norm, norm_type = _checked_norms(max_norm, norm_type)
        if self._enabled:
            self._check_scale_growth_tracker("clip_")
        if any(self._stage(each) is OptState.STEPPED for each in optimizers):
            raise RuntimeError("clip_() is being called after step(). Was update() missing in the last iteration?")
        if norm_type == 2.0 and all(self._stage(each) is OptState.READY for each in optimizers):
            every = self._to_clip(optimizers)
            if every is not None:
                return self._clip_at_the_step(every, max_norm) if every else zero_norm(optimizers)
        for each in optimizers:
            if self._stage(each) is OptState.READY:
                self.unscale_(each)
        return clip_in_memory_(optimizers, max_norm, norm_type, self._process_group)

    def _to_clip(self, optimizers: list[Optimizer]) -> dict[ScalerOptimizerState, OptimizerGradients] | None:
        """Return the gradients to clip at the step; None if some are to be clipped with another group already.

        Each clipping then has to be done one after the other, in memory.
        """
        found = {self._entries.of(each): collect_gradients(each) for each in optimizers}
        every = {e: gradients for e, gradients in found.items() if len(gradients) or self._process_group is not None}
        joint_with = frozenset(entry.key for entry in every)
        standing = [checked for entry in every if (checked := self._current_check(entry)) is not None]
        return every if all(checked.joint_with == joint_with for checked in standing) else None

    def _clip_at_the_step(self, every: dict[ScalerOptimizerState, OptimizerGradients], max_norm: float) -> Tensor:
        lowest = min([max_norm, *(entry.checked.max_norm for entry in every if entry.checked is not None)])
        checked = self._check_together(list(every), list(every.values()), lowest)
        return checked.decision.norm.clone()  # a copy, as the caller may write to it

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless a gradient is inf or NaN: then nothing changes.

        A fused optimizer decides on the device. For any other, this syncs with the device, as torch does.
        """
        if not self._enabled:
            return self._step_unscaled(optimizer, args, kwargs)
        refuse_closure(optimizer, args, kwargs)
        self._check_scale_growth_tracker("step")
        entry, state = self._entries.of(optimizer), self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once, after the last step() of "
                "each iteration."
            )
        if supports_amp_scaling(optimizer) and takes_grad_scaler(optimizer):
            result = super().step(optimizer, *args, **kwargs)
            self._record(entry, StepResult(self._numbers_found(entry)))
            self._count(entry, state)
            return result
        checked = (
            entry.checked
            if state["stage"] is OptState.UNSCALED
            else self._current_check(entry) or self._check_gradients(entry)
        )
        if checked is None:
            result = _step_without_gradients(optimizer, args, kwargs)
        else:
            if checked.scaled and not supports_amp_scaling(optimizer):
                refuse_half(checked.gradients)
            self._include_user_flags(entry, checked)
            result = self._take_step(entry, checked, args, kwargs)
            self._count(entry, state)
        state["stage"] = OptState.STEPPED
        return result

    def _step_unscaled(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step without scaling; still skip if gradients are not finite."""
        entry = self._entries.of(optimizer)
        checked = None
        if not has_closure(args, kwargs):  # a closure computes the gradients later
            checked = self._check_without_scale(entry)
        if checked is None:
            result = optimizer.step(*args, **kwargs)
            self._unchecked_steps += 1
            self._record(entry, StepResult(None, skipped_on_host=False))
        else:
            result = self._take_step(entry, checked, args, kwargs)
            self._close_unscaled(entry)
        entry.reset()
        return result

    def _take_step(
        self, entry: ScalerOptimizerState, checked: CheckedGradients, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result, skipped = take_step(entry.optimizer, checked, args, kwargs)
        checked.gradients = OptimizerGradients()  # so that the next backward pass can free them
        self._record(entry, StepResult(checked.decision.numbers[:2], skipped))
        return result

    def _record(self, entry: ScalerOptimizerState, outcome: StepResult) -> None:
        self._last = entry.outcome = outcome

    def _count(self, entry: ScalerOptimizerState, state: dict[str, Any]) -> None:
        """Count this step in the iteration, unless an optimizer hook has ended the iteration meanwhile."""
        if state is self._per_optimizer_states.get(entry.key):
            self._stepped.append(entry)

    def update(self, new_scale: float | Tensor | None = None, *, loss: Tensor | None = None) -> None:
        """End the iteration: update the scale, or set it.

        loss: the unscaled loss of the step. If it is inf or NaN itself, as after a bad batch, the overflow says nothing
            about the scale, which stays, for up to 30 such steps in a row. Without it, each overflow lowers the scale,
            as in torch. With several ranks, pass the same on all of them, such as their sum. No sync.

        Raises ScaleCollapsed after an overflow with the scale at ``min_scale``: on a GPU one call later, when the
        numbers have arrived, so that nothing syncs. Steps in between are skipped like any other.
        """
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise BadInput(f"update(loss={loss!r}): expected the loss of the step, a tensor with one number.")
        if self._enabled:
            self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states
            if new_scale is not None:
                super().update(self._limits.checked_scale(new_scale))
            elif not any(state["found_inf_per_device"] for state in states.values()):
                raise AssertionError(
                    "No inf checks were recorded prior to update. No optimizer was stepped since the last update(): "
                    "when accumulating gradients, call step() and update() together."
                )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        stepped, self._stepped = self._stepped, []
        others = self._other_flags(stepped, states) if self._enabled else []
        self._entries.drop_unstepped(but=stepped)
        for entry in [*self._entries, *stepped]:
            entry.reset()
        self._iteration_over, self._extra_factor = True, None
        if self._enabled:
            self._close(stepped, others, move=new_scale is None, loss=loss)
        self._extra_scalar = None

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
        outcome = self._outcome_of(optimizer)
        return outcome is not None and outcome.skipped

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
        return named_census(
            [(entry.optimizer, entry.stats) for entry in self._entries if entry.stats is not None], model
        )

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
        """Load a state of this class or of torch's; if it is invalid, raise BadInput and change nothing."""
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
        for entry in self._entries:
            if entry not in self._stepped:
                entry.outcome = None
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
        super().__setstate__({"collapses": True, **state})
        self._process_group = None
        self._begin()

    # Internals

    def _check_without_scale(self, entry: ScalerOptimizerState) -> CheckedGradients | None:
        """With scaling off: return the earlier check of the gradients, or check them now if the guard is on."""
        checked = entry.checked
        # After unscale_ the user may clip, which spreads a NaN and hides an inf: the check before that counts.
        if checked is None or not entry.unscaled or checked.gradients.are_all_replaced_in(entry.optimizer):
            checked = self._current_check(entry)
        if checked is None and self._checks_gradients and hasattr(entry.optimizer, "param_groups"):
            checked = self._check_gradients(entry)
        return checked

    def _check_all(self, optimizers: Sequence[Optimizer], max_norm: float) -> None:
        """Check gradients of several optimizers together, and clip them at the step: ``clip_``, for an engine.

        Must be the first call of the iteration.
        """
        every = {self._entries.of(each): collect_gradients(each) for each in optimizers}
        self._check_together(list(every), list(every.values()), max_norm)

    def _abandon(self) -> None:
        """Abandon the iteration after a step that failed."""
        if self._enabled:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for entry in self._entries:
            entry.reset()
        self._stepped, self._iteration_over, self._extra_factor, self._extra_scalar = [], True, None, None

    def _undo_backoff(self, outcome: StepResult) -> None:
        """Between iterations: undo the backoff of this step, and restore the growth tracker from before it.

        The step's numbers have arrived, and the scale is written on the device: no sync.
        """
        if outcome.backoff <= 1 or self._scale is None or self._growth_tracker is None:
            return
        self._scale.mul_(outcome.backoff)
        self._growth_tracker.add_(outcome.clean_steps).clamp_(max=self._growth_interval - 1)

    @property
    def _checks_gradients(self) -> bool:
        """Whether a step checks its gradients, if that was not done before."""
        return self._enabled or self._guard or self._extra_factor is not None

    def _outcome_of(self, optimizer: Optimizer) -> StepResult | None:
        """Return the result of the optimizer's last step."""
        return self._entries.of(optimizer).outcome

    def _stage(self, optimizer: Optimizer) -> OptState:
        if not self._enabled:
            return OptState.UNSCALED if self._entries.of(optimizer).unscaled else OptState.READY
        known = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if known is None else known["stage"]

    def _current_check(self, entry: ScalerOptimizerState) -> CheckedGradients | None:
        """Return the check made by ``clip_`` if gradients are unchanged since; check again if they are not."""
        checked = entry.checked
        if checked is None or checked.gradients.are_unchanged_in(entry.optimizer):
            return checked
        if checked.gradients.are_all_replaced_in(entry.optimizer):  # the requested clipping was for those
            entry.checked = None
            return None
        if self._enabled and not checked.scaled:  # already unscaled by a step that then failed
            return checked
        if checked.alone:
            return self._check_together([entry], [collect_gradients(entry.optimizer)], checked.max_norm)
        raise RuntimeError(
            "gradients changed after clip_(), which covers other ranks or optimizers too. Call clip_() last."
        )

    def _check_gradients(self, entry: ScalerOptimizerState, *, unscale: bool = False) -> CheckedGradients | None:
        """Check the gradients; None without any. In a process group, a rank without gradients must take part too."""
        gradients = collect_gradients(entry.optimizer)
        if not len(gradients) and self._process_group is None:
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
        for entry in self._entries if self._iteration_over else entries:
            entry.stats = None
        self._iteration_over = False
        scale = self._multiplier()
        home = first_device([entry.optimizer for entry in entries]) if scale is None else scale.device
        all_checked = check_gradients(
            every, scale, max_norm, home=home, process_group=self._process_group, unscale=unscale
        )
        for entry, checked in zip(entries, all_checked, strict=True):
            entry.checked, entry.stats = checked, checked.stats
            checked.joint_with = frozenset(each.key for each in entries)
            if self._enabled:
                flags = {
                    device: to_device(checked.decision.found_inf, device)
                    for device in checked.gradients.devices or {home}
                }
                self._per_optimizer_states[id(entry.optimizer)]["found_inf_per_device"] = flags
                entry.flags, entry.flag_versions = list(flags.values()), versions_of(flags.values())
        return all_checked[0]

    def _multiplier(self) -> Tensor | None:
        """Return what gradients in memory must be divided by; None for nothing."""
        scale = self._scale if self._enabled else None
        if self._extra_factor is None:
            return scale
        return self._extra_factor if scale is None else scale * to_device(self._extra_factor, scale.device)

    def _include_user_flags(self, entry: ScalerOptimizerState, checked: CheckedGradients) -> None:
        """Include found_inf flags that the user has added to ours, as torch does."""
        given = list(self._found_inf_per_device(entry.optimizer).values())
        if not entry.shows(given):
            checked.decision = checked.decision.or_found(given)

    def _other_flags(self, stepped: list[ScalerOptimizerState], states: Mapping[int, dict[str, Any]]) -> list[Tensor]:
        """Return found_inf flags of optimizers that were not stepped, and flags the user added; all lower the scale."""
        ours = {entry.key: entry for entry in stepped}
        flags = [(key, list(state["found_inf_per_device"].values())) for key, state in states.items()]
        return [flag for key, given in flags if key not in ours or not ours[key].shows(given) for flag in given]

    def _numbers_found(self, entry: ScalerOptimizerState) -> Tensor:
        """Return norm and found_inf for an optimizer that took the scaler itself, as far as it used it."""
        if entry.checked is not None:
            return entry.checked.decision.numbers[:2]
        scale, _ = self._check_scale_growth_tracker("step")
        found = [each.to(scale) for each in self._found_inf_per_device(entry.optimizer).values()]
        worst = torch.stack(found).max() if found else torch.zeros_like(scale)
        return torch.stack([torch.full_like(scale, math.nan), worst])

    def _close(
        self,
        stepped: list[ScalerOptimizerState],
        others: Iterable[Tensor] = (),
        *,
        move: bool = True,
        loss: Tensor | None = None,
    ) -> None:
        """Count steps, update the scale, and start copying the results. ``others``: further found_inf flags."""
        outcomes = [entry.outcome for entry in stepped if entry.outcome is not None]
        rows = [outcome.numbers for outcome in outcomes if outcome.numbers is not None]
        rows += [torch.stack([torch.full_like(found, math.nan), found]) for found in others]
        if not rows:
            return
        before, self._posted = self._posted, self._post(self._advance(rows, len(outcomes), move, loss))
        for index, outcome in enumerate(outcomes):
            outcome.posted, outcome.place, outcome.scaled = self._posted, UpdateField.FIRST_OPTIMIZER + 2 * index, True
        self._raise_if_stuck(before)

    def _close_unscaled(self, entry: ScalerOptimizerState) -> None:
        """Without scaling: start copying the result, and count the steps that have arrived. No sync."""
        outcome = entry.outcome
        assert outcome is not None
        assert outcome.numbers is not None
        outcome.posted = self._post(outcome.numbers)
        if outcome.posted.captured:  # steps of a CUDA graph are not counted: the host does not see its replays
            return
        if self._unscaled_counts.add(outcome):
            self._warn_if_stuck()

    def _warn_if_stuck(self) -> None:
        in_a_row = self._unscaled_counts.in_a_row
        if in_a_row < SKIPS_BEFORE_WARNING:
            self._warned = False
        elif not self._warned:
            self._warned = True
            warn_about_skips(in_a_row, self.census())

    def _post(self, facts: Tensor) -> AsyncScalars:
        return (
            AsyncScalars(facts)
            if self._extra_scalar is None
            else AsyncScalars(facts, to_device(self._extra_scalar, facts.device))
        )

    def _advance(self, rows: list[Tensor], stepped: int, move: bool, loss: Tensor | None) -> Tensor:
        scale, tracker = self._check_scale_growth_tracker("update")
        limits = replace(
            self._limits, growth=self._growth_factor, backoff=self._backoff_factor, interval=self._growth_interval
        )
        numbers = [to_device(row, scale.device) for row in rows]
        if self._tally is None:
            self._tally = new_counters(scale.device, *self._saved_tally)
        outcomes = numbers[0].unsqueeze(0) if len(numbers) == 1 else torch.stack(numbers)
        if loss is not None:
            loss = to_device(loss.detach(), scale.device)
        return update_scale_(scale, tracker, self._tally, outcomes, stepped, limits, move=move, loss=loss)

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

    def _raise_if_stuck(self, before: AsyncScalars | None) -> None:
        """Raise if the scale collapsed. On a GPU this reads the previous step, whose numbers have arrived on all ranks.

        Inside a CUDA graph capture it does nothing.
        """
        if self._posted is None or self._posted.captured or not self.collapses:
            return
        settled = before if self._posted.lags else self._posted
        if settled is None or not settled.read()[UpdateField.STUCK]:
            return
        raise collapse_error(self._limits.floor, int(settled.read()[UpdateField.IN_A_ROW]), self.census())


def _counted(tally: tuple[int, int, int]) -> StepCounts:
    in_a_row, applied, skipped = tally
    return StepCounts(applied, skipped, in_a_row)


def _step_without_gradients(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step a fused optimizer without gradients, which does nothing; for any other raise torch's error."""
    if supports_amp_scaling(optimizer) and not len(collect_gradients(optimizer)):
        return optimizer.step(*args, **kwargs)
    raise AssertionError(
        "No inf checks were recorded for this optimizer. None of its parameters has a gradient: was backward() "
        "called, on a loss that depends on them, after the last zero_grad() and before unscale_()?"
    )


def _type_of(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        raise BadInput(f"GradScaler({device!r}): unknown device. Use 'cuda' or 'cpu'.") from None


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


def _checked_optimizers(given: Any) -> list[Optimizer]:
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    if not optimizers or any(isinstance(each, Tensor) for each in optimizers):
        raise BadInput("clip_() takes the optimizer, not its parameters: scaler.clip_(optimizer, max_norm).")
    return list({id(each): each for each in optimizers}.values())  # without duplicates


def _checked_norms(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    if not is_number(max_norm) or not max_norm > 0:
        raise BadInput(f"clip_(max_norm={max_norm!r}): expected a number above 0; float('inf') only measures.")
    if not is_number(norm_type):
        raise BadInput(f"clip_(norm_type={norm_type!r}): expected a number, such as 2.0 or float('inf').")
    return float(max_norm), float(norm_type)
