"""A page put into a file, which it takes from nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ampwise.errors import BadInput

__all__ = ["check_paper", "write_page"]

HEAD = 2000  # characters of a file in which an earlier page of ours says what it is


def check_paper(paper: Path, option: str, *, force: bool) -> None:
    """Refuse a file that is not an earlier page of ours, before anything is done for it."""
    if paper.is_dir():
        raise BadInput(f"{option} {paper}: a folder; name a file, such as {paper / 'page.html'}.")
    if not paper.parent.is_dir():
        raise BadInput(f"{option} {paper}: there is no folder {paper.parent}.")
    if paper.is_file() and not force and not _is_ours(paper):
        raise BadInput(f"{option} {paper}: exists and is no earlier page of ours; -f writes over it, or name another.")


def write_page(page: Callable[[], str], paper: Path, option: str, *, force: bool) -> None:
    """Checked once more, as it may have appeared meanwhile."""
    check_paper(paper, option, force=force)
    try:
        paper.write_text(page(), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{option} {paper}: cannot be written: {error.strerror or error}. Name another file.") from error


def _is_ours(paper: Path) -> bool:
    from ampwise.report.page.templates import MARK

    try:
        with paper.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return not head or MARK in head  # an empty file holds nothing to lose
