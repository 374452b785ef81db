"""What a sink gets when it is opened, and what its kind may use: checks of its target, and separate random numbers."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampwise.runs.sinks.metrics import MetricsRow

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


def why_file_not_writable(path: Path) -> str | None:
    """Return why a file cannot be written, or None if it can; nothing is created."""
    if path.is_dir():
        return f"{path} is a folder, expected a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{path} is not writable"
    return why_folder_not_writable(path.parent)


def why_folder_not_writable(path: Path) -> str | None:
    """Return why a folder, and files in it, cannot be created, or None if they can."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        return f"{existing} is a file, expected a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random state at the end, so that a package may draw while it is imported."""
    python_state = random.getstate()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


class _ThreadRandom:
    """Replacement for the ``random`` module that uses its own generator in other threads than the main one."""

    def __init__(self) -> None:
        self._own = random.Random()

    def __getattr__(self, name: str) -> Any:
        return getattr(random if threading.current_thread() is threading.main_thread() else self._own, name)


def use_separate_random(modules: Iterable[str]) -> None:
    """Make these modules, if they are loaded, draw from a separate generator in a sink's thread, so that the random
    numbers of the script do not change."""
    for name in modules:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _ThreadRandom()  # type: ignore[union-attr]
