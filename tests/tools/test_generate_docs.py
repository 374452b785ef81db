"""The generated pages: complete, stable, and checked against what lies on disk."""

import json
import re
from pathlib import Path

import pytest

from ampwise.cli import commands
from ampwise.errors import BadInput
from ampwise.finding import Rule, Severity
from ampwise.finding.registry import built_in_rules, found_by

SCRIPT = Path(__file__).parents[2] / "tools" / "generate_docs.py"

RESULT = {
    "name": "census",
    "title": "Census of a gradient",
    "claim": "One read of the tensor.",
    "machine": {"gpu": "NVIDIA H200", "cpu": "16 cores"},
    "date": "2026-01-02",
    "versions": {"torch": "2.13.0"},
    "command": "make bench NAME=census",
    "columns": ["size", "a|b"],
    "rows": [["1 MiB", 0.25], ["2 MiB", None]],
    "notes": ["Median of 20."],
}


@pytest.fixture(scope="module")
def docs(load_script):
    return load_script(SCRIPT)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    return folder


def entry(**change):
    texts = {"summary": "Sums | up", "why": "Because.", "fix": "Fix it.", "bad": "x = 1", "good": "$ ls"}
    return Rule(**{"code": "AMP101", "name": "some-rule", "severity": Severity.ERROR, **texts, **change})


def test_written_pages_pass_the_check(docs, tmp_path, capsys):
    assert docs.main([], tmp_path) == 0
    assert "wrote docs/rules/index.md" in capsys.readouterr().out
    assert docs.main(["--check"], tmp_path) == 0
    assert docs.main([], tmp_path) == 0
    assert capsys.readouterr() == ("", ""), "a second run has nothing to do"


def test_the_check_names_what_is_stale_missing_or_left_over(docs, tmp_path, capsys):
    docs.main([], tmp_path)
    capsys.readouterr()
    (tmp_path / "docs/cli.md").write_text("old")
    (tmp_path / "docs/benchmarks.md").unlink()
    (tmp_path / "docs/rules/AMP999-gone.md").write_text("gone")
    (tmp_path / "docs/benchmarks").mkdir()
    (tmp_path / "docs/benchmarks/gone.md").write_text("gone")
    (tmp_path / "docs/by-hand.md").write_text("kept")
    assert docs.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.splitlines() == [
        "docs/benchmarks.md: missing; run `make docs`",
        "docs/cli.md: stale; run `make docs`",
        "docs/benchmarks/gone.md: left over; run `make docs`",
        "docs/rules/AMP999-gone.md: left over; run `make docs`",
    ]
    assert (tmp_path / "docs/cli.md").read_text() == "old", "a check writes nothing"
    docs.main([], tmp_path)
    assert docs.main(["--check"], tmp_path) == 0
    assert not (tmp_path / "docs/rules/AMP999-gone.md").exists()
    assert not (tmp_path / "docs/benchmarks/gone.md").exists()
    assert (tmp_path / "docs/by-hand.md").read_text() == "kept"


def test_every_rule_has_a_page_and_a_row(docs):
    pages = docs.rule_pages(built_in_rules())
    assert len(pages) == len(built_in_rules()) + 1
    for rule in built_in_rules():
        assert f"[{rule.code}]({rule.code}-{rule.name}.md)" in pages["docs/rules/index.md"]


def test_a_rule_page(docs):
    page = docs.rule_pages([entry(on_by_default=False)])["docs/rules/AMP101-some-rule.md"]
    assert page == docs.NOTICE + (
        "\n\n# AMP101 some-rule\n\n**Sums | up**\n\n"
        "error, off by default · guide: [Loss scaling](../concepts/loss_scaling.md)\n\n"
        "Bad:\n\n```python\nx = 1\n```\n\nGood:\n\n```console\n$ ls\n```\n\n"
        "## Why\n\nBecause.\n\n## Fix\n\nFix it.\n\n---\n\n[all rules](index.md)\n"
    )


def test_a_rule_page_shows_the_fix_as_a_diff(docs):
    page = docs.rule_pages([entry(bad="a\nb\nc", good="a\n\nx\nc")])["docs/rules/AMP101-some-rule.md"]
    assert "```diff\n a\n-b\n+\n+x\n c\n```" in page


def test_a_rule_page_leads_to_its_neighbours_and_its_guide(docs):
    rules = built_in_rules()
    pages = [*docs.rule_pages(rules).values()][1:]
    for rule, page, following in zip(rules, pages, [*pages[1:], ""], strict=True):
        link = f"[{rule.code} {rule.name}]({rule.code}-{rule.name}.md)"
        assert (f"← {link} · " in following) is bool(following)
        assert len(re.findall(r"\]\(\.\./.*?\.md\)", page.partition("## Why")[0])) == 1, f"{rule.code}: one guide"
        silenced = f"`# noqa: {rule.code}` at the end of a line" in page
        assert silenced is ("ampwise check" in found_by(rule)), rule.code


