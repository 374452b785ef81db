"""Who may be told of each step of an engine."""

from __future__ import annotations

from typing import Protocol

from ampwise.engine.step import Step

__all__ = ["Attendant"]


class Attendant(Protocol):
    """Someone who looks after a training: a guard."""

    def begins(self) -> None:
        """A window is about to begin: whoever had something to do after the last step has done it."""

    def before_update(self) -> None:
        """The gradients of a window are there, and weights and optimizer states still as they were."""

    def closed(self, step: Step) -> None:
        """A window is closed, and the engine between two steps. What is raised here ends ``engine.step``."""
