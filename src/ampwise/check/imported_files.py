"""Rules whose words are spread over two files: a clip in one, the scaled backward in another that imports it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from ampwise.check.source.project import Project
from ampwise.check.source.script import UnreadableFile, read_bytes

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["rules_for_imported_files"]

# Words that may be in the importing script instead; all other words of a rule must be in the file itself.
IN_IMPORTER = frozenset((".backward(", ".step(", "caler", "GradScaler", "unscale_", "autocast", "float16"))


def rules_for_imported_files(
    trainers: Iterable[str], files: Sequence[str], rules: Sequence[ModuleType]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the files that training scripts import, and the rules that may find something in them for that reason."""
    project = Project(files)
    words = {word for rule in rules for tuples in _needs(rule) for word in tuples}

    @functools.cache
    def words_in(path: str) -> set[str]:
        data = _bytes(path)
        return {word for word in words if word.encode() in data}

    for path in trainers:
        for other in project.imported_by(path):
            yield other, frozenset(rule.RULE.code for rule in rules if _may_find(rule, words_in(other), words_in(path)))


def _needs(rule: ModuleType) -> Sequence[Sequence[str]]:
    needs: Sequence[Sequence[str]] = getattr(rule, "NEEDS", ())
    return needs


def _may_find(rule: ModuleType, own: set[str], training: set[str]) -> bool:
    """Whether a file has the words of a rule, except those that its importer may have instead."""
    needs = _needs(rule)
    lacking = [words for words in needs if own.isdisjoint(words)]
    return len(lacking) < len(needs) and all(
        not IN_IMPORTER.isdisjoint(words) and not training.isdisjoint(words) for words in lacking
    )


def _bytes(path: str) -> bytes:
    try:
        return read_bytes(path)
    except UnreadableFile:
        return b""
