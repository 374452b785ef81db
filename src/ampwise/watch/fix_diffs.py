"""Diffs for findings of a run: what the linter would change in the script, where it has the same finding."""

from __future__ import annotations

import ast
import contextlib
import linecache
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ampwise.check.source.script import SourceScript, UnreadableFile, decode_source, script_from_text
from ampwise.finding import Finding
from ampwise.runs.rows import CountedFinding

__all__ = ["add_diffs"]

LARGEST_BYTES = 300_000  # of all files together, which takes the linter up to a second
LONGEST_DIFF = 20_000  # characters
SECONDS = 1.0  # after which the remaining findings get no diff
SCOPES = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)


def add_diffs(found: Sequence[CountedFinding], folder: str, since: float) -> None:
    """Give each finding that the linter can fix a diff that fixes this finding only.

    folder: where the script was started. since: the time of the start; a file written later is not what ran.
    """
    deadline = time.monotonic() + SECONDS
    fixable_findings = [seen for seen in found if seen.finding.rule.fixable and seen.finding.place.line is not None]
    files = dict.fromkeys(seen.finding.place.file for seen in fixable_findings if seen.finding.place.file is not None)
    scripts = _scripts(files, folder, since)
    linted = _linted(scripts, frozenset(seen.finding.rule.code for seen in fixable_findings)) if scripts else []
    for seen, finding in _pairs(fixable_findings, linted, scripts):
        if time.monotonic() > deadline:
            return
        diff = _diff(finding, scripts, folder)
        seen.diff, seen.diff_is_safe = (diff, finding.safe) if len(diff) <= LONGEST_DIFF else ("", True)


def _scripts(files: Iterable[str], folder: str, since: float) -> dict[str, SourceScript]:
    """Read the files whose text has not changed since the start and is not too long."""
    found: dict[str, SourceScript] = {}
    left = LARGEST_BYTES
    for file in files:
        with contextlib.suppress(UnreadableFile, OSError):
            text = _text(file, Path(folder, file), since)
            if 0 < len(text) <= left:
                found[file] = script_from_text(text, file)
                left -= len(text)
    return found


def _text(file: str, path: Path, since: float) -> str:
    if not path.is_file():
        kept = linecache.cache.get(file)
        is_cell = kept is not None and len(kept) == 4 and kept[1] is None  # of a notebook; it is not on disk
        return "".join(linecache.getlines(file)) if is_cell else ""
    status = path.stat()
    is_as_it_ran = status.st_mtime <= since and status.st_size <= LARGEST_BYTES
    return decode_source(path.read_bytes(), file) if is_as_it_ran else ""


def _linted(scripts: Mapping[str, SourceScript], codes: frozenset[str]) -> list[Finding]:
    """Return the linter's fixable findings by these rules, whatever the configuration near the files says."""
    from ampwise.check.linter import CheckTask, check_texts

    texts = {file: script.text for file, script in scripts.items()}
    task = CheckTask(tuple(texts), dict.fromkeys(texts, codes), texts, wanted=lambda path: codes)
    return [finding for finding in check_texts(task).findings if finding.edits]


def _pairs(
    found: Sequence[CountedFinding], linted: Sequence[Finding], scripts: Mapping[str, SourceScript]
) -> Iterator[tuple[CountedFinding, Finding]]:
    """Pair each finding with the linter's of the same rule: on its line, or nearest in its innermost loop or function.

    Each of the linter's findings is used once; findings on the same line are paired first.
    """
    unpaired, left = list(found), list(linted)
    for is_near in (_is_on_line, _Nearby(scripts)):
        for seen in list(unpaired):
            near = [each for each in left if _is_alike(seen.finding, each) and is_near(seen.finding, each)]
            if near:
                line = seen.finding.place.line or 0
                best = min(near, key=lambda each: abs((each.place.line or 0) - line))
                unpaired.remove(seen)
                left.remove(best)
                yield seen, best


def _is_alike(seen: Finding, other: Finding) -> bool:
    return (seen.rule.code, seen.place.file) == (other.rule.code, other.place.file)


def _is_on_line(seen: Finding, other: Finding) -> bool:
    first = other.place.line or 0
    return first <= (seen.place.line or 0) <= (other.place.end_line or first)


class _Nearby:
    """Whether the linter's finding is in the innermost loop or function around the line of the run's finding."""

    def __init__(self, scripts: Mapping[str, SourceScript]) -> None:
        self._scripts = scripts
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def __call__(self, seen: Finding, other: Finding) -> bool:
        line, spans = seen.place.line or 0, self._spans_in(seen.place.file or "")
        around = [(first, last) for first, last in spans if first <= line <= last]
        first, last = min(around, key=lambda span: span[1] - span[0], default=(1, 0))
        return first <= (other.place.line or 0) <= last

    def _spans_in(self, file: str) -> list[tuple[int, int]]:
        if file not in self._spans:
            nodes = [node for node in ast.walk(self._scripts[file].tree) if isinstance(node, SCOPES)]
            self._spans[file] = [(node.lineno, node.end_lineno or node.lineno) for node in nodes]
        return self._spans[file]


def _diff(finding: Finding, scripts: Mapping[str, SourceScript], folder: str) -> str:
    """Return the diff with its file named relative to where the script ran: `patch -p0` applies it there."""
    from ampwise.check.apply_edits import apply_fixes, unified_diff

    script = scripts[finding.place.file or ""]
    before, after, *rest = [*unified_diff(script, apply_fixes(script, [finding], unsafe=True).text).split("\n"), "", ""]
    near = [line.replace(f" {folder}/", " ", 1) for line in (before, after)]
    return "\n".join([*near, *rest]).removesuffix("\n\n")
