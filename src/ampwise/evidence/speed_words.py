"""A comparison of precisions in words: the same in the terminal, on the page and in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ampwise.evidence.speed import BASE, KINDS, LayerTime, Row, Speeds, Spread
from ampwise.evidence.speed_verdict import DEFINITELY, OPTIONAL, USE, Verdict

__all__ = [
    "BASES",
    "COLUMNS",
    "KIND_WORDS",
    "Column",
    "clock_note",
    "columns_of",
    "headline",
    "kept_note",
    "layer_note",
    "many",
    "problem_of",
    "problems",
    "setting",
    "split_of",
    "times",
]

# What each number rests on.
BASES = {
    "step_s": "measured here",
    "ratio": "measured here, by rounds",
    "loss": "measured here",
    "memory": "the peak measured here; its parts derived from the sizes of tensors",
    "flops": "counted by torch.utils.flop_counter",
    "peak_flops": "datasheet, dense",
    "peak_share": "derived: counted FLOPs, measured time, datasheet's peak",
    "split": "measured here, the median of three profiled steps",
    "layers": "measured here, the median of three profiled steps",
    "intensity": "derived from the sizes of products in a profiled step",
}
KIND_WORDS = {
    "matrix": "matrix products",
    "attention": "attention",
    "elementwise": "norms and elementwise",
    "casts": "casts",
    "optimizer": "clip and optimizer",
    "copies": "copies",
    "other": "other",
    "idle": "idle",
}
SAID = {
    Verdict.NOISE: "stay with fp32: the difference to {row} ({times} as fast) is within the noise",
    Verdict.STAY: "stay with fp32: {row}, the fastest of the others, is {times} as fast",
    Verdict.OPTIONAL: "optional: {row} is {times} as fast as fp32",
    Verdict.USE: "use {row}: {times} as fast as fp32",
    Verdict.DEFINITELY: "definitely {row}: {times} as fast as fp32",
}


def headline(speeds: Speeds) -> str:
    """The verdict in a sentence, without its full stop."""
    best = speeds.best
    if best is None or best.ratio is None:
        return _without_a_best(speeds)
    verdict = speeds.verdict(best)
    assert verdict is not None
    said = SAID[verdict].format(row=best.label, times=times(best.ratio.median))
    return f"{said}{_noise(speeds, verdict)}{_compiled(speeds)}"


def _without_a_best(speeds: Speeds) -> str:
    base = next((row for row in speeds.rows if row.precision == BASE and not row.compiled), None)
    if base is not None and base.step_s is None:
        running = [row for row in speeds.rows if row.step_s is not None]
        fastest = min(running, key=lambda row: row.step_s.median if row.step_s else 0.0, default=None)
        rest = "and so does everything else" if fastest is None else f"the fastest of the others is {fastest.label}"
        return f"nothing to compare with: fp32 {base.problem or 'was not measured'}; {rest}"
    why = "; ".join(f"{row.label}: {problem_of(row)}" for row in speeds.rows if row.label != BASE)
    return f"stay with fp32: {why}" if why else "stay with fp32: there was nothing else to measure"


def _noise(speeds: Speeds, verdict: Verdict) -> str:
    if speeds.noise is None:
        return ""
    return f" of ±{speeds.noise:.1%}" if verdict is Verdict.NOISE else f" (noise ±{speeds.noise:.1%})"


def _compiled(speeds: Speeds) -> str:
    """What torch.compile brings on top."""
    rows = [row for row in speeds.candidates if row.compiled and row.ratio_to_eager is not None]
    fastest = max(rows, key=lambda row: row.ratio_to_eager.median if row.ratio_to_eager else 0.0, default=None)
    if fastest is None or fastest.ratio_to_eager is None:
        return ""
    return f"; {fastest.label}, {times(fastest.ratio_to_eager.median)} as fast as eager fp32"


def problems(speeds: Speeds) -> list[str]:
    """What the table has no room for, a line for each row that has no verdict for a reason."""
    return [f"{row.label}: {problem}" for row in speeds.rows if ":" in (problem := problem_of(row))]


def problem_of(row: Row) -> str:
    """Why a row has no verdict, or no numbers."""
    if row.slower is not None:
        return f"takes {row.slower:,.0f} times as long as fp32: {row.problem}"
    if row.problem is not None:
        return row.problem
    if row.differs and row.loss is not None and row.loss.reference is not None:
        return f"not the same computation: loss {row.loss.loss:.6g}, in fp32 {row.loss.reference:.6g}"
    return ""


def times(ratio: float) -> str:
    """
    >>> times(6.0214), times(0.031), times(14.26)
    ('6.02×', '0.03×', '14.3×')
    """
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×"


def many(count: float) -> str:
    """
    >>> many(318_000), many(12.3456), many(4_200_000)
    ('318 k', '12.3', '4.2 M')
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


