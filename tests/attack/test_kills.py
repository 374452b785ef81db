"""Killed at any moment, a run goes on from its last whole checkpoint, and ends with the weights of one that was not.

By SIGKILL at any time, also in the middle of a file that is being written; and by SIGTERM, after which it saves.
"""

import json
import random

import pytest

from ampwise.guard.disk.catalog import checkpoints

from ..faults.conftest import Children
from ..faults.programs import BATCHES, lineage
from .effort import rounds

EPOCHS = 3
PREEMPTED = 75
GUARD = {"every": "4 steps", "keep": 2, "patience": "60s", "exit_code": PREEMPTED}
FSYNCS = 12  # of some eight a checkpoint
ENDED_EARLY = {-9, -15, PREEMPTED}  # SIGTERM ends a program whose guard does not listen yet, or no more


@pytest.fixture
def children(warm, tmp_path_factory):
    return Children(warm, tmp_path_factory.mktemp("children"))


@pytest.fixture(scope="module")
def unbroken(warm, tmp_path_factory):
    """What comes of it when nobody kills it: on one rank, or on two."""
    children = Children(warm, tmp_path_factory.mktemp("unbroken"))
    found = {}

    def run(ranks):
        if ranks not in found:
            ended = children.train(tmp_path_factory.mktemp("whole"), ranks=ranks, epochs=EPOCHS, guard=GUARD)
            found[ranks] = (ended[0] if ranks > 1 else ended).outcome
        return found[ranks]

    return run


def newest_whole(directory):
    return max((each.step for each in checkpoints(directory) if not each.trouble), default=0)


def steps_in(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def killed_at_any_time(drawn, expected):
    return {"kill_after_s": drawn.uniform(0, expected.seconds)}


def killed_at_any_byte(drawn, expected):
    """In the middle of a file, when it is whole and has not its name yet, when the folder has not."""
    return {"kill_at_fsync": drawn.randint(1, FSYNCS)}


def told_to_end_at_any_time(drawn, expected):
    return {"kill_after_s": drawn.uniform(0, expected.seconds), "kill_with": "SIGTERM"}


def told_to_end_and_killed_while_it_saves(drawn, expected):
    return told_to_end_at_any_time(drawn, expected) | killed_at_any_byte(drawn, expected)


WAYS = [killed_at_any_time, killed_at_any_byte, told_to_end_at_any_time, told_to_end_and_killed_while_it_saves]


def in_turn(drawn, expected):
    """Ways to be killed, without end."""
    while True:
        for way in drawn.sample(WAYS, len(WAYS)):
            yield way(drawn, expected)


def killed_so_often(kills, one_run):
    """Runs from their beginning to their end, until there were as many deaths as were asked for."""
    deaths = 0
    for number in range(4 * kills):
        deaths += one_run(number, kills - deaths)
        if deaths == kills:
            return
    pytest.fail(f"{deaths} deaths in {4 * kills} runs")


def test_a_process_that_is_killed_again_and_again(children, unbroken, tmp_path):
    expected, kills = unbroken(1), rounds(2, 60)
    ways = in_turn(random.Random(kills), expected)
    assert len(expected.lineage) == EPOCHS * BATCHES

    def one_run(number, at_most):
        directory, log, deaths, code = tmp_path / f"run-{number}", tmp_path / f"log-{number}", 0, None
        while code != 0:
            kill = next(ways) if deaths < at_most else {}
            newest, seen = newest_whole(directory), len(steps_in(log))
            ended = children.train(directory, epochs=EPOCHS, guard=GUARD, log=str(log), **kill)
            code = ended.code
            if begun := steps_in(log)[seen:]:
                assert begun[0][0] == newest + 1, "none lost beyond the last checkpoint, none before it made again"
            assert code in {0, *ENDED_EARLY}, (kill, ended.said)
            if code == PREEMPTED:
                assert newest_whole(directory) == steps_in(log)[-1][0], (kill, "the last step was saved")
            deaths += code != 0
        assert ended.outcome.weights == expected.weights
        assert lineage(steps_in(log)) == expected.lineage, "each batch once, in its step"
        assert not list(directory.glob(".step-*")), "what was half written is gone"
        return deaths

    killed_so_often(kills, one_run)


@pytest.mark.nightly
def test_two_ranks_that_are_killed_again_and_again(children, unbroken, tmp_path):
    """Each by itself: one dies before the other, or the other ends because it is alone."""
    expected, kills = unbroken(2), rounds(1, 12)
    ways = in_turn(random.Random(kills), expected)

    def one_run(number, at_most):
        deaths, codes = 0, []
        while codes != [0, 0]:
            by_rank = {rank: next(ways) for rank in range(2)} if deaths < at_most else None
            ended = children.train(tmp_path / f"run-{number}", ranks=2, epochs=EPOCHS, guard=GUARD, by_rank=by_rank)
            codes = [each.code for each in ended]
            early = ENDED_EARLY & set(codes)
            assert codes == [0, 0] or (early and set(codes) <= {*ENDED_EARLY, 70, 0}), ended[0].said + ended[1].said
            deaths += codes != [0, 0]
        assert [each.outcome.weights for each in ended] == 2 * [expected.weights]
        assert ended[0].outcome.loss == expected.loss, "and the statistics of BatchNorm"
        return deaths

    killed_so_often(kills, one_run)


@pytest.mark.parametrize("count", rounds([3], range(1, FSYNCS + 1)))
def test_a_checkpoint_that_is_cut_off_leaves_the_one_before(children, unbroken, tmp_path, count):
    """At each of its moments; here, of the first two."""
    killed = children.train(tmp_path, epochs=EPOCHS, guard=GUARD, kill_at_fsync=count)
    assert killed.code == -9
    ended = children.train(tmp_path, epochs=EPOCHS, guard=GUARD)
    assert ended.code == 0, ended.said
    assert "checkpoint-damaged" not in ended.outcome.told, "what has its name is whole"
    assert ended.outcome.weights == unbroken(1).weights
