"""GradScaler settings that suit an observed run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ampwise.numbers.census.underflow import NO_UNDERFLOW, scale_exponent
from ampwise.numbers.number_text import scale_text
from ampwise.watch.gradient_health import GradientHealth

__all__ = ["ScalerSettings", "suggested_settings"]

COSTLY_SEARCH = 3  # steps skipped at the start that are worth mentioning
WORTH_MORE_SCALE = 0.01  # of the gradients lost, from which a higher start is advised
SEVERAL = 3  # skips per overflow, from which a faster backoff is advised
OVERFLOWS = 4  # needed to know the usual number of skips per overflow
FASTEST = 1 / 16  # backoff: a stronger one would undo too much growth
USUAL_INTERVAL = 2000  # torch's default
USUAL_BACKOFF = 0.5


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """Scaler settings to change, and why; None for those to keep."""

    init_scale: float | None = None
    growth_interval: int | None = None
    backoff_factor: float | None = None
    reasons: tuple[tuple[str, str], ...] = ()  # setting, reason

    @property
    def arguments(self) -> dict[str, float | int]:
        """Settings to change, by name."""
        values = {name: getattr(self, name) for name in ("init_scale", "growth_interval", "backoff_factor")}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return f"GradScaler({', '.join(f'{name}={scale_text(value)}' for name, value in self.arguments.items())})"


def suggested_settings(health: GradientHealth) -> ScalerSettings | None:
    """Return settings that suit this run better than its own; None if there is nothing to change."""
    if health.scale is None or health.real_streaks():
        return None  # no scaler, or its settings are not the problem
    start, start_reason = _init_scale(health)
    interval = backoff = None
    reasons = [("init_scale", start_reason)] if start else []
    found = health.oscillation()
    if found and (health.growth_interval or 0) < USUAL_INTERVAL:
        interval = USUAL_INTERVAL
        undone = f"{found.undone} of {found.growths} increases overflowed immediately"
        reasons.append(("growth_interval", f"{undone}, costing {found.skipped:.0%} of steps"))
    ended = [streak.count for streak in health.streaks.all if streak.after_good and streak is not health.streaks.open]
    if len(ended) >= OVERFLOWS and median(ended) >= SEVERAL:
        several = int(median(ended))
        present = health.backoff_factor or USUAL_BACKOFF
        if max(present**several, FASTEST) < present:
            backoff = max(present**several, FASTEST)
            reasons.append(
                ("backoff_factor", f"an overflow usually takes {several} skipped steps until the scale is low enough")
            )
    return ScalerSettings(start, interval, backoff, tuple(reasons)) if reasons else None


def _init_scale(health: GradientHealth) -> tuple[float | None, str]:
    """Return a better initial scale and the reason for it; None if there is none."""
    settled, first, now = health.settled_scale, health.first_scale, health.scale
    if settled is None or first is None or now is None:
        return None, ""
    if health.search_skips >= COSTLY_SEARCH and settled < first:
        return settled, (
            f"{health.search_skips} of the first steps were skipped while the scale fell from {scale_text(first)} to "
            f"{scale_text(settled)}"
        )
    lost = sum(health.underflows.values(), start=NO_UNDERFLOW).lost_share
    fitting = health.fitting_scale() if lost >= WORTH_MORE_SCALE else None
    if fitting is None or fitting <= max(first, now):
        return None, ""
    doublings = scale_exponent(fitting) - scale_exponent(first)
    return fitting, (
        f"at least {lost:.0%} of the gradients are lost at {scale_text(now)}, and the initial scale can be raised by "
        f"{doublings} doublings from {scale_text(first)}"
    )
