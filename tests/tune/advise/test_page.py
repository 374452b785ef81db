"""The page about advice: its commands are commands, its Python runs, and what it shows is what one gets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ampwise.cli import build_parser, main
from ampwise.tune.advise import advise

PAGE = (Path(__file__).parents[3] / "docs" / "advise.md").read_text(encoding="utf-8")


def test_its_commands_are_parsed():
    commands = re.findall(r"^\$ ampwise (.*?)(?:\s+#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) >= 9
    for command in commands:
        words = shlex.split(command)
        _, unknown = build_parser(words).parse_known_args(words)
        assert not unknown


def test_what_it_shows_is_what_one_gets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = PAGE.split("--want bf16\n", 1)[1].split("\n…", 1)[0]
    main(["advise", "--gpu", "v100-sxm2-16", "--want", "bf16"])
    assert capsys.readouterr().out.startswith(shown)


def test_its_python_is_true():
    advice = advise(params="124M", arch="transformer", gpu="a100-40", want="fp16", symptom="nan")
    assert (advice.precision, advice.refused) == ("fp16", False)
    assert advice.findings
