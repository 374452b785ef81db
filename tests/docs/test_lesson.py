"""The lesson is a notebook in good order. That its numbers hold, its own cells say when `make site` runs it."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import jupytext

from ampwise.cli import main
from ampwise.finding.registry import find_rule

from ..for_each import for_each

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "docs" / "lesson" / "mixed_precision.py"
TEXT = LESSON.read_text(encoding="utf-8")
CELLS = jupytext.reads(TEXT, fmt="py:percent").cells
CODE = [cell for cell in CELLS if cell.cell_type == "code"]
WORDS = "\n\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
NUMBERS = {10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen"}


def tags(cell):
    return cell.metadata.get("tags", [])


def pitfalls(kind):
    """The pitfalls that have such a cell, in order, with the cell's source."""
    return {
        name: cell.source for cell in CODE if kind in tags(cell) for name in tags(cell) if name.startswith("pitfall-")
    }


def asserts(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_it_is_a_notebook_that_says_so():
    assert (
        jupytext.reads(TEXT, fmt="py:percent").metadata["jupytext"]["text_representation"]["format_name"] == "percent"
    )
    assert CELLS[0].source.startswith("# Mixed precision training")


def test_every_piece_of_code_is_introduced():
    bare = [cell.source for before, cell in pairwise(CELLS) if cell.cell_type == "code" == before.cell_type]
    assert not bare
    assert all(cell.source.strip() for cell in CELLS)


def test_code_that_is_shown_fits_a_screen():
    """Without scrolling: a page of 1280 pixels has 92 columns. What only draws is folded."""
    shown = [cell.source for cell in CODE if not {"hide-input", "hide-cell"} & set(tags(cell))]
    assert len(shown) > 40
    assert not [line for source in shown for line in source.splitlines() if len(line) > 92]
    assert max(len(source.splitlines()) for source in shown) <= 50


def test_every_pitfall_fails_first_and_is_fixed_next():
    failing, fixed = pitfalls("failing"), pitfalls("fixed")
    assert list(failing) == list(fixed)
    order = [kind for cell in CODE for kind in ("failing", "fixed") if kind in tags(cell)]
    assert order == ["failing", "fixed"] * len(failing)
    assert f"{NUMBERS[len(failing)]} ways in which it goes wrong" in " ".join(WORDS.split())


def test_pitfalls_are_numbered_as_they_come():
    numbers = [int(number) for number in re.findall(r"^\*\*(\d+)\. ", WORDS, re.MULTILINE)]
    assert numbers == list(range(1, len(pitfalls("failing")) + 1))


@for_each("kind", ["failing", "fixed"])
@for_each("name", pitfalls("failing"))
def test_a_pitfall_proves_what_it_says(kind, name):
    source = pitfalls(kind)[name]
    assert "print(" in source
    assert asserts(source)


def test_every_figure_has_words_for_those_who_do_not_see_it():
    shown = [
        node
        for node in ast.walk(ast.parse(TEXT))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "show"
    ]
    assert len(shown) >= 8
    for call in shown:
        figure, alt, caption = call.args
        assert isinstance(figure, ast.Name)
        assert len(ast.literal_eval(alt)) > 60  # plain text: a caption may have numbers in it
        assert isinstance(caption, ast.Constant | ast.JoinedStr)


def test_every_figure_holds_what_it_shows():
    """A cell that draws also asserts; one that draws again what other cells have proved need not."""
    unproved = [cell.source for cell in CODE if "show(\n" in cell.source and not asserts(cell.source)]
    assert len(unproved) <= 2


def test_exercises_have_solutions_that_are_folded_and_proved():
    exercises = re.findall(r"^\*\*[A-Z]\.\*\*", WORDS, re.MULTILINE)
    solutions = [cell.source for cell in CODE if "hide-cell" in tags(cell)]
    assert len(solutions) == len(exercises) > 0
    assert all(asserts(source) for source in solutions)


def test_no_path_is_of_one_machine():
    strings = [
        node.value
        for node in ast.walk(ast.parse(TEXT))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [text for text in strings if re.match(r"(/|~|[A-Z]:\\)\w", text)]
    assert not re.search(r"(/home/|/tmp/|/Users/|/root/|https?://)", TEXT)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", WORDS)
    assert len(links) > 5
    assert not [link for link in links if not (LESSON.parent / link).is_file()]


def test_results_that_are_drawn_are_there():
    names = re.findall(r'"((?:precisions|lowbit)_\w+)"', TEXT)
    assert len(names) >= 5
    assert not [name for name in names if not (ROOT / "benchmarks" / "results" / f"{name}.json").is_file()]


def test_rules_it_names_exist():
    codes = set(re.findall(r"AMP\d{3}", TEXT))
    assert len(codes) >= 6
    for code in codes:
        assert find_rule(code).code == code


def test_our_linter_passes_it_only_with_its_noqa(tmp_path, capsys):
    meant = re.compile(r"  # noqa: AMP\d{3}")
    bare = tmp_path / "lesson.py"
    bare.write_text(meant.sub("", TEXT), encoding="utf-8")
    assert main(["check", "--select", "ALL", str(LESSON)]) == 0
    capsys.readouterr()
    assert main(["check", "--select", "ALL", "--output-format", "concise", str(bare)]) == 1
    found = set(re.findall(r"AMP\d{3}", capsys.readouterr().out))
    assert found == {match[-6:] for match in meant.findall(TEXT)}
