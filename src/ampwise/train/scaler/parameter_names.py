"""Names for an optimizer's parameters: the model's, else the optimizer's own, else group and index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch.nn import Module
from torch.optim import Optimizer

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.train.scaler.grad_stats import GradStats

__all__ = ["named_census"]


def named_census(readings: Sequence[tuple[Optimizer, GradStats]], model: Module | None) -> DeviceCensus:
    """Return the censuses of gradient statistics by parameter name; they stay on the device until read."""
    by_identity = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    all_names: list[str] = []
    parts: list[Callable[[], Mapping[str, Census]]] = []
    for number, (optimizer, reading) in enumerate(readings):
        known = list(_names(optimizer, by_identity))
        names = []
        for index in reading.parameters:
            # A parameter may have been removed from its group since.
            name, place = known[index] if index < len(known) else (None, f"parameter {index}")
            # Several optimizers share group and index, and may share names.
            same = len(readings) > 1 and (name is None or name in all_names)
            names.append(f"{number}:{name or place}" if same else name or place)
        all_names += names
        parts.append(_named(names, reading))
    return DeviceCensus(all_names, parts)


def _named(names: Sequence[str], reading: GradStats) -> Callable[[], Mapping[str, Census]]:
    return lambda: dict(zip(names, reading.fetch(), strict=True))


def _names(optimizer: Optimizer, by_identity: Mapping[int, str]) -> Iterator[tuple[str | None, str]]:
    """Yield each parameter's name, if it has one, and its group and index."""
    for group_index, group in enumerate(optimizer.param_groups):
        own = group.get("param_names")  # set if the optimizer was created with named_parameters()
        for index, parameter in enumerate(group["params"]):
            yield by_identity.get(id(parameter)) or (own[index] if own else None), f"{group_index}.{index}"
