"""A framework that is missing, or of another version, is told of in one line."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from ampwise.errors import MissingDependency
from ampwise.integrations.versions import (
    ACCELERATE,
    LIGHTNING,
    TRANSFORMERS,
    SupportedFramework,
    lightning_name,
    require,
)

EVERY = [ACCELERATE, LIGHTNING, TRANSFORMERS]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.package)
def test_what_was_tested_is_taken_and_is_what_make_installs(framework):
    version = framework.tested.split()[0]
    assert framework.takes(version)
    assert f"{framework.package}=={version}" in (ROOT / "constraints.txt").read_text().split()


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.package)
def test_the_page_names_the_versions(framework):
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert f"| {framework.package} | {framework.since} up to {framework.before} | {framework.tested} |" in page


@pytest.mark.parametrize("version", ["1.14.9", "2.0.0", "0.34"])
def test_another_version_gets_a_line(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    words = f"needs accelerate 1.15 or later, below 2, but {version} is installed"
    with pytest.raises(MissingDependency, match=re.escape(words)) as refused:
        require(ACCELERATE, "accelerate")
    assert "\n" not in str(refused.value)
    assert "pip install 'accelerate>=1.15,<2'" in str(refused.value)


def test_a_missing_one_gets_a_line():
    nothing = SupportedFramework(ours="ampwise.nothing", package="no-such", since="1", before="2", tested="1")
    with pytest.raises(MissingDependency, match="needs no-such, which is not installed"):
        require(nothing, "no_such_module")


def test_importing_without_a_framework_is_reported_in_our_words(warm, tmp_path):
    barred = "'pytorch_lightning', 'lightning', 'transformers', 'accelerate'"
    code = (
        f"import sys\nfor name in ({barred}): sys.modules[name] = None\n"
        "import ampwise\nfor name in ampwise._FRAMEWORKS:\n"
        "    try: getattr(ampwise, name)\n    except ampwise.errors.MissingDependency as error: print(error)"
    )
    done = warm.run("-c", code, cwd=tmp_path)
    said = done.stdout.splitlines()
    assert [line.partition(" Install it")[0] for line in said] == [
        f"{each.ours} needs {each.package}, which is not installed." for each in EVERY
    ]


def test_lightning_goes_by_the_name_that_the_script_uses(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", sys)
    assert lightning_name() == "lightning.pytorch"
