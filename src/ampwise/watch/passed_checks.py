"""Checks that a run passed, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ampwise.runs.rows import CountedFinding
from ampwise.watch.gradient_health import GradientHealth
from ampwise.watch.run_events import RunEvents

__all__ = ["list_passed_checks"]

HALVES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A finished run, and what the claims below depend on."""

    run: RunEvents
    kinds: Mapping[str, int]  # number of events, by the name of their class
    healths: Collection[GradientHealth]

    @property
    def trained_in(self) -> set[str]:
        """Precisions of the training passes: autocast's, or that of the parameters."""
        return {forward.precision for forward in self.run.forwards if forward.training}

    @property
    def scaled(self) -> bool:
        return any(made.enabled for made in self.run.scalers)

    @property
    def skipped(self) -> bool:
        """Whether a scaler skipped steps because gradients overflowed."""
        return any(streak.first_scale is not None for health in self.healths for streak in health.streaks.all)

    @property
    def evaluated_in_half(self) -> bool:
        """Whether a model trained in a 16-bit format was also evaluated in that format."""
        trained = {(forward.model, forward.precision) for forward in self.run.forwards if forward.training}
        halves = {(model, precision) for model, precision in trained if precision in HALVES}
        return any(
            not forward.training and (forward.model, forward.precision) in halves for forward in self.run.forwards
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A sentence to report if an event happened, a condition holds, and none of the rules found anything."""

    words: str
    about: str = ""  # the event whose count replaces {n}; empty: the condition is enough
    rules: tuple[str, ...]  # rule codes, or prefixes of codes
    if_: Callable[[_Ran], bool] = lambda ran: True


CLAIMS = (
    _Claim(
        words="Gradients were unscaled when they were clipped ({n} times).",
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
        words="Losses were not scaled, which BF16 does not need ({n} backward passes).",
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
        words="The scaler's methods were called in the right order ({n} updates).",
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
        words="The scheduler did not advance on skipped steps.",
        about="Scheduled",
        rules=("AMP114",),
        if_=lambda ran: ran.skipped,
    ),
    _Claim(
        words="No mean loss was left undivided where gradients were accumulated ({n} steps).",
        about="Accumulation",
        rules=("AMP205", "AMP206"),
    ),
    _Claim(
        words="Checkpoints contain the scaler's state.",
        rules=("AMP204",),
        if_=lambda ran: ran.scaled and any(save.scaler for save in ran.run.saves),
    ),
    _Claim(
        words="Evaluation ran in the precision of training.",
        rules=("AMP501",),
        if_=lambda ran: ran.evaluated_in_half,
    ),
    _Claim(
        words="Gradients stayed within their format's range.",
        rules=("AMP6", "AMP301"),
        if_=lambda ran: _were_sampled(ran) and not ran.skipped,
    ),
    _Claim(
        words="Gradients stayed within their format's range, except for overflows that the scaler handled.",
        rules=("AMP6", "AMP301"),
        if_=lambda ran: _were_sampled(ran) and ran.skipped,
    ),
)


def list_passed_checks(
    run: RunEvents, kinds: Mapping[str, int], seen: Sequence[CountedFinding], healths: Mapping[int, GradientHealth]
) -> list[str]:
    """Return a sentence for each check that applied to the run and passed."""
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
    """Whether each optimizer's gradients were sampled at least once."""
    return bool(ran.healths) and all(health.samples for health in ran.healths)
