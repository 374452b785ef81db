"""What a precision needs besides autocast: changes to the model, or contexts for passes and for optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from ampwise.finding import Finding
from ampwise.train.precision.contexts import NO_CONTEXT

__all__ = ["PrecisionPlugin"]


class PrecisionPlugin:
    """Base class, which does nothing: enough for FP32, TF32, FP16 and BF16. Other precisions have a subclass each.

    The constructor changes nothing; ``install`` does, and is called after all arguments are checked.
    """

    graph_version = 0  # increases when passes change what they do: CUDA graphs are then captured again
    bypass_graphs = False  # for now, run passes eagerly and not in a CUDA graph

    @property
    def locked_because(self) -> str:
        """Why ``uninstall`` is not possible, and what to do; empty if it is."""
        return ""

    def install(self) -> None:
        """Change model and optimizers as the precision needs."""

    def uninstall(self) -> None:
        """Undo ``install``, before another precision is installed."""

    def pass_context(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and backward pass; a new one for each pass."""
        return NO_CONTEXT

    def step_context(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return the context for an optimizer's step."""
        return NO_CONTEXT

    def step_ended(self) -> None:
        """Called after each step, taken or skipped. Must not sync with the device."""

    def findings(self) -> list[Finding]:
        """Return findings about precision lost in training; may sync with the device."""
        return []

    def state(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned; if it does not fit, raise BadInput and change nothing."""
