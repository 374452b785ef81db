"""Scenarios: what an agent is asked, under which pressure, and what a right answer says and does.

A file of ``data/scenarios`` has a table for each scenario, named by its id.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ampwise.errors import BadInput, UnknownName

DATA = Path(__file__).parent / "data"
PRESSURES = ("time", "authority", "sunk cost", "just tell me", "complexity")
CODE = """\
Give the complete code in one fenced Python block, the last of your answer: only that block is run, as a module, on a \
machine without a GPU (use the `device` that is passed, if any). It must define {define}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A question. Without ``define`` it asks for an explanation, else for code, which ``test`` is run against.

    ``facts`` are statements of ``data/statements.toml`` on which a right answer takes a side, the right one; ``traps``
    are those on which it may. The wrong side fails.
    """

    id: str
    group: str
    prompt: str
    pressures: tuple[str, ...] = ()
    source: str = ""  # where the question comes from: an address, or none for our own
    files: dict[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    define: str = ""
    test: str = ""
    allow: tuple[str, ...] = ()  # rules that may find something in right code

    def __post_init__(self) -> None:
        if unknown := set(self.pressures) - set(PRESSURES):
            raise BadInput(f"scenario {self.id}: pressures {sorted(unknown)}: expected {', '.join(PRESSURES)}.")
        if bool(self.define) != bool(self.test):
            raise BadInput(f"scenario {self.id}: expected both `define` and `test`, or neither.")
        if not self.facts and not self.test:
            raise BadInput(f"scenario {self.id}: nothing to grade; give `facts`, or `define` and `test`.")

    def question(self) -> str:
        """Return what an agent reads: the prompt, the files, and what its code must define."""
        files = [f"{name}:\n```\n{text.strip()}\n```" for name, text in self.files.items()]
        return "\n\n".join([self.prompt.strip(), *files, *([CODE.format(define=self.define)] if self.define else [])])


@cache
def all_scenarios() -> dict[str, Scenario]:
    """Return the scenarios by id."""
    found: dict[str, Scenario] = {}
    for path in sorted((DATA / "scenarios").glob("*.toml")):
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if name in found:
                raise BadInput(f"{path.name}: scenario {name} is defined twice; rename one.")
            lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
            found[name] = Scenario(id=name, group=path.stem, **table | lists)
    return found


def chosen(ids: list[str]) -> list[Scenario]:
    """Return these scenarios, or all without any; an id may be a group."""
    every = all_scenarios()
    groups = {each.group for each in every.values()}
    for name in ids:
        if name not in every and name not in groups:
            raise UnknownName("scenario", name, [*groups, *every], listing="`python -m evals --list` lists them.")
    return [each for each in every.values() if not ids or each.id in ids or each.group in ids]
