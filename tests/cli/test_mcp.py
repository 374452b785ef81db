"""`ampwise mcp`: what stops it at the start. tests/integrations has the rest."""

from __future__ import annotations

import sys

import pytest

from ampwise.cli import main


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main(["mcp"]) == 2
    told = 'ampwise: error: ampwise mcp needs the package mcp: pip install "ampwise[mcp]"'
    assert capsys.readouterr().err.splitlines()[-1] == told


def test_another_version_is_a_line(monkeypatch, capsys):
    pytest.importorskip("mcp")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.28.1")
    assert main(["mcp"]) == 2
    assert "but 1.28.1 is installed" in capsys.readouterr().err


@pytest.mark.parametrize(("root", "said"), [("/", "the whole machine"), ("gone", "--root gone: no such folder")])
def test_a_root_that_is_none(capsys, root, said):
    assert main(["mcp", "--root", root]) == 2
    assert said in capsys.readouterr().err


def test_the_folder_is_taken_off_pythons_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sys.path[:] = ["", str(tmp_path), *sys.path]
    (tmp_path / "other").mkdir()
    sys.path.append(str(tmp_path / "other"))
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main(["mcp", "--root", "other"]) == 2
    assert not {"", str(tmp_path), str(tmp_path / "other")} & set(sys.path)
