"""`ampwise completion`: what a real bash completes with it."""

import argparse
import shutil
import subprocess

import pytest

from ampwise.cli import build_parser, commands, main

TRY = """
source completion.bash
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_ampwise
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def completed(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)

    def complete(*words):
        done = subprocess.run(
            ["bash", "-c", TRY, "bash", "ampwise", *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(completed):
    assert sorted(completed("")) == sorted([*commands(), "help"])
    assert completed("ch") == ["check", "checkpoints"]
    assert completed("--v") == ["--version"]
    assert completed("help", "re") == ["replay", "report"]
    assert completed("check", "train.py", "--exc") == ["--exclude"]
    assert completed("check", "--output-format", "s") == ["sarif"]
    assert completed("completion", "") == ["bash", "zsh", "fish"]
    assert completed("check", "tra") == []  # then bash completes files


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_has_every_command_and_option(capsys, shell):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in commands():
        for action in build_parser([command]).command._actions:
            for option in action.option_strings if action.help != argparse.SUPPRESS else ():
                assert option in text or f"-l {option[2:]} " in text or f"-s {option[1:]} " in text
