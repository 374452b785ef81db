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
    every_word = {word for groups in needs.values() for words in groups for word in words}

    @functools.cache
    def words_in(path: str) -> set[str]:
        try:
            data = read_bytes(path)
        except UnreadableFile:
            return set()
        return {word for word in every_word if word.encode() in data}

    for path in trainers:
        for other in project.imported_by(path):
            own, training = words_in(other), words_in(path)
            codes = set()
            for code, groups in needs.items():
                lacking = [words for words in groups if own.isdisjoint(words)]
                elsewhere = [words for words in lacking if not IN_IMPORTER.isdisjoint(words)]
                found = [words for words in elsewhere if not training.isdisjoint(words)]
                if len(lacking) < len(groups) and len(found) == len(lacking):
                    codes.add(code)
            yield other, frozenset(codes)
