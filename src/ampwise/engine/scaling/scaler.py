"""GradScaler: torch's, with one read that serves everything, limits, a guard, and facts one can ask for."""

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

from ampwise.census.device import DeviceCensus
from ampwise.engine.scaling.apply import asks_for_the_scaler, closes_over, refuse_closure, scales_by_itself, take_step
from ampwise.engine.scaling.diagnosis import PATIENCE, collapsed, warn_of_skips
from ampwise.engine.scaling.entry import Entries, Entry
from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.gradients import Gradients, gradients_of, home_of, refuse_half, there, versions_of
from ampwise.engine.scaling.look import Look, clip_in_memory_, look_at, no_norm
from ampwise.engine.scaling.naming import named_census
from ampwise.engine.scaling.outcome import Counts, Outcome
from ampwise.engine.scaling.scale import Fact, Limits, advance_, is_number, new_tally
from ampwise.engine.scaling.state import COUNTS, checked_state
from ampwise.engine.scaling.verdict import NO_CLIPPING
from ampwise.errors import BadInput

__all__ = ["GradScaler"]

OF_THIS_PROCESS = (
    "_entries", "_stepped", "_over", "_unwatched", "_aside", "_besides", "_last", "_posted", "_tally",
    "_unscaled_counts", "_warned", "_process_group",
)  # fmt: skip
MOST_DEVICES = 16  # an integer below is the number of a GPU, and no scale


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with the end of the step done in one read of the gradients.

    A drop-in: same arguments, methods, errors and state. With a fused optimizer, unscaling, the check for inf and
    NaN, clipping (``clip_``) and the counts by parameter (``census``) cost one read, and nothing waits for the GPU.
    A step with a gradient that is not finite is skipped whatever the precision: with ``enabled=False`` too.

    min_scale, max_scale: the scale stays between them. An overflow at ``min_scale`` raises ScaleCollapsed.
    hysteresis: the first n - 1 overflows of a row are forgiven; from the n-th on, each lowers the scale.
    guard: with ``enabled=False``, skip steps whose gradients are not finite all the same, and warn if it goes on.
    process_group: the ranks among which plain gradients are divided (FSDP1, sharding by hand), so that they skip
        and clip together. DDP and FSDP2 need none.

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
        self._limits = Limits.checked(
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
        self.collapses = True  # by raising ScaleCollapsed; a guard has other means, and is told by the step
        self._saved_tally = (0, 0, 0)
        self._begin()

    def _begin(self) -> None:
        """Without a step taken."""
        self._entries = Entries()
        self._stepped: list[Entry] = []  # in this iteration
        self._over = False  # the iteration, so that what is read next belongs to another
        self._unwatched = 0  # steps that nobody looked at
        self._aside: Tensor | None = None  # a number that travels with the facts
        self._besides: Tensor | None = None  # what gradients of this iteration are multiplied by, besides the scale
        self._forget()

    def _forget(self) -> None:
        """Facts of steps in the past."""
        self._tally: Tensor | None = None
        self._unscaled_counts = _counted(self._saved_tally)  # where scaling is off
        self._warned = False  # that they are all skipped
        self._last: Outcome | None = None
        self._posted: Posted | None = None

    # The step

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in memory, now: for whoever wants to look at or change them.

        Optional: ``step`` does it where nobody has. Nothing waits for the device.
        """
        entry = self._entries.of(optimizer)
        if not self._enabled:
            look = self._look_without_scale(entry)
            if look is not None:
                look.settle_()  # clipping that was asked for before
            entry.unscaled = True
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        look = self._standing_look(entry)
        if look is None:
            self._new_look(entry, unscale=True)
        else:
            refuse_half(look.gradients)
            look.settle_()  # clipping that was asked for before
        state["stage"] = OptState.UNSCALED

    def clip_(self, optimizer: Optimizer | Iterable[Optimizer], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of the optimizer's gradients, in true units whatever the state; returns the norm before.

        Before ``unscale_``, nothing is written: gradients stay scaled in memory until the step, which divides by scale
        and clipping at once. After it, they are clipped in memory. Of several optimizers, the norm of all gradients
        together is clipped; of several calls, the lowest limit counts. The coefficient is that of
        ``torch.nn.utils.clip_grad_norm_``, from a norm that is summed in FP64: weights agree with those of torch's way
        to the last digits, not to the last bit.
        """
        optimizers = _checked_optimizers(optimizer)
        max_norm, norm_type = _checked_norms(max_norm, norm_type)
        if self._enabled:
            self._check_scale_growth_tracker("clip_")
        if any(self._stage(each) is OptState.STEPPED for each in optimizers):
            raise RuntimeError("clip_() is being called after step(). Was update() left out in the last iteration?")
        if norm_type == 2.0 and all(self._stage(each) is OptState.READY for each in optimizers):
            every = self._to_clip(optimizers)
            if every is not None:
                return self._clip_at_the_step(every, max_norm) if every else no_norm(optimizers)
        for each in optimizers:
            if self._stage(each) is OptState.READY:
                self.unscale_(each)
        return clip_in_memory_(optimizers, max_norm, norm_type, self._process_group)

    def _to_clip(self, optimizers: list[Optimizer]) -> dict[Entry, Gradients] | None:
        """The gradients to clip at the step; None if some of them are to be clipped by another norm already.

        Then each clipping has to be done in its turn, in memory.
        """
        found = {self._entries.of(each): gradients_of(each) for each in optimizers}
        every = {e: gradients for e, gradients in found.items() if len(gradients) or self._process_group is not None}
        company = frozenset(entry.key for entry in every)
        standing = [look for entry in every if (look := self._standing_look(entry)) is not None]
        return every if all(look.company == company for look in standing) else None

    def _clip_at_the_step(self, every: dict[Entry, Gradients], max_norm: float) -> Tensor:
        lowest = min([max_norm, *(entry.look.max_norm for entry in every if entry.look is not None)])
        look = self._look_at(list(every), list(every.values()), lowest)
        return look.verdict.norm.clone()  # which the caller may write to

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Let the optimizer take its step, unless a gradient is inf or NaN: then nothing changes.

        A fused optimizer decides on the device. For any other, this waits for the verdict, as torch does.
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
        if scales_by_itself(optimizer) and asks_for_the_scaler(optimizer):
            result = super().step(optimizer, *args, **kwargs)
            self._record(entry, Outcome(self._numbers_found(entry)))
            self._count(entry, state)
            return result
        look = (
            entry.look if state["stage"] is OptState.UNSCALED else self._standing_look(entry) or self._new_look(entry)
        )
        if look is None:
            result = _step_without_gradients(optimizer, args, kwargs)
        else:
            if look.scaled and not scales_by_itself(optimizer):
                refuse_half(look.gradients)
            self._heed(entry, look)
            result = self._take_step(entry, look, args, kwargs)
            self._count(entry, state)
        state["stage"] = OptState.STEPPED
        return result

    def _step_unscaled(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step without scaling: guarded if there is anything to look at."""
        entry = self._entries.of(optimizer)
        look = None
        if not closes_over(args, kwargs):  # or gradients are yet to be computed
            look = self._look_without_scale(entry)
        if look is None:
            result = optimizer.step(*args, **kwargs)
            self._unwatched += 1
            self._record(entry, Outcome(None, known_to_skip=False))
        else:
            result = self._take_step(entry, look, args, kwargs)
            self._close_unscaled(entry)
        entry.begin_anew()
        return result

    def _take_step(self, entry: Entry, look: Look, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, skipped = take_step(entry.optimizer, look, args, kwargs)
        look.gradients = Gradients()  # the next backward may free them
        self._record(entry, Outcome(look.verdict.numbers[:2], skipped))
        return result

    def _record(self, entry: Entry, outcome: Outcome) -> None:
        self._last = entry.outcome = outcome

    def _count(self, entry: Entry, state: dict[str, Any]) -> None:
        """Among the steps of this iteration, unless a hook of the optimizer has closed it meanwhile."""
        if state is self._per_optimizer_states.get(entry.key):
            self._stepped.append(entry)

    def update(self, new_scale: float | Tensor | None = None, *, loss: Tensor | None = None) -> None:
        """Close the iteration: move the scale, or set it.

        loss: the unscaled loss of the step. If it is inf or NaN itself, as after a bad batch, the overflow says nothing
            about the scale, which stays, for up to 30 such steps in a row. Without it, each overflow lowers the scale,
            as in torch. With several ranks, pass the same on all of them, such as their sum. No sync.

        Raises ScaleCollapsed after an overflow with the scale at ``min_scale``: on a GPU one call later, when the
        facts have arrived anyway, so that nothing waits. Steps in between are skipped like any other.
        """
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise BadInput(f"update(loss={loss!r}): the loss of the step is expected, a tensor with one number.")
        if self._enabled:
            self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states
            if new_scale is not None:
                super().update(self._limits.checked_scale(new_scale))
            elif not any(state["found_inf_per_device"] for state in states.values()):
                raise AssertionError(
                    "No inf checks were recorded prior to update. No optimizer has taken a step since the last one: "
                    "when accumulating gradients, call step() and update() together."
                )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        stepped, self._stepped = self._stepped, []
        others = self._flags_besides(stepped, states) if self._enabled else []
        self._entries.drop_idle(but=stepped)
        for entry in [*self._entries, *stepped]:
            entry.begin_anew()
        self._over, self._besides = True, None
        if self._enabled:
            self._close(stepped, others, move=new_scale is None, loss=loss)
        self._aside = None

    # What happened

    @property
    def skipped(self) -> bool:
        """Whether the last ``step`` left the weights alone: ``if not scaler.skipped: scheduler.step()``.

        Of the optimizer that was stepped last; ``skipped_for`` asks for one of several. Waits if asked before the
        device has come so far.
        """
        return self._last is not None and self._last.skipped

    @property
    def min_scale(self) -> float:
        """The floor of the scale."""
        return self._limits.floor

    def skipped_for(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last step was skipped; for loops with several."""
        outcome = self._outcome_of(optimizer)
        return outcome is not None and outcome.skipped

    @property
    def grad_norm(self) -> float:
        """The norm of the last step's gradients, in true units, before clipping; NaN before the first."""
        return math.nan if self._last is None else self._last.norm

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights, of all optimizers, up to the last ``update``."""
        return self._counts()[1]

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped, of all optimizers, up to the last ``update``."""
        return self._counts()[2]

    def census(self, model: Module | None = None) -> DeviceCensus:
        """What the gradients of the last step held, by parameter, in true units and before clipping.

        Names are the model's, if it is given; or those the optimizer was made with; or "group.index". FP64 gradients
        are not counted, nor those on devices without a kernel.
        """
        if model is not None and not isinstance(model, Module):
            raise BadInput(f"census(): the model whose names to use is expected, not {type(model).__name__}.")
        return named_census(
            [(entry.optimizer, entry.reading) for entry in self._entries if entry.reading is not None], model
        )

    def __repr__(self) -> str:
        # Printing must not wait for the device.
        if not self._enabled:
            return f"<GradScaler on {self._device}, scaling off, {'guarded' if self._guard else 'not guarded'}>"
        return f"<GradScaler on {self._device}, scale from {self._init_scale:g}, at least {self._limits.floor:g}>"

    # State

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, which torch can load, and our counts. Empty if scaling is off."""
        if not self._enabled:
            return {}
        return super().state_dict() | dict(zip(COUNTS, self._counts(), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of torch's; one that makes no sense is refused, and nothing changes."""
        if not self._enabled:
            return
        if not state_dict:
            super().load_state_dict({})  # which torch has words for
        checked = checked_state(state_dict, self._limits)
        super().load_state_dict(checked)
        in_a_row, applied, skipped = (int(checked.get(key, 0)) for key in COUNTS)
        self._saved_tally = (in_a_row, applied, skipped)
        self._unwatched = 0
        # Steps that update() has yet to close keep their outcome: as in torch, it moves the scale that is loaded here.
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
        # Steps in the past stay with this process: they are known by its optimizers. So do its groups of ranks.
        for name in OF_THIS_PROCESS:
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"collapses": True, **state})
        self._process_group = None
        self._begin()

    # Inside

    def _look_without_scale(self, entry: Entry) -> Look | None:
        """Where scaling is off: the look that was taken, or one for the guard's sake."""
        look = entry.look
        # After unscale_ they may be clipped, which spreads a NaN and hides an inf: what was seen before counts.
        if look is None or not entry.unscaled or look.gradients.are_gone_from(entry.optimizer):
            look = self._standing_look(entry)
        if look is None and self._looks and hasattr(entry.optimizer, "param_groups"):
            look = self._new_look(entry)
        return look

    def _judge(self, optimizers: Sequence[Optimizer], max_norm: float) -> None:
        """Look at gradients of several optimizers together, and clip them at the step: ``clip_``, for an engine.

        Nothing has been asked of this iteration before.
        """
        every = {self._entries.of(each): gradients_of(each) for each in optimizers}
        self._look_at(list(every), list(every.values()), max_norm)

    def _abandon(self) -> None:
        """The iteration, after a step that failed: what comes next is another."""
        if self._enabled:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for entry in self._entries:
            entry.begin_anew()
        self._stepped, self._over, self._besides, self._aside = [], True, None, None

    def _undo_backoff(self, outcome: Outcome) -> None:
        """Between iterations: raise the scale by what this step lowered it, and count the clean steps before it again.

        The facts of the step have arrived, and the scale is written on the device: no sync.
        """
        if outcome.backoff <= 1 or self._scale is None or self._growth_tracker is None:
            return
        self._scale.mul_(outcome.backoff)
        self._growth_tracker.add_(outcome.clean_steps).clamp_(max=self._growth_interval - 1)

    @property
    def _looks(self) -> bool:
        """A step looks at its gradients, if not asked to look before."""
        return self._enabled or self._guard or self._besides is not None

    def _outcome_of(self, optimizer: Optimizer) -> Outcome | None:
        """How its last step went."""
        return self._entries.of(optimizer).outcome

    def _stage(self, optimizer: Optimizer) -> OptState:
        if not self._enabled:
            return OptState.UNSCALED if self._entries.of(optimizer).unscaled else OptState.READY
        known = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if known is None else known["stage"]

    def _standing_look(self, entry: Entry) -> Look | None:
        """The look taken by ``clip_``, if gradients are still as they were then; taken again if they are not."""
        look = entry.look
        if look is None or look.gradients.still_of(entry.optimizer):
            return look
        if look.gradients.are_gone_from(entry.optimizer):  # and the clipping that was meant for them with them
            entry.look = None
            return None
        if self._enabled and not look.scaled:  # divided by a step that then failed: another must not divide again
            return look
        if look.alone:
            return self._look_at([entry], [gradients_of(entry.optimizer)], look.max_norm)
        raise RuntimeError(
            "gradients have changed after clip_(), in which other ranks or optimizers have a part. Clip them last."
        )

    def _new_look(self, entry: Entry, *, unscale: bool = False) -> Look | None:
        """None if there is nothing to look at. In a group of ranks, one may have no share, and must look even so."""
        gradients = gradients_of(entry.optimizer)
        if not len(gradients) and self._process_group is None:
            return None
        if unscale:
            refuse_half(gradients)  # before they are written to
        return self._look_at([entry], [gradients], unscale=unscale)

    def _look_at(
        self,
        entries: Sequence[Entry],
        every: Sequence[Gradients],
        max_norm: float = NO_CLIPPING,
        *,
        unscale: bool = False,
    ) -> Look:
        """Look at gradients of one or several optimizers. What was read before goes first: its memory serves again."""
        for entry in self._entries if self._over else entries:
            entry.reading = None
        self._over = False
        scale = self._multiplier()
        home = home_of([entry.optimizer for entry in entries]) if scale is None else scale.device
        looks = look_at(every, scale, max_norm, home=home, process_group=self._process_group, unscale=unscale)
        for entry, look in zip(entries, looks, strict=True):
            entry.look, entry.reading = look, look.reading
            look.company = frozenset(each.key for each in entries)
            if self._enabled:
                flags = {device: there(look.verdict.found_inf, device) for device in look.gradients.devices or {home}}
                self._per_optimizer_states[id(entry.optimizer)]["found_inf_per_device"] = flags
                entry.flags, entry.flag_versions = list(flags.values()), versions_of(flags.values())
        return looks[0]

    def _multiplier(self) -> Tensor | None:
        """What gradients in memory are to be divided by."""
        scale = self._scale if self._enabled else None
        if self._besides is None:
            return scale
        return self._besides if scale is None else scale * there(self._besides, scale.device)

    def _heed(self, entry: Entry, look: Look) -> None:
        """Flags that somebody else has put among ours count too, as they do with torch."""
        given = list(self._found_inf_per_device(entry.optimizer).values())
        if not entry.shows(given):
            look.verdict = look.verdict.or_found(given)

    def _flags_besides(self, stepped: list[Entry], states: Mapping[int, dict[str, Any]]) -> list[Tensor]:
        """found_inf of optimizers that were not stepped, and flags that are not ours: the scale heeds them."""
        ours = {entry.key: entry for entry in stepped}
        flags = [(key, list(state["found_inf_per_device"].values())) for key, state in states.items()]
        return [flag for key, given in flags if key not in ours or not ours[key].shows(given) for flag in given]

    def _numbers_found(self, entry: Entry) -> Tensor:
        """Norm and found_inf of an optimizer that was handed the scaler, as far as it used it."""
        if entry.look is not None:
            return entry.look.verdict.numbers[:2]
        scale, _ = self._check_scale_growth_tracker("step")
        found = [each.to(scale) for each in self._found_inf_per_device(entry.optimizer).values()]
        worst = torch.stack(found).max() if found else torch.zeros_like(scale)
        return torch.stack([torch.full_like(scale, math.nan), worst])

    def _close(
        self, stepped: list[Entry], others: Iterable[Tensor] = (), *, move: bool = True, loss: Tensor | None = None
    ) -> None:
        """Count steps, move the scale, post the facts. ``others``: what the scale heeds besides."""
        outcomes = [entry.outcome for entry in stepped if entry.outcome is not None]
        rows = [outcome.numbers for outcome in outcomes if outcome.numbers is not None]
        rows += [torch.stack([torch.full_like(found, math.nan), found]) for found in others]
        if not rows:
            return
        before, self._posted = self._posted, self._post(self._advance(rows, len(outcomes), move, loss))
        for index, outcome in enumerate(outcomes):
            outcome.posted, outcome.place, outcome.scaled = self._posted, Fact.FIRST_OPTIMIZER + 2 * index, True
        self._raise_if_stuck(before)

    def _close_unscaled(self, entry: Entry) -> None:
        """Post the facts, and count steps that are known by now. There is nothing to move, and nothing to wait for."""
        outcome = entry.outcome
        assert outcome is not None
        assert outcome.numbers is not None
        outcome.posted = self._post(outcome.numbers)
        if outcome.posted.captured:  # steps of a graph are not counted: nobody tells the host of its replays
            return
        if self._unscaled_counts.add(outcome):
            self._warn_if_stuck()

    def _warn_if_stuck(self) -> None:
        in_a_row = self._unscaled_counts.in_a_row
        if in_a_row < PATIENCE:
            self._warned = False
        elif not self._warned:
            self._warned = True
            warn_of_skips(in_a_row, self.census())

    def _post(self, facts: Tensor) -> Posted:
        return Posted(facts) if self._aside is None else Posted(facts, there(self._aside, facts.device))

    def _advance(self, rows: list[Tensor], stepped: int, move: bool, loss: Tensor | None) -> Tensor:
        scale, tracker = self._check_scale_growth_tracker("update")
        limits = replace(
            self._limits, growth=self._growth_factor, backoff=self._backoff_factor, interval=self._growth_interval
        )
        numbers = [there(row, scale.device) for row in rows]
        if self._tally is None:
            self._tally = new_tally(scale.device, *self._saved_tally)
        outcomes = numbers[0].unsqueeze(0) if len(numbers) == 1 else torch.stack(numbers)
        if loss is not None:
            loss = there(loss.detach(), scale.device)
        return advance_(scale, tracker, self._tally, outcomes, stepped, limits, move=move, loss=loss)

    def _counts(self) -> tuple[int, int, int]:
        """Overflows in a row, steps applied, steps skipped."""
        if not self._enabled:
            counts = self._unscaled_counts.settle()
            return counts.in_a_row, counts.applied + self._unwatched, counts.skipped
        in_a_row, applied, skipped = self._saved_tally
        if self._posted is not None:
            facts = self._posted.read()
            in_a_row, applied, skipped = (int(facts[f]) for f in (Fact.IN_A_ROW, Fact.APPLIED, Fact.SKIPPED))
        return in_a_row, applied + self._unwatched, skipped

    def _raise_if_stuck(self, before: Posted | None) -> None:
        """On a GPU the step before is asked: its facts are there, on all ranks alike. In a graph nobody asks."""
        if self._posted is None or self._posted.captured or not self.collapses:
            return
        settled = before if self._posted.lags else self._posted
        if settled is None or not settled.read()[Fact.STUCK]:
            return
        raise collapsed(self._limits.floor, int(settled.read()[Fact.IN_A_ROW]), self.census())


