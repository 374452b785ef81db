"""What is too large or too deep is not checked, of too many paths a sample is; that is said in one line, or with -v."""

import json

import pytest

from ampwise.check.source import project, script, walk
from ampwise.cli import main

STEP = """\
for x in loader:
    optimizer.zero_grad()
{body}    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
HEAD = "import torch  # autocasts\nscaler = torch.amp.GradScaler()\noptimizer = torch.optim.SGD(model.parameters())\n"


def with_questions(number):
    asked = "".join(f"    if flag_{i}:\n        loss_{i}.backward()\n" for i in range(number))
    return HEAD + STEP.format(body=asked)


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(files, *options):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        code = main(["check", "--isolated", "--select", "ALL", "--jobs", "1", *options, *files])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


SAMPLED = (
    "train.py:4:1: more than 256 paths through this step; a sample of them was checked, which takes each side of each "
    "`if`"
)


def test_of_too_many_paths_a_sample_is_checked_and_that_is_said_in_one_line(check):
    files = {"train.py": with_questions(9), "other.py": with_questions(9)}
    code, out, err = check(files, "--output-format", "concise")
    assert (code, err) == (1, "")
    assert out.count("AMP101") == 2  # of the clips
    assert out.endswith("\n2 files were checked only in part (too many paths or too much code; -v lists them).\n")
    _, out, err = check(files, "--output-format", "concise", "-v")
    assert err.splitlines() == [f"ampwise: {SAMPLED.replace('train', 'other')}", f"ampwise: {SAMPLED}"]
    assert out.endswith("\n2 files were checked only in part.\n")
    _, _, err = check(files, "--output-format", "github")
    assert err == "ampwise: 2 files were checked only in part (too many paths or too much code; -v lists them)\n"


def test_it_is_in_the_json_too(check):
    _, out, _ = check({"train.py": with_questions(9)}, "--json")
    notes = [one for one in json.loads(out) if one["severity"] == "note"]
    assert [(note["code"], note["filename"], note["message"]) for note in notes] == [(None, "train.py", SAMPLED)]


def test_fewer_paths_are_all_checked(check):
    code, out, err = check({"train.py": with_questions(7)}, "--output-format", "concise")
    assert (code, err) == (1, "")
    assert "AMP101" in out


def test_a_long_script_is_followed_up_to_a_line_that_is_named(check):
    step = STEP.format(body="")
    _, out, err = check(
        {"train.py": HEAD + step + "x = 1\n" * walk.MOST_STATEMENTS + step}, "--output-format", "concise", "-v"
    )
    assert out.startswith("train.py:7:")
    (line,) = err.splitlines()
    end = walk.MOST_STATEMENTS + 1  # the statements of the loop were counted too
    assert line == (
        "ampwise: train.py:1:1: too much code to follow from the top of the file; "
        f"code after train.py:{end}:1 was not checked together with it"
    )


def test_a_helper_is_not_followed_from_everywhere(check, monkeypatch):
    monkeypatch.setattr(project, "MOST_FOLLOWED", 10)
    monkeypatch.setattr(project, "FOLLOWED_PER_LINE", 0)
    callers = "".join(f"def train_{i}(loss):\n    helper(loss)\n" for i in range(9))
    helper = "def helper(loss):\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n"
    _, _, err = check({"train.py": HEAD + helper + callers}, "-v")
    last, first, *_ = err.splitlines()
    assert first.startswith("ampwise: train.py:17:1: too much code to follow from `train_5`; code after train.py:")
    assert last == "ampwise: train.py: too much code to follow from 1 more function"


def test_nesting_beyond_what_can_be_followed_is_said_in_one_line(check):
    chain = "x = " + " + ".join("a" for _ in range(800)) + "\n"
    code, _, err = check({"train.py": HEAD + STEP.format(body=f"    {chain}    loss = loss / {chain[4:]}")})
    assert code in (0, 1)
    assert all(line.startswith("ampwise: train.py") and "nested too deeply" in line for line in err.splitlines())
    assert "internal error" not in err


@pytest.mark.parametrize(
    "text", ["(" * 150 + ")" * 150, "-" * 100_000 + "1", "a" + ".b" * 100_000, "+".join("a" * 100_000)]
)
def test_nesting_beyond_what_python_parses_is_said_in_one_line(check, text):
    code, _, err = check({"train.py": f"x = {text}\n"})
    assert code in (0, 2)
    assert len(err.splitlines()) <= 1
    assert "Traceback" not in err


def test_a_script_that_is_too_large_is_neither_checked_nor_followed(check, monkeypatch):
    monkeypatch.setattr(script, "LARGEST_BYTES", 2_000)
    helper = "def clip(model):\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    step = STEP.format(body="").replace("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "clip(model)")
    files = {"train.py": f"from helpers import clip\n{HEAD}{step}", "helpers.py": "import torch\n" + helper}
    code, out, _ = check(files)
    assert (code, "AMP101" in out) == (1, True)
    code, out, err = check({**files, "helpers.py": files["helpers.py"] + "#" * 2_000})
    assert (code, "AMP101" in out) == (2, False)
    assert "helpers.py: cannot check: larger than 0 MB" in err
    assert "helpers.py: not read for the files that import it: larger than 0 MB" in err


def test_only_so_many_imported_files_are_followed(check, monkeypatch):
    monkeypatch.setattr(project, "MOST_IMPORTED", 1)
    helper = "import torch\ndef {0}(model):\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    step = STEP.format(body="    one(model)\n    two(model)\n")
    files = {"train.py": f"from a import one\nfrom b import two\n{HEAD}{step}"}
    _, out, err = check({**files, "a.py": helper.format("one"), "b.py": helper.format("two")}, "-v")
    assert out.endswith("1 file was checked only in part.\n")
    assert err == "ampwise: b.py: import not followed: 1 imported file was already read, which is the limit\n"


def test_the_code_of_a_notebook_has_the_limit_of_a_script(check, monkeypatch):
    monkeypatch.setattr("ampwise.check.source.notebook.LARGEST_BYTES", 2_000)
    cell = {"cell_type": "code", "source": ["# long\n"] * 300, "metadata": {}, "outputs": []}
    code, _, err = check({"a.ipynb": json.dumps({"nbformat": 4, "metadata": {}, "cells": [cell]})})
    assert (code, err) == (
        2,
        "ampwise: a.ipynb: cannot check: its code is larger than 0 MB, which is too large to check\n",
    )


def test_the_json_of_a_notebook_has_a_limit_of_values(check, monkeypatch):
    monkeypatch.setattr("ampwise.check.source.notebook.MOST_VALUES", 2_000_000)
    code, _, err = check({"a.ipynb": '{"nbformat": 4, "cells": [' + "[]," * 1_000_001 + "[]]}"})
    assert (code, err) == (
        2,
        "ampwise: a.ipynb: cannot check: a broken notebook: its JSON has more than 2 million values\n",
    )
