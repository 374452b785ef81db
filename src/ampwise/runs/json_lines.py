"""Steps and layer samples as lines of JSON, and back; and fewer lines for a run that gets long.

The line of a step: ``{"s": step, "o": optimizer, "t": seconds, "l": loss, "n": norm, "g": scale, "r": lr, "x": 1}``.
``x`` marks a skipped step; unknown values are left out, and so are ``o`` and ``x`` if they are 0. For several merged
steps, ``s`` and ``t`` are ``[first, last]``, ``k`` is the number of steps, ``x`` how many were skipped, and each number
is ``[lowest, mean, highest]``, followed by ``finite, nans, infs, negative infs`` if not all were finite.

JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity". Numbers have seven
digits, more than FP32 has; the loss scale is exact, because it is compared between ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ampwise.finding.strict_json import refuse_many, refuse_surrogates, to_json_types
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.formats import binade_of
from ampwise.runs.rows import NO_STATS, LayerSample, NumberStats, StepBucket, StepRow, merge_buckets

# Errors that an invalid line can raise.
LINE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
KEYS = {"l": "loss", "n": "norm", "g": "scale", "r": "lr"}
LARGEST_COUNT = 2**63  # larger counts could overflow as floats
MOST_BINADES = 2200  # FP64 has fewer
_DECODE = json.JSONDecoder().raw_decode


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
    for key, value, text in (
        ("l", row.loss, _short),
        ("n", row.norm, _short),
        ("g", row.scale, _exact),
        ("r", row.lr, _short),
    ):
        if value is not None:
            parts.append(f'"{key}":{text(value)}')
    return ",".join(parts) + (',"x":1}\n' if row.skipped else "}\n")


def bucket_line(bucket: StepBucket) -> str:
    """Return the line of several merged steps."""
    parts = [f'{{"s":[{bucket.first:d},{bucket.last:d}],"k":{bucket.count:d}']
    if bucket.optimizer:
        parts.append(f'"o":{bucket.optimizer:d}')
    parts.append(f'"t":[{_seconds(bucket.began)},{_seconds(bucket.ended)}]')
    for key, metric in KEYS.items():
        stats: NumberStats = getattr(bucket, metric)
        if stats == NO_STATS:
            continue
        low, mean, high, finite, nans, infs, negative_infs = stats
        if low is None or mean is None or high is None:
            numbers = "null,null,null"
        elif key == "g":
            numbers = f"{float(low)!r},{float(mean)!r},{float(high)!r}"
        else:
            numbers = f"{low:.7g},{mean:.7g},{high:.7g}"
        counts = "" if finite == bucket.count else f",{finite},{nans},{infs},{negative_infs}"
        parts.append(f'"{key}":[{numbers}{counts}]')
    return ",".join(parts) + (f',"x":{bucket.skipped:d}}}\n' if bucket.skipped else "}\n")


def read_bucket(line: bytes | str) -> StepBucket:
    """Read the step or steps of a line; raise one of LINE_ERRORS if it is invalid."""
    data = read_object(line)
    if "k" in data:
        (first, last), count = map(_count, _list(data["s"])), _count(data["k"])
        began, ended = map(_finite, _list(data["t"]))
    else:
        first, count, began = _count(data["s"]), 1, _finite(data["t"])
        last, ended = first, began
    skipped = _count(data.get("x", 0))
    if first > last or skipped > count:
        raise ValueError(f"steps {first} to {last}, {skipped} of {count} skipped")
    return StepBucket(
        optimizer=_count(data.get("o", 0)),
        first=first,
        last=last,
        count=count,
        skipped=skipped,
        began=began,
        ended=ended,
        **{metric: _stats(data, key) for key, metric in KEYS.items()},
    )


def _stats(data: Mapping[str, Any], key: str) -> NumberStats:
    value = data.get(key)
    if value is None:
        return NO_STATS
    if "k" not in data:
        return NumberStats.of(_number(value))
    low, mean, high, *counts = _list(value)
    finite, *others = map(_count, counts or [_count(data["k"]), 0, 0, 0])
    if not finite:
        return NumberStats(None, None, None, 0, *others)
    return NumberStats(_finite(low), _finite(mean), _finite(high), finite, *others)


def thin_steps(lines: Iterable[bytes], *, old: int, size: int) -> Iterator[bytes]:
    """Merge the first ``old`` lines into buckets of up to ``size`` steps, and keep the others. Lines that cannot be
    read are dropped.
    """
    remaining = iter(lines)
    groups: dict[int, list[tuple[bytes, StepBucket]]] = {}  # by optimizer: those of two networks alternate
    totals: dict[int, int] = {}  # steps of each group
    for line in itertools.islice(remaining, old):
        try:
            bucket = read_bucket(line)
        except LINE_ERRORS:
            continue
        total = totals.get(bucket.optimizer, 0) + bucket.count
        if total > size and bucket.optimizer in groups:
            yield _merged_line(groups.pop(bucket.optimizer))
            total = bucket.count
        totals[bucket.optimizer] = total
        groups.setdefault(bucket.optimizer, []).append((line, bucket))
    yield from map(_merged_line, groups.values())
    yield from remaining


def _merged_line(group: list[tuple[bytes, StepBucket]]) -> bytes:
    lines, buckets = zip(*group, strict=True)
    return lines[0] if len(lines) == 1 else bucket_line(merge_buckets(buckets)).encode()


# --- layers --------------------------------------------------------------------------------------------------------


def layers_line(sample: LayerSample) -> str:
    """Return the line of a layer sample."""
    return object_line(
        {
            "s": [sample.first, sample.last],
            "k": sample.steps,
            "o": sample.optimizer,
            "g": to_json_types(sample.scale),
            "layers": {name: _census_data(census) for name, census in sample.layers.items()},
        }
    )


def read_layers(line: bytes | str) -> LayerSample:
    """Read the layer sample of a line; raise one of LINE_ERRORS if it is invalid."""
    data = read_object(line)
    first, last = map(_count, _list(data["s"]))
    return LayerSample(
        optimizer=_count(data["o"]),
        first=first,
        last=last,
        steps=_count(data["k"]),
        scale=_number(data["g"]),
        layers={name: _read_census(census) for name, census in data["layers"].items()},
    )


def thin_layers(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Halve the number of samples by merging each with its neighbour of the same optimizer; as a stream. Lines that
    cannot be read are dropped.

    Training waits for it, so it adds up parsed lines, and makes no Census of each tensor.
    """
    waiting: dict[int, tuple[bytes, dict[str, Any]]] = {}  # for a neighbour
    for line in lines:
        if not line:  # no more lines yet
            yield line
            continue
        try:
            data = read_object(line)
            optimizer = _count(data["o"])
        except LINE_ERRORS:
            continue
        if optimizer not in waiting:
            waiting[optimizer] = line, data
            continue
        line_before, before = waiting.pop(optimizer)
        try:
            yield object_line(_merge_samples(before, data)).encode()
        except LINE_ERRORS:
            for each in (line_before, line):
                with contextlib.suppress(*LINE_ERRORS):
                    read_layers(each)
                    yield each
    yield from (line for line, _ in waiting.values())


