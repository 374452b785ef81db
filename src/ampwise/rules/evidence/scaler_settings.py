"""GradScaler settings that suit an observed run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import find_scalar_format
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.number_text import scale_text
from ampwise.rules.evidence.scale_behaviour import oscillation
from ampwise.rules.evidence.underflow import scale_exponent

__all__ = ["ScalerSettings", "fitting_scale", "suggested_settings"]

COSTLY_SEARCH = 3  # steps skipped at the start that are worth mentioning
WORTH_MORE_SCALE = 0.01  # of the gradients lost, from which a higher start is advised
HEADROOM = 2  # doublings kept free above the largest gradient: the next one may be four times as large
HIGH = 0.95  # quantile of the largest gradients, so that one outlier does not decide
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
    if health.scale is None or any(streak.is_real(health.precision) for streak in health.streaks.all):
        return None  # no scaler, or its settings are not the problem
    found = {
        "init_scale": _init_scale(health),
        "growth_interval": _growth_interval(health),
        "backoff_factor": _backoff_factor(health),
    }
    reasons = tuple((name, advice[1]) for name, advice in found.items() if advice is not None)
    if not reasons:
        return None
    start, interval, backoff = (advice and advice[0] for advice in found.values())
    return ScalerSettings(start, None if interval is None else int(interval), backoff, reasons)


def fitting_scale(health: GradientHealth) -> float | None:
    """Return the loss scale, a power of two, that suits the gradients of recent samples best; None without samples."""
    total = sum(health.recent_layers.values(), start=Census())
    if not total.nonzeros or not len(health.amaxes):
        return None
    return math.ldexp(1.0, min(total.best_scale("fp16", headroom=HEADROOM), _highest(health)))


def _highest(health: GradientHealth) -> int:
    """Return the exponent of the highest scale that leaves headroom above the large gradients of the run."""
    highs = sorted(point.high for point in health.amaxes.points)
    large = highs[min(len(highs) - 1, int(HIGH * len(highs)))]
    return math.floor(math.log2(find_scalar_format("fp16").max) - large) - HEADROOM


def _init_scale(health: GradientHealth) -> tuple[float, str] | None:
    settled, first = health.settled_scale, health.first_scale
    if settled is None or first is None:
        return None
    if health.search_skips >= COSTLY_SEARCH and settled < first:
        return settled, (
            f"{health.search_skips} of the first steps were skipped while the scale fell from {scale_text(first)} to "
            f"{scale_text(settled)}"
        )
    return _higher_start(health, first)


def _higher_start(health: GradientHealth, first: float) -> tuple[float, str] | None:
    values = sum(found.values for found in health.underflows.values())
    lost = sum(found.lost for found in health.underflows.values()) / values if values else 0.0
    fitting = fitting_scale(health) if lost >= WORTH_MORE_SCALE else None
    if fitting is None or fitting <= first or health.scale is None or fitting <= health.scale:
        return None
    doublings = scale_exponent(fitting) - scale_exponent(first)
    return fitting, (
        f"about {lost:.0%} of the gradients are lost at {scale_text(health.scale)}, and the initial scale can be "
        f"raised by {doublings} doublings from {scale_text(first)}"
    )


def _growth_interval(health: GradientHealth) -> tuple[float, str] | None:
    found = oscillation(health)
    now = health.growth_interval
    if found is None or (now is not None and now >= USUAL_INTERVAL):
        return None
    return USUAL_INTERVAL, (
        f"{found.undone} of {found.growths} increases overflowed immediately, costing {found.skipped:.0%} of steps"
    )


def _backoff_factor(health: GradientHealth) -> tuple[float, str] | None:
    ended = [streak.count for streak in health.streaks.all if streak.after_good and streak is not health.streaks.open]
    if len(ended) < OVERFLOWS or median(ended) < SEVERAL:
        return None
    now, several = health.backoff_factor or USUAL_BACKOFF, int(median(ended))
    return max(
        now**several, FASTEST
    ), f"an overflow usually takes {several} skipped steps until the scale is low enough"
