"""Write a page to a file, without overwriting files that ampwise did not write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ampwise.errors import BadInput
from ampwise.report.page.templates import GENERATOR_MARK

HEAD = 2000  # characters at the start of a file in which ampwise's mark must be


def check_page_path(path: Path, *, force: bool) -> None:
    """Raise if the path is not writable as a page, or is a file that ampwise did not write."""
    if path.is_dir():
        raise BadInput(f"-o {path}: is a folder. Give a file, such as {path / 'page.html'}.")
    if not path.parent.is_dir():
        raise BadInput(f"-o {path}: there is no folder {path.parent}.")
    if not path.is_file() or force:
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD)
        is_ours = not head or GENERATOR_MARK in head  # an empty file holds nothing to lose
    except OSError:
        is_ours = False
    if not is_ours:
        raise BadInput(f"-o {path}: exists and is not an ampwise page. Use -f to overwrite it, or give another.")


def write_page(page: Callable[[], str], path: Path, *, force: bool) -> None:
    """Write the page; the path is checked again, as a file may have appeared since."""
    check_page_path(path, force=force)
    try:
        path.write_text(page(), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"-o {path}: cannot be written: {error.strerror or error}. Give another file.") from error
