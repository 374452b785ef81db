"""`ampwise explain`: a rule in a screenful."""

import json
import re

import pytest

from ampwise.cli import explain, main
from ampwise.cli.explain import page
from ampwise.finding import Rule, Severity
from ampwise.rules import all_rules, find_rule

RULE = Rule(
    code="AMP101",
    name="clip-scaled-grads",
    severity=Severity.ERROR,
    summary="Gradients are clipped while still scaled",
    why="The threshold is 65536 times too small. " * 4,
    fix="Call scaler.unscale_(optimizer) first.",
    bad="""
        for x in data:
            clip_grad_norm_(parameters, 1.0)
    """,
    good="$ ampwise rules [red]",
    on_by_default=False,
    url="https://example.org/AMP101",
)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_the_page():
    assert page(RULE) == (
        "AMP101 clip-scaled-grads (error, off by default)\n"
        "Gradients are clipped while still scaled\n"
        "\n"
        "Why\n"
        "  The threshold is 65536 times too small. The threshold is 65536 times too\n"
        "  small. The threshold is 65536 times too small. The threshold is 65536 times\n"
        "  too small.\n"
        "\n"
        "Fix\n"
        "  Call scaler.unscale_(optimizer) first.\n"
        "\n"
        "Bad\n"
        "  for x in data:\n"
        "      clip_grad_norm_(parameters, 1.0)\n"
        "\n"
        "Good\n"
        "  $ ampwise rules [red]\n"
        "\n"
        "More\n"
        "  https://example.org/AMP101\n"
    )


@pytest.mark.parametrize(
    ("fixable", "lines"),
    [
        ("", []),
        ("always", ["  Fixed by `ampwise check --fix`."]),
        ("sometimes", ["  Sometimes fixed by `ampwise check --fix`."]),
    ],
)
def test_the_page_says_whether_it_can_be_mended(fixable, lines):
    text = page(RULE.but(fixable=fixable)).splitlines()
    start = text.index("Fix") + 2
    assert text[start : start + len(lines) + 1] == [*lines, ""]


def test_colour_changes_only_the_colour():
    coloured = page(RULE, colour=True)
    assert coloured != page(RULE)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == page(RULE)


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_every_rule_is_explained_by_code_and_by_name(rule, capsys):
    assert main(["explain", rule.code.lower()]) == 0
    by_code = capsys.readouterr().out
    assert main(["explain", rule.name]) == 0
    assert capsys.readouterr().out == by_code
    assert by_code.startswith(f"{rule.code} {rule.name} ({rule.severity}")


def test_json(capsys):
    rule = all_rules()[0]
    assert main(["explain", rule.code, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rule.as_dict()


def test_an_unknown_rule_is_one_line_and_exit_2(capsys):
    name = all_rules()[0].name
    assert main(["explain", name + "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ampwise: error: unknown rule '{name}x'. Did you mean {name}")
    assert err.count("\n") == 1


def test_the_examples_in_the_help_exist():
    named = re.findall(r"ampwise explain (\S+)", explain.__doc__)
    assert named
    assert all(find_rule(name) for name in named)


@pytest.mark.parametrize("columns", ["1", "2", "40"])
def test_no_terminal_is_too_narrow(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["explain", "AMP701"]) == 0
    assert "AMP701" in capsys.readouterr().out
