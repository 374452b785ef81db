"""The picture of docs/scale.md: what a step, a start, a checkpoint and a resume cost a model of 70 B parameters."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figure import Line, Panel, drawn, powers_of_ten
from benchmarks.scale.models import MODELS
from benchmarks.scale.simulation import PATIENCE_S, Setting

__all__ = ["picture"]

DRAWN = "70B"
RANKS = (16, 64, 256, 1024, 4096, 16_384)


def picture() -> str:
    a_step = [
        Line("a step", _over(lambda each: each.step_s), dashed=True),
        Line("the guard's exchange", _over(lambda each: each.agree_s)),
        Line("the engine's", _over(lambda each: each.device_s())),
    ]
    others = [
        Line("the guard's patience", _over(lambda _: PATIENCE_S), dashed=True),
        Line("start: groups are made", _over(lambda each: each.meeting_s)),
        Line("first rank merges", _over(lambda each: each.checkpoint().first_rank)),
        Line("resume: a rank reads", _over(lambda each: each.read_s)),
        Line("names and fsyncs", _over(lambda each: each.checkpoint().names)),
        Line("exchanges", _over(lambda each: each.checkpoint().exchanges)),
        Line("data, there and back", _over(lambda each: each.checkpoint().data)),
    ]
    across = [(float(ranks), f"{ranks:,}") for ranks in RANKS]
    return drawn(
        f"Simulated costs of ampwise for {DRAWN} parameters on {RANKS[0]} to {RANKS[-1]:,} ranks",
        [
            Panel(f"A step, {DRAWN} parameters", a_step, across, "ranks", powers_of_ten(1e-5, 1e2)),
            Panel("A start, a checkpoint, a resume", others, across, "ranks", powers_of_ten(1e-3, 2e5)),
        ],
    )


def _over(value: Callable[[Setting], float]) -> list[tuple[float, float]]:
    return [(ranks, value(Setting(model=MODELS[DRAWN], ranks=ranks))) for ranks in RANKS]
