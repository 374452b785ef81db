"""docs/benchmarks: a page for each benchmark's results and an index; and tables of results in other pages."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.markdown import NOTICE, Pages, facts, page, plain, table

from ampwise.errors import BadInput

__all__ = ["BENCHMARKS_FOLDER", "benchmark_pages", "pages_with_tables"]

BENCHMARKS_FOLDER = "docs/benchmarks"
RESULTS_FOLDER = "benchmarks/results"
TABLE_BEGINS = re.compile(rf"<!-- The table of (?P<results>{RESULTS_FOLDER}/\w+\.json)\. -->")
TABLE_ENDS = "<!-- End of the table. -->"
RESULT_KEYS = ("name", "title", "claim", "machine", "date", "versions", "command", "columns", "rows", "notes")

Result = Mapping[str, Any]


def benchmark_pages(root: Path) -> Pages:
    by_benchmark: dict[str, list[Result]] = defaultdict(list)
    for file in sorted((root / RESULTS_FOLDER).glob("*.json")):
        result = _read_result(file)
        by_benchmark[_benchmark(file, result)].append(result)
    questions = {name: _question(root / "benchmarks", name) for name in by_benchmark}
    pages = {
        f"{BENCHMARKS_FOLDER}/{name}.md": _benchmark_page(name, questions[name], results)
        for name, results in by_benchmark.items()
    }
    return {"docs/benchmarks.md": _index(questions, by_benchmark), **pages}


def _index(questions: Mapping[str, str], by_benchmark: Mapping[str, Sequence[Result]]) -> str:
    if not by_benchmark:
        return page([NOTICE, "# Benchmarks", "No results yet. `make bench NAME=...` runs a benchmark."])
    rows = [
        (f"[{name}](benchmarks/{name}.md)", questions[name], _devices(results))
        for name, results in sorted(by_benchmark.items())
    ]
    says = (
        "Each result names its machine, date, versions and command. `make bench NAME=census` and `make gpu-bench "
        "NAME=census` run one again; contenders of a comparison take turns in the same run."
    )
    contents = "```{toctree}\n:hidden:\n:glob:\nbenchmarks/*\n```"
    return page([NOTICE, "# Benchmarks", says, table(("benchmark", "", "measured on"), rows), contents])


def _devices(results: Sequence[Result]) -> str:
    """Return what the results were measured on: the GPU, or the kind of CPU."""
    machines = (result["machine"] for result in results)
    names = (str(machine.get("gpu") or f"{machine.get('system', '')} CPU".strip()) for machine in machines)
    return ", ".join(dict.fromkeys(names))


def _benchmark_page(name: str, question: str, results: Sequence[Result]) -> str:
    parts = [part for result in results for part in _result(result)]
    return page([NOTICE, f"# {name}", *filter(None, [question]), *parts])


def _benchmark(file: Path, result: Result) -> str:
    found = re.search(r"NAME=(\w+)", result["command"])
    if found is None:
        raise BadInput(f"{file}: its command names no benchmark (NAME=...); run the benchmark again")
    return found[1]


def _question(folder: Path, name: str) -> str:
    """Return the first line of the benchmark's docstring."""
    for file in (folder / f"{name}.py", folder / name / "__init__.py"):
        if file.is_file():
            words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            return words.partition("\n")[0].replace("``", "`")
    return ""


def _result(result: Result) -> Iterator[str]:
    yield f"## {result['title']}"
    yield plain(result["claim"])
    yield table(result["columns"], result["rows"])
    shown = {
        "Machine": facts(result["machine"]),
        "Date": result["date"],
        "Versions": facts(result["versions"]),
    }
    yield "\n".join([*(f"- {name}: {value}" for name, value in shown.items()), f"- Command: `{result['command']}`"])
    if result["notes"]:
        yield "\n".join(["Notes:", "", *(f"- {note}" for note in result["notes"])])


def pages_with_tables(root: Path) -> Pages:
    """Return hand-written pages with their generated tables, which are between two marks."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((root / "docs").rglob("*.md"))}
    return {
        file.relative_to(root).as_posix(): _with_tables(file, text, root)
        for file, text in texts.items()
        if TABLE_BEGINS.search(text)
    }


def _with_tables(file: Path, text: str, root: Path) -> str:
    pieces, at = [], 0
    for mark in TABLE_BEGINS.finditer(text):
        end = text.find(TABLE_ENDS, mark.end())
        if end < 0:
            raise BadInput(f"{file}: a table is to be between {mark[0]!r} and {TABLE_ENDS!r}")
        result = _read_result(root / mark["results"])
        pieces += [text[at : mark.end()], "\n\n", table(result["columns"], result["rows"]), "\n\n"]
        at = end
    return "".join([*pieces, text[at:]])


def _read_result(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise BadInput(f"{file}: no such result; run the benchmark")
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{file}: not JSON ({error}); run the benchmark again") from error
    missing = [key for key in RESULT_KEYS if not isinstance(result, dict) or key not in result]
    if missing:
        raise BadInput(f"{file}: a result has no {', '.join(missing)}; run the benchmark again")
    short = [row for row in result["rows"] if len(row) != len(result["columns"])]
    if short:
        raise BadInput(f"{file}: row {short[0]} does not fit the columns {result['columns']}")
    return dict(result)
