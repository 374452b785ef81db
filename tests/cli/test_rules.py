"""`ampwise rules`: all of them, by category."""

import json
import sys

from ampwise.cli import main
from ampwise.cli.rules import table
from ampwise.finding import Rule, Severity
from ampwise.rules import RegisteredRule, registered


def entry(code, name, category, **more):
    texts = {"summary": f"About {name}", "why": "w", "fix": "f", "bad": "b", "good": "g"}
    rule = Rule(code=code, name=name, severity=Severity.WARNING, **texts, **more)
    return RegisteredRule(rule=rule, category=category, module=sys)


def test_the_table():
    entries = [
        entry("AMP101", "clip-scaled-grads", "source"),
        entry("AMP900", "old", "hardware", on_by_default=False),
        entry("AMP102", "twice", "source", fixable="always"),
        entry("AMP103", "thrice", "source", fixable="sometimes"),
    ]
    assert table(entries) == (
        "source\n"
        "  AMP101  clip-scaled-grads  warning       About clip-scaled-grads\n"
        "  AMP102  twice              warning  [*]  About twice\n"
        "  AMP103  thrice             warning  [-]  About thrice\n"
        "\n"
        "hardware\n"
        "  AMP900  old                warning       About old (off by default)\n"
        "\n"
        "4 rules; `ampwise explain CODE` explains one.\n"
        "[*] is fixed by `ampwise check --fix`, [-] sometimes.\n"
    )


def test_on_a_narrow_terminal_the_summary_has_its_own_line():
    entries = [entry("AMP101", "clip-scaled-grads", "source"), entry("AMP102", "twice-" + "x" * 40, "source")]
    assert table(entries, width=90).splitlines()[1:5] == [
        "  AMP101  clip-scaled-grads                               warning",
        "          About clip-scaled-grads",
        f"  AMP102  twice-{'x' * 40}  warning",
        f"          About twice-{'x' * 40}",
    ]
    assert table(entries, width=200) == table(entries)


def test_a_rule_is_one_line_for_grep_and_fits_a_terminal():
    assert all(line in table(registered()) for line in (f"{one.rule.summary}" for one in registered()))
    assert max(map(len, table(registered(), width=80).splitlines())) <= 80


def test_every_rule_is_listed(capsys):
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    assert all(entry.rule.code in out and entry.rule.name in out for entry in registered())


def test_json(capsys):
    assert main(["rules", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)
    assert rules == [{**entry.rule.as_dict(), "category": entry.category} for entry in registered()]


def test_no_rules():
    assert table([]) == "No rules.\n"
