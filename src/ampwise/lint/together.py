"""Rules whose words stand in two files: the clip in the one, the scaled backward in the other that imports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ampwise.rules import Listed, with_words_in
from ampwise.source.project import Project
from ampwise.source.script import Unreadable, read_bytes

__all__ = ["rules_together"]

IN_HALF = (b"autocast(", b"GradScaler", b"scaler.s")  # scaler.scale(loss), scaler.step(optimizer)


def rules_together(
    trainers: Iterable[str], files: Sequence[str], rules: Sequence[Listed]
) -> Iterator[tuple[str, frozenset[str]]]:
    """For each file that makes gradients, and those it imports: the rules that have all their words in them together."""
    project = Project(files)
    for path in trainers:
        imported = project.imported_by(path)
        if imported:
            own = {other: _bytes(other) for other in (path, *imported)}
            together = with_words_in(b"\n".join(own.values()), rules)
            for other, data in own.items():
                yield other, frozenset(rule.code for rule in together if _has_a_part(rule, data))


def _has_a_part(rule: Listed, data: bytes) -> bool:
    """Whether a file has some of the words itself: without any there is nothing in it to point at."""
    return any(word.encode() in data for words in rule.needs for word in words)


def _bytes(path: str) -> bytes:
    try:
        return read_bytes(path)
    except Unreadable:
        return b""
