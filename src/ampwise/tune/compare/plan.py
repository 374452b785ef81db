"""Choose which precisions are compared: those requested, or those the device runs; and say why one is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.train.precision.precision import PRECISIONS, RIGHT_NAMES, DevicePrecisions
from ampwise.tune.compare.float8 import FP8, why_no_float8
from ampwise.tune.compare.speeds import BASE, PrecisionRow

__all__ = ["NAMES", "ComparePlan", "PlannedRow", "checked_names", "make_plan"]

NAMES = (*PRECISIONS, FP8)


class PlannedRow(NamedTuple):
    """A precision to measure, eager or compiled."""

    precision: str
    compiled: bool


class ComparePlan(NamedTuple):
    """What to measure, FP32 first, and a row for each precision that cannot run."""

    entries: tuple[PlannedRow, ...]
    left_out: tuple[PrecisionRow, ...]


def checked_names(asked: Iterable[str]) -> list[str]:
    """Return the precisions by name, each once.

    >>> checked_names(["bf16", "fp16", "bf16"])
    ['bf16', 'fp16']
    """
    if isinstance(asked, str):
        raise BadInput(f"compare: precisions={asked!r}: expected a list of names, such as ['fp32', 'bf16'].")
    names = list(dict.fromkeys(asked))
    for name in names:
        if name not in NAMES:
            right = RIGHT_NAMES.get(str(name).lower().removeprefix("torch."))
            hint = f"Did you mean {right!r}? " if right else ""
            listing = f"{hint}The precisions are {', '.join(NAMES)}."
            raise UnknownName("precision", str(name), () if right else NAMES, listing=listing)
    if not names:
        raise BadInput(f"compare: no precisions given. The precisions are {', '.join(NAMES)}.")
    return names


def make_plan(
    asked: Sequence[str] | None, facts: DevicePrecisions, device: torch.device, *, compiled: bool
) -> ComparePlan:
    """Plan the comparison; FP32 is always included, as the baseline."""
    wanted = [name for name in PRECISIONS if name in facts.runs] if asked is None else asked
    missing = {name: why for name in wanted if (why := _why_not(name, facts, device))}
    chosen = [BASE, *(name for name in NAMES if name in wanted and name not in missing and name != BASE)]
    if len(chosen) == 1 and missing:
        raise PrecisionUnavailable(
            f"compare: none of {', '.join(wanted)} runs here, so fp32 has no counterpart: {' '.join(missing.values())}"
        )
    kinds = (False, True) if compiled else (False,)
    entries = [PlannedRow(name, each) for each in kinds for name in chosen]
    return ComparePlan(
        tuple(entries), tuple(PrecisionRow(precision=name, problem=f"not run: {missing[name]}") for name in missing)
    )


def _why_not(name: str, facts: DevicePrecisions, device: torch.device) -> str | None:
    """Return why the precision does not run, as a sentence; None if it runs."""
    return why_no_float8(device) if name == FP8 else facts.lacks.get(name)
