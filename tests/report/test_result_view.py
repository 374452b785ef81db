"""Results are shown alike on a terminal, by print() and in notebooks."""

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.report.result_view import Headline, Line, ResultTable, ShownResult, print_result

EVIL = "<b>[red]\x1b[2J"


class Result(ShownResult):
    def _parts(self):
        yield Headline("use bf16", "speed", "ok")
        yield Line(EVIL, "dim")
        table = {"headings": ("row", "x", "verdict"), "left": (0, 2), "names": (0,)}
        yield ResultTable(**table, rows=[("fp32", "1", ""), (EVIL, "2.5", "use")], styles=("bold", "green"), more=3)
        yield find_rule("AMP101").at(Place(file="train.py", line=3), "too soon", fix="call it later")
        yield Line("the end")


def test_tables_and_findings_stand_apart_and_nothing_is_markup(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert str(Result()).splitlines() == [
        "use bf16",
        r"<b>[red]\x1b[2J",
        "",
        "row                x  verdict",
        "fp32               1",
        r"<b>[red]\x1b[2J  2.5  use",
        "… and 3 more",
        "",
        "AMP101 clip-scaled-grads: too soon",
        "  fix: call it later",
        "",
        "the end",
    ]
    print_result(Result())
    assert capsys.readouterr().out == f"{Result()}\n"


def test_a_notebook_gets_the_same_in_html():
    shown = Result()._repr_html_()
    for part in ("use bf16", "<b>fp32</b>", "2.5", "… and 3 more", "AMP101", "train.py:3", "call it later", "the end"):
        assert part in shown
    assert shown.count(r"&lt;b&gt;[red]\x1b[2J") == 2
    assert "<b>[red]" not in shown
