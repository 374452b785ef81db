"""The facts that a run recorded about itself: settings, time, memory, activations, dtypes, headline numbers.

The record is untrusted and may come from a later version: what is not as expected is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampwise.errors import UnknownName
from ampwise.numbers.formats import find_scalar_format
from ampwise.report.curves import by_optimizer
from ampwise.report.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_scale,
    format_short,
    read_number,
)
from ampwise.runs.reader import Run
from ampwise.runs.rows import StepBucket

TIMING_NAMES = {  # the most important ones; JSON has all
    "seconds_per_step": "time per step",
    "half_share": "matmuls in half precision",
    "cast_share": "time in casts",
    "data_wait_share": "time waiting for data",
    "syncs_per_step": "device syncs per step",
}
TIME_NAMES = {"matrix": "matmuls", "casts": "casts between precisions"}  # others are shown as they are
MEMORY_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
}
OTHER_MEMORY = "activations and other"
EMULATED = "the matmuls ran in FP32 on this CPU"
MOST_MATMULS = 12
MOST_LINES = 8
ACTIVATION_HEADINGS = ["module", "format", "largest", "of the format's maximum"]
ACTIVATIONS = "The largest output magnitude of each module in the sampled steps"


def sentences(run: Run, name: str) -> list[str]:
    """Return a fact that is a list of sentences; an empty list if it is anything else."""
    found = run.facts.get(name)
    return [str(sentence) for sentence in found] if isinstance(found, (list, tuple)) else []


def mapping(run: Run, name: str) -> Mapping[str, Any]:
    """Return a fact that is a mapping; an empty mapping if it is anything else."""
    return as_mapping(run.facts.get(name))


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a value that is a mapping; an empty mapping if it is anything else."""
    return value if isinstance(value, Mapping) else {}


