"""Which precisions are compared: those asked for, or those the device runs; and why one is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ampwise.engine.precision.precision import PRECISIONS, RIGHT_NAMES, Facts
from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.evidence.speed import BASE, Row
from ampwise.tune.compare.float8 import FP8, why_no_float8

__all__ = ["NAMES", "Entry", "Plan", "checked_names", "plan"]

NAMES = (*PRECISIONS, FP8)


class Entry(NamedTuple):
    """Something to measure."""

    precision: str
    compiled: bool


class Plan(NamedTuple):
    """What is measured, FP32 first, and rows that say why they are not."""

    entries: tuple[Entry, ...]
    left_out: tuple[Row, ...]


def checked_names(asked: Iterable[str]) -> list[str]:
    """Precisions by name, each once.

    >>> checked_names(["bf16", "fp16", "bf16"])
    ['bf16', 'fp16']
    """
    if isinstance(asked, str):
        raise BadInput(f"compare: precisions={asked!r}: a list of names is expected, such as ['fp32', 'bf16'].")
    names = list(dict.fromkeys(asked))
    for name in names:
        if name not in NAMES:
            right = RIGHT_NAMES.get(str(name).lower().removeprefix("torch."))
            hint = f"Here that is called {right!r}. " if right else ""
            listing = f"{hint}The precisions are {', '.join(NAMES)}."
            raise UnknownName("precision", str(name), () if right else NAMES, listing=listing)
    if not names:
        raise BadInput(f"compare: no precisions were named. The precisions are {', '.join(NAMES)}.")
    return names


def plan(asked: Sequence[str] | None, facts: Facts, device: torch.device, *, compiled: bool) -> Plan:
    """FP32 is there in any case, as what the others are compared with."""
    wanted = [name for name in PRECISIONS if name in facts.runs] if asked is None else asked
    missing = {name: why for name in wanted if (why := _why_not(name, facts, device))}
    chosen = [BASE, *(name for name in NAMES if name in wanted and name not in missing and name != BASE)]
    if len(chosen) == 1 and missing:
        raise PrecisionUnavailable(
            f"compare: of {', '.join(wanted)} there is nothing left to compare with fp32: {' '.join(missing.values())}"
        )
    kinds = (False, True) if compiled else (False,)
    entries = [Entry(name, each) for each in kinds for name in chosen]
    return Plan(tuple(entries), tuple(Row(precision=name, problem=f"not run: {missing[name]}") for name in missing))


def _why_not(name: str, facts: Facts, device: torch.device) -> str | None:
    """A sentence."""
    return why_no_float8(device) if name == FP8 else facts.lacks.get(name)
