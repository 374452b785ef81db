"""docs/claims.md: claims about mixed precision, whether they are true, and the tests that settle them.

The claims are decorators of tests in tests/claims (``@claim(...)``), read without running or importing anything. It is
an error if a claim decorates something that is not a test, a test asserts nothing, or a named test does not exist.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.markdown import NOTICE, Pages, page, table

from ampwise.errors import BadInput

__all__ = ["claims_page"]

FOLDER = "tests/claims"
PAGE = "docs/claims.md"
TITLE = "Claims about mixed precision, tested"
VERDICTS = {"true": "true", "false": "false", "depends": "it depends"}
REQUIRED = {"said", "verdict", "truth"}
ALLOWED = {*REQUIRED, "also"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Claim, its own test, and other tests of it."""

    said: str
    verdict: str
    truth: str
    test: str  # "tests/claims/test_formats.py::test_x"
    line: int  # where it begins
    also: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Title of a test module, and its claims in order."""

    title: str
    claims: tuple[Settled, ...]


def claims_page(root: Path) -> Pages:
    """Return the page by its path under the repository; nothing if there are no such tests."""
    folder = root / FOLDER
    if not folder.is_dir():
        return {}
    themes = [theme for file in sorted(folder.glob("*.py")) if (theme := _theme(file, root)).claims]
    _refuse_twins(themes)
    return {PAGE: page([*_parts(themes)])}


# Reading


def _theme(file: Path, root: Path) -> Theme:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    title = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    return Theme(title=title, claims=tuple(_claims(tree, file, root)))


def _claims(tree: ast.Module, file: Path, root: Path) -> Iterator[Settled]:
    path = file.relative_to(root).as_posix()
    for node in ast.walk(tree):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "claim":
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                where = f"{path}:{node.lineno}: `{node.name}`"
                _check_test(node, file, tree, where)
                given = _arguments(call, where)
                _check_others(given["also"], root, where)
                yield Settled(**given, test=f"{path}::{node.name}", line=call.lineno)


def _check_test(node: ast.AST, file: Path, tree: ast.Module, where: str) -> None:
    """Raise BadInput unless pytest would run the test and it can fail."""
    is_run = isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node in tree.body
    if not is_run or not file.name.startswith("test_"):
        raise BadInput(f"{where} carries a claim and is no test; make it a function test_... of a module test_....py")
    if not any(isinstance(part, ast.Assert) or _is_raises(part) for part in ast.walk(node)):
        raise BadInput(f"{where} asserts nothing; assert what makes the claim true or false")


def _is_raises(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "raises"


def _arguments(call: ast.Call, where: str) -> dict[str, Any]:
    texts = {str(keyword.arg): keyword.value for keyword in call.keywords}
    texts |= {"said": call.args[0]} if call.args else {}
    try:
        given = {name: ast.literal_eval(text) for name, text in texts.items()}
    except ValueError as error:
        raise BadInput(f"{where}: a claim is read, not run; write its texts out") from error
    if not given.keys() >= REQUIRED or not given.keys() <= ALLOWED or not all(given.values()):
        raise BadInput(f"{where}: a claim has said, verdict and truth, and may have also; this has {', '.join(given)}")
    if given["verdict"] not in VERDICTS:
        raise BadInput(f"{where}: the verdict is {given['verdict']!r}; it can be {', '.join(VERDICTS)}")
    return {**given, "also": tuple(given.get("also", ()))}


def _check_others(tests: Sequence[str], root: Path, where: str) -> None:
    for name in tests:
        if not _is_test(name, root):
            raise BadInput(f"{where}: there is no test {name}; name it as path::test, from the repository's root")


def _is_test(name: str, root: Path) -> bool:
    path, _, function = name.partition("::")
    if not function.startswith("test_") or not (root / path).is_file():
        return False
    body = ast.parse((root / path).read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


def _refuse_twins(themes: Sequence[Theme]) -> None:
    seen: set[str] = set()
    for claim in (claim for theme in themes for claim in theme.claims):
        if claim.said in seen:
            raise BadInput(f"{claim.test}: {claim.said!r} is settled twice; put what both test under one claim")
        seen.add(claim.said)
    if not seen:
        raise BadInput(f"{FOLDER} has no claims; write them over tests, as {FOLDER}/claim.py says")


# Writing


def _parts(themes: Sequence[Theme]) -> Iterator[str]:
    claims = [claim for theme in themes for claim in theme.claims]
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    yield NOTICE
    yield f"# {TITLE}"
    yield (
        f"{len(claims)} claims from guides, forum threads and colleagues. {counts['false']} are false, "
        f"{counts['true']} true, and {counts['depends']} depend on conditions, which are given. Each has a test in "
        "`tests/claims` that fails if the verdict is wrong; `make test` runs them all. What CUDA does is read from "
        "torch without a GPU, or was measured: figures of one H200 are those of the "
        "[published benchmarks](benchmarks.md), and the tests compare the sentences with them."
    )
    for theme in themes:
        yield f"## {theme.title}"
        yield table(
            ["claim", "verdict"], [(f"[{_title(each)}](#{_anchor(each)})", _verdict(each)) for each in theme.claims]
        )
        yield from map(_section, theme.claims)


def _section(claim: Settled) -> str:
    tests = [_link(claim.test, f"#L{claim.line}"), *map(_link, claim.also)]
    return "\n\n".join(
        [
            f'<a id="{_anchor(claim)}"></a>',
            f"### {_title(claim)}",
            f"**{_verdict(claim).capitalize()}.** {claim.truth}",
            "\n".join(f"- {test}" for test in tests),
        ]
    )


def _title(claim: Settled) -> str:
    return claim.said.removesuffix(".")


def _verdict(claim: Settled) -> str:
    return VERDICTS[claim.verdict]


def _anchor(claim: Settled) -> str:
    return claim.test.partition("::test_")[2].replace("_", "-")


def _link(test: str, place: str = "") -> str:
    return f"[`{test}`](../{test.partition('::')[0]}{place})"
