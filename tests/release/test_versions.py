"""The version is set in pyproject.toml: what shows it asks the installed package, or is written by `make docs`."""

import re
import subprocess

from tools.address import SHOWN_IN, address_pages

from .conftest import ROOT, clean

# Where a version of ampwise may stand: what tells the past, and what `make docs` writes.
TOLD = {"CHANGELOG.md", "constraints.txt", *SHOWN_IN}
PLACES = ("src", "docs", "tools", "examples", ".ci")
TEXT = {".py", ".c", ".pyi", ".md", ".toml", ".yml", ".yaml", ".html", ".js", ".css", ".txt", ".cfg", ".json", ""}
SKIPPED = {"vendor", "__pycache__", "ampwise.egg-info"}
ASSIGNED = re.compile(r"^\s*(__version__|version|release)\s*[:=]\s*[\"']?\d+\.\d+", re.MULTILINE)


def texts():
    """The files that people and programs read for the version; not what others wrote, nor what was measured."""
    below = (path for place in PLACES for path in (ROOT / place).rglob("*"))
    for path in (*ROOT.iterdir(), *below):
        if path.is_file() and path.suffix in TEXT and not SKIPPED & {*path.parts}:
            name = path.relative_to(ROOT).as_posix()
            if name not in TOLD:
                yield name, path.read_text(encoding="utf-8", errors="replace")


def copies(text, version):
    """The lines in which a version stands as such, and not as a part of another."""
    found = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d]|\.\d)")
    return [line.strip() for line in text.splitlines() if found.search(line)]


def test_there_is_no_other_copy(project):
    assert {name: lines for name, text in texts() if (lines := copies(text, project["version"]))} == {}


def test_a_new_address_and_version_reach_all_that_shows_them(tmp_path):
    for path in SHOWN_IN:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = (ROOT / path).read_text(encoding="utf-8")
        if path == "pyproject.toml":
            text = re.sub(r'(?m)^version = ".*?"', 'version = "7.8.9"', text)
            text = re.sub(r'(?m)^Source = ".*?"', 'Source = "https://github.com/someone/ampwise"', text)
        (tmp_path / path).write_text(text, encoding="utf-8")
    pages = address_pages(tmp_path)
    assert not [path for path, text in pages.items() if "ampwise/ampwise" in text]
    assert "uses: someone/ampwise@v7.8.9" in pages["docs/ci.md"]
    assert "uses: someone/ampwise@v7.8.9" in pages["action.yml"]
    assert "repo: https://github.com/someone/ampwise\n    rev: v7.8.9\n" in pages["docs/ci.md"]
    assert "\nversion: 7.8.9\n" in pages["CITATION.cff"]


def test_none_is_kept_in_a_variable():
    assert [name for name, text in texts() if name.startswith(("src/", "docs/conf.py")) and ASSIGNED.search(text)] == []


def test_the_test_can_fail():
    assert copies('release = "1.2.3"', "1.2.3") == ['release = "1.2.3"']
    assert copies("ampwise 1.2.3.", "1.2.3")
    assert not copies("torch 11.2.3, 1.2.30, 1.2.3.4", "1.2.3")
    assert ASSIGNED.search('__version__ = "0.1"')
    assert not ASSIGNED.search("version = release = ampwise.__version__")


def test_it_is_one_that_pip_and_people_understand(project):
    """MAJOR.MINOR.PATCH; with aN, bN or rcN before a release, and .devN between two."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+|\.dev\d+)?", project["version"])


def test_the_changelog_has_it(project):
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased" if "dev" in project["version"] else project["version"])


def test_the_installed_package_says_it(installed, project, tmp_path):
    """`--version` and SARIF are in test_installed.py; records, capsules and checkpoints ask in the same two ways."""
    python = installed / "env" / "bin" / "python"
    code = """
import importlib.metadata
import ampwise
from ampwise.finding.version import installed_version
print(ampwise.__version__, installed_version(), importlib.metadata.version("ampwise"))
"""
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean({}), capture_output=True, text=True)
    assert done.stdout.split() == 3 * [project["version"]], done.stderr


def test_whoever_says_it_asks_in_one_of_two_ways():
    asked = re.compile(r"metadata\.version\(\s*(NAME|[\"']ampwise[\"'])")
    askers = {name for name, text in texts() if name.startswith("src/") and asked.search(text)}
    assert askers == {"src/ampwise/finding/version.py"}
