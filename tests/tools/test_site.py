"""What the site is made with: formulas as MathML, files as pages, one sidebar; and its check."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx")

from docutils import nodes
from tools.site import check, links, mathml, sidebar

from ..for_each import for_each


class Body:
    def __init__(self):
        self.body = []


@pytest.mark.parametrize(("draw", "display"), [(mathml._inline, False), (mathml._block, True)])
def test_formulas_need_no_script(draw, display):
    page = Body()
    with pytest.raises(nodes.SkipNode):
        draw(page, nodes.math("", r"2^{-24} \le x"))
    (drawn,) = page.body
    assert "<math" in drawn
    assert "<script" not in drawn
    assert ('display="block"' in drawn) is display


def test_a_file_is_a_page_with_the_lines_of_a_code_host(tmp_path):
    (tmp_path / "a.py").write_text("x = 1 < 2\n\nprint(x)\n")
    shown = links._highlighted(tmp_path / "a.py")
    assert '<span id="L1">' in shown
    assert '<span id="L3">' in shown
    assert "&lt;" in shown
    assert links.page_of(tmp_path / "a.py", tmp_path) == "files/a.py"
    (tmp_path / "LICENSE").write_text("Some & words")
    assert "Some &amp; words" in links._highlighted(tmp_path / "LICENSE")


def test_anchors_of_code_hosts_are_targets():
    source = ['<a id="a-case"></a>\n\n### A case\n']
    links._read_anchors(None, "peers", source)
    assert source == ["(a-case)=\n\n### A case\n"]


@for_each(
    ("written", "read"),
    [
        ("[![ci](https://ci.example/x.svg)](https://ci.example) words", " words"),
        ("![alone](http://ci.example/x.svg)", ""),
        ('<p align="center">\n    <img alt="A b" width="600" src="docs/a.png">\n</p>', "\n![A b](docs/a.png)\n"),
        ("<picture><source srcset='dark.svg'><img src='light.svg'></picture>", "![](light.svg)"),
        ('<img src="https://ci.example/x.svg" alt="x">', ""),
        ("![one](docs/a.png) and [two](docs/run.md)", "![one](docs/a.png) and [two](docs/run.md)"),
        ('```html\n<img src="https://a/b">\n```\n', '```html\n<img src="https://a/b">\n```\n'),
    ],
)
def test_pictures_of_what_is_included(written, read):
    assert links.without_badges(written) == read


def test_schemas_are_published_as_they_are(tmp_path):
    folder = tmp_path / links.SCHEMAS
    folder.mkdir(parents=True)
    (folder / "check.json").write_text("{}")
    app = SimpleNamespace(srcdir=tmp_path / "docs", outdir=tmp_path / "site")
    links._publish_schemas(app, None)
    assert (tmp_path / "site" / "schemas" / "check.json").read_text() == "{}"


def test_rules_and_files_of_a_folder_share_a_sidebar():
    made = []

    def toctree(**options):
        made.append(options)
        return f"<ul>{len(made)}</ul>"

    names = [
        "rules/AMP101-a",
        "rules/AMP102-b",
        "rules/index",
        "rules/index",
        "files/a/b.py",
        "files/a/c.py",
        "files/d.py",
    ]
    shown = []
    for name in names:
        context = {"toctree": toctree}
        sidebar._share(None, name, "page.html", context, None)
        shown.append(context["toctree"](depth=2))
    assert shown == [f"<ul>{number}</ul>" for number in (1, 1, 2, 3, 4, 4, 5)]


def site(folder, **pages):
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def test_a_site_that_holds_together_passes(tmp_path, capsys):
    (tmp_path / "look.css").touch()
    site(
        tmp_path,
        index='<link href="look.css"><a href="other.html#there">x</a><a href="https://pytorch.org">y</a>',
        other='<h2 id="there">t</h2><a href="#">z</a><img src="data:image/png;base64,x#y"><a href="mailto:a@b.c">m</a>',
    )
    assert check.main([str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="gone.html">x</a>', "index.html: gone.html: no such page"),
        ('<a href="#gone">x</a>', "index.html: #gone: no such place on index.html"),
        ('<a href="index.html#gone">x</a>', "index.html: index.html#gone: no such place on index.html"),
        ('<img src="gone.png">', "index.html: gone.png: no such page"),
        ('<script src="https://cdn.example/x.js"></script>', "index.html: fetches https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "index.html: fetches //fonts.example/x.css"),
    ],
)
def test_what_is_broken_or_fetched_is_named(tmp_path, capsys, body, problem):
    assert check.main([str(site(tmp_path, index=body))]) == 1
    assert capsys.readouterr().err.splitlines() == [problem]


def test_the_check_is_a_program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check", str(site(tmp_path, index=""))])
    assert check.main(sys.argv[1:]) == 0
