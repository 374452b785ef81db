"""The skill file of `ampwise skill`: what an agent should know, with every fact taken from the code's own data.

``template`` has the prose with a slot for each number, code and command. ``slots`` fills them from formats, rules and
commands, and ``tables`` makes the lists and tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ampwise.integrations.skill.slots import slots
from ampwise.integrations.skill.tables import SECTIONS, commands_table
from ampwise.integrations.skill.template import TEMPLATE

__all__ = ["FILE", "skill_text"]

FILE = "SKILL.md"


def skill_text(commands: Mapping[str, str]) -> str:
    """Return the text of the skill file, given the commands, each with what it does."""
    sections = {name: make() for name, make in SECTIONS.items()}
    filled = slots(commands) | sections | {"all_commands": commands_table(commands)}
    return TEMPLATE.format_map(filled)
