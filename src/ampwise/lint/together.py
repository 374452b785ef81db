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
    """For each file that makes gradients, and those it imports: the codes of the rules that have words in them all."""
    project = Project(files)
    for path in trainers:
        together = [path, *project.imported_by(path)]
        if len(together) > 1:
            data = b"\n".join(_bytes(other) for other in together)
            if not any(word in data for word in IN_HALF):
                continue
            codes = frozenset(rule.code for rule in with_words_in(data, rules))
            yield from ((other, codes) for other in together)


def _bytes(path: str) -> bytes:
    try:
        return read_bytes(path)
    except Unreadable:
        return b""
