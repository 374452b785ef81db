"""Events of a run: what the guard did, or a sink that failed. Log messages, kept one per line in the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ampwise.finding.strict_json import to_json_types
from ampwise.runs.json_lines import is_count, object_line, read_object

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
DEEPEST = 4  # lists in the fields of an event, one in another


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """An event as plain data. step: None if it belongs to no step; fields: the numbers and texts of the message."""

    name: str  # such as "rolled-back"
    level: Level
    message: str  # one line
    step: int | None = None
    advice: str = ""  # what to do about it, in sentences; empty if nothing
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """
        >>> str(LoggedEvent(name="climbed-back", level="info", message="back from fp32 to fp16", step=1200))
        'climbed-back at step 1,200: back from fp32 to fp16'
        """
        at = "" if self.step is None else f" at step {self.step:,}"
        return f"{self.name}{at}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """Return the event as valid JSON data: numbers that are not finite are strings."""
        data: dict[str, Any] = to_json_types(asdict(self))
        return data


# Called with each event of a guard on rank 0, instead of printing to stderr: set by ``ampwise run``.
EVENT_LISTENERS: list[Callable[[LoggedEvent], None]] = []


def event_line(event: LoggedEvent) -> str:
    """Return the line of an event in a record."""
    return object_line(event.as_dict())


def read_event(line: bytes | str) -> LoggedEvent:
    """Read the event of a line; raise ValueError or KeyError if it is invalid."""
    data = read_object(line)
    event = LoggedEvent(**{name: data[name] for name in LoggedEvent.__slots__})
    texts = (event.name, event.message, event.advice)
    if not all(isinstance(text, str) for text in texts) or event.level not in LEVELS:
        raise ValueError(f"an event with invalid texts, or of the level {event.level!r:.80}")
    fields_are_plain = isinstance(event.fields, dict) and _depth_is_at_most(DEEPEST, event.fields)
    if not (event.step is None or is_count(event.step)) or not fields_are_plain:
        raise ValueError(f"an event at step {event.step!r:.80}, or with invalid fields")
    return event


def _depth_is_at_most(depth: int, value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_depth_is_at_most(depth - 1, each) for each in inner)
