"""`ampwise explain`: a rule in a screenful, all of them, or those that mention a word."""

import json
import re

import pytest

from ampwise.cli import explain, main
from ampwise.cli.explain import page, search, table
from ampwise.finding import Rule, Severity
from ampwise.finding.registry import all_rules, find_rule, found_by

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
    good="$ ampwise explain [red]",
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
        "Fix\n"
        "  Call scaler.unscale_(optimizer) first.\n"
        "\n"
        "Example\n"
        "  - for x in data:\n"
        "  -     clip_grad_norm_(parameters, 1.0)\n"
        "  + $ ampwise explain [red]\n"
        "\n"
        "Why\n"
        "  The threshold is 65536 times too small. The threshold is 65536 times too\n"
        "  small. The threshold is 65536 times too small. The threshold is 65536 times\n"
        "  too small.\n"
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
def test_the_page_says_whether_it_can_be_fixed(fixable, lines):
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
    assert by_code.startswith(f"{rule.code} {rule.name} ({rule.severity.word}")
    assert by_code.count("\n") <= 30, "one screen"


def test_json(capsys):
    rule = all_rules()[0]
    assert main(["explain", rule.code, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{**rule.as_dict(), "found_by": ["ampwise check", "ampwise run"]}]


def test_an_unknown_rule_is_one_line_and_exit_2(capsys):
    name = all_rules()[0].name
    assert main(["explain", name + "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ampwise: error: unknown rule '{name}x'. Did you mean {name}")
    assert err.count("\n") == 1


def test_a_removed_rule_says_what_replaced_it(capsys):
    assert main(["explain", "AMP802"]) == 2
    err = capsys.readouterr().err
    assert err == "ampwise: error: unknown rule 'AMP802'. AMP802 became a log event of the guard, `step-skipped`.\n"


def test_the_examples_in_the_help_exist():
    named = re.findall(r"ampwise explain (\S+)", explain.__doc__)
    assert named == ["AMP101", "clip-scaled-grads", "clip", "AMP101"]
    assert find_rule("AMP101") is find_rule("clip-scaled-grads")


@pytest.mark.parametrize("columns", ["1", "2", "40"])
def test_no_terminal_is_too_narrow(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["explain", "AMP701"]) == 0
    assert "AMP701" in capsys.readouterr().out


def test_the_page_says_which_commands_find_it(capsys):
    assert main(["explain", "AMP101"]) == 0
    assert "\nFound by\n  ampwise check, ampwise run" in capsys.readouterr().out


# All rules


def rule(code, name, **more):
    return RULE.but(code=code, name=name, summary=f"About {name}", severity=Severity.WARNING, **more)


LISTED = [
    rule("AMP101", "clip-scaled-grads", on_by_default=True),
    rule("AMP901", "old"),
    rule("AMP102", "twice", fixable="always", on_by_default=True),
    rule("AMP103", "thrice", fixable="sometimes", on_by_default=True),
]


def test_the_table():
    assert table(LISTED) == (
        "Order of the step: scale, backward, unscale, clip, step, update.\n"
        "  AMP101  clip-scaled-grads  warning       About clip-scaled-grads\n"
        "  AMP102  twice              warning  [*]  About twice\n"
        "  AMP103  thrice             warning  [-]  About thrice\n"
        "\n"
        "Origin of a NaN or infinity, found by replaying the step.\n"
        "  AMP901  old                warning       About old (off by default)\n"
        "\n"
        "4 rules; `ampwise explain CODE` explains one.\n"
        "[*] is fixed by `ampwise check --fix`, [-] sometimes.\n"
    )


def test_on_a_narrow_terminal_the_summary_has_its_own_line():
    rules = [LISTED[0], rule("AMP102", "twice-" + "x" * 40, on_by_default=True)]
    assert table(rules, width=90).splitlines()[1:5] == [
        "  AMP101  clip-scaled-grads                               warning",
        "          About clip-scaled-grads",
        f"  AMP102  twice-{'x' * 40}  warning",
        f"          About twice-{'x' * 40}",
    ]
    assert table(rules, width=200) == table(rules)


def test_a_rule_is_one_line_for_grep_and_fits_a_terminal():
    assert all(rule.summary in table(all_rules()) for rule in all_rules())
    assert max(map(len, table(all_rules(), width=80).splitlines())) <= 80


def test_without_an_argument_every_rule_is_listed(capsys):
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert all(rule.code in out and rule.name in out for rule in all_rules())
    assert main(["explain", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == [{**rule.as_dict(), "found_by": found_by(rule)} for rule in all_rules()]


def test_a_word_finds_the_rules_that_mention_it(capsys):
    assert main(["explain", "unscale"]) == 0
    out = capsys.readouterr().out
    assert "AMP101  clip-scaled-grads" in out, "its summary has the word"
    assert "AMP103  unscale-twice" in out
    assert "AMP901" not in out
    assert main(["explain", "unscale", "--json"]) == 0
    assert "AMP103" in [found["code"] for found in json.loads(capsys.readouterr().out)]


def test_a_word_that_only_one_rule_has_explains_it(capsys):
    assert main(["explain", "twice one backward"]) == 0
    assert capsys.readouterr().out.startswith("AMP110 double-step")


def test_several_rules_are_listed(capsys):
    for words in (["AMP101", "AMP103"], ["AMP103,AMP101"], ["AMP101,", "unscale-twice"]):
        assert main(["explain", *words]) == 0
        out = capsys.readouterr().out
        assert "2 rules" in out
        assert "AMP101" in out
        assert "AMP103" in out


def test_names_and_summaries_come_before_texts():
    assert [found.name for found in search("unscale", all_rules())] == [
        rule.name for rule in all_rules() if "unscale" in rule.name or "unscale" in rule.summary.lower()
    ]
    assert "AMP101" in {found.code for found in search("65536", all_rules())}, "a word of the text, not of a name"
    assert search("zzz", all_rules()) == []
    assert search(" ", all_rules()) == []
