"""Steps and layer samples as lines of JSON, and back.

The line of a step: ``{"s": step, "o": optimizer, "t": seconds, "l": loss, "n": norm, "g": scale, "r": lr, "x": 1}``.
``x`` marks a skipped step; unknown values are left out, and so are ``o`` and ``x`` if they are 0. For several merged
steps, ``s`` and ``t`` are ``[first, last]``, ``k`` is the number of steps, ``x`` how many were skipped, and each number
is ``[lowest, mean, highest]``, followed by ``finite, nans, infs, negative infs`` if not all were finite.

JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity". Numbers have seven
digits, more than FP32 has; the loss scale is exact, because it is compared between ranks.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampwise.finding.strict_json import refuse_many, refuse_surrogates
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import binade_of
from ampwise.runs.bucket import NO_STATS, NumberStats, StepBucket
from ampwise.runs.rows import LayerSample, StepRow

__all__ = [
    "LINE_ERRORS",
    "bucket_line",
    "is_count",
    "layers_line",
    "merge_layers",
    "merge_steps",
    "object_line",
    "parse_bucket",
    "read_bucket",
    "read_layers",
    "read_object",
    "step_line",
]

LINE_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)  # errors that an invalid line can raise
_DECODE = json.JSONDecoder().raw_decode
LARGEST_COUNT = 2**63  # larger counts could overflow as floats
MOST_BINADES = 2200  # FP64 has fewer


# --- steps ---------------------------------------------------------------------------------------------------------


def step_line(row: StepRow) -> str:
    """Return the line of one step. It runs at every training step, so it does not use json.dumps.

    >>> step_line(StepRow(step=3, loss=2.5, norm=float("inf"), scale=65536.0, skipped=True))
    '{"s":3,"t":0.0000,"l":2.5,"n":"Infinity","g":65536.0,"x":1}\\n'
    """
    parts = [f'{{"s":{row.step:d}']
    if row.optimizer:
        parts.append(f'"o":{row.optimizer:d}')
    parts.append(f'"t":{_seconds(row.seconds)}')
    if row.loss is not None:
        parts.append(f'"l":{_short(row.loss)}')
    if row.norm is not None:
        parts.append(f'"n":{_short(row.norm)}')
    if row.scale is not None:
        parts.append(f'"g":{_exact(row.scale)}')
    if row.lr is not None:
        parts.append(f'"r":{_short(row.lr)}')
    return ",".join(parts) + (',"x":1}\n' if row.skipped else "}\n")


def bucket_line(bucket: StepBucket) -> str:
    """Return the line of several merged steps."""
    parts = [f'{{"s":[{bucket.first:d},{bucket.last:d}],"k":{bucket.count:d}']
    if bucket.optimizer:
        parts.append(f'"o":{bucket.optimizer:d}')
    parts.append(f'"t":[{_seconds(bucket.began)},{_seconds(bucket.ended)}]')
    for key, spread, text in (
        ("l", bucket.loss, _short),
        ("n", bucket.norm, _short),
        ("g", bucket.scale, _exact),
        ("r", bucket.lr, _short),
    ):
        if spread.known:
            parts.append(f'"{key}":[{_spread(spread, bucket.count, text)}]')
    return ",".join(parts) + (f',"x":{bucket.skipped:d}}}\n' if bucket.skipped else "}\n")


def read_bucket(line: bytes | str) -> StepBucket:
    """Read the step or steps of a line; raise one of LINE_ERRORS if it is invalid."""
    return parse_bucket(read_object(line))


def parse_bucket(data: Mapping[str, Any]) -> StepBucket:
    """Return the step or steps of a parsed line."""
    if "k" in data:
        return _several(data)
    step, seconds = _whole(data["s"]), _finite(data["t"])
    return StepBucket(
        optimizer=_whole(data.get("o", 0)),
        first=step,
        last=step,
        skipped=_whole(data.get("x", 0)),
        began=seconds,
        ended=seconds,
        loss=NumberStats.of(_number(data.get("l"))),
        norm=NumberStats.of(_number(data.get("n"))),
        scale=NumberStats.of(_number(data.get("g"))),
        lr=NumberStats.of(_number(data.get("r"))),
    )


def merge_steps(rows: Sequence[Mapping[str, Any]]) -> StepBucket:
    """Merge parsed lines of one step each: the same as adding up ``bucket_of`` of each, but faster.

    Thinning does this to every step of a run, while the training waits.
    """
    steps = [row["s"] for row in rows]
    return StepBucket(
        optimizer=rows[0].get("o", 0),
        first=min(steps),
        last=max(steps),
        count=len(rows),
        skipped=sum(row.get("x", 0) for row in rows),
        began=min(rows[0]["t"], rows[-1]["t"]),
        ended=max(rows[0]["t"], rows[-1]["t"]),
        loss=_spread_of([row.get("l") for row in rows]),
        norm=_spread_of([row.get("n") for row in rows]),
        scale=_spread_of([row.get("g") for row in rows]),
        lr=_spread_of([row.get("r") for row in rows]),
    )


def _spread_of(values: list[Any]) -> NumberStats:
    try:
        total = sum(values)
    except TypeError:  # None or "Infinity" among them
        total = math.nan
    if not math.isfinite(total):
        return NumberStats.over([NumberStats.of(_number(value)) for value in values])
    low, high = min(values), max(values)
    return NumberStats(low, min(max(total / len(values), low), high), high, len(values))


def _several(data: Mapping[str, Any]) -> StepBucket:
    first, last = map(_whole, _list(data["s"]))
    began, ended = map(_finite, _list(data["t"]))
    count, skipped = _whole(data["k"]), _whole(data.get("x", 0))
    if first > last or skipped > count:
        raise ValueError(f"steps {first} to {last}, {skipped} of {count} skipped")
    return StepBucket(
        optimizer=_whole(data.get("o", 0)),
        first=first,
        last=last,
        count=count,
        skipped=skipped,
        began=began,
        ended=ended,
        loss=_read_spread(data.get("l"), count),
        norm=_read_spread(data.get("n"), count),
        scale=_read_spread(data.get("g"), count),
        lr=_read_spread(data.get("r"), count),
    )


def _spread(spread: NumberStats, steps: int, text: Callable[[float], str]) -> str:
    extremes = ["null" if value is None else text(value) for value in spread[:3]]
    counts = [] if spread.finite == steps else [str(count) for count in spread[3:]]
    return ",".join(extremes + counts)


def _read_spread(data: Any, steps: int) -> NumberStats:
    if data is None:
        return NO_STATS
    values = _list(data)
    counts = [_whole(count) for count in values[3:]] or [steps, 0, 0, 0]
    low, mean, high = values[:3]
    if not counts[0]:
        return NumberStats(None, None, None, *counts)
    return NumberStats(_finite(low), _finite(mean), _finite(high), *counts)


# --- layers --------------------------------------------------------------------------------------------------------


def layers_line(sample: LayerSample) -> str:
    """Return the line of a layer sample."""
    data = {
        "s": [sample.first, sample.last],
        "k": sample.steps,
        "o": sample.optimizer,
        "g": None if sample.scale is None else _valid(sample.scale),
        "layers": {name: _census(census) for name, census in sample.layers.items()},
    }
    return object_line(data)


def merge_layers(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two parsed samples: the same as adding two LayerSamples, but faster, without creating a Census."""
    (first, _), (_, last) = one["s"], other["s"]
    scales = [scale for scale in (_number(one["g"]), _number(other["g"])) if scale is not None]
    mine, theirs = one["layers"], other["layers"]
    layers = {name: _added(mine[name], theirs[name]) if name in theirs else mine[name] for name in mine}
    return {
        "s": [first, last],
        "k": one["k"] + other["k"],
        "o": one["o"],
        "g": _valid(max(scales)) if scales else None,
        "layers": layers | {name: census for name, census in theirs.items() if name not in mine},
    }


