"""Averages of the weights that the script makes, and that are never updated or never used."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, own_files
from ampwise.watch.average_code import (
    average_made_at,
    dropped_updates,
    is_only_updated,
    made_by_class_at,
    never_updated,
)
from ampwise.watch.learning import IdleAverage, Learning
from ampwise.watch.sampled_values import is_plain

__all__ = ["StaleAverages"]

MOST = 8  # parameters of a copy that are compared, the small ones
MOST_BYTES = 2**16  # of each
MOST_SITES = 16


@dataclass(slots=True)
class _Copy:
    """Some parameters of a model's copy, those that they were copied from, and their values then."""

    name: str
    pairs: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # original, copy, values
    is_changed: bool = False  # known to be updated, or to be something else than an average


class StaleAverages:
    """Copies of models that are averages by their names, torch's ``AveragedModel``, and own classes."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._copies: dict[CallSite, _Copy] = {}
        self._averaged: dict[int, tuple[weakref.ref[nn.Module], CallSite]] = {}  # of torch's class
        self._updates: dict[CallSite, int] = {}

    # What the script does

    def copied(self, original: Tensor, copy: Tensor) -> None:
        """Note that a parameter was copied by ``deepcopy``."""
        site = calling_site()
        name = average_made_at(site)
        if name is None or (len(self._copies) >= MOST_SITES and site not in self._copies):
            return
        known = self._copies.setdefault(site, _Copy(name))
        if any(each is original for each, _, _ in known.pairs):  # a copy of each epoch
            known.is_changed = True
        elif len(known.pairs) < MOST and is_plain(copy) and copy.nbytes <= MOST_BYTES and copy.is_cpu:
            known.pairs.append((original, copy, copy.detach().clone()))

    def averaged_model_made(self, model: nn.Module) -> None:
        """Note an ``AveragedModel``, which copies a model by itself."""
        site = calling_site()
        self._averaged[id(model)] = (weakref.ref(model), site)
        self._updates.setdefault(site, 0)

    def averaged_model_updated(self, model: nn.Module) -> None:
        refer, site = self._averaged.get(id(model), (None, None))
        if refer is not None and site is not None and refer() is model:
            self._updates[site] += 1

    def replaced(self, parameter: Any) -> None:
        """Note that a module got another parameter in the place of this one."""
        for known in self._copies.values():
            known.is_changed |= any(copy is parameter for _, copy, _ in known.pairs)

    # What becomes of it

    def update(self, called_in: list[CallSite]) -> None:
        """Bring the facts up to date. called_in: lines that ask models for their parameters."""
        found = self._facts.idle_averages
        files = sorted({*own_files(), *(each.file or "" for each in (*called_in, *self._copies, *self._updates))})
        found.clear()
        updated: list[CallSite] = [site for site, count in self._updates.items() if count]
        for site, count in self._updates.items():
            self_made = self._copies.get(site)
            if not count and (self_made is None or not _is_changed(self_made)):
                found[site] = IdleAverage(name=average_made_at(site) or "AveragedModel", why="never updated")
        for site, known in self._copies.items():
            trained = [original for original, _, values in known.pairs if not torch.equal(original.detach(), values)]
            if site in self._updates or not trained or known.is_changed:
                continue
            if _is_changed(known):
                updated.append(site)
            else:
                found[site] = IdleAverage(name=known.name, why="unchanged")
        for site in called_in:
            if site.function == "__init__" and (made := made_by_class_at(site)) is not None:
                if never_updated(made, files):
                    found[made] = IdleAverage(name=average_made_at(made) or "", why="never updated")
                else:
                    updated.append(made)
        dropping = [site for file in files for site in dropped_updates(file)]
        for site in dropping:
            found[site] = IdleAverage(name="", why="dropped")
        if dropping:  # they are why it stays as it is
            for site in [site for site, each in found.items() if each.why == "unchanged"]:
                del found[site]
        for site in updated:
            if is_only_updated(site):
                found.setdefault(site, IdleAverage(name=average_made_at(site) or "", why="never used"))


def _is_changed(known: _Copy) -> bool:
    """Whether any of a copy's parameters has changed, or is trained by itself."""
    return known.is_changed or any(
        copy.grad is not None or copy.shape != values.shape or not torch.equal(copy.detach(), values.to(copy.dtype))
        for _, copy, values in known.pairs
    )