class Column(NamedTuple):
    """Of the table: its heading, what a row has in it, and what the number is."""

    heading: str
    cell: Callable[[Row, Speeds], str]
    meaning: str


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    unit, sign = (1.0, "s") if spread.median >= 1 else (1e3, "ms")
    return f"{spread.median * unit:.3g} {sign} ({spread.low * unit:.3g}–{spread.high * unit:.3g})"


def _tokens(row: Row, speeds: Speeds) -> str:
    rate = row.per_second(speeds.tokens)
    return "" if rate is None else many(rate)


def _samples(row: Row, speeds: Speeds) -> str:
    rate = row.per_second(speeds.batch) if speeds.tokens is None else None
    return "" if rate is None else many(rate)


def _peak(row: Row, speeds: Speeds) -> str:
    share = row.peak_share(speeds.flops)
    return "" if share is None else f"{'~' if row.peak_is_approximate else ''}{share:.0%}"


def _memory(row: Row, _: Speeds) -> str:
    return "" if row.memory is None else f"{row.memory.peak / 2**30:.2f} GiB"


def _ratio(row: Row, _: Speeds) -> str:
    return "" if row.ratio_to_eager is None else times(row.ratio_to_eager.median)


def _ratio_alike(row: Row, _: Speeds) -> str:
    return "" if row.ratio is None else times(row.ratio.median)


def _loss(row: Row, _: Speeds) -> str:
    return "" if row.loss is None else f"{row.loss.loss:.5g}"


def _verdict(row: Row, speeds: Speeds) -> str:
    if row.slower is not None:
        return "given up"
    if row.problem is not None:
        return row.problem.partition(":")[0]
    if row.differs:
        return "not the same"
    verdict = speeds.verdict(row)
    return "" if verdict is None else str(verdict)


COLUMNS = (
    Column("precision", lambda row, _: row.label, "what matrix products run in; by torch.compile, or not"),
    Column("step", lambda row, _: _spread(row.step_s), "median; eight in ten lie in between; measured here"),
    Column("×fp32", _ratio, "as fast as eager fp32, paired by rounds; measured here"),
    Column("×alike", _ratio_alike, "as fast as fp32 that is compiled as this row is; measured here"),
    Column("tokens/s", _tokens, "those of a batch in a step; measured here"),
    Column("samples/s", _samples, "those of a batch in a step; measured here"),
    Column("of peak", _peak, "counted FLOPs a second, of the datasheet's dense peak"),
    Column("memory", _memory, "the peak of a step; measured here"),
    Column("loss", _loss, "before the first step, of the same weights, batch and random numbers; measured here"),
    Column("verdict", _verdict, f"below {OPTIONAL} stay, to {USE} optional, to {DEFINITELY} use, above definitely"),
)
ONLY_WITH_COMPILED = "×alike"


def columns_of(speeds: Speeds) -> list[Column]:
    """Those in which a row has something."""
    compiled = any(row.compiled for row in speeds.rows)
    return [
        column
        for column in COLUMNS
        if any(column.cell(row, speeds) for row in speeds.rows) and (compiled or column.heading != ONLY_WITH_COMPILED)
    ]


def split_of(row: Row) -> dict[str, float]:
    """Shares of a step by kind, idle with them where that is known."""
    if row.split is None:
        return {}
    work = 1 - (row.idle_share or 0.0)
    shares = {kind: work * row.split.share(kind) for kind in KINDS if row.split.share(kind)}
    return shares | ({} if row.idle_share is None else {"idle": row.idle_share})


def layer_note(layer: LayerTime, label: str) -> str:
    """How a layer does in a precision."""
    ratio = layer.ratio(label)
    return "" if ratio is None else times(ratio)


def setting(speeds: Speeds) -> str:
    """Where, with how much, how often."""
    parts = [speeds.device_name]
    if speeds.batch is not None:
        parts.append(f"a batch of {speeds.batch:,}")
    if speeds.tokens is not None:
        parts.append(f"{speeds.tokens:,} tokens")
    if speeds.rounds:
        parts.append(f"{speeds.rounds} rounds")
    return ", ".join(parts)


def kept_note(speeds: Speeds) -> str:
    return f"Rows of 16 bits keep in FP32: {', '.join(speeds.kept)}." if speeds.kept else ""


def clock_note(speeds: Speeds) -> str:
    clocks = speeds.clocks
    if clocks is None:
        return ""
    held = f", held back by {' and '.join(clocks.held_back_by)}" if clocks.held_back_by else ""
    return f"GPU clock {clocks.lowest} MHz at its lowest, {clocks.top} at most{held}."
