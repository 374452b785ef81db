"""The public API is the one that is listed in tests/api.txt; whoever changes it does so on purpose."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

import ampwise

ROOT = Path(__file__).parents[1]

PUBLIC = """
from ampwise.home import Maker as Maker, make as make
_HOMES = {"make": "home", "Maker": "home"}
__all__ = sorted(_HOMES)
"""
HOME = """
from __future__ import annotations
from dataclasses import dataclass
VERSION = 7
class Base:
    def said(self) -> str: ...
    def inherited(self, /, x: int) -> None: ...
class Maker(Base):
    def __init__(self, size: int, *, deep: bool = False) -> None:
        self.size: int = size
        self._hidden = deep
    @property
    def made(self) -> Made: ...
    @classmethod
    def of(cls, text: str = "a") -> Maker: ...
    @staticmethod
    def free(x: int) -> int: ...
    def said(self) -> int: ...
    def __len__(self) -> int: ...
    def _private(self) -> None: ...
@dataclass(frozen=True)
class Made:
    parts: tuple[int, ...] = ()
    def as_dict(self) -> dict[str, object]:
        return {"version": VERSION, "parts": self.parts}
def make(first: int, *rest: int, kind: str = "x") -> Maker | None: ...
"""
LISTED = """
class ampwise.Maker(Base)
    __init__(size: int, *, deep: bool=False)
    __len__() -> int
    staticmethod free(x: int) -> int
    inherited(x: int) -> None
    made -> Made
    classmethod of(text: str='a') -> Maker
    said() -> int
    size
ampwise.make(first: int, *rest: int, kind: str='x') -> Maker | None

## What they return

class ampwise.home.Made()
    as_dict() -> dict[str, object]
    parts: tuple[int, ...] = ()
"""


@pytest.fixture(scope="module")
def lister(load_script):
    return load_script(ROOT / "tools" / "list_api.py")


@pytest.fixture(scope="module")
def listed(lister):
    return lister.listing()


def test_the_public_api_is_the_listed_one(lister):
    differs = lister.difference()
    assert not differs, differs


@pytest.fixture
def small(tmp_path):
    """A package of two files that says it is ampwise."""
    folder = tmp_path / "src" / "ampwise"
    folder.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (folder / "__init__.py").write_text(PUBLIC)
    (folder / "home.py").write_text(HOME)
    (folder / "integrations").mkdir()
    (folder / "integrations" / "__init__.py").write_text("")
    for name in ("accelerate", "lightning", "transformers"):
        (folder / "integrations" / f"{name}.py").write_text("__all__ = []\n")
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return tmp_path


def test_what_is_listed_of_a_small_package(lister, small):
    text = lister.listing(small)
    assert LISTED in text
    assert "ampwise.home, version 7: version, parts" in text


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("kind: str", "sort: str", "+ampwise.make(first: int, *rest: int, sort: str='x') -> Maker | None"),
        ("    @property\n", "", "-    made -> Made"),
        ("parts: tuple[int, ...] = ()", "parts: tuple[int, ...]", "+    parts: tuple[int, ...]"),
        ("VERSION = 7", "VERSION = 8", "+ampwise.home, version 8: version, parts"),
        ("def inherited", "def renamed", "+    renamed(x: int) -> None"),
    ],
)
def test_a_change_is_shown_with_the_way_to_accept_it(lister, small, capsys, was, now, line):
    assert lister.main([], small) == 0
    assert lister.main(["--check"], small) == 0
    home = small / "src" / "ampwise" / "home.py"
    home.write_text(home.read_text().replace(was, now))
    assert lister.main(["--check"], small) == 1
    said = capsys.readouterr().err
    assert line in said.splitlines()
    assert said.startswith("The public API is not the one that is listed.\n--- listed in tests/api.txt\n")
    assert "If that is meant: `python -m tools.list_api`, and a line in CHANGELOG.md" in said


def test_what_is_private_may_change(lister, small):
    lister.main([], small)
    home = small / "src" / "ampwise" / "home.py"
    home.write_text(home.read_text().replace("_private", "_other").replace("_hidden", "_veiled"))
    assert lister.difference(small) == ""


# --- the listing against what Python sees


def blocks(text):
    """{public name: its lines}"""
    found = {}
    for line in text.splitlines():
        if line.startswith(("ampwise.", "class ampwise.")):
            name = line.removeprefix("class ").partition("(")[0]
            found[name] = [line]
        elif line.startswith("    ") and found:
            found[name].append(line.strip())
    return found


def parameters(line):
    """The names in a line such as ``f(a: int, *, b=1) -> str``."""
    arguments = ast.parse(f"def f{line[line.index('(') :]}: ...").body[0].args
    many = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *many)]


@pytest.mark.parametrize("name", sorted(ampwise.__all__))
def test_python_sees_what_is_listed(listed, name):
    pytest.importorskip("torch")
    lines = blocks(listed)[f"ampwise.{name}"]
    value = getattr(ampwise, name)
    if not isinstance(value, type):
        assert set(parameters(lines[0])) == set(inspect.signature(value).parameters)
        return
    names = {line.removeprefix("classmethod ").removeprefix("staticmethod ") for line in lines[1:]}
    names = {line.partition("(")[0].partition(" ")[0].rstrip(":") for line in names}
    ours = [each for each in value.__mro__ if each.__module__.startswith("ampwise")]
    missing = {part for each in ours for part in vars(each) if not part.startswith("_")} - names
    assert not missing
    made = next((line for line in lines if line.startswith("__init__(")), None)
    if made is not None and not issubclass(value, Enum):
        assert set(parameters(made)) == set(inspect.signature(value).parameters)


def test_a_name_is_the_function_in_any_order_of_imports():
    """Two functions are named as packages are. Each order in a fork of one Python that has imported torch."""
    code = """
