"""What is released, built once for all tests; and an environment with nothing in it but that and what it asks for."""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")


@pytest.fixture(scope="session")
def project():
    """The project's table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Make a folder once for all processes that run tests: ``once("name", make)`` calls ``make(folder)``."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, make):
        folder, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tree(once):
    """What setuptools sees of a fresh checkout; built here, so that nothing is left in the real one."""

    def make(folder):
        for name in RELEASED:
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "src" / "ampwise", folder / "src" / "ampwise", ignore=_IGNORED)
        # Of which none may come along.
        shutil.copytree(ROOT / "tests" / "release", folder / "tests" / "release", ignore=_IGNORED)

    return once("tree", make)


@pytest.fixture(scope="session")
def dist(once, tree):
    """The folder with the wheel and the sdist: those that AMPWISE_DIST names, or built as `make release` does."""
    given = os.environ.get("AMPWISE_DIST")
    return ROOT / given if given else once("dist", lambda folder: build(tree, folder))


@pytest.fixture(scope="session")
def wheel(dist):
    return _only(dist, "*.whl")


@pytest.fixture(scope="session")
def sdist(dist):
    return _only(dist, "*.tar.gz")


@pytest.fixture(scope="session")
def bare_wheel(once, tree):
    """From the tree itself, and by a machine that has no compiler."""
    return _only(once("bare", lambda folder: build(tree, folder, "--wheel", CC="no-compiler-here")), "*.whl")


@pytest.fixture(scope="session")
def installed(once, wheel, project):
    """The folder of an environment with the wheel, what it asks for, and nothing else; no torch."""

    def make(folder):
        venv.create(folder / "env", symlinks=True)
        # Not --no-deps: what is missing would be looked for, and not found.
        words = ["install", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check", wheel]
        asked = folder / "asked"
        asked.mkdir()
        for name in needed(project["dependencies"]):
            link_distribution(name, asked)
        (site_packages(folder) / "asked.pth").write_text(f"{asked}\n")
        python("-m", "pip", "--python", folder / "env" / "bin" / "python", *words, cwd=folder)

    return once("installed", make)


@pytest.fixture(scope="session")
def command(installed):
    """The installed command, run where nothing of the checkout is: ``command("check", "train.py", cwd=folder)``."""

    def run(*words, cwd, code=0):
        line = [installed / "env" / "bin" / "ampwise", *words]
        done = subprocess.run(line, cwd=cwd, env=clean({}), capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def build(tree, folder, *words, **environment):
    """`python -m build`, with what is installed here: there may be no network."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools", "77")
    python("-m", "build", "--no-isolation", "--outdir", folder, *words, tree, cwd=tree, env=environment)


def python(*words, cwd, env=()):
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=clean(dict(env)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean(more):
    """This environment without what leads Python to the checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "COLUMNS")}
    return kept | {"NO_COLOR": "1"} | more


def site_packages(installed):
    return next((installed / "env" / "lib").glob("python*/site-packages"))


def needed(requirements):
    """The distributions that requirements without extras come to, and theirs."""
    from packaging.requirements import Requirement

    found, pending = {}, list(requirements)
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            pending += found[requirement.name].requires or []
    return list(found)


def link_distribution(name, folder):
    """All that a distribution has at the top of site-packages, its metadata too, by links."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        (folder / top).symlink_to(distribution.locate_file(top))


def _only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


_IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
