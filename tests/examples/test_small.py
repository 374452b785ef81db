"""The small examples, run as they are."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(capfd, monkeypatch, name, *arguments):
    """What it prints, and what it says besides."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    code = None
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code
    return capfd.readouterr()


@pytest.mark.nightly
def test_a_guarded_training_passes_over_what_is_broken_and_can_be_started_again(capfd, monkeypatch, tmp_path):
    first = run(capfd, monkeypatch, "guarded.py", "--directory", tmp_path, "--epochs", 1)
    assert "passed over: 3 batches" in first.out
    assert "rolled back" in first.err
    again = run(capfd, monkeypatch, "guarded.py", "--directory", tmp_path, "--epochs", 1)
    (weights,) = (line for line in first.out.splitlines() if line.startswith("weights: "))
    assert weights in again.out.splitlines()  # it is over: the same weights
    assert "resuming from" in again.err


def test_a_plain_loop_passes_over_what_is_broken_and_can_be_started_again(capfd, monkeypatch, tmp_path):
    first = run(capfd, monkeypatch, "guarded_loop.py", "--directory", tmp_path, "--epochs", 1)
    assert "passed over: 3 batches" in first.out
    assert "rolled back" in first.err
    again = run(capfd, monkeypatch, "guarded_loop.py", "--directory", tmp_path, "--epochs", 1)
    (weights,) = (line for line in first.out.splitlines() if line.startswith("weights: "))
    assert weights in again.out.splitlines()  # it is over: the same weights


def test_a_nan_is_hunted_down_to_its_line(capfd, monkeypatch):
    said = run(capfd, monkeypatch, "nan_hunt.py")
    assert "division-by-zero" in said.out + said.err


@pytest.mark.nightly
def test_would_it_train_in_formats_that_are_not_here(capfd, monkeypatch):
    said = run(capfd, monkeypatch, "would_it_train.py", "--steps", 2, "--keep", "head")
    names = [line.split()[0] for line in said.out.splitlines()]
    assert names == ["fp32", "emulate:mxfp8", "emulate:e4m3", "emulate:nvfp4"]
    losses = [line.split()[2] for line in said.out.splitlines()]
    assert len(set(losses)) > 1
    assert all(abs(float(loss) / float(losses[0]) - 1) < 0.05 for loss in losses)
