"""Result of a comparison: the measurements, the findings, and their words for the terminal, the page and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ampwise.finding import Finding
from ampwise.finding.registry import run_checks
from ampwise.finding.terminal import shortened
from ampwise.numbers.number_text import count_text
from ampwise.report.result_view import Headline, Line, Part, ResultTable, ShownResult
from ampwise.tune.bench.speeds import BASE, KINDS, LayerTime, PrecisionRow, SpeedComparison
from ampwise.tune.bench.verdict import DEFINITELY, KIND_WORDS, OPTIONAL, USE, SpeedVerdict, ratio_text

# How each number was obtained.
BASES = {
    "step_s": "measured here",
    "ratio": "measured here, by rounds",
    "loss": "measured here",
    "memory": "the peak measured here; its parts derived from tensor sizes",
    "joules": "the driver's counter of the whole GPU, over a second of steps",
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
# Columns of the table, and what they mean.
MEANINGS = {
    "precision": "what matmuls run in; with torch.compile or without",
    "step": "median, and the range of 80% of the steps; measured here",
    "×fp32": "speedup over eager fp32, paired by rounds; measured here",
    "×alike": "speedup over fp32 in the same mode, eager or compiled; measured here",
    "tokens/s": "of a batch per step; measured here",
    "samples/s": "of a batch per step; measured here",
    "of peak": "counted FLOPs per second, relative to the datasheet's dense peak",
    "memory": "the peak of a step; measured here",
    "J/token": "energy of the whole GPU, by the driver's counter; measured here",
    "J/sample": "energy of the whole GPU, by the driver's counter; measured here",
    "loss": "before the first step, for the same weights, batch and random numbers; measured here",
    "verdict": f"below {OPTIONAL} stay, up to {USE} optional, up to {DEFINITELY} use, above definitely",
}
MOST_LAYERS = 12
STYLES = {"definitely": "green", "use": "green", "optional": "yellow", "stay": "", "noise": "dim"}
MOODS = {"definitely": "ok", "use": "ok", "optional": "info"}


@dataclass(frozen=True, slots=True)
class BenchResult(ShownResult):
    """A training step in several precisions: ``ampwise.bench`` returns one.

    ``speeds`` has every number, ``findings`` are reasons and warnings, ``best`` is the row to switch to, if there is
    one. ``print`` shows the same as ``ampwise bench``; a notebook shows it as tables.
    """

    speeds: SpeedComparison

    @property
    def rows(self) -> tuple[PrecisionRow, ...]:
        """The rows: one for each precision, eager or compiled."""
        return self.speeds.rows

    @property
    def best(self) -> PrecisionRow | None:
        """The fastest row with the same loss; among rows noise cannot separate, the one that takes least change."""
        return self.speeds.best

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        return speed_headline(self.speeds)

    @property
    def findings(self) -> list[Finding]:
        """Why it is not faster, and what makes a number doubtful; worst first."""
        found = run_checks(self.speeds)
        return sorted(found, key=lambda finding: (finding.severity.rank, finding.rule.code))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; ``basis`` says what each number rests on."""
        best = self.best
        return self.speeds.as_dict() | {
            "verdict": self.verdict,
            "best": None if best is None else best.label,
            "findings": [finding.as_dict() for finding in self.findings],
            "basis": BASES,
        }

    def __repr__(self) -> str:
        return shortened(f"<BenchResult: {self.verdict}>")

    def _parts(self) -> Iterator[Part]:
        """Yield the verdict first, then the numbers behind it."""
        speeds, best = self.speeds, self.best
        yield Line(f"{speeds.name} on {setup_text(speeds)}", "dim")
        mood = MOODS.get(str(speeds.verdict(best)), "") if best is not None else ""
        yield Headline(self.verdict, "precisions", mood)
        headings, rows = speed_table(speeds)
        left = [column for column, heading in enumerate(headings) if heading in ("precision", "verdict")]
        styles = [STYLES.get(str(speeds.verdict(row)), "") for row in speeds.rows]
        yield ResultTable(headings=headings, rows=rows, left=left, styles=styles)
        for row in speeds.rows:
            if ":" in problem_of(row):  # too long for the table
                yield Line(f"{row.label}: {problem_of(row)}", "yellow")
        shares = {row.label: split_of(row) for row in speeds.rows if row.split is not None}
        if shares:
            kinds = [kind for kind in KIND_WORDS if any(kind in split for split in shares.values())]
            rows = [
                [label, *(f"{split[kind]:.0%}" if kind in split else "-" for kind in kinds)]
                for label, split in shares.items()
            ]
            headings = ["time of a step", *(KIND_WORDS[kind] for kind in kinds)]
            yield ResultTable(headings=headings, rows=rows, wraps=range(1, len(headings)))
        if speeds.layers:
            yield self._layers()
        yield from self.findings
        yield from (Line(note, "dim") for note in notes_of(speeds))

    def _layers(self) -> ResultTable:
        layers = self.speeds.layers
        labels = [label for label in layers[0].seconds if label != BASE]
        rows = []
        for layer in layers[:MOST_LAYERS]:
            base = f"{1e3 * layer.seconds[BASE]:.3g} ms" if BASE in layer.seconds else ""
            times = f"×{layer.times}" if layer.times > 1 else ""
            rows.append([layer.name, layer.kind, times, base, *(layer_note(layer, label) for label in labels)])
        headings = ("layers", "class", "", BASE, *labels)
        return ResultTable(headings=headings, rows=rows, left=(0, 1), names=(0,), more=len(layers) - MOST_LAYERS)


