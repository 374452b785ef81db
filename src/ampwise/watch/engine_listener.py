"""Findings and events of ampwise's own engines and guards in a watched script."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ampwise.finding import Finding
from ampwise.runs.events import EVENT_LISTENERS, LoggedEvent
from ampwise.trace import bad_steps
from ampwise.trace.capsule import saving as capsules

__all__ = ["EngineListener"]


class EngineListener:
    """Listen to the engines of a script.

    on_finding: called with each finding and its step. on_event: called with each event of a guard. paused: a context to
    enter around replays, so that they are not watched. folder: where to save bad steps.
    """

    def __init__(
        self,
        on_finding: Callable[[Finding, int], None],
        on_event: Callable[[LoggedEvent], None],
        paused: Callable[[], AbstractContextManager[Any]],
        folder: Path | None,
        *,
        weights: bool,
    ) -> None:
        self._on_finding, self._on_event, self._paused = on_finding, on_event, paused
        self._capsules = None if folder is None else capsules.Capsules(folder, weights=weights)

    def listen(self) -> None:
        bad_steps.FINDING_LISTENERS.append(self._on_finding)
        EVENT_LISTENERS.append(self._on_event)
        bad_steps.REPLAY_CONTEXTS.append(self._paused)
        if self._capsules is not None:
            capsules.SHARED_CAPSULES.append(self._capsules)

    def leave(self) -> None:
        bad_steps.FINDING_LISTENERS.remove(self._on_finding)
        EVENT_LISTENERS.remove(self._on_event)
        bad_steps.REPLAY_CONTEXTS.remove(self._paused)
        if self._capsules is not None:
            capsules.SHARED_CAPSULES.remove(self._capsules)
