"""The events of a run as lines: what the guard did, and sinks that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.runs.events import LoggedEvent
    from ampwise.runs.reader import Run

__all__ = ["event_lines", "latest_events"]


def latest_events(run: Run, most: int) -> tuple[list[tuple[LoggedEvent, str]], int]:
    """Return the last events in order, each with the advice to show, and how many earlier ones there are.

    Advice is shown once for each kind of event, with the last one.
    """
    shown = run.events[-most:]
    last = {event.name: number for number, event in enumerate(shown)}
    advised = [(event, event.advice if last[event.name] == number else "") for number, event in enumerate(shown)]
    return advised, len(run.events) - len(shown)


def event_lines(run: Run, most: int) -> list[str]:
    """Return the last events as sentences, after one that counts the earlier ones."""
    shown, earlier = latest_events(run, most)
    lines = [f"{event}{f'. {advice}' if advice else ''}" for event, advice in shown]
    return [*([f"{earlier:,} earlier ones: the JSON has all of them"] if earlier else []), *lines]