import inspect, os, traceback
import torch
orders = ("import ampwise.trace", "import ampwise.trace.bad_steps", "from ampwise import trace", "import ampwise.watch")
for first in orders:
    if os.fork():
        assert os.wait()[1] == 0, first
        continue
    try:
        exec(first)
        import ampwise, ampwise.trace.capsule, ampwise.train.engine, ampwise.watch
        from ampwise import trace, watch
        from ampwise.integrations.plain_loop import watch as same_watch
        from ampwise.trace.tracing import trace as same_trace
        from ampwise.trace import bad_steps
        assert trace is ampwise.trace is same_trace and inspect.isfunction(trace), trace
        assert watch is ampwise.watch is same_watch, watch
        assert not inspect.ismodule(watch)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""
    packages = {path.name for path in Path(ampwise.__file__).parent.iterdir() if path.is_dir()}
    assert packages & set(ampwise.__all__) == {"trace", "watch"}
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_name_is_a_function_or_a_class_and_help_shows_its_arguments():
    for name in ampwise.__all__:
        thing = getattr(ampwise, name)
        assert inspect.isfunction(thing) or inspect.isclass(thing), name
        if inspect.isfunction(thing):
            shown = pydoc.plain(pydoc.render_doc(thing))
            assert f"{name}(" in shown
            assert "(*args: 'Any', **kwargs: 'Any')" not in shown


# --- docstrings

RESULTS = {"DeviceCensus", "Run", "SearchResult"}  # not made by users


def documented():
    """Public functions, and classes with their public methods; not hooks, which Callback documents."""
    for name in ampwise.__all__:
        value = getattr(ampwise, name)
        if inspect.isfunction(value) or name not in RESULTS:
            yield name, value
        for part, method in vars(value).items() if inspect.isclass(value) else ():
            method = getattr(method, "__func__", method)
            hook = value is not ampwise.Callback and hasattr(ampwise.Callback, part)
            if inspect.isfunction(method) and not part.startswith("_") and not hook:
                yield f"{name}.{part}", method


def lacks(value):
    """What a docstring does not say."""
    text = inspect.getdoc(value) or ""
    if not text.partition("\n")[0].rstrip().endswith((".", ":", '"."')):
        yield "a first line that says what it is"
    if isinstance(value, type) and (issubclass(value, Exception | SystemExit) or value.__init__ is object.__init__):
        return
    signature = inspect.signature(value)
    for name in signature.parameters.keys() - {"self", "cls"}:
        if not re.search(rf"\b{name}\b", text):
            yield name
        if re.search(rf"^{name}: ", text, re.MULTILINE):
            yield f"{name} under Args"
    returns = signature.return_annotation not in (inspect.Signature.empty, "None") and not isinstance(value, type)
    if returns and not re.search(r"\b(return|yield)", text, re.IGNORECASE):
        yield "what is returned"
    yield from (each for each in ("Args:", "Returns:", "Raises:") if each in text and f"\n{each}\n    " not in text)


def test_a_docstring_names_every_parameter_and_what_is_returned():
    assert len(dict(documented())) > 100
    assert {name: found for name, value in documented() if (found := list(lacks(value)))} == {}


def test_what_a_docstring_lacks_is_noticed():
    def bare(size, other) -> int:
        """Of a size

        Args: of no form
        size: not indented
        """

    assert sorted(lacks(bare)) == [
        "Args:",
        "a first line that says what it is",
        "other",
        "size under Args",
        "what is returned",
    ]


def test_what_a_function_returns_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name, value in ((name, getattr(ampwise, name)) for name in ampwise.__all__):
        returned = str(inspect.signature(value).return_annotation) if inspect.isfunction(value) else ""
        ours = set(re.findall(r"[A-Z]\w+", returned)) - {"None", "Callable", "P", "R", "Tensor", "Optimizer"}
        assert {each for each in ours if not re.search(rf"ampwise\.[\w.]*\b{each}\b", pages)} == set(), name


def test_the_frameworks_are_listed(listed):
    found = blocks(listed)
    assert {
        "ampwise.integrations.accelerate.fix",
        "ampwise.integrations.lightning.Precision",
        "ampwise.integrations.transformers.AmpwiseCallback",
    } <= set(found)
    assert len(found) > len(ampwise.__all__) + 20  # what they return
