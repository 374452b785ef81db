"""The command of a comparison, and variations of it for the user to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

__all__ = ["compare_command", "with_command", "with_options"]

REPEATABLE = "--keep"  # may be given several times


def compare_command(maker: str, options: Iterable[Sequence[str]]) -> str:
    """Return the command line.

    >>> compare_command("train:make", [("--compile",), ("--keep", "fp32=*.head")])
    "ampwise compare train:make --compile --keep 'fp32=*.head'"
    """
    return shlex.join(["ampwise", "compare", maker, *(word for option in options for word in option)])


def with_options(command: str, *options: str) -> str:
    """Return the command with these options replacing those of the same name.

    >>> with_options("ampwise compare train:make --batch 8 --compile", "--batch 32")
    'ampwise compare train:make --compile --batch 32'
    >>> with_options("ampwise compare train:make", "--json | jq .rows")
    'ampwise compare train:make --json | jq .rows'
    """
    head, *given = _parts(command)
    new = [part for option in options for part in _parts(option.partition(" | ")[0])]
    replaced = {name for name, *_ in new} - {REPEATABLE}
    words = [*head, *(word for part in (*(each for each in given if each[0] not in replaced), *new) for word in part)]
    return shlex.join(words) + "".join(f" | {tail}" for _, bar, tail in _piped(options) if bar)


def with_command(command: str, name: str, *names: str) -> str:
    """Return another command for the same subject, keeping the named options.

    >>> with_command("ampwise compare train:make --batch 8 --compile", "align", "--batch")
    'ampwise align train:make --batch 8'
    """
    (program, _, *rest), *given = _parts(command)
    return shlex.join([program, name, *rest, *(word for part in given if part[0] in names for word in part)])


def _piped(options: Iterable[str]) -> list[tuple[str, str, str]]:
    return [option.partition(" | ") for option in options]


def _parts(command: str) -> list[list[str]]:
    """Split into what precedes the options, if anything, and each option with its values."""
    parts: list[list[str]] = []
    for word in shlex.split(command):
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    return parts