def _added(one: list[Any], other: list[Any]) -> list[Any]:
    zeros, infs, nans, amax, amin, sum_squares, lowest, counts = one
    zeros2, infs2, nans2, amax2, amin2, sum_squares2, lowest2, counts2 = other
    return [
        zeros + zeros2,
        infs + infs2,
        nans + nans2,
        max(amax, amax2),
        min(amin, amin2) or max(amin, amin2),
        _valid(float(sum_squares) + float(sum_squares2)),
        *_added_counts(lowest, counts, lowest2, counts2),
    ]


def _added_counts(lowest: int, counts: list[int], lowest2: int, counts2: list[int]) -> tuple[int, list[int]]:
    if not counts or not counts2:
        return (lowest, counts) if counts else (lowest2, counts2)
    low, high = min(lowest, lowest2), max(lowest + len(counts), lowest2 + len(counts2))
    one = [0] * (lowest - low) + counts + [0] * (high - lowest - len(counts))
    other = [0] * (lowest2 - low) + counts2 + [0] * (high - lowest2 - len(counts2))
    return low, list(map(operator.add, one, other))


def read_layers(line: bytes | str) -> LayerSample:
    """Read the layer sample of a line; raise one of LINE_ERRORS if it is invalid."""
    data = read_object(line)
    first, last = map(_whole, _list(data["s"]))
    return LayerSample(
        optimizer=_whole(data["o"]),
        first=first,
        last=last,
        steps=_whole(data["k"]),
        scale=_number(data["g"]),
        layers={name: _read_census(census) for name, census in data["layers"].items()},
    )


