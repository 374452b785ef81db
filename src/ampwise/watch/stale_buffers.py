"""Averages of a model's parameters whose buffers, such as the statistics of batch norm, stay as they were."""

from __future__ import annotations

import ast
import linecache
import sys
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import says
from ampwise.trace.names_in_code import FUNCTIONS, call_name, nodes_of
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.sampled_values import SampledValues, is_plain

__all__ = ["StaleBuffers"]

MOST = 4  # buffers that are compared
STATISTICS = ("running_mean", "running_var")
# What a script may bring the buffers up to date by, at a time that no look sees.
MENTIONS = ("buffers", "update_bn", "running_mean", "running_var")
STATES = ("state_dict", "load_state_dict")
SAVES = ("save", "save_checkpoint")

Reader = tuple[CallSite, Sequence[weakref.ref[nn.Module]]]  # a line, and the modules whose parameters it reads


@dataclass(frozen=True, slots=True)
class _Pair:
    """A model and its average, and some of their values at the first look."""

    average: weakref.ref[nn.Module]
    site: CallSite  # where its parameters are read
    own: tuple[SampledValues, ...]
    parameter: SampledValues
    original: tuple[SampledValues, ...]


class StaleBuffers:
    """Compare buffers of modules whose parameters one line, or one function, reads: of a model, and of its average."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._pairs: dict[Hashable, _Pair | None] = {}  # None: no average, or one that is right
        self._seen: dict[Hashable, int] = {}  # numbers of modules among which there was no pair
        self._mentions: bool | None = None

    def look(self, key: Hashable, readers: Sequence[Reader], held: set[int], step: int) -> None:
        """Look at modules whose parameters are read together. held: ids of parameters that an optimizer has.

        key: of these readers. They may be asked in vain as long as there is only one module.
        """
        pair = self._pairs.get(key)
        if pair is not None:
            self._compare(key, pair, step)
        many = sum(len(modules) for _, modules in readers)
        if key in self._pairs or self._seen.get(key) == many:
            return
        self._seen[key] = many
        sites = {id(each): (each, site) for site, modules in readers for refer in modules if (each := refer())}
        found = [(each, statistics) for each, _ in sites.values() if (statistics := _statistics(each))]
        if len(found) < 2:
            return
        self._pairs[key] = None
        trained = [each for each in found if all(id(one) in held for one in nn.Module.parameters(each[0]))]
        others = [each for each in found if not any(id(one) in held for one in nn.Module.parameters(each[0]))]
        is_pair = len(trained) == len(others) == 1 and type(trained[0][0]) is type(others[0][0])
        site = sites[id(others[0][0])][1] if is_pair else CallSite()
        if self._mentions is None and is_pair:
            main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
            self._mentions = any(map(_mentions_buffers, (main, site.file or "")))
        if is_pair and not self._mentions:
            parameter = next(filter(is_plain, nn.Module.parameters(others[0][0])), None)
            if parameter is not None:
                sampled = [tuple(map(SampledValues, statistics)) for _, statistics in (others[0], trained[0])]
                self._pairs[key] = _Pair(
                    weakref.ref(others[0][0]), site, sampled[0], SampledValues(parameter), sampled[1]
                )

    def _compare(self, key: Hashable, pair: _Pair, step: int) -> None:
        site = pair.site
        if pair.average() is None:
            self._pairs[key] = None  # what was seen so far holds
        elif _any_changed(pair.own):
            self._pairs[key] = None
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
    """Whether a file may copy buffers: by their names, or by states that it does not only save or restore."""
    if any(word in line for line in linecache.getlines(file) for word in MENTIONS):
        return True
    if not says(file, "state_dict"):
        return False
    only_saved = {id(node) for each in nodes_of(file) if _saves(each) for node in ast.walk(each)}
    calls = (node for node in nodes_of(file) if isinstance(node, ast.Call) and call_name(node) in STATES)
    return any(id(each) not in only_saved for each in calls)


def _saves(node: ast.AST) -> bool:
    """Whether a node is a method that gives or takes a state, or a call that saves one."""
    return (isinstance(node, FUNCTIONS) and node.name in STATES) or (
        isinstance(node, ast.Call) and call_name(node) in SAVES
    )
