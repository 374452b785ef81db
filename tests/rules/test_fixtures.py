"""Every source rule against its fixture: the lines marked ``# expect: AMP101`` and no others.

A fixture is a file of small functions. Those called ``fine_*`` are near misses: code that looks like the
mistake and is right. All rules look at every fixture, so a near miss must be silent for all of them.

Functions called ``run_*`` take no arguments and are also run on a CPU under the watch: the lines marked ``# at run
time: AMP101`` (or ``# expect: AMP101; at run time: AMP101``) must be found, and no others.
"""

import ast
import re
import runpy
import warnings
from pathlib import Path

import pytest

import ampwise.rules
from ampwise.check.apply_edits import apply_fixes
from ampwise.check.source.project import Project
from ampwise.check.source.script import script_from_text
from ampwise.check.source_rules import matching_rules
from ampwise.finding.registry import rule_modules, source_rules
from ampwise.watch.watch import Watch

HERE = Path(__file__).parent / "fixtures"
FIXTURES = sorted(HERE.glob("*.py"))
FIXED = sorted((HERE / "fixed").glob("*.py"))
EXPECT = re.compile(r"#\s*expect:\s*((?:[A-Z]+\d{3}[,\s]*)+)")
AT_RUN_TIME = re.compile(r"#.*at run time:\s*((?:[A-Z]+\d{3}[,\s]*)+)")
RULES = {module.RULE.name: module for module in source_rules()}


def expectations(text, pattern=EXPECT):
    marked = ((number, pattern.search(line)) for number, line in enumerate(text.split("\n"), 1))
    return sorted((number, code) for number, match in marked if match for code in re.findall(r"[A-Z]+\d{3}", match[1]))


def findings_in(text, path="fixture.py"):
    code = Project([path], {path: text}).code(path)
    possible = matching_rules(text.encode(), source_rules())  # as the linter does: a missing word hides a finding
    found = [finding for rule in possible for finding in rule.check_source(code)]
    return list(
        {(finding.rule.code, finding.place): finding for finding in found if finding.place.file == path}.values()
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_finds_what_is_marked_and_nothing_else(path):
    text = path.read_text()
    found = sorted((finding.place.line, finding.rule.code) for finding in findings_in(text))
    assert not differences(found, expectations(text))
    near_misses = [
        range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("fine_", "run_fine_"))
    ]
    assert not [
        f"line {line}: {code} in a near miss; give the function another name"
        for line, code in [*expectations(text), *expectations(text, AT_RUN_TIME)]
        if any(line in lines for lines in near_misses)
    ]


def differences(found, marked):
    """What is found and not marked, and what is marked and not found, each as a line to read."""
    return [
        *(f"line {line}: {code} found, not marked" for line, code in found if (line, code) not in marked),
        *(f"line {line}: {code} marked, not found" for line, code in marked if (line, code) not in found),
    ]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_has_examples_and_a_fixture_with_faults_and_near_misses(name):
    rule = RULES[name].RULE
    ast.parse(rule.bad), ast.parse(rule.good)
    assert rule.bad != rule.good
    if rule.fixable:
        fixed = HERE / "fixed" / f"{name.replace('-', '_')}.py"
        assert fixed.is_file(), f"{name} has a fix: write {fixed.name} in {fixed.parent}, a script that runs once fixed"
    code, path = rule.code, HERE / f"{name.replace('-', '_')}.py"
    assert path.is_file(), f"{code} {name} needs a fixture, {path.name}: `make new-rule NAME={name}` writes one"
    text = path.read_text()
    assert code in [code for _, code in expectations(text)], (
        f"{path.name}: mark at least one faulty line with `# expect: {code}`"
    )
    functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert sum(function.startswith("fine_") for function in functions) >= 2, (
        f"{path.name}: add at least two functions named fine_*: code that looks like the mistake and is right"
    )


def run_functions():
    for path in FIXTURES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("run_"):
                yield pytest.param(path, node, id=f"{path.stem}-{node.name}")


@pytest.mark.filterwarnings("ignore")  # of functions that are wrong on purpose
@pytest.mark.parametrize(("path", "node"), list(run_functions()))
def test_a_run_finds_what_is_marked_and_nothing_else(path, node):
    with Watch(timing=False) as watch:
        runpy.run_path(str(path))[node.name]()
    inside = range(node.lineno, node.end_lineno + 1)
    found = sorted((each.finding.place.line, each.finding.rule.code) for each in watch.findings)
    assert not differences(found, [each for each in expectations(path.read_text(), AT_RUN_TIME) if each[0] in inside])
    assert not watch.failures


def test_every_check_of_a_run_has_a_case():
    """In the fixture of its rule, or among the scripts and records of tests/watch."""
    watch = Path(__file__).parent.parent / "watch"
    marked = {code for _, code in expectations((watch / "test_conduct.py").read_text())}
    for name in ("test_run_events.py", "test_replaying.py"):
        marked |= set(re.findall(r"AMP\d{3}", (watch / name).read_text()))
    marked |= {code for path in FIXTURES for _, code in expectations(path.read_text(), AT_RUN_TIME)}
    watched = [module.RULE.code for module in rule_modules() if hasattr(module, "check_event")]
    assert not [f"{code}: add a run_* function with `# at run time: {code}`" for code in watched if code not in marked]


def test_nothing_is_left_to_do():
    files = [*FIXTURES, *Path(ampwise.rules.__file__).parent.glob("amp*/*.py")]
    assert not [
        f"{path.name}:{number}: fill in: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "TODO" in line
    ]


def fixed(text, path="fixture.py"):
    for _ in range(10):
        script = script_from_text(text, path)
        result = apply_fixes(script, findings_in(text, path), unsafe=True)
        if result.text == text:
            return text
        text = result.text
    raise AssertionError("fixing never ends")


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