def test_a_bar_does_not_break_a_table(docs):
    index = docs.rule_pages([entry()])["docs/rules/index.md"]
    assert "| [AMP101](AMP101-some-rule.md) | Sums \\| up | `some-rule` | error |  |" in index


@pytest.mark.parametrize(
    ("fixable", "line"),
    [
        ("always", "Fixed by `ampwise check --fix`."),
        ("sometimes", "Sometimes fixed by `ampwise check --fix`."),
    ],
)
def test_what_can_be_fixed_is_said_in_the_index_and_on_the_page(docs, fixable, line):
    pages = docs.rule_pages([entry(fixable=fixable)])
    assert f"| `some-rule` | error | {fixable} |" in pages["docs/rules/index.md"]
    assert f"## Fix\n\nFix it.\n\n{line}\n\n---" in pages["docs/rules/AMP101-some-rule.md"]


def test_every_command_is_documented(docs):
    (page,) = docs.cli_page().values()
    assert all(f"## ampwise {command}\n" in page for command in commands())
    assert "| `RULE ...` | the code or the name of a rule, or words to search |\n" in page
    assert not re.search(r"(?<![`\w])--[a-z]", re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)), "a long dash"


def test_no_results_is_said(docs, tmp_path):
    (page,) = docs.benchmark_pages(tmp_path).values()
    assert "No results yet." in page


def test_a_result_shows_table_machine_date_versions_and_command(docs, results, tmp_path):
    (results / "census.json").write_text(json.dumps(RESULT))
    page = docs.benchmark_pages(tmp_path)["docs/benchmarks/census.md"]
    assert page == docs.NOTICE + (
        "\n\n# census\n\n## Census of a gradient\n\nOne read of the tensor.\n\n"
        "| size | a\\|b |\n| --- | --- |\n| 1 MiB | 0.25 |\n| 2 MiB | – |\n\n"
        "- Machine: gpu NVIDIA H200, cpu 16 cores\n- Date: 2026-01-02\n- Versions: torch 2.13.0\n"
        "- Command: `make bench NAME=census`\n\nNotes:\n\n- Median of 20.\n"
    )


def test_results_of_a_benchmark_are_on_one_page_and_in_the_list(docs, results, tmp_path):
    (tmp_path / "benchmarks" / "census.py").write_text('"""How fast ``census`` is.\n\nMore of it.\n"""')
    on_cpu = {**RESULT, "machine": {"system": "Linux aarch64"}, "title": "On a CPU"}
    other = {**RESULT, "command": "make gpu-bench NAME=step  # --part host"}
    for name, result in {"census_gpu": RESULT, "census_cpu": on_cpu, "step": other}.items():
        (results / f"{name}.json").write_text(json.dumps(result))
    pages = docs.benchmark_pages(tmp_path)
    assert pages.keys() == {"docs/benchmarks.md", "docs/benchmarks/census.md", "docs/benchmarks/step.md"}
    index, census = pages["docs/benchmarks.md"], pages["docs/benchmarks/census.md"]
    row = "| [census](benchmarks/census.md) | How fast `census` is. | Linux aarch64 CPU, NVIDIA H200 |"
    assert row in index
    assert "| [step](benchmarks/step.md) |  | NVIDIA H200 |" in index
    assert census.count("\n## ") == 2
    assert "# census\n\nHow fast `census` is.\n\n## On a CPU" in census


def test_tables_of_results_in_pages_written_by_hand(docs, results, tmp_path):
    (results / "census.json").write_text(json.dumps(RESULT))
    page = tmp_path / "docs" / "guides" / "sizes.md"
    page.parent.mkdir(parents=True)
    marked = "<!-- The table of benchmarks/results/census.json. -->{}<!-- End of the table. -->"
    shown = "\n\n| size | a\\|b |\n| --- | --- |\n| 1 MiB | 0.25 |\n| 2 MiB | – |\n\n"
    page.write_text(f"One:\n{marked.format('old')}\nTwo: {marked.format('')} end")
    (page.parent / "plain.md").write_text("no table")
    text = f"One:\n{marked.format(shown)}\nTwo: {marked.format(shown)} end"
    assert docs.pages_with_tables(tmp_path) == {"docs/guides/sizes.md": text}
    (results / "census.json").unlink()
    with pytest.raises(BadInput, match=r"census.json: no such result"):
        docs.pages_with_tables(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a result has no name, title, claim"),
        (json.dumps({key: RESULT[key] for key in RESULT if key != "date"}), "a result has no date;"),
        (
            json.dumps({**RESULT, "rows": [["1 MiB"]]}),
            "row ['1 MiB'] does not fit the columns ['size', 'a|b']",
        ),
        (json.dumps({**RESULT, "command": "python x.py"}), "its command names no benchmark (NAME=...)"),
    ],
)
def test_a_broken_result_is_refused_by_name(docs, results, tmp_path, text, message):
    (results / "census.json").write_text(text)
    with pytest.raises(BadInput) as caught:
        docs.benchmark_pages(tmp_path)
    assert "census.json: " in str(caught.value)
    assert message in str(caught.value)
