"""``ampwise checkpoints``: which checkpoint a run would resume from, and why not from a newer one."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from ampwise.cli import main
from ampwise.guard.disk.catalog import checkpoints, mark_bad, mark_good
from ampwise.guard.disk.writing import write_checkpoint

FILE = "tensors-00000.safetensors"


def save(folder, step, **about):
    tensors = {"w": torch.arange(300.0)}
    return write_checkpoint(folder, step=step, live=tensors, staged=tensors, plain=None, about=about, group=None)


@pytest.fixture
def four(tmp_path):
    """Good, flipped, discredited and cut off, the newest last."""
    good, flipped, bad, cut = (save(tmp_path, step, precision="bf16") for step in (100, 200, 300, 400))
    mark_good(good)
    data = bytearray((flipped.path / FILE).read_bytes())
    data[-1] ^= 1
    (flipped.path / FILE).write_bytes(data)
    mark_bad(bad, "the weights are not finite.")
    os.truncate(cut.path / FILE, 1000)
    return tmp_path


def resume(capsys, *words):
    code = main(["checkpoints", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


NOT_400 = (
    "Not from step 400 (step-00000400): "
    "tensors-00000.safetensors has 1,000 bytes, expected 1,272: it was truncated or changed."
)
NOT_300 = "Not from step 300 (step-00000300): the weights are not finite."
NOT_200 = (
    "Not from step 200 (step-00000200): "
    "tensors-00000.safetensors has changed since it was written: its checksum differs."
)


def test_the_newest_whole_one_and_why_not_the_newer_ones(four, capsys):
    code, out, err = resume(capsys, four)
    first, second, verdict = out.splitlines()
    assert (code, err, first, second) == (0, "", NOT_400, NOT_300)
    assert verdict.startswith(f"A run would resume from step 200 ({four / 'step-00000200'}): bf16, 1.25 KiB, 20")
    assert verdict.endswith(", intact.")


def test_verify_reads_the_files(four, capsys):
    code, out, err = resume(capsys, four, "--verify")
    *lines, verdict = out.splitlines()
    assert (code, lines) == (0, [NOT_400, NOT_300, NOT_200])
    assert "A run would resume from step 100" in verdict
    assert verdict.endswith(", good.")
    assert err.splitlines() == [f"ampwise: reading step-00000{step} (1.25 KiB)" for step in (200, 100)]


def test_show_is_a_table_of_all(four, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = resume(capsys, four, "-v")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "step", "saved", "size", "ranks", "precision", "state"]
    rows = [line for line in lines if line.startswith("step-")]
    assert [row.split()[1] for row in rows] == ["400", "300", "200", "100"]
    assert "damaged: tensors-00000.safetensors" in rows[0]
    assert re.search(r"1\.25 KiB +1 +bf16 +good$", rows[3])
    assert lines[-1].startswith("A run would resume from step 200")


def test_what_a_run_has_left_behind_is_not_called_damaged(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    mark_bad(save(tmp_path, 100), "the run was rolled back to step 50", undone=True)
    _, out, _ = resume(capsys, tmp_path, "-v")
    assert "rolled back: the run was rolled back to step 50" in out
    assert "damaged" not in out


def test_json_has_all_of_it(four, capsys):
    code, out, _ = resume(capsys, four, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["directory"] == str(four)
    assert data["resume"] == data["checkpoints"][2]
    assert [each["step"] for each in data["checkpoints"]] == [400, 300, 200, 100]
    assert data["checkpoints"][3]["good"] is True
    assert data["checkpoints"][1]["trouble"] == "the weights are not finite."
    assert data["resume"]["about"] == {"precision": "bf16"}


def test_nothing_to_go_on_from(tmp_path, capsys):
    code, out, err = resume(capsys, tmp_path)
    assert (code, err) == (1, "")
    assert (
        out
        == f"There is no checkpoint to resume from in {tmp_path}: it has none. A run would start from the beginning.\n"
    )
    mark_bad(save(tmp_path, 1), "bad weights")
    code, out, _ = resume(capsys, tmp_path, "-v")
    assert code == 1
    assert out.endswith("all are damaged. A run would refuse to start: give it another directory.\n")
    code, out, _ = resume(capsys, tmp_path, "--json")
    assert (code, json.loads(out)["resume"]) == (1, None)


def test_checkpoints_that_were_all_undone_are_no_hindrance(tmp_path, capsys):
    mark_bad(save(tmp_path, 100), "the run was rolled back to step 0", undone=True)
    code, out, _ = resume(capsys, tmp_path)
    assert code == 1
    assert out.endswith("all were rolled back. A run would start from the beginning.\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "no such folder. Name the directory that the Guard writes to."),
        ("file", "cannot be read: Not a directory. Name a folder of checkpoints."),
        ("step-00000001", "is a single checkpoint. Name the folder above it:"),
    ],
)
def test_a_folder_that_is_none_of_ours(tmp_path, capsys, name, text):
    save(tmp_path, 1)
    (tmp_path / "file").write_text("")
    code, out, err = resume(capsys, tmp_path / name)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_what_a_checkpoint_says_is_not_believed_by_the_terminal(tmp_path, capsys):
    save(tmp_path, 1, precision="\x1b[2J[red]x[/red]\n" + "y" * 100)
    mark_bad(save(tmp_path, 2), "\x1b[31mbad\n")
    for words in ((), ("-v",)):
        _, out, _ = resume(capsys, tmp_path, *words)
        assert "\x1b" not in out
        assert "[red]" in out
        assert all(line.isprintable() for line in out.splitlines())


def test_nothing_is_changed(four, capsys):
    def everything():
        return sorted((path, path.stat().st_mtime_ns) for path in four.rglob("*"))

    before = everything()
    for words in ((), ("-v", "--verify"), ("--json",)):
        resume(capsys, four, *words)
    assert everything() == before
    assert len(checkpoints(four)) == 4


def test_torch_stays_out(four):
    code = (
        "import sys\nfrom ampwise.cli import main\n"
        f"main(['checkpoints', {str(four)!r}, '-v', '--verify'])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["checkpoints", "--help"])
    assert "ampwise checkpoints checkpoints -v" in capsys.readouterr().out
