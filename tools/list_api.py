"""Write tests/api.txt, the listing of the public API. A test compares it with the code.

    python -m tools.list_api            update it after an intended change; docs/upgrading.md says what breaks users
    python -m tools.list_api --check    write nothing; show the differences, and exit 1 if there are any

It lists the names of ampwise and of its modules for frameworks, and what their functions return; the commands with
their options; the versions of files written to disk; the package's requirements. Except for the commands, it is read
from the source without importing it, so that it is the same with every Python and torch, and needs no framework.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.api.classes import described
from tools.api.commands import command_lines
from tools.api.forms import form_lines
from tools.api.package import package_lines
from tools.api.source import Definition, Source

__all__ = ["difference", "listing", "main"]

REPOSITORY = Path(__file__).resolve().parent.parent
LISTING = "tests/api.txt"
FRAMEWORKS = ("accelerate", "lightning", "transformers")
HEADING = "# What may be relied on. Written by `python -m tools.list_api`; docs/upgrading.md says what may change when."
HINT = (
    "If that is meant: `python -m tools.list_api`, and a line in CHANGELOG.md; docs/upgrading.md says what breaks whom."
)


def main(argv: Sequence[str] | None = None, root: Path = REPOSITORY) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something differs")
    args = parser.parse_args(argv)
    if not args.check:
        (root / LISTING).write_text(listing(root), encoding="utf-8")
        return 0
    differs = difference(root)
    sys.stderr.write(differs)
    return 1 if differs else 0


def difference(root: Path = REPOSITORY) -> str:
    """Return a diff from the listing to the code, and what to do about it; "" if there is none."""
    path = root / LISTING
    listed = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(
        listed.splitlines(), listing(root).splitlines(), f"listed in {LISTING}", "in the code", n=1, lineterm=""
    )
    text = "\n".join(lines)
    return f"The public API is not the one that is listed.\n{text}\n{HINT}\n" if text else ""


def listing(root: Path = REPOSITORY) -> str:
    """Return the whole listing."""
    source = Source(root / "src")
    sections = {
        "Names": _names(source),
        "What they return": _returned(source),
        "Commands": command_lines(),
        "Forms on disk and in JSON": form_lines(source, root / "src/ampwise/cli/_schemas"),
        "The package": package_lines(root / "pyproject.toml", source),
    }
    parts = [HEADING, *("\n".join([f"\n## {title}\n", *lines]) for title, lines in sections.items())]
    return "\n".join(parts) + "\n"


def _public(source: Source) -> list[tuple[str, Definition]]:
    modules = ("ampwise", *(f"ampwise.integrations.{name}" for name in FRAMEWORKS))
    return [(f"{module}.{name}", source.find(module, name)) for module in modules for name in source.exports(module)]


def _names(source: Source) -> Iterator[str]:
    for path, definition in _public(source):
        yield from described(source, definition, path)


def _returned(source: Source) -> Iterator[str]:
    """Yield the classes without a public name that public functions, methods and properties return, recursively."""
    pending = [definition for _, definition in _public(source)]
    seen = set(pending)
    found = []
    while pending:
        for given in source.given_by(pending.pop()):
            if given not in seen:
                seen.add(given)
                found.append(given)
                pending.append(given)
    for definition in sorted(found, key=lambda each: (each.module, each.name)):
        yield from described(source, definition, f"{definition.module}.{definition.name}", constructed=False)


if __name__ == "__main__":
    sys.exit(main())