def _counted(tally: tuple[int, int, int]) -> Counts:
    in_a_row, applied, skipped = tally
    return Counts(applied, skipped, in_a_row)


def _step_without_gradients(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer has nothing to do and does it; any other is refused, in torch's words."""
    if scales_by_itself(optimizer) and not len(gradients_of(optimizer)):
        return optimizer.step(*args, **kwargs)
    raise AssertionError(
        "No inf checks were recorded for this optimizer. None of its parameters had a gradient to look at: was "
        "backward() called, on a loss that depends on them, after the last zero_grad() and before unscale_()?"
    )


def _type_of(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        raise BadInput(f"GradScaler({device!r}): no such device. 'cuda' and 'cpu' are the usual ones.") from None


def _old_order(first: float, second: float) -> float:
    """The scale from the arguments of torch.cuda.amp.GradScaler, in which it came first."""
    if not is_number(first) or (isinstance(first, int) and first < MOST_DEVICES):
        raise BadInput(f"GradScaler({first!r}): the name of a device comes first, such as 'cuda', 'cuda:0' or 'cpu'.")
    if second != 2.0**16:
        raise BadInput("GradScaler(init_scale, growth_factor, ...) in torch.cuda.amp's order: name the arguments.")
    warnings.warn(
        f"GradScaler({first!r}): the device comes first, as in torch.amp. Write GradScaler('cuda', {first!r}).",
        FutureWarning,
        stacklevel=3,
    )
    return float(first)


def _checked_optimizers(given: Any) -> list[Optimizer]:
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    if not optimizers or any(isinstance(each, Tensor) for each in optimizers):
        raise BadInput("clip_() takes the optimizer, not its parameters: scaler.clip_(optimizer, max_norm).")
    return list({id(each): each for each in optimizers}.values())  # each of them once


def _checked_norms(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    if not is_number(max_norm) or not max_norm > 0:
        raise BadInput(f"clip_(max_norm={max_norm!r}): a number above 0 is expected; float('inf') only measures.")
    if not is_number(norm_type):
        raise BadInput(f"clip_(norm_type={norm_type!r}): a number is expected, such as 2.0 or float('inf').")
    return float(max_norm), float(norm_type)
