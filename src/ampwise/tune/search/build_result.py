"""Build the result of a search from its trials: patterns, the ranking with reasons, costs and gain, the gap."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch.nn import Module

from ampwise.hardware import Gpu
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.train.precision.policy_table import brace_ranges
from ampwise.tune.search.arrangement import FormatArrangement, FormatChoice
from ampwise.tune.search.descent import Assignment, FormatLadder
from ampwise.tune.search.reasons import find_reasons, usual_amplification
from ampwise.tune.search.result import FormatGain, ModuleSensitivity
from ampwise.tune.search.sensitivity import UnitProbe, singular_range
from ampwise.tune.search.trials import SearchTrial
from ampwise.tune.search.units import SearchUnit

FULL_BITS = 32
MOST_CONDITIONS = 16  # modules whose singular values are computed

Alone = Mapping[int, tuple[int, SearchTrial]]  # by unit, a format's index and the trial with it in this unit alone


class ModuleGlobs:
    """Patterns for modules of a model."""

    def __init__(self, model: Module) -> None:
        self._named = named_modules(model)

    def of(self, modules: Iterable[Module]) -> list[str]:
        """Return patterns for these modules, and no others."""
        wanted = set(modules)
        first: dict[Module, str] = {}
        for name, module in self._named.items():
            if module in wanted:
                first.setdefault(module, name)
        return globs(list(first.values()), [name for name, module in self._named.items() if module not in wanted])

    def policy(self, arrangement: FormatArrangement) -> Policy:
        """Return the policy that sets the regions of an arrangement."""
        policy = Policy(arrangement.base)
        for region in dict.fromkeys(arrangement.regions.values()):
            policy = policy.keep(region, *self.of(one for one, its in arrangement.regions.items() if its == region))
        return policy

    def narrow(self, units: Sequence[SearchUnit], chosen: Sequence[FormatChoice]) -> dict[str, str]:
        """Return the emulated formats, by pattern."""
        found: dict[str, str] = {}
        for choice in dict.fromkeys(choice for choice in chosen if choice.narrow):
            modules = [unit.module for unit, its in zip(units, chosen, strict=True) if its == choice]
            found.update((pattern, choice.name) for pattern in self.of(modules))
        return found


def rank_modules(
    units: Sequence[SearchUnit],
    choices: Sequence[FormatChoice],
    best: Assignment,
    ladder: FormatLadder,
    looks: Mapping[str, UnitProbe],
    alone: Alone,
    flops: float,
) -> tuple[ModuleSensitivity, ...]:
    """Rank modules: widest formats first; equal ones by measured error, else by estimate. ``flops`` are all of them."""
    # Trials in which only this unit has the next narrower format.
    narrower_alone = {unit: trial for unit, (place, trial) in alone.items() if place == best[unit] - 1}

    def order(place: int) -> tuple[int, float]:
        at, trial = best[place], narrower_alone.get(place)
        return -at, -(ladder.scores[place][max(at - 1, 0)] if trial is None else trial.error)

    ranking: list[ModuleSensitivity] = []
    raised = 0
    for place in sorted(range(len(units)), key=order):
        unit, at, trial = units[place], best[place], narrower_alone.get(place)
        narrower = choices[at - 1] if at > ladder.lowest[place] else None
        look, reasons = looks.get(unit.name) or UnitProbe(), []
        if narrower is not None:
            raised += 1
            locals_ = [each.locals[narrower.name] for each in looks.values() if narrower.name in each.locals]
            condition = singular_range(unit) if raised <= MOST_CONDITIONS else None
            own = look.locals.get(narrower.name)
            reasons = find_reasons(narrower, look.facts, own, condition, usual_amplification(locals_), trial)
        ranking.append(
            ModuleSensitivity(
                name=unit.name,
                kind=unit.kind,
                format=choices[at].name,
                share=unit.flops / flops,
                narrower=None if narrower is None else narrower.name,
                estimates={name: local.score for name, local in look.locals.items()},
                alone=None if trial is None else trial.error,
                reasons=tuple(reason.text for reason in reasons),
            )
        )
    return tuple(ranking)


def cost_gap(ladder: FormatLadder, best: Assignment, alone: Alone, tolerance: float) -> float:
    """Return how much cheaper another assignment could be: units that fail a format alone must be wider in any."""
    least = list(ladder.lowest)
    for unit, (place, trial) in alone.items():
        if trial.error > tolerance:
            least[unit] = max(least[unit], place + 1)
    bound = ladder.cost(tuple(least))
    if tuple(least) == ladder.lowest and best != ladder.lowest:  # the lowest has failed: something has to be wider
        bound += min(
            costs[place + 1] - costs[place]
            for costs, place in zip(ladder.costs, ladder.lowest, strict=True)
            if place + 1 < ladder.formats
        )
    cost = ladder.cost(best)
    return max(0.0, (cost - bound) / cost)


def unit_costs(units: Sequence[SearchUnit], choices: Sequence[FormatChoice]) -> tuple[tuple[float, ...], ...]:
    """Return the cost of each unit in each format: its share of the FLOPs times the share of FP32's bits."""
    whole = sum(unit.flops for unit in units)
    return tuple(tuple(unit.flops / whole * choice.bits / FULL_BITS for choice in choices) for unit in units)


