"""Write the pages and pictures of docs/ that are generated from code, records and tests.

    python -m tools.generate_docs            write them
    python -m tools.generate_docs --check    write nothing; exit 1 if a page is out of date

Each page function returns {path under the repository: text}. The pages are the same on every machine and
Python version, so that a difference always means a change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.address import address_pages
from tools.autocast_page import autocast_page
from tools.benchmarks_page import BENCHMARKS_FOLDER, benchmark_pages, pages_with_tables
from tools.claims_page import claims_page
from tools.cli_page import cli_page
from tools.markdown import NOTICE, Pages
from tools.peers_page import peers_page
from tools.pictures import pictures
from tools.rules_page import RULES_FOLDER, rule_pages

from ampwise.errors import BadInput
from ampwise.finding.registry import built_in_rules

__all__ = [
    "NOTICE",
    "address_pages",
    "all_pages",
    "autocast_page",
    "benchmark_pages",
    "claims_page",
    "cli_page",
    "main",
    "pages_with_tables",
    "peers_page",
    "rule_pages",
]

REPOSITORY = Path(__file__).resolve().parent.parent
PEERS_RECORD = "tests/conformance/seen.json"
OURS_ALONE = (RULES_FOLDER, BENCHMARKS_FOLDER)  # other pages of docs/ are written by hand


def main(argv: Sequence[str] | None = None, root: Path = REPOSITORY) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    args = parser.parse_args(argv)
    pages = all_pages(root)
    differences = list(compare(pages, root))
    if args.check:
        for problem, path in differences:
            print(f"{path}: {problem}; run `make docs`", file=sys.stderr)
        return 1 if differences else 0
    update(pages, differences, root)
    return 0


def all_pages(root: Path) -> Pages:
    measured = {**benchmark_pages(root), **pages_with_tables(root), **peers_page(root / PEERS_RECORD)}
    written = {**rule_pages(built_in_rules()), **cli_page(), **autocast_page(root), **claims_page(root)}
    return {**written, **measured, **pictures(root), **address_pages(root)}


def compare(pages: Pages, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the problems of the files on disk, as (problem, path)."""
    for path, text in sorted(pages.items()):
        file = root / path
        if not file.is_file():
            yield "missing", path
        elif file.read_bytes() != text.encode():
            yield "stale", path
    for file in sorted(file for folder in OURS_ALONE for file in (root / folder).glob("*.md")):
        path = file.relative_to(root).as_posix()
        if path not in pages:
            yield "left over", path


def update(pages: Pages, differences: Sequence[tuple[str, str]], root: Path) -> None:
    for problem, path in differences:
        file = root / path
        if problem == "left over":
            file.unlink()
            print(f"removed {path}")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pages[path].encode())  # bytes: the same line ends on Windows
            print(f"wrote {path}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        sys.exit(f"generate_docs: error: {error}")
