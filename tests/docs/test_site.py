"""The site's sources: every page is found, every name documented once, every link leads somewhere, nothing is fetched.

The site itself is built by `make site`, with warnings as errors, and its links are looked at again there.
"""

import ast
import re
from pathlib import Path, PurePosixPath

import pytest

import ampwise

pytest.importorskip("sphinx")

from tools.site.links import SCHEMAS, included, without_badges
from tools.site.sidebar import is_a_rule

from ..for_each import for_each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
FETCHED = re.compile(
    r"""!\[[^]]*\]\(\s*https?:|\b(?:src|srcset|poster)\s*=\s*["'](?:https?:)?//|<link\b""", re.IGNORECASE
)


def docname(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


@for_each("name", ["search", "genindex", "py-modindex"])
def test_no_page_has_the_name_of_one_that_sphinx_makes(name):
    """It would be written over, and every link to it would still lead somewhere."""
    assert name not in map(docname, PAGES)


def contents(page):
    """The names of the pages in a page's lists of contents."""
    here = PurePosixPath(docname(page)).parent
    for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
        for line in filter(None, map(str.strip, block.splitlines())):
            if not line.startswith(":"):
                name = (here / re.sub(r".*<(.*)>$", r"\1", line)).as_posix()
                yield from (docname(file) for file in DOCS.glob(f"{name}.md")) if "*" in name else [name]


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def test_every_page_is_in_the_contents_once():
    found, waiting = ["index"], ["index"]
    while waiting:
        page = DOCS / f"{waiting.pop()}.md"
        new = list(contents(page)) if page.is_file() else []
        found, waiting = found + new, waiting + new
    lesson = [docname(page) for page in DOCS.glob("lesson/*.py")]
    assert sorted(found) == sorted([*(docname(page) for page in PAGES if not is_a_rule(docname(page))), *lesson])


def test_the_list_of_rules_has_those_that_the_sidebar_has_not():
    listed = set(LINK.findall((DOCS / "rules" / "index.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in PAGES if is_a_rule(docname(page))}


def names_of(module):
    """A module's ``__all__``, without loading the framework that it is for."""
    found = re.search(
        r"^__all__ = (\[.*\])$", (ROOT / "src/ampwise/integrations" / f"{module}.py").read_text(), re.MULTILINE
    )
    return ast.literal_eval(found[1])


def test_every_public_name_is_documented_once():
    texts = [page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md")]
    directives = [
        name for text in texts for name in re.findall(r"^\.\. auto(?!summary)\w+:: ([\w.]+)", text, re.MULTILINE)
    ]
    listed = re.findall(r"^   ~([\w.]+)$", (DOCS / "reference" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(directives) == len({*directives})
    assert sorted(directives) == sorted(listed)
    frameworks = [
        f"ampwise.integrations.{module}.{name}" for module in ampwise._FRAMEWORKS for name in names_of(module)
    ]
    assert {*(f"ampwise.{name}" for name in ampwise.__all__), *frameworks} <= {*directives}


def written():
    return [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]


def test_links_lead_to_files_and_nothing_is_fetched():
    pages = written()
    assert len(pages) > 200
    for page in pages:
        text = page.read_text(encoding="utf-8")
        addresses = (link.partition("#")[0] for link in LINK.findall(without_code(text)))
        gone = [to for to in addresses if to and not re.match(r"\w+:", to) and not (page.parent / to).exists()]
        assert not gone, page
        assert not FETCHED.search(without_code(without_badges(text))), f"{page} is read offline and fetches something"


def test_what_is_included_is_there():
    files = included(DOCS)
    assert {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"} <= {*files}
    assert files[ROOT / "README.md"] == DOCS / "index.md", "the landing page"
    assert all(file.is_file() for file in files)


def test_every_schema_is_published():
    listed = LINK.findall((DOCS / "schemas.md").read_text(encoding="utf-8"))
    schemas = {f"../{SCHEMAS}/{file.name}" for file in (ROOT / SCHEMAS).iterdir()}
    assert {link for link in listed if not link.startswith("https:")} == schemas


def test_the_looks_come_from_here():
    styles = "".join(file.read_text(encoding="utf-8") for file in DOCS.glob("_static/*.css"))
    assert not re.search(r"@import|url\(|https?:", styles)
    configuration = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert "http" not in configuration
    assert 'html_math_renderer = "mathml"' in configuration, "others fetch a script"
    assert "nb_ipywidgets_js: dict[str, dict[str, str]] = {}" in configuration, "its default fetches scripts"
