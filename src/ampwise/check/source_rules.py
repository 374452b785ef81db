"""The rules that check source code, and which of them can find something in a file."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from ampwise.check.source.script import UnreadableFile, read_bytes

# Words that may be in the importing script instead; all other words of a rule must be in the file itself.
IN_IMPORTER = frozenset((".backward(", ".step(", "caler", "GradScaler", "unscale_", "unscale_(", "autocast", "float16"))


def matching_rules(data: bytes, rules: Iterable[ModuleType]) -> list[ModuleType]:
    """Return those of ``rules`` that can find something in a file with these bytes, judging by its words.

    ``NEEDS`` of a rule lists groups of words; the file must contain at least one word of each group.
    """
    present: dict[str, bool] = {}  # many rules need the same word
    found = []
    for rule in rules:
        for words in getattr(rule, "NEEDS", ()):
            for word in words:
                if word not in present:
                    present[word] = word.encode() in data
                if present[word]:
                    break
            else:
                break  # the file has no word of this group
        else:
            found.append(rule)
    return found


def rules_for_imported_files(
    trainers: Iterable[str], files: Sequence[str], rules: Sequence[ModuleType]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the files that training scripts import, and the rules that may find something in them for that reason.

    The words of such a rule are spread over two files: a clip in one, the scaled backward in the other.
    """
    from ampwise.check.source.project import Project

    project = Project(files)
    needs = {rule.RULE.code: getattr(rule, "NEEDS", ()) for rule in rules}

    @functools.cache
    def read(path: str) -> bytes:
        try:
            return read_bytes(path)
        except UnreadableFile:
            return b""

    @functools.cache
    def has_one(path: str, words: tuple[str, ...]) -> bool:
        return any(word.encode() in read(path) for word in words)

    for path in trainers:
        for other in project.imported_by(path):
            codes = set()
            for code, groups in needs.items():
                lacking = [words for words in groups if not has_one(other, words)]
                if len(lacking) < len(groups) and not any(map(IN_IMPORTER.isdisjoint, lacking)):
                    codes.update([code] if all(has_one(path, words) for words in lacking) else [])
            yield other, frozenset(codes)
