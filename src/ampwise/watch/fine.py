"""What was looked for and found in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ampwise.evidence.conduct import Conduct
from ampwise.evidence.health import Health
from ampwise.record.rows import Seen

__all__ = ["what_was_fine"]

HALVES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A run that is over, as far as it can be praised."""

    run: Conduct
    kinds: Mapping[str, int]  # events, by the name of their class
    healths: Collection[Health]

    @property
    def trained_in(self) -> set[str]:
        """What the training passes ran in, by autocast or by their parameters."""
        return {forward.precision for forward in self.run.forwards if forward.training}

    @property
    def scaled(self) -> bool:
        return any(made.enabled for made in self.run.scalers)

    @property
    def skipped(self) -> bool:
        """Gradients overflowed now and then, and a scaler skipped the step."""
        return any(streak.first_scale is not None for health in self.healths for streak in health.streaks.all)

    @property
    def evaluated_in_half(self) -> bool:
        """A model that was trained in half ran without training, in what it was trained in."""
        trained = {(forward.model, forward.precision) for forward in self.run.forwards if forward.training}
        halves = {(model, precision) for model, precision in trained if precision in HALVES}
        return any(
            not forward.training and (forward.model, forward.precision) in halves for forward in self.run.forwards
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What to say if an event happened, under a condition, and none of the rules found anything."""

    words: str
    about: str = ""  # the event, whose number takes the place of {n}; none: the condition says enough
    rules: tuple[str, ...]  # codes, or how they begin
    if_: Callable[[_Ran], bool] = lambda ran: True


CLAIMS = (
    _Claim(
        words="Gradients were clipped in true units, without the loss scale ({n} times).",
        about="Clip",
        rules=("AMP101",),
        if_=lambda ran: ran.scaled,
    ),
    _Claim(
        words="Losses were scaled, as FP16 needs ({n} backward passes).",
        about="Backward",
        rules=("AMP108", "AMP109", "AMP301", "AMP302", "AMP304", "AMP308"),
        if_=lambda ran: ran.scaled and ran.trained_in == {"fp16"},
    ),
    _Claim(
        words="Losses were not scaled, which BF16 has no need of ({n} backward passes).",
        about="Backward",
        rules=("AMP302", "AMP308"),
        if_=lambda ran: not ran.run.scalers and not ran.run.unused_scalers and ran.trained_in == {"bf16"},
    ),
    _Claim(
        words="Backward passes ran outside of autocast ({n} times).",
        about="Backward",
        rules=("AMP111", "AMP301", "AMP304", "AMP306"),  # the last three: there may have been no autocast at all
        if_=lambda ran: not ran.trained_in.isdisjoint(HALVES),
    ),
    _Claim(
        words="The scaler was driven in order ({n} updates).",
        about="Update",
        rules=("AMP103", "AMP104", "AMP105", "AMP106", "AMP107", "AMP110", "AMP112", "AMP113", "AMP201", "AMP203"),
        if_=lambda ran: ran.scaled,
    ),
    _Claim(
        words="Every step went through the scaler ({n} steps).",
        about="ScalerStep",
        rules=("AMP109", "AMP110"),
        if_=lambda ran: ran.scaled and not ran.kinds.get("OptimizerStep"),
    ),
    _Claim(
        words="The schedule did not run ahead on skipped steps.",
        about="Scheduled",
        rules=("AMP114",),
        if_=lambda ran: ran.skipped,
    ),
    _Claim(
        words="No mean was left undivided where gradients add up ({n} steps).",
        about="Accumulation",
        rules=("AMP205", "AMP206"),
    ),
    _Claim(
        words="Checkpoints have the scaler's state.",
        rules=("AMP204",),
        if_=lambda ran: ran.scaled and any(save.scaler for save in ran.run.saves),
    ),
    _Claim(
        words="Evaluation ran in the precision of training.",
        rules=("AMP501",),
        if_=lambda ran: ran.evaluated_in_half,
    ),
    _Claim(
        words="Gradients stayed within what their format holds.",
        rules=("AMP6", "AMP301"),
        if_=lambda ran: _were_sampled(ran) and not ran.skipped,
    ),
    _Claim(
        words="Gradients stayed within what their format holds, but for overflows that the scaler has answered.",
        rules=("AMP6", "AMP301"),
        if_=lambda ran: _were_sampled(ran) and ran.skipped,
    ),
)


def what_was_fine(
    run: Conduct, kinds: Mapping[str, int], seen: Sequence[Seen], healths: Mapping[int, Health]
) -> list[str]:
    """Sentences, only on what did happen and was judged."""
    if not run.steps:
        return []
    found = {each.finding.rule.code for each in seen}
    ran = _Ran(run=run, kinds=kinds, healths=healths.values())
    return [
        claim.words.format(n=kinds.get(claim.about, 0))
        for claim in CLAIMS
        if (not claim.about or kinds.get(claim.about))
        and claim.if_(ran)
        and not any(code.startswith(claim.rules) for code in found)
    ]


def _were_sampled(ran: _Ran) -> bool:
    """All optimizers' gradients were looked at closely, at one step at least."""
    return bool(ran.healths) and all(health.samples for health in ran.healths)
