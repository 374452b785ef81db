"""Every source rule against its fixture: the lines marked ``# expect: AMP101`` and no others.

A fixture is a file of small functions. Those called ``fine_*`` are near misses: code that looks like the
mistake and is right. All rules look at every fixture, so a near miss must be silent for all of them.
"""

import ast
import re
import runpy
import warnings
from pathlib import Path

import pytest

from ampwise.check.apply_edits import apply_fixes
from ampwise.check.rule_entry import matching_rules
from ampwise.check.source.project import Project
from ampwise.check.source.script import script_from_text
from ampwise.rules import list_entries, rules_in

HERE = Path(__file__).parent / "fixtures"
FIXTURES = sorted(HERE.glob("*.py"))
FIXED = sorted((HERE / "fixed").glob("*.py"))
EXPECT = re.compile(r"#\s*expect:\s*((?:[A-Z]+\d{3}[,\s]*)+)")
RULES = {module.RULE.name: module for module in rules_in("source")}


def expectations(text):
    marked = ((number, EXPECT.search(line)) for number, line in enumerate(text.split("\n"), 1))
    return sorted((number, code) for number, match in marked if match for code in re.findall(r"[A-Z]+\d{3}", match[1]))


def findings_in(text, path="fixture.py"):
    code = Project([path], {path: text}).code(path)
    possible = matching_rules(
        text.encode(), list_entries("source")
    )  # as the linter does: a missing word hides a finding
    found = [finding for rule in possible for finding in rule.module.check(code)]
    return list(
        {(finding.rule.code, finding.place): finding for finding in found if finding.place.file == path}.values()
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_finds_what_is_marked_and_nothing_else(path):
    text = path.read_text()
    found = sorted((finding.place.line, finding.rule.code) for finding in findings_in(text))
    assert found == expectations(text)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_has_a_fixture_with_faults_and_near_misses(name):
    text = (HERE / f"{name.replace('-', '_')}.py").read_text()
    marked = [code for _, code in expectations(text)]
    assert RULES[name].RULE.code in marked
    functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert sum(function.startswith("fine_") for function in functions) >= 2


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_bad_example_parses_and_differs_from_the_good_one(name):
    rule = RULES[name].RULE
    ast.parse(rule.bad), ast.parse(rule.good)
    assert rule.bad != rule.good


def fixed(text, path="fixture.py"):
    for _ in range(10):
        script = script_from_text(text, path)
        result = apply_fixes(script, findings_in(text, path), unsafe=True)
        if result.text == text:
            return text
        text = result.text
    raise AssertionError("fixing never ends")


@pytest.mark.parametrize("name", sorted(name for name, module in RULES.items() if module.RULE.fixable))
def test_every_fixable_rule_has_a_script_that_is_fixed_and_runs(name):
    assert (HERE / "fixed" / f"{name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize("path", FIXED, ids=lambda path: path.stem)
def test_a_fixed_script_has_no_finding_and_runs(path, tmp_path):
    text = path.read_text()
    assert sorted((finding.place.line, finding.rule.code) for finding in findings_in(text)) == expectations(text)
    assert expectations(text)
    result = re.sub(r"\s*# expect:.*", "", fixed(text))
    assert findings_in(result) == []
    script = tmp_path / "fixed.py"
    script.write_text(result)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(script), run_name="__main__")
