"""Names for an optimizer's parameters, from the best source there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch.nn import Module
from torch.optim import Optimizer

from ampwise.census.algebra import Census
from ampwise.census.device import DeviceCensus
from ampwise.engine.scaling.reading import Reading

__all__ = ["named_census"]


def named_census(readings: Sequence[tuple[Optimizer, Reading]], model: Module | None) -> DeviceCensus:
    """The censuses of readings, by parameter: they stay on the device until someone looks."""
    by_identity = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    all_names: list[str] = []
    parts: list[Callable[[], Mapping[str, Census]]] = []
    for number, (optimizer, reading) in enumerate(readings):
        known = list(_names(optimizer, by_identity))
        names = []
        for index in reading.parameters:
            # A parameter may have been taken out of its group since.
            name, place = known[index] if index < len(known) else (None, f"parameter {index}")
            # Places are the same in several optimizers, and names may be.
            same = len(readings) > 1 and (name is None or name in all_names)
            names.append(f"{number}:{name or place}" if same else name or place)
        all_names += names
        parts.append(_named(names, reading))
    return DeviceCensus(all_names, parts)


def _named(names: Sequence[str], reading: Reading) -> Callable[[], Mapping[str, Census]]:
    return lambda: dict(zip(names, reading.fetch(), strict=True))


def _names(optimizer: Optimizer, by_identity: Mapping[int, str]) -> Iterator[tuple[str | None, str]]:
    """For each parameter its name, if there is one, and its place."""
    for group_index, group in enumerate(optimizer.param_groups):
        own = group.get("param_names")  # of an optimizer made with named_parameters()
        for index, parameter in enumerate(group["params"]):
            yield by_identity.get(id(parameter)) or (own[index] if own else None), f"{group_index}.{index}"