def _merge_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the sum of two parsed LayerSamples."""
    scales = [scale for scale in (_number(one["g"]), _number(other["g"])) if scale is not None]
    layers = dict(one["layers"])
    for name, census in other["layers"].items():
        layers[name] = _add_census_data(layers[name], census) if name in layers else census
    return {
        "s": [min(one["s"][0], other["s"][0]), max(one["s"][1], other["s"][1])],
        "k": one["k"] + other["k"],
        "o": one["o"],
        "g": to_json_types(max(scales, default=None)),
        "layers": layers,
    }


def _add_census_data(one: list[Any], other: list[Any]) -> list[Any]:
    zeros, infs, nans, amax, amin, sum_squares, lowest, counts = one
    zeros2, infs2, nans2, amax2, amin2, sum_squares2, lowest2, counts2 = other
    sum_squares = float(sum_squares) + float(sum_squares2)
    if not counts or not counts2:
        lowest, counts = (lowest, counts) if counts else (lowest2, counts2)
    else:
        if lowest > lowest2:
            lowest, counts, lowest2, counts2 = lowest2, counts2, lowest, counts
        start, end = lowest2 - lowest, lowest2 - lowest + len(counts2)
        counts = counts + [0] * (end - len(counts))
        counts[start:end] = map(operator.add, counts[start:end], counts2)
    return [
        zeros + zeros2,
        infs + infs2,
        nans + nans2,
        max(amax, amax2),
        min(amin, amin2) or max(amin, amin2),  # 0.0 stands for "none"
        sum_squares if sum_squares < math.inf else "Infinity",
        lowest,
        counts,
    ]


def _census_data(census: Census) -> list[Any]:
    lowest = min(census.binades, default=0)
    counts = [0] * (max(census.binades) - lowest + 1) if census.binades else []
    for exponent, count in census.binades.items():
        counts[exponent - lowest] = count
    total = float(census.sum_squares)
    sum_squares = total if math.isfinite(total) else to_json_types(total)
    return [census.zeros, census.infs, census.nans, census.amax, census.amin, sum_squares, lowest, counts]


def _read_census(data: Any) -> Census:
    zeros, infs, nans, amax, amin, sum_squares, lowest, counts = _list(data)
    whole = (zeros, infs, nans, *_list(counts))
    if len(counts) > MOST_BINADES or {*map(type, whole)} != {int} or min(whole) < 0 or max(whole) >= LARGEST_COUNT:
        raise ValueError("a census with invalid counts")
    parts = {"zeros": zeros, "infs": infs, "nans": nans, "amax": amax, "amin": amin, "sum_squares": sum_squares}
    # A fast path for tens of thousands of them: valid data, exactly as it is written.
    if (
        {type(amax), type(amin), type(sum_squares)} == {float}
        and type(lowest) is int
        and counts
        and counts[0]
        and counts[-1]
        and 0.0 < amin <= amax < math.inf
        and 0.0 <= sum_squares < math.inf
        and binade_of(amin) == lowest
        and binade_of(amax) == lowest + len(counts) - 1
    ):
        return Census(binades={exponent: count for exponent, count in enumerate(counts, lowest) if count}, **parts)
    return Census.from_dict({"binades": dict(enumerate(counts, lowest)), **parts})  # checks everything


# --- objects and numbers -------------------------------------------------------------------------------------------


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


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2**63 - 1.

    >>> is_count(3), is_count(True), is_count(-1), is_count(2**63)
    (True, False, False, False)
    """
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _short(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else f'"{to_json_types(float(value))}"'


def _exact(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else f'"{to_json_types(float(value))}"'


def _seconds(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "0"


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _count(value: Any) -> int:
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
