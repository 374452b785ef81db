"""What holds for every output, whatever the findings: none is lost, and none drives the terminal."""

import json
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampwise.finding import Edit, Finding, Place, Rule, Severity
from ampwise.report.printers import output_formats
from ampwise.report.printers.outputs import concise, full, github, gitlab, sarif
from ampwise.report.printers.outputs import json as json_output

from ...for_each import for_each

# All of Unicode, lone surrogates too: a file name that is not UTF-8 has them.
texts = st.one_of(
    st.text(st.characters(), max_size=30),
    st.sampled_from(["[red]", "\x1b[31m", "a\nb", "::error::x", "%0A", "\u202e", "\x00", "\ud800", "|", "💥"]),
)
names = st.none() | texts
counts = st.none() | st.integers(0, 10**9)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=4) | st.complex_numbers(),
    lambda parts: st.lists(parts, max_size=3) | st.tuples(parts) | st.dictionaries(texts, parts, max_size=3),
    max_leaves=6,
)


@st.composite
def places(draw):
    position = {}
    if draw(st.booleans()):
        position["line"] = draw(st.integers(1, 10**6))
        if draw(st.booleans()):
            position["column"] = draw(st.integers(1, 10**4))
            if draw(st.booleans()):
                position["end_line"] = position["line"] + draw(st.integers(0, 3))
                position["end_column"] = position["column"] + draw(st.integers(0, 99))
    named = {part: draw(names) for part in ("file", "module", "parameter", "device")}
    if named["file"] is not None:
        position["cell"] = draw(st.none() | st.integers(1, 99))
    return Place(**position, **named, step=draw(counts), rank=draw(counts))


@st.composite
def edits(draw, cell):
    """One below the other, and so apart."""
    lines = sorted(draw(st.sets(st.integers(1, 50), max_size=3)))
    column = draw(st.integers(1, 9))
    return [Edit(line, column, line, column + draw(st.integers(0, 5)), draw(texts), cell) for line in lines]


@st.composite
def findings(draw):
    rule = Rule(
        code=draw(st.sampled_from(["AMP101", "AMP102", "ACME001"])),
        name="some-rule",
        severity=draw(st.sampled_from(Severity)),
        summary="Some rule",
        why="Because.",
        fix="Do it otherwise.",
        bad="a",
        good="b",
        fixable="sometimes",
    )
    evidence = draw(st.dictionaries(texts, values, max_size=3))
    place = draw(places())
    mending = {"edits": draw(edits(place.cell)), "safe": draw(st.booleans())} if place.file is not None else {}
    return rule.at(place, draw(texts), evidence=evidence, fix=draw(names), **mending)


lists = st.lists(findings(), max_size=4)
quick = settings(suppress_health_check=list(HealthCheck))


def strict(text):
    """Parse as strictly as the standard says: no NaN, no half surrogate pairs."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(text, parse_constant=refuse)
    json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    return parsed


@quick
@given(lists)
def test_json_keeps_every_finding(given_findings: list[Finding]):
    objects = strict(json_output.render(given_findings))
    assert [(o["code"], o["severity"]) for o in objects] == [(f.rule.code, f.severity) for f in given_findings]
    assert [o["place"].get("step") for o in objects] == [f.place.step for f in given_findings]


@quick
@given(lists)
def test_sarif_keeps_every_finding_and_is_valid(validate_sarif, given_findings: list[Finding]):
    log = strict(sarif.render(given_findings))
    validate_sarif(log)
    run = log["runs"][0]
    assert [result["ruleId"] for result in run["results"]] == [f.rule.code for f in given_findings]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    assert all(ids[result["ruleIndex"]] == result["ruleId"] for result in run["results"])


@quick
@given(lists)
def test_gitlab_keeps_every_finding_under_a_name_of_its_own(given_findings: list[Finding]):
    issues = strict(gitlab.render(given_findings))
    assert len(issues) == len(given_findings)
    assert len({issue["fingerprint"] for issue in issues}) == len(given_findings)


@quick
@given(lists)
def test_github_is_one_command_a_finding(given_findings: list[Finding]):
    lines = github.render(given_findings).splitlines()
    assert len(lines) == len(given_findings)
    assert all(line.startswith(("::error title=", "::warning title=", "::notice title=")) for line in lines)


@quick
@given(lists)
def test_concise_is_one_line_a_finding_and_a_summary(given_findings: list[Finding]):
    sums = 2 if any(finding.edits for finding in given_findings) else 1
    assert len(concise.render(given_findings).splitlines()) == len(given_findings) + sums


@quick
@given(lists)
def test_text_for_people_cannot_drive_the_terminal(given_findings: list[Finding]):
    # Sources to show: without them no edit would be printed.
    sources = {finding.place.file: "x = 'a\x1b\x07b'\n" * 60 for finding in given_findings if finding.place.file}
    for output in (concise, full, github):
        text = output.render(given_findings, texts=sources)
        bad = [char for char in text if not char.isprintable() and char != "\n" and char.strip()]
        assert not bad
        text.encode("utf-8")


@quick
@given(lists)
def test_full_says_every_finding(given_findings: list[Finding]):
    heads = [
        line for line in full.render(given_findings).split("\n") if line.startswith(("error[", "warning[", "note["))
    ]
    assert len(heads) == len(given_findings)


@given(st.floats())
def test_numbers_come_back_from_json(number):
    rule = Rule(code="AMP101", name="a", severity=Severity.INFO, summary="s", why="w", fix="f", bad="b", good="g")
    text = json_output.render([rule.at(Place(), "m", evidence={"value": number})])
    back = float(strict(text)[0]["evidence"]["value"])
    assert back == number or (math.isnan(back) and math.isnan(number))


@for_each("name", output_formats())
def test_no_findings_is_a_valid_document_too(name):
    import importlib

    text = importlib.import_module(f"ampwise.report.printers.outputs.{name}").render([])
    expected = {
        "concise": "All checks passed!\n",
        "full": "All checks passed!\n",
        "github": "",
        "json": "[]\n",
    }
    if name in expected:
        assert text == expected[name]
    elif name == "gitlab":
        assert json.loads(text) == []
    else:
        assert json.loads(text)["runs"][0]["results"] == []
