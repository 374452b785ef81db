"""Ranks under a guard: whatever one of them meets, all do the same about it. Most of these went wrong once."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ampwise.guard.disk.catalog import checkpoints

from ..night import by_night

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork")

PROGRAM = Path(__file__).with_name("guard_ranks.py")
KINDS = (("tensors", "safetensors"), ("plain", "json"))
LOADED = [
    *("ampwise.guard.guard", "ampwise.guard.disk.reading", "ampwise.guard.disk.writing", "ampwise.trace.diagnosis"),
    *("torch.distributed.fsdp", "torch.nn.parallel", "torch.utils.data"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(warm, folder):
    """What both ranks said of each case."""
    result = folder / "answers.json"
    done = warm.run(str(PROGRAM), str(folder), str(result), cwd=folder, timeout=600, loaded=LOADED)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())


def both(ranks, case, fact):
    """The same on both."""
    first, second = (rank[fact] for rank in ranks[case])
    assert first == second
    return first


def test_a_rollback_to_disk_reads_while_a_checkpoint_is_written(ranks):
    case = "back_to_disk_while_writing"
    assert both(ranks, case, "code") is None
    assert ranks[case][1]["busy"] == [True], "or nothing is tested here"
    assert both(ranks, case, "told") == ["rolled-back", "rolled-back"]
    assert both(ranks, case, "sources") == ["memory", "disk"]
    assert both(ranks, case, "applied") == 28
    assert both(ranks, case, "unbroken")
    assert both(ranks, case, "last") == 28
    # That of step 20 from before the first rollback, and that which was being written in the second.
    undone = [[20, True], [20, True], [16, True]]
    assert both(ranks, case, "disk") == [[28, False], *undone, [12, False], [8, False], [4, False]]


def test_after_a_rollback_at_the_end_both_save_or_neither_does(ranks, folder):
    case = "back_at_the_end"
    assert both(ranks, case, "told") == ["step-skipped", "rolled-back"]
    assert both(ranks, case, "number") == 8
    assert both(ranks, case, "last") == 8
    assert {each.step: each.undone for each in checkpoints(folder / case)} == {12: True, 8: False, 4: False}


def test_what_one_rank_cannot_read_is_read_by_none(ranks):
    case = "damaged_for_one"
    assert both(ranks, case, "told") == ["checkpoint-damaged"]
    assert both(ranks, case, "begun_at") == 4
    assert both(ranks, case, "unbroken")
    words = [rank["words"][0] for rank in ranks[case]]
    assert all("plain-00001.json cannot be read: Input/output error." in each for each in words)
    assert "rank 1: " in words[0]


@pytest.mark.parametrize("world", [*by_night(1), 2, 3])
def test_a_flipped_bit_is_found_by_whichever_rank_reads_the_file(ranks, world):
    """Two have written it: each of so many others reads what it needs, each file once, before anything is changed."""
    said = ranks[f"flipped_in_one_of_{world}"]
    files = {f"{kind}-0000{rank}.{ending}": None for kind, ending in KINDS for rank in range(2)}
    changed = [] if world == 2 else ["ranks-changed"]
    whole = [each.pop("") for each in said]
    assert [each["begun_at"] for each in whole] == [8] * world
    assert [each["told"] for each in whole] == [changed] * world
    assert all(len(each["proven"]) == len(set(each["proven"])) for each in whole)
    needed = {name for each in whole for name in each["proven"]}
    assert needed == files.keys() - ({"plain-00001.json"} if world == 1 else set())
    for name in needed:
        found = [each[name] for each in said]
        assert [each["begun_at"] for each in found] == [4] * world, name
        assert [each["told"] for each in found] == [[*changed, "checkpoint-damaged"]] * world
        assert all(f"{name} has changed since it was written" in each["words"][-1] for each in found)
        assert all(each["weights"] == found[0]["weights"] != whole[0]["weights"] for each in found)


def test_out_of_memory_on_one_rank_is_reported_and_raised_and_the_other_stops(ranks):
    case = "no_memory_on_one"
    other, starved = ranks[case]
    assert starved["raised"] == "no room in the backward pass"
    assert starved["told"] == ["out-of-memory"]
    assert (other["code"], other["told"]) == (70, ["rank-lost"])
    assert both(ranks, case, "applied") == 3


def test_an_evaluation_longer_than_patience_is_no_silence_if_one_says_so(ranks):
    case = "alive_for_long"
    assert both(ranks, case, "code") is None
    assert both(ranks, case, "told") == []
    assert both(ranks, case, "applied") == both(ranks, case, "last") == 4


def test_a_signal_to_one_rank_after_the_last_step_is_heeded_by_both(ranks):
    case = "told_to_end_after_the_last_step"
    assert both(ranks, case, "code") == 5
    assert both(ranks, case, "told") == ["preempted"]
    assert both(ranks, case, "last") == 3


def test_a_rank_that_is_gone_after_the_last_step_is_noticed(ranks):
    left, gone = ranks["gone_after_the_last_step"]
    assert gone is None
    assert (left["code"], left["told"]) == (70, ["rank-lost"])
