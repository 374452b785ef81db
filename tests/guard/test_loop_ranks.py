"""Ranks with a loop of their own under a guard: what one of them meets, all do the same about, and nothing is lost."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from .test_guard_ranks import LOADED

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork")

PROGRAM = Path(__file__).with_name("guard_loop_ranks.py")


@pytest.fixture(scope="module")
def ranks(warm, tmp_path_factory):
    """What all ranks said of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    result = folder / "answers.json"
    done = warm.run(str(PROGRAM), str(folder), str(result), cwd=folder, timeout=600, loaded=LOADED)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())


def of_all(ranks, case):
    """The same on all."""
    first, *others = ranks[case]
    assert others
    assert all(other == first for other in others), case
    assert "error" not in first, first
    return first


@pytest.mark.parametrize("case", ["ddp", "ddp_own_torch", "fsdp2", "fsdp2_own_ampwise"])
def test_a_bad_batch_on_one_rank_and_a_kill_leave_no_trace(ranks, case):
    """All ranks go back, leave it out, and resume: to the bit as a run that never had it."""
    said = of_all(ranks, case)
    step, left = (3, [[0, 4], [0, 5]]) if case == "fsdp2" else (6, [[0, 5]])  # which accumulates two batches
    assert said["codes"] == [None] * 3
    assert [event[:2] for event in said["events"]] == [["rolled-back", step]]
    assert said["events"][0][2].startswith("because `batch` has "), "also on ranks whose batch is fine"
    assert said["resumed"] == []
    assert said["passed"] == left
    assert said["same"]


def test_a_step_that_one_rank_leaves_out_is_left_out_by_all(ranks):
    """As a script does that asks its own loss: the shards of the others would move on without it."""
    said = of_all(ranks, "left_out")
    assert [event[:2] for event in said["events"]] == [["rolled-back", 6]]
    assert "a rank left out `optimizer.step()`, which others called" in said["events"][0][2]
    assert (said["passed"], said["same"]) == ([[0, 5]], True)


def test_ranks_that_nothing_connects_do_not_share_a_directory(ranks):
    """The second would wait for the lock of the first, or resume what the first has saved."""
    first, second = ranks["on_their_own"]
    assert first == {"trained": 10}
    assert "this is rank 1, and the model is neither wrapped in DistributedDataParallel nor" in second["refused"]


def test_other_numbers_of_ranks_go_on_with_the_same_weights(ranks):
    runs = [ranks[name] for name in sorted(ranks) if name.startswith("resharded_")]
    assert len(runs) > 2
    for number, run in enumerate(runs):
        assert [each["begun_at"] for each in run] == [3 * number] * len(run)
        assert all(each["before"] == runs[number - 1][0]["after"] for each in run if number)
        assert all(each["after"] == run[0]["after"] != each["before"] for each in run)
