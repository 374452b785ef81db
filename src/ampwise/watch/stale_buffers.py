"""Averages of a model's parameters whose buffers, such as the statistics of batch norm, stay as they were."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.learning_watch import SampledValues, is_plain

__all__ = ["StaleBuffers"]

MOST = 4  # buffers that are compared
STATISTICS = ("running_mean", "running_var")
# What a script may bring the buffers up to date by, at a time that no look sees.
MENTIONS = ("buffers", "state_dict", "update_bn", "running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A model and its average, and some of their values at the first look."""

    average: weakref.ref[nn.Module]
    own: tuple[SampledValues, ...]
    parameter: SampledValues
    original: tuple[SampledValues, ...]


class StaleBuffers:
    """Compare the buffers of modules whose parameters one line reads: a model's, and those of its average."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._pairs: dict[CallSite, _Pair | None] = {}  # None: no average, or one that is right
        self._mentions: bool | None = None

    def look(self, site: CallSite, modules: Iterable[nn.Module | None], held: set[int], step: int) -> None:
        """Look at modules whose parameters a line reads. held: ids of parameters that an optimizer has."""
        pair = self._pairs.get(site)
        if pair is not None:
            self._compare(site, pair, step)
        if site in self._pairs:
            return
        found = [(each, statistics) for each in modules if each is not None and (statistics := _statistics(each))]
        if len(found) < 2:
            return
        self._pairs[site] = None
        if self._mentions is None:
            main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
            self._mentions = any(map(_mentions_buffers, (main, site.file or "")))
        trained = [each for each in found if all(id(one) in held for one in nn.Module.parameters(each[0]))]
        others = [each for each in found if not any(id(one) in held for one in nn.Module.parameters(each[0]))]
        is_pair = len(trained) == len(others) == 1 and type(trained[0][0]) is type(others[0][0])
        if is_pair and not self._mentions:
            parameter = next(filter(is_plain, nn.Module.parameters(others[0][0])), None)
            if parameter is not None:
                sampled = [tuple(map(SampledValues, statistics)) for _, statistics in (others[0], trained[0])]
                self._pairs[site] = _Pair(weakref.ref(others[0][0]), sampled[0], SampledValues(parameter), sampled[1])

    def _compare(self, site: CallSite, pair: _Pair, step: int) -> None:
        if pair.average() is None:
            self._pairs[site] = None  # what was seen so far holds
        elif _any_changed(pair.own):
            self._pairs[site] = None
            self._facts.stale_buffers.pop(site, None)
        elif _any_changed((pair.parameter,)) and _any_changed(pair.original):
            what = type(pair.average()).__name__
            self._facts.stale_buffers.setdefault(site, CountedCalls(step=step, what=what)).times += 1


def _statistics(module: nn.Module) -> list[Tensor]:
    """Return some of the running statistics of a module, if they are on the CPU: elsewhere a look would sync."""
    named = ((name.rpartition(".")[2], each) for name, each in module.named_buffers())
    return [each for name, each in named if name in STATISTICS and each.is_cpu and is_plain(each)][:MOST]


def _any_changed(values: Iterable[SampledValues]) -> bool:
    with torch.no_grad():
        return any(each.changed().read()[0] > 0 for each in values)


def _mentions_buffers(file: str) -> bool:
    return any(word in line for line in linecache.getlines(file) for word in MENTIONS)