def _rows(found: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; an empty list for anything else."""
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, (list, tuple)) else []


# --- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedSetting:
    """A suggested GradScaler setting, and the reason."""

    name: str
    value: Any
    reason: str = ""


def settings(run: Run) -> list[SuggestedSetting]:
    """Return the suggested GradScaler settings."""
    return [
        SuggestedSetting(name=str(row["name"]), value=row["value"], reason=str(row.get("reason") or ""))
        for row in _rows(run.facts.get("settings"))
        if "name" in row and "value" in row
    ]


def optimizer_names(run: Run) -> dict[int, str]:
    """Return the names of the optimizers, "AdamW of Generator", by index; equal names also contain the index."""
    names = {
        row["index"]: " of ".join(str(row[part]) for part in ("name", "model") if row.get(part))
        for row in _rows(run.facts.get("optimizers"))
        if type(row.get("index")) is int
    }
    times = Counter(names.values())
    return {index: name if times[name] == 1 else f"{name}, optimizer {index}" for index, name in names.items() if name}


def environment(run: Run) -> dict[str, Any]:
    """Return the environment of a run: what was recorded at its start, and torch's facts from its end."""
    of_torch = {name: value for name, value in mapping(run, "torch").items() if value is not None}
    wrote = run.manifest.get("ampwise")
    return {**run.environment, **of_torch, **({} if wrote is None else {"ampwise": wrote})}


def steps_of(run: Run) -> int:
    """Return the number of steps of a run: those of the optimizer that took the most, including skipped ones."""
    recorded = run.facts.get("steps")
    if isinstance(recorded, int) and not isinstance(recorded, bool) and recorded >= 0:
        return recorded
    taken: Counter[int] = Counter()  # an unfinished run has not recorded the number
    for bucket in run.steps:
        taken[bucket.optimizer] += bucket.count
    return max(taken.values(), default=0)


def passes_per_step(run: Run) -> int:
    """Return over how many backward passes the loss of a step is summed, if it is the same number at each; else 1."""
    passes, steps = run.facts.get("backward_passes"), run.facts.get("steps")
    is_known = isinstance(passes, int) and isinstance(steps, int) and steps > 0
    one_optimizer = len({bucket.optimizer for bucket in run.steps}) == 1
    return passes // steps if is_known and one_optimizer and passes % steps == 0 else 1  # type: ignore[operator]


def skip_rate(steps: Sequence[StepBucket]) -> float | None:
    """Return the share of skipped steps over all optimizers; None if there are no steps."""
    taken = sum(bucket.count for bucket in steps)
    return sum(bucket.skipped for bucket in steps) / taken if taken else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineNumber:
    """A headline number: name, formatted value, and an optional note."""

    name: str
    value: str
    note: str = ""


def headline_numbers_of(run: Run) -> list[HeadlineNumber]:
    """Return the numbers that are known. With several optimizers, loss and scale are those of the first."""
    if not steps_of(run):
        return []
    found = [HeadlineNumber(name="steps", value=f"{steps_of(run):,}")]
    (optimizer, first), *others = by_optimizer(run.steps).items() or [(0, [])]
    skipped = sum(bucket.skipped for bucket in run.steps)
    # Over all optimizers: together they may skip more steps than the run has.
    share = f"{format_percent(skip_rate(run.steps) or 0.0)}{' over all optimizers' if others else ''}"
    found.append(HeadlineNumber(name="skipped", value=f"{skipped:,}", note=share if skipped else ""))
    owner = optimizer_names(run).get(optimizer, "") if others else ""
    losses = [bucket.loss for bucket in first if bucket.loss.known]
    if losses:
        texts = []
        for stats in losses if len(losses) == 1 else (losses[0], losses[-1]):
            if stats.mean is not None and stats.finite >= stats.bad:
                texts.append(f"{stats.mean:.4g}")
            else:  # merged steps, of which most were not finite
                texts.append("NaN" if stats.nans else "inf" if stats.infs else "-inf")
        found.append(HeadlineNumber(name="loss", value=" → ".join(texts), note=owner))
    scales = [bucket.scale.mean for bucket in first if bucket.scale.mean is not None]
    if scales:
        found.append(HeadlineNumber(name="loss scale", value=format_scale(scales[-1]), note=owner))
    measured = mapping(run, "timing")
    seconds, half = read_number(measured.get("seconds_per_step")), read_number(measured.get("half_share"))
    if seconds is not None:
        found.append(HeadlineNumber(name="time per step", value=format_duration(seconds)))
    if half is not None and _is_emulated(measured):
        found.append(HeadlineNumber(name="in half precision", value="n/a", note=EMULATED))
    elif half is not None:
        found.append(HeadlineNumber(name="in half precision", value=format_percent(half), note="of matmul work"))
    held = memory(run)
    if held is not None and held.devices:
        found.append(HeadlineNumber(name="peak memory", value=held.devices[0].allocated, note=held.devices[0].name))
    elif held is not None and held.host_peak:
        found.append(HeadlineNumber(name="peak memory", value=held.host_peak, note="of the process"))
    return found


# --- time and memory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalShare:
    """A part of a total, for a stacked bar."""

    name: str
    amount: float
    share: float  # of the total
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeakMemory:
    """Peak memory of a device, formatted."""

    name: str
    allocated: str
    reserved: str
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory by what it holds. ``whole`` describes the total of the parts."""

    parts: list[TotalShare]
    whole: str
    devices: list[DevicePeakMemory]
    host_peak: str  # empty if unknown


def timing(run: Run) -> list[tuple[str, str]]:
    """Return where time went: name and formatted value of each measured number."""
    found, texts = mapping(run, "timing"), []
    for name, words in TIMING_NAMES.items():
        value = found.get(name)
        if value is None or isinstance(value, (Mapping, list, tuple)):
            continue
        number = read_number(value)
        if name == "half_share" and _is_emulated(found):
            text = f"n/a: {EMULATED}"
        elif number is None or isinstance(value, str):
            text = format_short(value)
        elif name.startswith("seconds"):
            text = format_duration(number)
        else:
            text = f"{number:.1%}" if "share" in name else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
        texts.append((words, text))
    return texts


def _is_emulated(timing: Mapping[str, Any]) -> bool:
    """Return whether all matmuls under autocast ran in FP32 on a CPU, which says nothing about a GPU.

    A model that rounds to FP16 by itself does that, since many CPUs have no fast FP16 matmuls.
    """
    return timing.get("device") == "cpu" and bool(timing.get("autocast")) and read_number(timing["half_share"]) == 0


def device_time_by_kind(run: Run) -> list[TotalShare]:
    """Return the device's time by kind of work in the profiled steps, largest first."""
    found = _amounts(mapping(run, "timing").get("time_by_kind"))
    return _shares({TIME_NAMES.get(name, name): seconds for name, seconds in found.items()})


def work_by_precision(run: Run) -> list[TotalShare]:
    """Return the matmul work by precision."""
    return _shares(_amounts(mapping(run, "timing").get("flops_by_precision")))


def largest_matmuls(run: Run) -> list[list[str]]:
    """Return the largest matmuls: operation, shape, precision, count, share of the work, and notes."""
    rows = _rows(mapping(run, "timing").get("matrix_products"))
    work = sum(_amount(row.get("flops")) for row in rows)
    return [
        [
            *(str(row.get(part) or "") for part in ("op", "shape", "precision")),
            format_short(row.get("count", "")),
            f"{_amount(row.get('flops')) / work:.1%}" if work else "",
            "not aligned" if row.get("aligned") is False else "",
        ]
        for row in rows[:MOST_MATMULS]
    ]


def waiting_lines(run: Run) -> list[tuple[str, str]]:
    """Return the script lines that waited for data or synced with the device."""
    data, syncs = (
        sorted(_amounts(mapping(run, "timing").get(name)).items(), key=lambda pair: -pair[1])[:MOST_LINES]
        for name in ("data_waits", "syncs")
    )
    return [
        *((line, f"{seconds:.3g} s for data") for line, seconds in data),
        *((line, f"{count:,.0f} × device sync") for line, count in syncs),
    ]


def memory(run: Run) -> HeldMemory | None:
    """Return what took up memory; None if nothing was measured."""
    found = mapping(run, "memory")
    held = {words: _amounts(found.get(name)) for name, words in MEMORY_NAMES.items()}
    amounts = {words: sum(formats.values()) for words, formats in held.items() if formats}
    notes = {
        words: ", ".join(f"{name} {format_bytes(amount)}" for name, amount in formats.items())
        for words, formats in held.items()
    }
    devices = {name: row for name, row in as_mapping(found.get("devices")).items() if isinstance(row, Mapping)}
    only = next(iter(devices.values())) if len(devices) == 1 else {}
    rest = read_number(only.get("rest"))
    if rest is not None and rest > 0:
        amounts[OTHER_MEMORY] = rest
    if not amounts and not devices and read_number(found.get("host_peak")) is None:
        return None
    whole = f"of {format_bytes(sum(amounts.values()))}" + (" at the device's peak" if OTHER_MEMORY in amounts else "")
    return HeldMemory(
        parts=_shares(amounts, notes),
        whole=whole,
        devices=[
            DevicePeakMemory(
                name=str(name),
                allocated=_bytes(row.get("peak_allocated")),
                reserved=_bytes(row.get("peak_reserved")),
                total=_bytes(row.get("total")),
            )
            for name, row in devices.items()
        ],
        host_peak=_bytes(found.get("host_peak")),
    )


def _bytes(value: object) -> str:
    amount = read_number(value)
    return "" if amount is None else format_bytes(amount)


def _shares(amounts: Mapping[str, float], notes: Mapping[str, str] | None = None) -> list[TotalShare]:
    whole = sum(amounts.values())
    ordered = sorted(amounts.items(), key=lambda pair: -pair[1])
    return [
        TotalShare(name=name, amount=amount, share=amount / whole, note=(notes or {}).get(name, ""))
        for name, amount in ordered
        if amount > 0
    ]


def _amounts(found: object) -> dict[str, float]:
    """Return the positive, finite amounts of a mapping from names to amounts."""
    return {str(name): amount for name, value in as_mapping(found).items() if (amount := _amount(value)) > 0}


def _amount(value: object) -> float:
    found = read_number(value)
    return found if found is not None and 0 < found < math.inf else 0.0


# --- modules -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The largest output magnitude of a module, relative to the largest number of its format."""

    module: str
    dtype: str
    largest: float
    share: float | None  # of the largest number of its format; None for an unknown format

    @property
    def cells(self) -> list[str]:
        """Table row under ACTIVATION_HEADINGS."""
        if not math.isfinite(self.largest):
            return [self.module, self.dtype, "NaN" if math.isnan(self.largest) else "inf", "not finite"]
        share = "" if self.share is None else format_percent(self.share)
        return [self.module, self.dtype, f"{self.largest:.3g}", share]


def activations_of(run: Run) -> list[Activation]:
    """Return every sampled module, the nearest to overflow first; none if the run sampled no activations."""
    found = []
    for module, row in mapping(run, "activations").items():
        largest, dtype = read_number(as_mapping(row).get("largest")), str(as_mapping(row).get("dtype") or "")
        if largest is None:
            continue
        try:
            share = abs(largest) / find_scalar_format(dtype).max if math.isfinite(largest) else None
        except (UnknownName, ValueError):
            share = None
        found.append(Activation(module=str(module), dtype=dtype, largest=largest, share=share))
    return sorted(found, key=lambda one: (math.isfinite(one.largest), -(one.share or 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDtypes:
    """A module's call in one step, with its dtypes."""

    module: str
    kind: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    parameters: tuple[str, ...]
    autocast: str  # empty: it was off
    calls: int
    is_leaf: bool

    @property
    def changes(self) -> bool:
        """Whether the output dtypes differ from the input dtypes."""
        return bool(self.takes and self.gives) and set(self.takes) != set(self.gives)

    @property
    def depth(self) -> int:
        return self.module.count(".")

    @property
    def format(self) -> str:
        """Output dtype, for a colour: one dtype, "mixed" or "none"."""
        return self.gives[0] if len(self.gives) == 1 else "mixed" if self.gives else "none"


def dtype_flow_of(run: Run) -> list[ModuleDtypes]:
    """Return the recorded modules of one step, in the order in which they ran; none if the run recorded none."""

    def texts(value: object) -> tuple[str, ...]:
        return tuple(map(str, value)) if isinstance(value, list) else ()

    rows = [
        (str(row.get("model") or ""), str(row.get("module") or ""), row) for row in _rows(run.facts.get("dtype_flow"))
    ]
    several = len({model for model, _, _ in rows}) > 1
    # "blocks.0.norm" is in "blocks" and "blocks.0"; some of these are never called themselves.
    parents = {(model, name[:end]) for model, name, _ in rows for end, character in enumerate(name) if character == "."}
    return [
        ModuleDtypes(
            module=f"{model}: {name}" if several and name != model else name,
            kind=str(row.get("kind") or ""),
            takes=texts(row.get("takes")),
            gives=texts(row.get("gives")),
            parameters=texts(row.get("parameters")),
            autocast=str(row.get("autocast") or ""),
            calls=row["calls"] if isinstance(row.get("calls"), int) else 1,
            is_leaf=name != model and (model, name) not in parents,
        )
        for model, name, row in rows
    ]


def count_output_dtypes(flow: Sequence[ModuleDtypes]) -> str:
    """Count the innermost modules by output dtype."""
    given = Counter(ran.format for ran in flow if ran.is_leaf and ran.gives)
    return ", ".join(f"{count:,} in {name}" for name, count in given.most_common())
