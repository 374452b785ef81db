"""The hooks that pre-commit reads: complete, and commands that exist."""

import shlex
from pathlib import Path

import pytest

from ampwise.cli import main

LINES = (Path(__file__).parents[1] / ".pre-commit-hooks.yaml").read_text().splitlines()


def listed(lines):
    """What YAML reads in a list of flat tables, which is all that this file may be."""
    found = []
    for line in lines:
        key, colon, value = line[2:].partition(": ")
        if line.startswith("#"):
            continue
        assert colon, line
        assert line[:2] in ("- ", "  "), line
        if line[0] == "-":
            found.append({})
        found[-1][key] = value
    return found


HOOKS = listed(LINES)


def test_each_hook_is_there_once_and_says_all_that_pre_commit_asks_for():
    assert [hook["id"] for hook in HOOKS] == ["ampwise", "ampwise-fix"]
    for hook in HOOKS:
        assert {"id", "name", "entry", "language"} <= hook.keys()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hook_runs_and_honours_what_is_excluded(hook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import torch\n\nscaler = torch.cuda.amp.GradScaler()\nscaler.scale(1)\n")
    program, *words = shlex.split(hook["entry"])
    assert program == "ampwise"
    assert main([*words, "a.py"]) == (0 if "--fix" in words else 1)
    (tmp_path / "ampwise.toml").write_text('extend-exclude = ["a.py"]')
    assert main([*words, "a.py"]) == 0
    capsys.readouterr()