# --- words shared by the terminal, the page and notebooks ------------------------------------------------------------


def speed_headline(speeds: SpeedComparison) -> str:
    """Return the verdict as a sentence without its full stop."""
    best = speeds.best
    if best is None or best.ratio is None:
        return _without_a_best(speeds)
    verdict = speeds.verdict(best)
    assert verdict is not None
    text = HEADLINES[verdict].format(row=best.label, times=ratio_text(best.ratio.median))
    if speeds.noise is not None:
        noise = f"±{speeds.noise:.1%}"
        text += f" of {noise}" if verdict is SpeedVerdict.NOISE else f" (noise {noise})"
    compiled = [
        (row.ratio_to_eager.median, row.label) for row in speeds.candidates if row.compiled and row.ratio_to_eager
    ]
    if compiled:  # what torch.compile adds
        ratio, label = max(compiled, key=lambda each: each[0])
        text += f"; {label}, {ratio_text(ratio)} as fast as eager fp32"
    return text


def _without_a_best(speeds: SpeedComparison) -> str:
    base = next((row for row in speeds.rows if row.precision == BASE and not row.compiled), None)
    if base is not None and base.step_s is None:
        running = [(row.step_s.median, row.label) for row in speeds.rows if row.step_s is not None]
        fastest = min(running, key=lambda each: each[0], default=None)
        others = "and so does everything else" if fastest is None else f"the fastest alternative is {fastest[1]}"
        return f"nothing to compare with: fp32 {base.problem or 'was not measured'}; {others}"
    why = "; ".join(f"{row.label}: {problem_of(row)}" for row in speeds.rows if row.label != BASE)
    return f"stay with fp32: {why}" if why else "stay with fp32: there was nothing else to measure"


def problem_of(row: PrecisionRow) -> str:
    """Return why a row has no verdict, or no numbers."""
    if row.slower is not None:
        return f"takes {row.slower:,.0f} times as long as fp32: {row.problem}"
    if row.problem is not None:
        return row.problem
    if row.differs and row.loss is not None and row.loss.reference is not None:
        return f"not the same computation: loss {row.loss.loss:.6g}, but {row.loss.reference:.6g} in fp32"
    return ""


def speed_table(speeds: SpeedComparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the columns that are not empty, and the cells of each row."""
    rows = [dict(_cells(row, speeds)) for row in speeds.rows]
    compiled = any(row.compiled for row in speeds.rows)
    headings = [name for name in MEANINGS if any(row.get(name) for row in rows) and (compiled or name != "×alike")]
    return headings, [[row.get(name, "") for name in headings] for row in rows]


def _cells(row: PrecisionRow, speeds: SpeedComparison) -> Iterator[tuple[str, str]]:
    """Yield what is known about a row, by heading."""
    yield "precision", row.label
    if row.step_s is not None:
        unit, sign = (1.0, "s") if row.step_s.median >= 1 else (1e3, "ms")
        middle, low, high = (
            f"{seconds * unit:.3g}" for seconds in (row.step_s.median, row.step_s.low, row.step_s.high)
        )
        yield "step", f"{middle} {sign} ({low}–{high})"
    if row.ratio_to_eager is not None:
        yield "×fp32", ratio_text(row.ratio_to_eager.median)
    if row.ratio is not None:
        yield "×alike", ratio_text(row.ratio.median)
    count = speeds.batch if speeds.tokens is None else speeds.tokens
    rate = row.per_second(count)
    if rate is not None:
        yield "samples/s" if speeds.tokens is None else "tokens/s", count_text(rate)
    share = row.peak_share(speeds.flops)
    if share is not None:
        yield "of peak", f"{'~' if row.peak_is_approximate else ''}{share:.0%}"
    if row.memory is not None:
        yield "memory", f"{row.memory.peak / 2**30:.2f} GiB"
    if row.joules is not None and count:
        yield "J/sample" if speeds.tokens is None else "J/token", f"{row.joules / count:.3g}"
    if row.loss is not None:
        yield "loss", f"{row.loss.loss:.5g}"
    if row.slower is not None:
        yield "verdict", "given up"
    elif row.problem is not None:
        yield "verdict", row.problem.partition(":")[0]
    else:
        yield "verdict", "not the same" if row.differs else str(speeds.verdict(row) or "")


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
        parts.append(f"{speeds.rounds} round{'s' if speeds.rounds != 1 else ''}")
    return ", ".join(parts)


def notes_of(speeds: SpeedComparison) -> list[str]:
    """Return what was kept in FP32, the GPU's clock, and what was not measured, in sentences."""
    notes = []
    if speeds.kept:
        notes.append(f"16-bit rows keep in FP32: {', '.join(speeds.kept)}.")
    clocks = speeds.clocks
    if clocks is not None:
        held = f", throttled by {' and '.join(clocks.held_back_by)}" if clocks.held_back_by else ""
        notes.append(f"GPU clock as low as {clocks.lowest} MHz, {clocks.top} MHz at most{held}.")
    return [*notes, *filter(None, speeds.not_measured)]
