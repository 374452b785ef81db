"""Engines of ampwise in a script that is watched: they explain their bad steps themselves, and the watch hears."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ampwise.engine import bad_steps, capsules
from ampwise.finding import Finding

__all__ = ["Engines"]


class Engines:
    """told: of a finding and its step. paused: what is around their replays, which the script has not asked for."""

    def __init__(
        self,
        told: Callable[[Finding, int], None],
        paused: Callable[[], AbstractContextManager[Any]],
        folder: Path | None,
        *,
        weights: bool,
    ) -> None:
        self._told, self._paused = told, paused
        self._capsules = None if folder is None else capsules.Capsules(folder, weights=weights)

    def listen(self) -> None:
        bad_steps.LISTENERS.append(self._told)
        bad_steps.AROUND.append(self._paused)
        if self._capsules is not None:
            capsules.FOR_ALL.append(self._capsules)

    def leave(self) -> None:
        bad_steps.LISTENERS.remove(self._told)
        bad_steps.AROUND.remove(self._paused)
        if self._capsules is not None:
            capsules.FOR_ALL.remove(self._capsules)
