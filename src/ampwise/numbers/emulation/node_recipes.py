"""Find the recipe of a matmul that runs outside modules: in a backward pass, or recomputed by a checkpoint."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

from ampwise.numbers.emulation.recipe import EmulationRecipe

MOST_NOTED = 2**18
CHECKPOINT = torch.utils.checkpoint.__file__
BACKWARD_PASS = torch.autograd.graph._engine_run_backward.__code__


class _Noted(NamedTuple):
    own: EmulationRecipe | None  # recipe of the matmuls of its backward pass
    again: EmulationRecipe | None  # recipe of what is recomputed for it


NOTHING = _Noted(None, None)


class NodeRecipes:
    """Recipes of autograd nodes, by the sequence number of the node."""

    def __init__(self) -> None:
        # By the thread that created the node: each thread counts its own, and on a GPU backward runs in another thread.
        self._noted: dict[int, dict[int, _Noted]] = defaultdict(dict)
        self._latest: dict[int, int] = {}

    def recipe(self) -> EmulationRecipe | None:
        """Return the recipe of the node whose backward runs now; None outside a backward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        threads, own, number = list(self._noted), threading.get_ident(), node._sequence_nr()
        if len(threads) > 1:  # prefer this one, if its backward pass started here
            is_own = any(frame.f_code is BACKWARD_PASS for frame in _frames())
            threads.sort(key=lambda thread: (thread == own) != is_own)
        for thread in threads:
            noted = self._noted[thread].get(number)
            if noted is not None:
                return noted.again if _recomputes(node) else noted.own
        return None

    @property
    def has_new(self) -> bool:
        """Whether nodes were created since the last call of ``note``."""
        return self._latest.get(threading.get_ident()) != torch._C._autograd._get_sequence_nr() - 1

    def note(self, here: EmulationRecipe | None, again: EmulationRecipe | None) -> None:
        """Record the recipe of the nodes created since the last call, and the recipe for recomputing them.

        Also call this before a module is entered: earlier nodes do not belong to it.
        """
        last, thread = torch._C._autograd._get_sequence_nr() - 1, threading.get_ident()
        first = self._latest.get(thread, last - 1) + 1
        self._latest[thread] = last
        # A node created with gradients off belongs to a custom autograd function, or to a reentrant checkpoint.
        noted = _Noted(here if torch.is_grad_enabled() else None, again)
        if noted == NOTHING:  # no need to store it, where it would displace useful entries
            return
        self._noted[thread].update(dict.fromkeys(range(first, last + 1), noted))
        if len(self._noted[thread]) > MOST_NOTED:  # drop those of past steps
            self._noted[thread] = dict(list(self._noted[thread].items())[-MOST_NOTED // 2 :])


def checkpoint_depth() -> int:
    """Return the number of checkpoint frames on the call stack: 0 outside, more when nested."""
    found, frame = 0, sys._getframe().f_back  # without _frames(), for speed: this runs at each operation
    while frame is not None:
        found += frame.f_code.co_filename == CHECKPOINT
        frame = frame.f_back
    return found


def in_backward() -> bool:
    """Return whether a backward pass is running, and not recomputing a checkpointed part."""
    node = torch._C._current_autograd_node()
    return node is not None and not _recomputes(node)


def _recomputes(node: Any) -> bool:
    """Return whether a checkpoint, or a custom autograd function with gradients on, is recomputing now."""
    if isinstance(node, BackwardCFunction) and torch.is_grad_enabled():
        return True
    for frame in _frames():
        if frame.f_code is BACKWARD_PASS:  # a reentrant checkpoint starts this after recomputing
            return False
        if frame.f_code.co_filename == CHECKPOINT:
            return True
    return False


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