def _census(census: Census) -> list[Any]:
    lowest = min(census.binades, default=0)
    counts = [0] * (max(census.binades) - lowest + 1) if census.binades else []
    for exponent, count in census.binades.items():
        counts[exponent - lowest] = count
    extremes = [census.amax, census.amin, _valid(census.sum_squares)]
    return [census.zeros, census.infs, census.nans, *extremes, lowest, counts]


def _read_census(data: Any) -> Census:
    zeros, infs, nans, amax, amin, sum_squares, lowest, counts = _list(data)
    if len(_list(counts)) > MOST_BINADES or not all(map(is_count, (zeros, infs, nans, *counts))):
        raise ValueError("a census with invalid counts")
    if _as_written(data):
        binades = {exponent: count for exponent, count in enumerate(counts, lowest) if count}
        return Census(binades=binades, zeros=zeros, infs=infs, nans=nans, amax=amax, amin=amin, sum_squares=sum_squares)
    return Census.from_dict(  # slower: accepts equivalent data, and raises for invalid data
        {
            "binades": dict(enumerate(counts, lowest)),
            "zeros": zeros,
            "infs": infs,
            "nans": nans,
            "amax": amax,
            "amin": amin,
            "sum_squares": sum_squares,
        }
    )


def _as_written(data: list[Any]) -> bool:
    """Whether the data is valid and exactly as ``_census`` writes it; a fast path, for tens of thousands of them."""
    *whole, amax, amin, sum_squares, lowest, counts = data
    if type(counts) is not list or not counts or {*map(type, whole), *map(type, counts), type(lowest)} != {int}:
        return False
    if {type(amax), type(amin), type(sum_squares)} != {float} or min(*whole, *counts, sum_squares) < 0:
        return False
    ends = counts[0] and counts[-1] and 0.0 < amin <= amax < math.inf and sum_squares < math.inf
    return bool(ends) and binade_of(amin) == lowest and binade_of(amax) == lowest + len(counts) - 1


# --- numbers -------------------------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else f'"{_valid(value)}"'


def _exact(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else f'"{_valid(value)}"'


def _seconds(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "0"


def _valid(value: float) -> float | str:
    """Return the number, or the string that stands for NaN or infinity in JSON."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def object_line(data: Mapping[str, Any]) -> str:
    """Return a JSON object as a line."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def read_object(line: bytes | str) -> dict[str, Any]:
    """Read a line that holds one JSON object."""
    text = line if isinstance(line, str) else line.decode()
    refuse_many(text)
    data, end = _DECODE(text)  # twice as fast as json.loads
    if not isinstance(data, dict) or text[end:] not in ("\n", ""):
        raise ValueError("expected one JSON object in the line")
    refuse_surrogates(text, data)
    return data


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2**63 - 1.

    >>> is_count(3), is_count(True), is_count(-1), is_count(2**63)
    (True, False, False, False)
    """
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _whole(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is not a count")
    return value  # type: ignore[no-any-return]


def _number(value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if value not in ("NaN", "Infinity", "-Infinity") and type(value) is not int:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number
