"""Names for an optimizer's parameters, from the best source there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.nn import Module
from torch.optim import Optimizer

from ampwise.census.algebra import Census
from ampwise.census.device import DeviceCensus
from ampwise.engine.reading import Reading

__all__ = ["named_census"]

Place = tuple[int, int]  # group, index in the group


def named_census(readings: Sequence[tuple[Optimizer, Reading]], model: Module | None) -> DeviceCensus:
    """The censuses of readings, by parameter: they stay on the device until someone looks."""
    by_identity = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    all_names: list[str] = []
    parts: list[Callable[[], Mapping[str, Census]]] = []
    for number, (optimizer, reading) in enumerate(readings):
        names = _names(optimizer, reading.places, by_identity, f"{number}:" if len(readings) > 1 else "")
        all_names += names.values()
        parts.append(_renamed(reading, names))
    return DeviceCensus(all_names, parts)


def _renamed(reading: Reading, names: Mapping[Place, str]) -> Callable[[], Mapping[str, Census]]:
    return lambda: {names[place]: census for place, census in reading.fetch().items()}


def _names(
    optimizer: Optimizer, places: Sequence[Place], by_identity: Mapping[int, str], prefix: str
) -> dict[Place, str]:
    names = {}
    for group_index, index in places:
        group = optimizer.param_groups[group_index]
        name = by_identity.get(id(group["params"][index]))
        if name is None and group.get("param_names"):  # given as named_parameters()
            name = group["param_names"][index]
        names[group_index, index] = name or f"{prefix}{group_index}.{index}"
    return names
