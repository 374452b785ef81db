"""Information that a sink gets when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampwise.runs.sinks.metrics import MetricsRow

__all__ = ["Send", "SinkContext"]

Send = Callable[[Sequence[MetricsRow]], None]  # an open sink


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The run, and the target for its metrics."""

    base: Path  # absolute path of the run: its record, if it has one
    target: str | None = None  # text after the colon
    folder: Path = field(default_factory=Path.cwd)  # working directory at the start: a script may change it

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.base.name

    def path(self, suffix: str) -> Path:
        """Return the target as a path; without a target, a path next to the record, which holds only its own files."""
        return self.folder / self.target if self.target else self.base.with_name(f"{self.base.name}.{suffix}")
