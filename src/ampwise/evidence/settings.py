"""Settings of a GradScaler that fit what was seen of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ampwise.census.algebra import Census
from ampwise.evidence.health import Health
from ampwise.evidence.scaling import oscillation
from ampwise.evidence.underflow import scale_exponent
from ampwise.evidence.wording import scale_text
from ampwise.formats import find_scalar_format

__all__ = ["Settings", "fitting_scale", "suggested_settings"]

COSTLY_SEARCH = 3  # steps skipped at the start before a word about them is worth it
WORTH_MORE_SCALE = 0.01  # of the gradients lost before a higher start is advised
HEADROOM = 2  # doublings kept free above the largest gradient: of the next steps one may be four times as large
HIGH = 0.95  # quantile of the largest gradients, so that one wild step does not decide
SEVERAL = 3  # skips for one overflow, before a faster backoff is advised
OVERFLOWS = 4  # before the usual number of skips for one is known
FASTEST = 1 / 16  # backoff: more than that would undo a day's growth
USUAL_INTERVAL = 2000  # torch's own
USUAL_BACKOFF = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What to give the scaler, and why; None where nothing is to be changed."""

    init_scale: float | None = None
    growth_interval: int | None = None
    backoff_factor: float | None = None
    reasons: tuple[tuple[str, str], ...] = ()  # setting, reason

    @property
    def arguments(self) -> dict[str, float | int]:
        """The settings that are to be changed."""
        values = {name: getattr(self, name) for name in ("init_scale", "growth_interval", "backoff_factor")}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return f"GradScaler({', '.join(f'{name}={scale_text(value)}' for name, value in self.arguments.items())})"


def suggested_settings(health: Health) -> Settings | None:
    """Settings that fit this run better than those it had; None where there is nothing to say."""
    if health.scale is None or any(streak.is_real(health.precision) for streak in health.streaks.all):
        return None  # no scaler, or what is broken is not its settings
    found = {
        "init_scale": _init_scale(health),
        "growth_interval": _growth_interval(health),
        "backoff_factor": _backoff_factor(health),
    }
    reasons = tuple((name, advice[1]) for name, advice in found.items() if advice is not None)
    if not reasons:
        return None
    start, interval, backoff = (advice and advice[0] for advice in found.values())
    return Settings(start, None if interval is None else int(interval), backoff, reasons)


def fitting_scale(health: Health) -> float | None:
    """The loss scale, a power of two, that suits the gradients of the last samples best; None without samples."""
    total = sum(health.recent_layers.values(), start=Census())
    if not total.nonzeros or not len(health.amaxes):
        return None
    return math.ldexp(1.0, min(total.best_scale("fp16", headroom=HEADROOM), _highest(health)))


def _highest(health: Health) -> int:
    """The exponent of the highest scale at which a large gradient, as seen over the run, keeps its headroom."""
    highs = sorted(point.high for point in health.amaxes.points)
    large = highs[min(len(highs) - 1, int(HIGH * len(highs)))]
    return math.floor(math.log2(find_scalar_format("fp16").max) - large) - HEADROOM


def _init_scale(health: Health) -> tuple[float, str] | None:
    settled, first = health.settled_scale, health.first_scale
    if settled is None or first is None:
        return None
    if health.search_skips >= COSTLY_SEARCH and settled < first:
        return settled, (
            f"{health.search_skips} of the first steps were skipped on the way from a scale of {scale_text(first)} "
            f"to {scale_text(settled)}"
        )
    return _higher_start(health, first)


def _higher_start(health: Health, first: float) -> tuple[float, str] | None:
    values = sum(found.values for found in health.underflows.values())
    lost = sum(found.lost for found in health.underflows.values()) / values if values else 0.0
    fitting = fitting_scale(health) if lost >= WORTH_MORE_SCALE else None
    if fitting is None or fitting <= first or health.scale is None or fitting <= health.scale:
        return None
    doublings = scale_exponent(fitting) - scale_exponent(first)
    return fitting, (
        f"about {lost:.0%} of the gradients are lost at {scale_text(health.scale)}, "
        f"and there is room for {doublings} doublings above {scale_text(first)}"
    )


def _growth_interval(health: Health) -> tuple[float, str] | None:
    found = oscillation(health)
    now = health.growth_interval
    if found is None or (now is not None and now >= USUAL_INTERVAL):
        return None
    return USUAL_INTERVAL, f"{found.undone} of {found.growths} growths overflowed at once: {found.skipped:.0%} of steps"


def _backoff_factor(health: Health) -> tuple[float, str] | None:
    ended = [streak.count for streak in health.streaks.all if streak.after_good and streak is not health.streaks.open]
    if len(ended) < OVERFLOWS or median(ended) < SEVERAL:
        return None
    now, several = health.backoff_factor or USUAL_BACKOFF, int(median(ended))
    return max(
        now**several, FASTEST
    ), f"an overflow usually takes {several} skipped steps until the scale is low enough"
