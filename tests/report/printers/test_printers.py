"""Choosing an output and writing it."""

import argparse
import io
import subprocess
import sys

import pytest

from ampwise.errors import UnknownName
from ampwise.report.printers import add_output_arguments, output_format, output_formats, print_findings


def chosen(*words, **environment):
    parser = argparse.ArgumentParser()
    add_output_arguments(parser)
    return output_format(parser.parse_args(words), environment)


def test_flag_over_variable_over_actions_over_default():
    told = {"AMPWISE_OUTPUT_FORMAT": "concise", "GITHUB_ACTIONS": "true"}
    assert chosen("--output-format", "sarif", **told) == "sarif"
    assert chosen("--json", **told) == "json"
    assert chosen(**told) == "concise"
    assert chosen(GITHUB_ACTIONS="true") == "github"
    assert chosen(GITHUB_ACTIONS="") == "full"
    assert chosen(AMPWISE_OUTPUT_FORMAT="") == "full"


def test_json_and_another_format_contradict(capsys):
    with pytest.raises(SystemExit):
        chosen("--json", "--output-format", "full")
    assert "not allowed with" in capsys.readouterr().err


def test_a_wrong_variable_is_named():
    with pytest.raises(UnknownName) as caught:
        chosen(AMPWISE_OUTPUT_FORMAT="jsno")
    assert str(caught.value) == (
        "unknown output format in AMPWISE_OUTPUT_FORMAT 'jsno'. Did you mean json? "
        "The formats are concise, full, github, gitlab, json, sarif."
    )


def test_a_wrong_format_is_an_error_and_not_a_fallback(finding):
    with pytest.raises(UnknownName, match="unknown output format 'xml'"):
        print_findings([finding()], "xml")


@pytest.mark.parametrize("name", output_formats())
def test_every_format_prints(name, finding, capsys):
    print_findings([finding(file="train.py", line=3)], name)
    out = capsys.readouterr().out
    assert "AMP101" in out
    assert "\x1b" not in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_on_a_terminal_and_never_under_no_color(finding, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    print_findings([finding()], "concise", terminal)
    assert "\x1b[1;31mAMP101\x1b[0m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    print_findings([finding()], "concise", plain)
    assert "\x1b" not in plain.getvalue()


@pytest.mark.parametrize("name", ["concise", "full", "github"])
def test_a_stream_that_cannot_encode_a_character_gets_an_escape(name, finding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_findings([finding("größer → \ud800")], name, stream)
    stream.flush()
    assert rb"gr\xf6\xdfer -> \ud800" in raw.getvalue()


def test_printing_needs_neither_rich_nor_torch():
    code = """
import sys
from ampwise.finding import Place, Rule, Severity
from ampwise.report.printers import output_formats, print_findings
rule = Rule(code="AMP101", name="a", severity=Severity.INFO, summary="s", why="w", fix="f", bad="b", good="g")
for name in output_formats():
    print_findings([rule.at(Place(file=sys.argv[0], line=1), "m")], name)
print([name for name in ("rich", "torch", "numpy", "pydantic") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
