"""action.yml: what the composite action runs, run here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampwise.cli import build_parser

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
PAGE = (ROOT / "docs" / "ci.md").read_text()
BAD = "scaler.scale(loss).backward()\nclip_grad_norm_(params, 1.0)\nscaler.step(optimizer)\nscaler.update()\n"


def step_named(name):
    return next(step for step in STEPS if step.get("name") == name)


@pytest.fixture
def act(tmp_path):
    """Runs a step's bash in a folder with a script, as Actions would; its exit code."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "ampwise"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m ampwise "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "work").mkdir()

    def run(name, script, paths=".", args=""):
        (tmp_path / "work" / "train.py").write_text(script)
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "AMPWISE_PATHS": paths,
            "AMPWISE_ARGS": args,
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step_named(name)["run"]]
        done = subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    return run


def test_every_step_is_whole():
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        assert ("uses" in step) != ("run" in step)
        assert "run" not in step or step["shell"] == "bash"
        assert re.fullmatch(r"[\w./-]+@v\d+", step.get("uses", "a@v1"))


def test_inputs_reach_commands_as_variables_only():
    assert not [step for step in STEPS if "${{" in step.get("run", "")]
    used = set(re.findall(r"inputs\.([\w-]+)", json.dumps(ACTION)))
    assert used == set(ACTION["inputs"])
    for name, about in ACTION["inputs"].items():
        assert f"| `{name}` | {'`' + about['default'] + '`' if about['default'] else ''}" in PAGE


def test_its_commands_can_be_given():
    commands = [line.strip() for step in STEPS for line in step.get("run", "").splitlines() if "ampwise check" in line]
    assert len(commands) == 2
    for command in commands:
        words = command.partition(" > ")[0].replace("$AMPWISE_ARGS $AMPWISE_PATHS", ".").split()[1:]
        assert build_parser(words).parse_known_args(words)[1] == []


def test_findings_are_sent_and_then_fail_the_job(act, tmp_path):
    assert act("Write SARIF", BAD)[0] == 0
    file = Path((tmp_path / "output").read_text().strip().removeprefix("file="))
    assert [found["ruleId"] for found in json.loads(file.read_text())["runs"][0]["results"]] == ["AMP101"]
    code, told = act("Check", BAD, paths="train.py")
    assert code == 1
    assert told.startswith("::error")
    assert "AMP101" in told


def test_what_is_clean_or_cannot_be_checked(act):
    assert act("Check", BAD, args="--ignore AMP101")[0] == 0
    assert act("Write SARIF", BAD, paths="gone.py")[0] == 0  # the report says so, and can be sent
    assert act("Check", BAD, paths="gone.py")[0] == 2
    assert act("Write SARIF", BAD, args="--nonsense")[0] == 2
