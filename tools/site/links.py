"""Sphinx extension: links to files of the repository and to ``<a id>``, as on code hosts.

A file outside docs/ is linked by its path (``../examples/char_gpt.py``), which also works on code hosts. On the site
such a link leads to the page that includes the file, if there is one, else to a page generated from it; JSON schemas
are published as they are. What a page includes, such as README.md, may have HTML for its pictures, and badges, which
are left out, since they come from other sites.
"""

from __future__ import annotations

import html
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from markdown_it.tree import SyntaxTreeNode
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

__all__ = ["FOLDER", "SCHEMAS", "included", "page_of", "without_badges"]

INCLUDED = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
ANCHOR = re.compile(r'^<a id="([^"]+)"></a>$', re.MULTILINE)
FENCE = re.compile(r"(^(?:`{3,}|~{3,}).*?^(?:`{3,}|~{3,})$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"(?:^[ \t]+)?<picture>.*?(<img\b[^>]*>).*?</picture>", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"(?:^[ \t]+)?<img\b[^>]*?>", re.MULTILINE)  # indented, it would be code
WRAPPER = re.compile(r"^[ \t]*</?(?:p|div|center)\b[^>]*>|</?(?:p|div|center)>[ \t]*$|<br ?/?>", re.MULTILINE)
BADGE = re.compile(r"\[!\[[^\]]*\]\(https?:[^)]*\)\]\([^)]*\)|!\[[^\]]*\]\(https?:[^)]*\)")
FOLDER = "files"  # of the site, for pages generated from files
SCHEMAS = "src/ampwise/cli/_schemas"  # in schemas/ of the site

_their_link = SphinxRenderer.render_link_unknown


def setup(app: Sphinx) -> dict[str, Any]:
    SphinxRenderer.render_link_unknown = _link  # type: ignore[method-assign]  # MyST has no hook for links
    app.connect("source-read", _read_anchors)
    app.connect("include-read", _read_included)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("html-collect-pages", _pages)
    app.connect("build-finished", _publish_schemas)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": 1}


@cache
def included(docs: Path) -> dict[Path, Path]:
    """Return the files outside docs/ that pages include, and the page of each."""
    return {
        (page.parent / path).resolve(): page
        for page in sorted(docs.rglob("*.md"))
        for path in INCLUDED.findall(page.read_text(encoding="utf-8"))
    }


def page_of(file: Path, root: Path) -> str:
    """Return the name of the page generated from a file."""
    return f"{FOLDER}/{file.relative_to(root).as_posix()}"


def _read_anchors(_app: Sphinx, _docname: str, source: list[str]) -> None:
    source[0] = ANCHOR.sub(r"(\1)=", source[0])


def _read_included(_app: Sphinx, _path: Path, _docname: str, source: list[str]) -> None:
    source[0] = without_badges(ANCHOR.sub(r"(\1)=", source[0]))


def without_badges(text: str) -> str:
    """Return Markdown with HTML pictures as Markdown ones, and without those of other sites; code stays as it is.

    >>> without_badges('[![ci](https://ci.example/x.svg)](https://ci.example)\\n<p><img src="a.png" alt="A"></p>')
    '\\n![A](a.png)'
    """
    parts = FENCE.split(text)
    for at in range(0, len(parts), 2):
        part = WRAPPER.sub("", PICTURE.sub(r"\1", parts[at]))
        parts[at] = BADGE.sub("", IMAGE.sub(_as_markdown, part))
    return "".join(parts)


def _as_markdown(found: re.Match[str]) -> str:
    source, alt = (re.search(rf"""\b{name}=["']([^"']*)["']""", found[0]) for name in ("src", "alt"))
    return f"![{alt[1] if alt else ''}]({source[1]})" if source else ""


def _link(self: SphinxRenderer, token: SyntaxTreeNode) -> None:
    env = self.sphinx_env
    docs, root = Path(env.srcdir), Path(env.srcdir).parent
    path, _, anchor = unquote(str(token.attrGet("href") or "")).partition("#")
    source = Path(self.document["source"])  # of an included file, its own
    file = (source.parent / path).resolve()
    file = file / "README.md" if (file / "README.md").is_file() else file
    file = included(docs).get(file, file)
    if file.is_dir() and not file.is_relative_to(docs):  # which a code host shows
        self.render_children(token)
        return
    if file.is_relative_to(docs) or not file.is_file():
        here = Path(env.doc2path(env.docname)).parent
        token.attrs["href"] = os.path.relpath(file, here) + (f"#{anchor}" if anchor else "")
        _their_link(self, token)
        return
    if file.parent == root / SCHEMAS:
        address = os.path.relpath(f"schemas/{file.name}", Path(env.docname).parent)
    else:
        _files(env).setdefault(env.docname, set()).add(file)
        address = env.app.builder.get_relative_uri(env.docname, page_of(file, root))
    reference = nodes.reference(refuri=address + (f"#{anchor}" if anchor else ""), internal=True)
    self.add_line_and_source_path(reference, token)
    with self.current_node_context(reference, append=True):
        self.render_children(token)


def _files(env: BuildEnvironment) -> dict[str, set[Path]]:
    """Return the linked files by page."""
    if not hasattr(env, "linked_files"):
        env.linked_files = {}  # type: ignore[attr-defined]
    found: dict[str, set[Path]] = env.linked_files  # type: ignore[attr-defined]
    return found


def _forget(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _files(env).pop(docname, None)


def _merge(_app: Sphinx, env: BuildEnvironment, docnames: Iterable[str], other: BuildEnvironment) -> None:
    _files(env).update((name, files) for name, files in _files(other).items() if name in docnames)


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    root = Path(app.srcdir).parent
    for file in sorted(set().union(*_files(app.env).values())):
        title = file.relative_to(root).as_posix()
        body = f"<h1><code>{html.escape(title)}</code></h1>\n{_highlighted(file)}"
        yield page_of(file, root), {"title": title, "body": body, "parents": []}, "page.html"


def _publish_schemas(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copytree(Path(app.srcdir).parent / SCHEMAS, Path(app.outdir) / "schemas", dirs_exist_ok=True)


def _highlighted(file: Path) -> str:
    """Return the file's text as HTML; its lines are ``#L1``, ``#L2``, as on code hosts."""
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    text = highlight(file.read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True))
    lines = (f'<span id="L{number}">{line}</span>' for number, line in enumerate(text.splitlines(), 1))
    return '<div class="highlight"><pre>' + "\n".join(lines) + "\n</pre></div>"