def estimate_gain(
    units: Sequence[SearchUnit],
    chosen: Sequence[FormatChoice],
    choices: Sequence[FormatChoice],
    gpu: Gpu | None,
    kept: tuple[int, int] | None,
) -> FormatGain:
    """Compute the gain of these formats; ``kept``: bytes saved for the backward pass, here and in FP32."""

    def seconds(formats: Iterable[str]) -> float | None:
        peaks = [None if gpu is None else gpu.figure(name) for name in formats]
        times = [unit.flops / peak.value for unit, peak in zip(units, peaks, strict=True) if peak is not None]
        return sum(times) if len(times) == len(units) else None

    whole = sum(unit.flops for unit in units)
    lacking = _lacking(gpu, [choice for choice in choices if choice in chosen])
    own = None if lacking else seconds(choice.peak for choice in chosen)
    wide = seconds("fp32" for _ in units)
    half = seconds(choices[0].region for _ in units)  # the narrowest has a 16-bit region
    return FormatGain(
        cost=sum(unit.flops / whole * choice.bits / FULL_BITS for unit, choice in zip(units, chosen, strict=True)),
        gpu=None if gpu is None else gpu.id,
        faster_than_fp32=wide / own if own and wide else None,
        faster_than_16_bits=half / own if own and half else None,
        why_no_time=lacking,
        kept_bytes=None if kept is None else kept[0],
        kept_bytes_fp32=None if kept is None else kept[1],
    )


def _lacking(gpu: Gpu | None, used: Iterable[FormatChoice]) -> str | None:
    if gpu is None:
        return "no GPU was given"
    missing = next((choice for choice in used if gpu.figure(choice.peak) is None), None)
    if missing is None:
        return None
    if gpu.has_tensor_cores(missing.peak) is False:
        return f"{gpu.name} has no tensor cores for {missing.name}"
    return f"the peak of {gpu.name} for {missing.name} is unknown"


def globs(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return patterns that match all ``names`` and none of ``others``: numbers become ``*`` where possible.

    >>> globs(["blocks.0.up", "blocks.1.up", "head"], ["blocks.0.down", "blocks.1.down"])
    ['blocks.*.up', 'head']
    >>> globs(["layers.0", "layers.2"], ["layers.1"])
    ['layers.0', 'layers.2']
    """
    left = list(dict.fromkeys(names))
    found: list[str] = []
    while left:
        pattern = next(pattern for pattern in _patterns(left) if not any(fnmatchcase(each, pattern) for each in others))
        found.append(pattern)
        left = [name for name in left if not fnmatchcase(name, pattern)]
    # A star also matches dots, so a later pattern may match all that an earlier one does.
    needed = []
    for place, pattern in enumerate(found):
        matched, later = [name for name in names if fnmatchcase(name, pattern)], found[place + 1 :]
        if not all(any(fnmatchcase(name, other) for other in later) for name in matched):
            needed.append(pattern)
    return needed


def spans(names: Iterable[str]) -> list[str]:
    """Abbreviate names for display: those that differ by one number become one.

    >>> spans(["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up", "head"])
    ['layers.{0..2,5}.up', 'head']
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
        alike.setdefault((*parts[:place], "", *parts[place + 1 :]), []).extend(parts[place : place + 1])
    return [
        ".".join(part or brace_ranges(sorted(map(int, numbers))) for part in parts if part or numbers)
        for parts, numbers in alike.items()
    ]


def _patterns(names: list[str]) -> Iterable[str]:
    """Yield patterns for the first name, widest first; the last one is the name itself."""
    parts = [re.sub(r"[*?[]", lambda sign: f"[{sign[0]}]", part) for part in names[0].split(".")]
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for count in range(len(numbers), 0, -1):
        starred = set(numbers[:count])
        pattern = ".".join("*" if place in starred else part for place, part in enumerate(parts))
        if sum(fnmatchcase(name, pattern) for name in names) > 1:
            yield pattern
    yield ".".join(parts)
