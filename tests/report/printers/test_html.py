"""Pieces of HTML for notebooks."""

import re

from ampwise.finding import Place, Rule, Severity
from ampwise.finding.html import badge, code, facts_html, finding_html, prose, source, table, text

from ...for_each import for_each

HOSTILE = "<script>\x1b[2J\u202e'\"&\udc80"
RULE = Rule(
    code="AMP998",
    name="made-up",
    severity=Severity.WARNING,
    summary="s",
    why="w",
    fix="Call `this()`:\n    this()",
    bad="b",
    good="g",
)


@for_each(
    "make",
    [
        text,
        prose,
        code,
        badge,
        lambda words: badge("x", words),
        lambda words: source({3: words}, 3),
        lambda words: table([words], [[text(words)]]),
        lambda words: facts_html(words, {words: words}, mood=words, note=words),
        lambda words: finding_html(RULE.at(Place(file=words, parameter=words), words, fix=words), details=[words]),
        lambda words: RULE.at(Place(file=words, line=3), words)._repr_html_(),
    ],
)
def test_nothing_hostile_comes_through(make):
    markup = make(HOSTILE)
    assert "<script" not in markup
    assert not re.search("[\x00-\x1f\u202e\udc80]", markup)
    assert HOSTILE[-4:] not in markup  # quotes that would end an attribute


def test_a_finding_shows_itself():
    markup = RULE.at(Place(file="train.py", line=3), "`loss` is <b>odd</b>")._repr_html_()
    for told in ("warning AMP998", "made-up", "train.py:3", ">loss</code> is &lt;b&gt;odd", "Fix:"):
        assert told in markup
    # The fix keeps its lines, and what is code in it looks like code.
    assert re.search(r'<br><code style="[^"]*monospace[^"]*white-space:pre[^"]*">    this\(\)</code>', markup)
    assert "<pre" not in markup  # no lines are known


def test_no_colour_of_text_is_set():
    """A notebook's own is readable on its own ground, in the light and in the dark."""
    finding = RULE.at(Place(file="train.py", line=3), "m")
    for markup in (
        finding_html(finding, lines={2: "a", 3: "b"}),
        facts_html("Step 1", {"loss": 2}, mood="ok", note="n"),
    ):
        styles = re.findall('style="([^"]*)"', markup)
        assert styles
        names = [part.split(":")[0] for style in styles for part in style.split(";")]
        assert "color" not in names
        solid = [style for style in styles if re.search("background:#[0-9a-f]{6}(;|$)", style)]
        assert not solid


def test_the_line_that_is_meant_is_marked():
    rows = re.findall('<span style="display:block([^"]*)">', source({9: "a()", 10: "\tb()", 11: "c()"}, 10))
    assert [bool(style) for style in rows] == [False, True, False]
    assert "</span>    b()</span>" in source({10: "\tb()"})
    assert source({}) == ""


def test_tables_align_numbers_to_the_right():
    markup = table(("name", "before", "after", ""), [["a", "1", "2", "better"], ["b", "3", "4", ""]])
    assert re.findall('<td style="text-align:(left|right)', markup) == ["left", "right", "right", "left"] * 2
    assert "<thead" not in table((), [["a", "b"]])
