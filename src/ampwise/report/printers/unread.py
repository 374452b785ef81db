"""A file that could not be checked, as the formats for programs show it: an error without a rule."""

from __future__ import annotations

from typing import Protocol

from ampwise.finding import Place

NAME = "not-checked"  # where a format requires the name of a rule


class Unread(Protocol):
    """A file that could not be checked: its path, the reason, and the line of the error if it is known."""

    path: str
    reason: str
    line: int | None


def place_of(unread: Unread) -> Place:
    """Return the place of the error."""
    return Place(file=unread.path, line=unread.line)


def message_of(unread: Unread) -> str:
    """Return the message: that the file was not checked, and why."""
    return f"cannot check: {unread.reason}"
