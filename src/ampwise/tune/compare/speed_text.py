"""Text of a comparison of precisions, shared by the terminal, the report and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ampwise.rules.amp5xx_speed.verdict import DEFINITELY, OPTIONAL, USE, SpeedVerdict, ratio_text
from ampwise.tune.compare.speeds import BASE, KINDS, LayerTime, PrecisionRow, SpeedComparison, TimeSpread

__all__ = [
    "BASES",
    "COLUMNS",
    "Column",
    "clock_note",
    "columns_of",
    "kept_note",
    "layer_note",
    "problem_of",
    "problems",
    "setup_text",
    "short_count",
    "speed_headline",
    "split_of",
]

# How each number was obtained.
BASES = {
    "step_s": "measured here",
    "ratio": "measured here, by rounds",
    "loss": "measured here",
    "memory": "the peak measured here; its parts derived from tensor sizes",
    "flops": "counted by torch.utils.flop_counter",
    "peak_flops": "datasheet, dense",
    "peak_share": "derived: counted FLOPs, measured time, datasheet's peak",
    "split": "measured here, the median of three profiled steps",
    "layers": "measured here, the median of three profiled steps",
    "intensity": "derived from matmul sizes in a profiled step",
}
HEADLINES = {
    SpeedVerdict.NOISE: "stay with fp32: the difference to {row} ({times} as fast) is within the noise",
    SpeedVerdict.STAY: "stay with fp32: {row}, the fastest alternative, is {times} as fast",
    SpeedVerdict.OPTIONAL: "optional: {row} is {times} as fast as fp32",
    SpeedVerdict.USE: "use {row}: {times} as fast as fp32",
    SpeedVerdict.DEFINITELY: "definitely {row}: {times} as fast as fp32",
}


def speed_headline(speeds: SpeedComparison) -> str:
    """Return the verdict as a sentence without its full stop."""
    best = speeds.best
    if best is None or best.ratio is None:
        return _without_a_best(speeds)
    verdict = speeds.verdict(best)
    assert verdict is not None
    text = HEADLINES[verdict].format(row=best.label, times=ratio_text(best.ratio.median))
    return f"{text}{_noise(speeds, verdict)}{_compiled(speeds)}"


def _without_a_best(speeds: SpeedComparison) -> str:
    base = next((row for row in speeds.rows if row.precision == BASE and not row.compiled), None)
    if base is not None and base.step_s is None:
        running = [row for row in speeds.rows if row.step_s is not None]
        fastest = min(running, key=lambda row: row.step_s.median if row.step_s else 0.0, default=None)
        others = "and so does everything else" if fastest is None else f"the fastest alternative is {fastest.label}"
        return f"nothing to compare with: fp32 {base.problem or 'was not measured'}; {others}"
    why = "; ".join(f"{row.label}: {problem_of(row)}" for row in speeds.rows if row.label != BASE)
    return f"stay with fp32: {why}" if why else "stay with fp32: there was nothing else to measure"


def _noise(speeds: SpeedComparison, verdict: SpeedVerdict) -> str:
    if speeds.noise is None:
        return ""
    return f" of ±{speeds.noise:.1%}" if verdict is SpeedVerdict.NOISE else f" (noise ±{speeds.noise:.1%})"


def _compiled(speeds: SpeedComparison) -> str:
    """Return what torch.compile adds."""
    rows = [row for row in speeds.candidates if row.compiled and row.ratio_to_eager is not None]
    fastest = max(rows, key=lambda row: row.ratio_to_eager.median if row.ratio_to_eager else 0.0, default=None)
    if fastest is None or fastest.ratio_to_eager is None:
        return ""
    return f"; {fastest.label}, {ratio_text(fastest.ratio_to_eager.median)} as fast as eager fp32"


def problems(speeds: SpeedComparison) -> list[str]:
    """Return a line for each row that has no verdict for a reason too long for the table."""
    return [f"{row.label}: {problem}" for row in speeds.rows if ":" in (problem := problem_of(row))]


def problem_of(row: PrecisionRow) -> str:
    """Return why a row has no verdict, or no numbers."""
    if row.slower is not None:
        return f"takes {row.slower:,.0f} times as long as fp32: {row.problem}"
    if row.problem is not None:
        return row.problem
    if row.differs and row.loss is not None and row.loss.reference is not None:
        return f"not the same computation: loss {row.loss.loss:.6g}, but {row.loss.reference:.6g} in fp32"
    return ""


def short_count(count: float) -> str:
    """
    >>> short_count(318_000), short_count(12.3456), short_count(4_200_000)
    ('318 k', '12.3', '4.2 M')
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


class Column(NamedTuple):
    """A column of the table: its heading, its cell text, and its meaning."""

    heading: str
    cell: Callable[[PrecisionRow, SpeedComparison], str]
    meaning: str


