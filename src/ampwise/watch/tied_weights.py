"""Follow parameters that are assigned to two modules, to see whether they are still one when they are trained."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.watch.learning import Learning, UntiedWeights

__all__ = ["TiedWeights"]

Slot = tuple[weakref.ref[nn.Module], str]  # a module and the name of a parameter


class TiedWeights:
    """The modules that each parameter was assigned to, and the lines that have assigned another one since."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._slots: dict[int, tuple[weakref.ref[Tensor], list[Slot]]] = {}  # by id of the parameter
        self._untied: list[tuple[Slot, Slot, CallSite]] = []

    def registered(self, module: nn.Module, name: str, before: Any, parameter: Tensor) -> None:
        """Note that a module was given a parameter in the place of another one or of none."""
        if before is parameter:
            return
        slot = (weakref.ref(module), name)
        if before is not None:
            ref, slots = self._slots.get(id(before), (None, []))
            if ref is not None and ref() is before:
                for other in slots:
                    if other[0]() is not module or other[1] != name:
                        self._untied.append((other, slot, calling_site()))
        ref, slots = self._slots.get(id(parameter), (None, []))
        if ref is None or ref() is not parameter:
            self._slots[id(parameter)] = (weakref.ref(parameter), [slot])
        else:
            slots.append(slot)

    def check(self, names: Sequence[str], parameters: Sequence[Any]) -> None:
        """Look for parameters of an optimizer that were tied once."""
        if not self._untied or len(names) != len(parameters):
            return
        known = {id(each): name for name, each in zip(names, parameters, strict=True)}
        for (first, first_name), (second, second_name), site in self._untied:
            modules = first(), second()
            if modules[0] is None or modules[1] is None:
                continue
            one, other = modules[0]._parameters.get(first_name), modules[1]._parameters.get(second_name)
            pair = known.get(id(one)), known.get(id(other))
            if one is None or other is None or one is other or None in pair or one.shape != other.shape:
                continue
            if not any({each.first, each.second} == set(pair) for each in self._facts.untied):
                self._facts.untied.append(UntiedWeights(first=str(pair[0]), second=str(pair[1]), site=site))
