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
    fixable = [seen for seen in found if seen.finding.rule.fixable and seen.finding.place.line is not None]
    files = dict.fromkeys(seen.finding.place.file for seen in fixable if seen.finding.place.file is not None)
    scripts = _read_scripts(files, folder, since)
    if not scripts:
        return
    from ampwise.check.apply_edits import apply_fixes, unified_diff
    from ampwise.check.linter import CheckTask, check_texts  # not loaded in a run without such findings

    # The linter's fixable findings by these rules, whatever the configuration near the files says.
    texts = {file: script.text for file, script in scripts.items()}
    codes = frozenset(seen.finding.rule.code for seen in fixable)
    task = CheckTask(tuple(texts), dict.fromkeys(texts, codes), texts, wanted=lambda path: codes)
    linted = [finding for finding in check_texts(task).findings if finding.edits]
    for seen, finding in _pairs(fixable, linted, scripts):
        if time.monotonic() > deadline:
            return
        script = scripts[finding.place.file or ""]
        diff = unified_diff(script, apply_fixes(script, [finding], unsafe=True).text)
        # Name the file relative to where the script ran: `patch -p0` applies the diff there.
        before, after, *rest = [*diff.split("\n"), "", ""]
        near = [line.replace(f" {folder}/", " ", 1) for line in (before, after)]
        diff = "\n".join([*near, *rest]).removesuffix("\n\n")
        seen.diff, seen.diff_is_safe = (diff, finding.safe) if len(diff) <= LONGEST_DIFF else ("", True)


def _read_scripts(files: Iterable[str], folder: str, since: float) -> dict[str, SourceScript]:
    """Read the files whose text has not changed since the start and is not too long."""
    found: dict[str, SourceScript] = {}
    left = LARGEST_BYTES
    for file in files:
        with contextlib.suppress(UnreadableFile, OSError):
            path, text = Path(folder, file), ""
            if path.is_file():
                status = path.stat()
                if status.st_mtime <= since and status.st_size <= LARGEST_BYTES:
                    text = decode_source(path.read_bytes(), file)
            else:
                kept = linecache.cache.get(file)
                if kept is not None and len(kept) == 4 and kept[1] is None:  # a cell of a notebook, not on disk
                    text = "".join(linecache.getlines(file))
            if 0 < len(text) <= left:
                found[file] = script_from_text(text, file)
                left -= len(text)
    return found


def _pairs(
    found: Sequence[CountedFinding], linted: Sequence[Finding], scripts: Mapping[str, SourceScript]
) -> Iterator[tuple[CountedFinding, Finding]]:
    """Pair each finding with the linter's of the same rule: on its line, or nearest in its innermost loop or function.

    Each of the linter's findings is used once; findings on the same line are paired first.
    """
    spans: dict[str, list[tuple[int, int]]] = {}  # of loops and functions, by file
    for file, script in scripts.items():
        nodes = [node for node in ast.walk(script.tree) if isinstance(node, SCOPES)]
        spans[file] = [(node.lineno, node.end_lineno or node.lineno) for node in nodes]
    unpaired, left = list(found), list(linted)
    for on_same_line in (True, False):
        for seen in list(unpaired):
            place = seen.finding.place
            line = place.line or 0
            around = [(first, last) for first, last in spans.get(place.file or "", []) if first <= line <= last]
            first, last = min(around, key=lambda span: span[1] - span[0], default=(1, 0))
            near = []
            for each in left:
                at = each.place.line or 0
                is_near = at <= line <= (each.place.end_line or at) if on_same_line else first <= at <= last
                if is_near and (each.rule.code, each.place.file) == (seen.finding.rule.code, place.file):
                    near.append(each)
            if near:
                best = min(near, key=lambda each: abs((each.place.line or 0) - line))
                unpaired.remove(seen)
                left.remove(best)
                yield seen, best
