"""The command of a comparison, and the same with something changed: what one types to see it for oneself."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

__all__ = ["changed", "command_of", "of_verb"]

ADDS_UP = "--keep"  # may be given several times


def command_of(maker: str, options: Iterable[Sequence[str]]) -> str:
    """As one types it.

    >>> command_of("train:make", [("--compile",), ("--keep", "fp32=*.head")])
    "ampwise compare train:make --compile --keep 'fp32=*.head'"
    """
    return shlex.join(["ampwise", "compare", maker, *(word for option in options for word in option)])


def changed(command: str, *options: str) -> str:
    """With these options, in the place of those of the same name.

    >>> changed("ampwise compare train:make --batch 8 --compile", "--batch 32")
    'ampwise compare train:make --compile --batch 32'
    >>> changed("ampwise compare train:make", "--json | jq .rows")
    'ampwise compare train:make --json | jq .rows'
    """
    head, *given = _parts(command)
    new = [part for option in options for part in _parts(option.partition(" | ")[0])]
    replaced = {name for name, *_ in new} - {ADDS_UP}
    words = [*head, *(word for part in (*(each for each in given if each[0] not in replaced), *new) for word in part)]
    return shlex.join(words) + "".join(f" | {tail}" for _, bar, tail in _piped(options) if bar)


def of_verb(command: str, verb: str, *names: str) -> str:
    """Another verb on the same, with those of the options that it has, too.

    >>> of_verb("ampwise compare train:make --batch 8 --compile", "align", "--batch")
    'ampwise align train:make --batch 8'
    """
    (program, _, *rest), *given = _parts(command)
    return shlex.join([program, verb, *rest, *(word for part in given if part[0] in names for word in part)])


def _piped(options: Iterable[str]) -> list[tuple[str, str, str]]:
    return [option.partition(" | ") for option in options]


def _parts(command: str) -> list[list[str]]:
    """What comes before the options, if anything does, and each option with its values."""
    parts: list[list[str]] = []
    for word in shlex.split(command):
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    return parts
