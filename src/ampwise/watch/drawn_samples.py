"""Samples that ``sample()`` draws without a gradient, although the loss is to train their distribution."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Laplace, MultivariateNormal, Normal

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.watch.graph_lines import graph_nodes
from ampwise.watch.inspection import saved_tensor
from ampwise.watch.learning import CountedCalls, Learning

__all__ = ["REPARAMETRISED", "DrawnSamples"]

REPARAMETRISED: tuple[type[Distribution], ...] = (Normal, MultivariateNormal, Laplace)
KEPT = 8  # samples of a step
READ_BY = ("mat1", "self", "input")  # names under which layers keep what they were given
LAYERS = ("AddmmBackward", "MmBackward", "ConvolutionBackward")


class _Drawn(NamedTuple):
    sample: Tensor  # kept until the next backward pass: other values cannot have its memory
    distribution: weakref.ref[Distribution]
    made_by: int  # number of the operation that computed the location
    site: CallSite


class DrawnSamples:
    """Look for samples in the graph of a loss that trains the distribution they were drawn from by another term only.

    Samples whose log-probability is asked for, as of a policy's actions, and of which others have a gradient, are fine.
    """

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._drawn: deque[_Drawn] = deque(maxlen=KEPT)
        self._trained: weakref.WeakSet[Distribution] = weakref.WeakSet()  # by gradients through other samples

    def drawn(self, distribution: Distribution, sample: Any) -> None:
        """Note a sample without a gradient of a distribution whose location has one."""
        location = getattr(distribution, "loc", None)
        if distribution in self._trained:
            return
        if torch.is_grad_enabled() and isinstance(location, Tensor) and location.grad_fn is not None:
            number = location.grad_fn._sequence_nr()
            self._drawn.append(_Drawn(sample, weakref.ref(distribution), number, calling_site()))

    def trained_otherwise(self, distribution: Distribution, value: Any = None) -> None:
        """Note that a sample has a gradient, or that the probability of one is asked for."""
        self._trained.add(distribution)
        if self._drawn:
            kept = [
                each for each in self._drawn if each.distribution() is not distribution and each.sample is not value
            ]
            self._drawn = deque(kept, maxlen=KEPT)

    def look(self, loss: Tensor, step: int) -> None:
        """Look at a loss that is about to be differentiated."""
        drawn, self._drawn = self._drawn, deque(maxlen=KEPT)
        if not drawn:
            return
        numbers, read = set[int](), set[tuple[int, int]]()
        for node in graph_nodes(loss):
            if hasattr(node, "_sequence_nr"):
                numbers.add(node._sequence_nr())
            for name in READ_BY if node.name().startswith(LAYERS) else ():
                given = saved_tensor(node, name)
                if given is not None:
                    read.add((given.data_ptr(), given.numel()))
        for each in drawn:
            if each.made_by in numbers and (each.sample.data_ptr(), each.sample.numel()) in read:
                calls = self._facts.drawn_without_graph.setdefault(each.site, CountedCalls(step=step))
                calls.times += 1

    def forget(self) -> None:
        """Forget the samples of a pass that is not looked at."""
        self._drawn.clear()
