"""The skill file of `ampwise skill`: what an agent should know, each fact from the record that the code uses.

``words`` has the prose, in which no number stands: where one belongs is a slot. ``slots`` fills them from formats,
rules and verbs, and ``tables`` makes the lists that are nothing but records.
"""

from __future__ import annotations

from ampwise.integrations.skill.slots import slots
from ampwise.integrations.skill.tables import SECTIONS
from ampwise.integrations.skill.words import WORDS

__all__ = ["FILE", "skill_text"]

FILE = "SKILL.md"


def skill_text() -> str:
    """The whole file; the same at every call."""
    filled = slots() | {name: make() for name, make in SECTIONS.items()}
    return WORDS.format_map(filled)
