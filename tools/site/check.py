"""Check the built site: every link has a target, and nothing is fetched from other sites.

python -m tools.site.check build/site    exit 1, with the problems of each page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

__all__ = ["Page", "main", "problems", "read"]

# Attributes whose value a browser fetches automatically, by tag.
FETCHED = {
    "audio": {"src"},
    "embed": {"src"},
    "iframe": {"src"},
    "image": {"href", "xlink:href"},
    "img": {"src", "srcset"},
    "link": {"href"},
    "object": {"data"},
    "script": {"src"},
    "source": {"src", "srcset"},
    "use": {"href", "xlink:href"},
    "video": {"src", "poster"},
}


@dataclass(frozen=True, slots=True)
class Page:
    """Ids, links and fetched resources of a page."""

    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.page.ids.add(value)
            elif name in FETCHED.get(tag, ()):
                self.page.fetched.add(value)
            elif tag == "a" and name == "href":
                self.page.links.add(value)


def read(text: str) -> Page:
    reader = _Reader()
    reader.feed(text)
    return reader.page


def problems(site: Path) -> Iterator[str]:
    pages = {file.relative_to(site).as_posix(): read(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    for name, page in sorted(pages.items()):
        for address in sorted(page.fetched):
            if _is_elsewhere(address):
                yield f"{name}: fetches {address}"
        for address in sorted(page.links | page.fetched):
            if not _is_elsewhere(address) and (wrong := _broken(address, name, pages, site)):
                yield f"{name}: {address}: {wrong}"


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in {"http", "https", "mailto"}


def _broken(address: str, name: str, pages: Mapping[str, Page], site: Path) -> str | None:
    if address.startswith("data:") or address == "#":
        return None
    parts = urlsplit(urljoin(name, address))
    target, anchor = unquote(parts.path) or name, unquote(parts.fragment)
    if target not in pages:
        return None if (site / target).is_file() else "no such page"
    return f"no such place on {target}" if anchor and anchor not in pages[target].ids else None


def main(argv: list[str]) -> int:
    found = list(problems(Path(argv[0])))
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
