"""Steps and samples of layers as lines of JSON, and back.

A line of a step: ``{"s": step, "o": optimizer, "t": seconds, "l": loss, "n": norm, "g": scale, "r": lr, "x": 1}``,
where ``x`` says that it was skipped, and what is not known, or is 0 (``o``, ``x``), is left out. Of several steps
together, ``s`` and ``t`` are those of the first and the last, ``k`` is how many, ``x`` how many were skipped, and each
number is ``[lowest, mean, highest]``, with ``finite, nans, infs, negative infs`` after these where not all were finite.

JSON has no NaN and no infinity: they are the strings "NaN", "Infinity" and "-Infinity". Seven digits are more than
FP32 promises; the loss scale is exact, since ranks are compared by it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampwise.census.algebra import Census
from ampwise.formats import binade_of
from ampwise.record.bucket import NOTHING, Bucket, Spread
from ampwise.record.rows import LayerSample, StepRow
from ampwise.strict_json import refuse_halves, refuse_many

__all__ = [
    "BROKEN",
    "added_layers",
    "bucket_line",
    "bucket_of",
    "bucket_of_singles",
    "is_count",
    "layers_line",
    "object_line",
    "read_bucket",
    "read_layers",
    "read_object",
    "step_line",
]

BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # what a bad line leads to
_DECODE = json.JSONDecoder().raw_decode
LARGEST_COUNT = 2**63  # larger ones overflow as floats
MOST_BINADES = 2200  # of FP64


# --- steps ---------------------------------------------------------------------------------------------------------


def step_line(row: StepRow) -> str:
    """One step; called at every step of the training, hence by hand.

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


def bucket_line(bucket: Bucket) -> str:
    """Several steps together."""
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


def read_bucket(line: bytes | str) -> Bucket:
    """The step, or the steps, of a line; one of BROKEN where it says something else."""
    return bucket_of(read_object(line))


def bucket_of(data: Mapping[str, Any]) -> Bucket:
    """The step, or the steps, of a line that is parsed already."""
    if "k" in data:
        return _several(data)
    step, seconds = _whole(data["s"]), _finite(data["t"])
    return Bucket(
        optimizer=_whole(data.get("o", 0)),
        first=step,
        last=step,
        skipped=_whole(data.get("x", 0)),
        began=seconds,
        ended=seconds,
        loss=Spread.of(_number(data.get("l"))),
        norm=Spread.of(_number(data.get("n"))),
        scale=Spread.of(_number(data.get("g"))),
        lr=Spread.of(_number(data.get("r"))),
    )


def bucket_of_singles(rows: Sequence[Mapping[str, Any]]) -> Bucket:
    """What adding up ``bucket_of`` of each would give: lines of one step each, parsed.

    Thinning does this to every step of a run, while the training waits.
    """
    steps = [row["s"] for row in rows]
    return Bucket(
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


def _spread_of(values: list[Any]) -> Spread:
    try:
        total = sum(values)
    except TypeError:  # a None, or the word for an infinity, among them
        total = math.nan
    if not math.isfinite(total):
        return Spread.over([Spread.of(_number(value)) for value in values])
    low, high = min(values), max(values)
    return Spread(low, min(max(total / len(values), low), high), high, len(values))


def _several(data: Mapping[str, Any]) -> Bucket:
    first, last = map(_whole, _list(data["s"]))
    began, ended = map(_finite, _list(data["t"]))
    count, skipped = _whole(data["k"]), _whole(data.get("x", 0))
    if first > last or skipped > count:
        raise ValueError(f"steps {first} to {last}, {skipped} of {count} skipped")
    return Bucket(
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


def _spread(spread: Spread, steps: int, text: Callable[[float], str]) -> str:
    extremes = ["null" if value is None else text(value) for value in spread[:3]]
    counts = [] if spread.finite == steps else [str(count) for count in spread[3:]]
    return ",".join(extremes + counts)


def _read_spread(data: Any, steps: int) -> Spread:
    if data is None:
        return NOTHING
    values = _list(data)
    counts = [_whole(count) for count in values[3:]] or [steps, 0, 0, 0]
    low, mean, high = values[:3]
    if not counts[0]:
        return Spread(None, None, None, *counts)
    return Spread(_finite(low), _finite(mean), _finite(high), *counts)


# --- layers --------------------------------------------------------------------------------------------------------


def layers_line(sample: LayerSample) -> str:
    """A sample of all parameters."""
    data = {
        "s": [sample.first, sample.last],
        "k": sample.steps,
        "o": sample.optimizer,
        "g": None if sample.scale is None else _valid(sample.scale),
        "layers": {name: _census(census) for name, census in sample.layers.items()},
    }
    return object_line(data)


def added_layers(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two parsed samples as one: what LayerSample's addition does, without the time to make a Census of each part."""
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
    """The sample of a line; one of BROKEN where it says something else."""
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
        raise ValueError("a census with other counts than there are")
    if _as_written(data):
        binades = {exponent: count for exponent, count in enumerate(counts, lowest) if count}
        return Census(binades=binades, zeros=zeros, infs=infs, nans=nans, amax=amax, amin=amin, sum_squares=sum_squares)
    return Census.from_dict(  # it takes what else means the same, and says what is wrong with the rest
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
    """Whether it is what ``_census`` makes of a gradient that is not all zeros: a record has tens of thousands."""
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
    """The number, or the word that JSON has to take for it."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def object_line(data: Mapping[str, Any]) -> str:
    """Plain data as a line."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def read_object(line: bytes | str) -> dict[str, Any]:
    """The plain data of a line."""
    text = line if isinstance(line, str) else line.decode()
    refuse_many(text)
    data, end = _DECODE(text)  # half the time of json.loads
    if not isinstance(data, dict) or text[end:] not in ("\n", ""):
        raise ValueError("not an object in a line of its own")
    refuse_halves(text, data)
    return data


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def is_count(value: Any) -> bool:
    """Whether it is a number from 0 that others can compute with.

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
