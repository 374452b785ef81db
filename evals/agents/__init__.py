"""Agents that answer: any command, and two that come with the evaluation and need no model."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ampwise.cli import summaries
from ampwise.errors import BadInput
from ampwise.integrations.skill import NAME, skill_files
from evals.scenarios import Scenario

BUILT_IN = ("advisor", "guide")
ROOT = Path(__file__).parents[2]
WITH_SKILL = """\
You have this skill; its other files are in the folder {folder}, and `ampwise` can be called.

{skill}

# The question

{question}
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an agent printed, and why that is no answer, if it is none."""

    text: str
    seconds: float
    error: str = ""


def command_of(agent: str) -> list[str]:
    """Return the command line of an agent: a built-in one by its name, or any other."""
    if agent in BUILT_IN:
        return [sys.executable, "-m", f"evals.agents.{agent}"]
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise BadInput(f"--agent {agent!r}: {error}. Give a command, quoted as in a shell.") from error
    if not words:
        raise BadInput(f"--agent {agent!r}: expected a command, or one of {', '.join(BUILT_IN)}.")
    return words


def ask(command: list[str], scenario: Scenario, *, skill: bool, seconds: float) -> Reply:
    """Run an agent in a folder of its own, which has the scenario's files; it reads the prompt on stdin."""
    with tempfile.TemporaryDirectory(prefix="evals-") as name:
        folder = Path(name)
        for path, text in scenario.files.items():
            (folder / path).write_text(text.lstrip(), encoding="utf-8")
        prompt = scenario.question()
        if skill:
            files = skill_files(summaries())
            for path, text in files.items():
                (folder / NAME / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / NAME / path).write_text(text, encoding="utf-8")
            prompt = WITH_SKILL.format(folder=NAME, skill=files["SKILL.md"], question=prompt)
        return _run(command, prompt, folder, seconds)


def question_of(prompt: str) -> str:
    """Return a prompt without the skill, for agents that match words."""
    return prompt.rpartition("\n# The question\n")[2]


def _run(command: list[str], prompt: str, folder: Path, seconds: float) -> Reply:
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that its children end with it
        )
    except OSError as failure:
        raise BadInput(f"--agent {command[0]}: cannot be started: {failure.strerror}. Give a command.") from failure
    try:
        out, err = process.communicate(prompt.encode(), timeout=seconds)
        code = process.returncode
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        error = f"exit code {code}: {' '.join(last)}"[:300] if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        error = f"no answer within {seconds:g} s"
    return Reply(out.decode(errors="replace"), time.monotonic() - start, error)
