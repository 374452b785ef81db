"""Rules whose words stand in two files: the clip in the one, the scaled backward in the other that imports it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from ampwise.rules import Listed
from ampwise.source.project import Project
from ampwise.source.script import Unreadable, read_bytes

__all__ = ["rules_together"]

# What a training script says for the files it imports; all else a rule must find in the file itself.
SAID_BY_TRAINERS = frozenset((".backward(", ".step(", "caler", "GradScaler", "unscale_", "autocast", "float16"))


def rules_together(
    trainers: Iterable[str], files: Sequence[str], rules: Sequence[Listed]
) -> Iterator[tuple[str, frozenset[str]]]:
    """The files that training scripts import, and the rules that may find something there because of that."""
    project = Project(files)
    words = {word for rule in rules for tuples in rule.needs for word in tuples}

    @functools.cache
    def words_in(path: str) -> set[str]:
        data = _bytes(path)
        return {word for word in words if word.encode() in data}

    for path in trainers:
        for other in project.imported_by(path):
            yield other, frozenset(rule.code for rule in rules if _may_find(rule, words_in(other), words_in(path)))


def _may_find(rule: Listed, own: set[str], training: set[str]) -> bool:
    """Whether a file has the words of a rule, but for those that its importer may have instead."""
    lacking = [words for words in rule.needs if own.isdisjoint(words)]
    return len(lacking) < len(rule.needs) and all(
        not SAID_BY_TRAINERS.isdisjoint(words) and not training.isdisjoint(words) for words in lacking
    )


def _bytes(path: str) -> bytes:
    try:
        return read_bytes(path)
    except Unreadable:
        return b""
