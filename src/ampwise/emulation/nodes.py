"""Which recipe a product has that is computed outside of modules: one of a backward pass, or one computed again."""

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

from ampwise.emulation.recipe import Recipe

__all__ = ["Nodes", "checkpoints_around", "in_backward"]

MOST_NOTED = 2**18
CHECKPOINT = torch.utils.checkpoint.__file__
BACKWARD_PASS = torch.autograd.graph._engine_run_backward.__code__


class _Noted(NamedTuple):
    own: Recipe | None  # of the products of its backward pass
    again: Recipe | None  # of what is computed again for it


NOTHING = _Noted(None, None)


class Nodes:
    """The recipes of a graph's nodes, each known by the number that torch gives to the node of an operation."""

    def __init__(self) -> None:
        # By the thread that made the node: each counts its own, and on a GPU the backward pass has a thread for itself.
        self._noted: dict[int, dict[int, _Noted]] = defaultdict(dict)
        self._latest: dict[int, int] = {}

    def recipe(self) -> Recipe | None:
        """That of the node that runs its backward pass; None outside of one."""
        node: Any = torch._C._current_autograd_node()
        noted = None if node is None else self._find(node._sequence_nr())
        if noted is None:
            return None
        return noted.again if _recomputes(node) else noted.own

    def _find(self, number: int) -> _Noted | None:
        """A backward pass that began in this thread is, if there are several, one of what this thread computed."""
        threads, own = list(self._noted), threading.get_ident()
        if len(threads) > 1:
            is_own = any(frame.f_code is BACKWARD_PASS for frame in _frames())
            threads.sort(key=lambda thread: (thread == own) != is_own)
        return next((found for thread in threads if (found := self._noted[thread].get(number)) is not None), None)

    @property
    def has_new(self) -> bool:
        """Whether nodes were made that nothing was noted of."""
        return self._latest.get(threading.get_ident()) != torch._C._autograd._get_sequence_nr() - 1

    def note(self, here: Recipe | None, again: Recipe | None) -> None:
        """Of the nodes made since the last call: the recipe where they were made, and that of what computes them again.

        To be called before a module is entered, too: what was made by then was not made in it.
        """
        last, thread = torch._C._autograd._get_sequence_nr() - 1, threading.get_ident()
        first = self._latest.get(thread, last - 1) + 1
        self._latest[thread] = last
        # A node made without gradients is that of a function of the user's own, or of a reentrant checkpoint.
        noted = _Noted(here if torch.is_grad_enabled() else None, again)
        if noted == NOTHING:  # which need not be known: others' nodes are not to push out those of a pass
            return
        self._noted[thread].update(dict.fromkeys(range(first, last + 1), noted))
        if len(self._noted[thread]) > MOST_NOTED:  # of steps long past
            self._noted[thread] = dict(list(self._noted[thread].items())[-MOST_NOTED // 2 :])


def checkpoints_around() -> int:
    """More of them within one than outside of it, and 0 where there is none."""
    found, frame = 0, sys._getframe().f_back  # without _frames(): it is asked at each operation
    while frame is not None:
        found += frame.f_code.co_filename == CHECKPOINT
        frame = frame.f_back
    return found


def in_backward() -> bool:
    """In a backward pass, and not where it computes a checkpointed part again."""
    node = torch._C._current_autograd_node()
    return node is not None and not _recomputes(node)


def _recomputes(node: Any) -> bool:
    """A checkpoint has called what we are in, or, with gradients on, a function of the user's own does it by itself."""
    if isinstance(node, BackwardCFunction) and torch.is_grad_enabled():
        return True
    for frame in _frames():
        if frame.f_code is BACKWARD_PASS:  # which a reentrant checkpoint begins when it has computed
            return False
        if frame.f_code.co_filename == CHECKPOINT:
            return True
    return False


def _frames() -> Iterator[FrameType]:
    """What is running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