def _spread(spread: TimeSpread | None) -> str:
    if spread is None:
        return ""
    unit, sign = (1.0, "s") if spread.median >= 1 else (1e3, "ms")
    return f"{spread.median * unit:.3g} {sign} ({spread.low * unit:.3g}–{spread.high * unit:.3g})"


def _tokens(row: PrecisionRow, speeds: SpeedComparison) -> str:
    rate = row.per_second(speeds.tokens)
    return "" if rate is None else short_count(rate)


def _samples(row: PrecisionRow, speeds: SpeedComparison) -> str:
    rate = row.per_second(speeds.batch) if speeds.tokens is None else None
    return "" if rate is None else short_count(rate)


def _peak(row: PrecisionRow, speeds: SpeedComparison) -> str:
    share = row.peak_share(speeds.flops)
    return "" if share is None else f"{'~' if row.peak_is_approximate else ''}{share:.0%}"


def _memory(row: PrecisionRow, _: SpeedComparison) -> str:
    return "" if row.memory is None else f"{row.memory.peak / 2**30:.2f} GiB"


def _ratio(row: PrecisionRow, _: SpeedComparison) -> str:
    return "" if row.ratio_to_eager is None else ratio_text(row.ratio_to_eager.median)


def _ratio_alike(row: PrecisionRow, _: SpeedComparison) -> str:
    return "" if row.ratio is None else ratio_text(row.ratio.median)


def _loss(row: PrecisionRow, _: SpeedComparison) -> str:
    return "" if row.loss is None else f"{row.loss.loss:.5g}"


def _verdict(row: PrecisionRow, speeds: SpeedComparison) -> str:
    if row.slower is not None:
        return "given up"
    if row.problem is not None:
        return row.problem.partition(":")[0]
    if row.differs:
        return "not the same"
    verdict = speeds.verdict(row)
    return "" if verdict is None else str(verdict)


COLUMNS = (
    Column("precision", lambda row, _: row.label, "what matmuls run in; with torch.compile or without"),
    Column("step", lambda row, _: _spread(row.step_s), "median, and the range of 80% of the steps; measured here"),
    Column("×fp32", _ratio, "speedup over eager fp32, paired by rounds; measured here"),
    Column("×alike", _ratio_alike, "speedup over fp32 in the same mode, eager or compiled; measured here"),
    Column("tokens/s", _tokens, "of a batch per step; measured here"),
    Column("samples/s", _samples, "of a batch per step; measured here"),
    Column("of peak", _peak, "counted FLOPs per second, relative to the datasheet's dense peak"),
    Column("memory", _memory, "the peak of a step; measured here"),
    Column("loss", _loss, "before the first step, for the same weights, batch and random numbers; measured here"),
    Column(
        "verdict", _verdict, f"below {OPTIONAL} stay, up to {USE} optional, up to {DEFINITELY} use, above definitely"
    ),
)
ONLY_WITH_COMPILED = "×alike"


def columns_of(speeds: SpeedComparison) -> list[Column]:
    """Return the columns that are not empty."""
    compiled = any(row.compiled for row in speeds.rows)
    return [
        column
        for column in COLUMNS
        if any(column.cell(row, speeds) for row in speeds.rows) and (compiled or column.heading != ONLY_WITH_COMPILED)
    ]


def split_of(row: PrecisionRow) -> dict[str, float]:
    """Return the fractions of a step by kind, including idle if known."""
    if row.split is None:
        return {}
    work = 1 - (row.idle_share or 0.0)
    shares = {kind: work * row.split.share(kind) for kind in KINDS if row.split.share(kind)}
    return shares | ({} if row.idle_share is None else {"idle": row.idle_share})


def layer_note(layer: LayerTime, label: str) -> str:
    """Return the speedup of a layer in a precision."""
    ratio = layer.ratio(label)
    return "" if ratio is None else ratio_text(ratio)


def setup_text(speeds: SpeedComparison) -> str:
    """Return the device, the batch and the number of rounds."""
    parts = [speeds.device_name]
    if speeds.batch is not None:
        parts.append(f"a batch of {speeds.batch:,}")
    if speeds.tokens is not None:
        parts.append(f"{speeds.tokens:,} tokens")
    if speeds.rounds:
        parts.append(f"{speeds.rounds} rounds")
    return ", ".join(parts)


def kept_note(speeds: SpeedComparison) -> str:
    return f"16-bit rows keep in FP32: {', '.join(speeds.kept)}." if speeds.kept else ""


def clock_note(speeds: SpeedComparison) -> str:
    clocks = speeds.clocks
    if clocks is None:
        return ""
    held = f", throttled by {' and '.join(clocks.held_back_by)}" if clocks.held_back_by else ""
    return f"GPU clock as low as {clocks.lowest} MHz, {clocks.top} MHz at most{held}."
