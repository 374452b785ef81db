"""The examples of several ranks, by torchrun and by themselves."""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def rows(said):
    """The table of ranks, as words: the columns are set apart by two spaces or more."""
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("Lesson: ") == 1
    return [re.split(r"  +", line.strip()) for line in re.findall(r"^ +\d  .*$", said.stdout, re.MULTILINE)]


def test_ddp_ranks_skip_alike_and_exchange_once_a_window(warm, tmp_path):
    said = warm.run(*TORCHRUN, EXAMPLES / "ddp.py", "--steps", 12, cwd=tmp_path)
    first, second = rows(said)
    assert first[1:5] == second[1:5]  # what was skipped, the loss scale, exchanges, and the weights
    assert first[1:4] == ["6", "65536", "12"]  # a bad batch leaves the loss scale alone
    assert first[5] != second[5]  # the losses are of their own data
    assert "bad-batch" in said.stderr
    assert "on rank 1" in said.stderr


@pytest.mark.nightly
def test_fsdp2_ranks_skip_what_one_of_them_has_not_seen(warm, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = warm.run(
        EXAMPLES / "fsdp2.py",
        "--ranks",
        2,
        "--steps",
        30,
        cwd=tmp_path,
        env=environment,
        loaded=["torch.distributed.fsdp"],
    )
    first, second = rows(said)
    assert (first[2], second[2]) == ("infinite", "all finite")
    assert first[3:5] == second[3:5] == ["6", "32768"]
    assert min(float(row[5].rstrip("%")) for row in (first, second)) > 60
    assert "OMP_NUM_THREADS" not in said.stderr
