"""Optimizers that take turns: the loss of one depends on models that another changes by losses of its own, as in a GAN.

Such a loss has no usual size: it rises whenever the other side gets better.
"""

from __future__ import annotations

from collections import defaultdict

from ampwise.watch.model_calls import ModelCalls

__all__ = ["Rivals"]


class Rivals:
    """Which optimizers train the models of a loss, and which of them make a step on the same backward pass."""

    def __init__(self) -> None:
        self._in_loss: defaultdict[int, set[int]] = defaultdict(set)  # optimizers of the models in the loss of one
        self._together: defaultdict[int, set[int]] = defaultdict(set)  # those that make a step on the same pass
        self._stepped: dict[int, int] = {}  # backward passes before an optimizer's last step

    def step_begins(self, index: int, calls: ModelCalls) -> None:
        """Note a step of an optimizer. calls: its loss is the last one that was kept."""
        number = calls.backward_passes
        if calls.losses:
            self._in_loss[index] |= calls.losses[-1].start.trains - {index}
        for other, at in self._stepped.items():
            if at == number and other != index:
                self._together[index].add(other)
                self._together[other].add(index)
        self._stepped[index] = number

    def has_any(self, index: int) -> bool:
        """Whether models in the loss of an optimizer are changed by steps on other losses, or those of its own in one.

        A critic is judged by samples that were made without a graph: only the loss of its rival shows that they play.
        """
        own = self._in_loss[index] | {other for other, those in self._in_loss.items() if index in those}
        return any(each in self._stepped for each in own - self._together[index])
