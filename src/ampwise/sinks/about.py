"""What a sink is told when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampwise.sinks.metrics import Row

__all__ = ["About", "Send"]

Send = Callable[[Sequence[Row]], None]  # what an open sink is


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run, and where the user wants its numbers."""

    base: Path  # the run, as an absolute path: its record, where it has one
    target: str | None = None  # what followed the colon
    folder: Path = field(default_factory=Path.cwd)  # when the run began: a script may go elsewhere

    @property
    def name(self) -> str:
        """Of the run."""
        return self.base.name

    def path(self, suffix: str) -> Path:
        """The target as a path; without one, a neighbour of the record, which takes nothing foreign into itself."""
        return self.folder / self.target if self.target else self.base.with_name(f"{self.base.name}.{suffix}")
