"""Times per layer in each precision; modules whose names differ only by a number share one line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from ampwise.train.precision.policy import named_modules
from ampwise.train.precision.policy_table import ANY
from ampwise.tune.compare.profile_summary import OUTSIDE
from ampwise.tune.compare.speeds import BASE, LayerTime

__all__ = ["layer_times"]

ROOT = "(the model itself)"
NO_TIME = 1e-9  # seconds: a module without work of its own
NEXT_TO_NOTHING = 1e-3  # of a step


class _Alike(NamedTuple):
    name: str
    kind: str


def layer_times(
    model: nn.Module,
    modules: Mapping[str, Mapping[str, float]],
    step_s: Mapping[str, float] = MappingProxyType({}),
    *,
    certain: bool = True,
) -> tuple[LayerTime, ...]:
    """Return times by layer; the slowest in FP32 come first.

    ``modules`` holds seconds by row label and module name; ``step_s`` seconds of a step by label. Ratios of layers that
    take next to nothing of a step are marked uncertain.
    """
    named = named_modules(model)
    alike: dict[_Alike, list[str]] = {}
    for name in dict.fromkeys(name for seconds in modules.values() for name in seconds):
        alike.setdefault(_alike(name, named), []).append(name)
    found = []
    for key, names in alike.items():
        seconds = {label: sum(times.get(name, 0.0) for name in names) for label, times in modules.items()}
        if max(seconds.values()) > NO_TIME:
            notable = any(each >= NEXT_TO_NOTHING * step_s.get(label, 0.0) for label, each in seconds.items())
            sure = certain and notable
            found.append(LayerTime(name=key.name, kind=key.kind, times=len(names), seconds=seconds, certain=sure))
    return tuple(sorted(found, key=lambda layer: -layer.seconds.get(BASE, max(layer.seconds.values()))))


def _alike(name: str, named: Mapping[str, nn.Module]) -> _Alike:
    if name == OUTSIDE:
        return _Alike(OUTSIDE, "")
    path = ".".join(ANY if part.isdigit() else part for part in name.split("."))
    return _Alike(path or ROOT, type(named[name]).__name__)
