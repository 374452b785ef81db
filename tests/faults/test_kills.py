"""Killed at any moment, a run goes on from its last whole checkpoint, and ends with the weights of one that was not.

AMPWISE_KILLS=50 kills as often, for the nightly target.
"""

import os
import random

import pytest

from ampwise.guard.disk.catalog import checkpoints

from .conftest import Children
from .programs import BATCHES, lineage

KILLS = int(os.environ.get("AMPWISE_KILLS", "5"))
TRIES = 4 * KILLS  # runs
EPOCHS = 3
GUARD = {"every": "4 steps", "keep": 2, "patience": "20s"}
FSYNCS = 12  # of some eight a checkpoint


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


def at_any_time(drawn, expected):
    return {"kill_after_s": drawn.uniform(0, expected.seconds)}


def at_any_byte(drawn, expected):
    """In the middle of a file, when it is whole and has not its name yet, when the folder has not."""
    return {"kill_at_fsync": drawn.randint(1, FSYNCS)}


def killed_so_often(one_run):
    """Runs from their beginning to their end, until there were as many deaths as were asked for."""
    deaths = 0
    for number in range(TRIES):
        deaths += one_run(number, KILLS - deaths)
        if deaths == KILLS:
            return
    pytest.fail(f"{deaths} deaths in {TRIES} runs")


@pytest.mark.parametrize("way", [at_any_time, at_any_byte])
def test_a_process_that_is_killed_again_and_again(children, unbroken, logged, tmp_path, way):
    expected, drawn = unbroken(1), random.Random(KILLS)
    assert len(expected.lineage) == EPOCHS * BATCHES

    def one_run(number, at_most):
        directory, log, deaths, code = tmp_path / f"run-{number}", tmp_path / f"log-{number}", 0, None
        while code != 0:
            kill = way(drawn, expected) if deaths < at_most else {}
            newest, seen = newest_whole(directory), len(logged(log))
            ended = children.train(directory, epochs=EPOCHS, guard=GUARD, log=str(log), **kill)
            code = ended.code
            if begun := logged(log)[seen:]:
                assert begun[0][0] == newest + 1, "none lost beyond the last checkpoint, none before it made again"
            assert code in (0, -9), ended.said
            deaths += code != 0
        assert ended.outcome.weights == expected.weights
        assert lineage(logged(log)) == expected.lineage, "each batch once, in its step"
        assert not list(directory.glob(".step-*")), "what was half written is gone"
        return deaths

    killed_so_often(one_run)


def test_two_ranks_that_are_killed_again_and_again(children, unbroken, tmp_path):
    """Each by itself: one dies before the other, or the other ends because it is alone."""
    expected, drawn = unbroken(2), random.Random(KILLS)

    def one_run(number, at_most):
        deaths, codes = 0, []
        while codes != [0, 0]:
            kill = {rank: drawn.choice([at_any_time, at_any_byte])(drawn, expected) for rank in range(2)}
            by_rank = kill if deaths < at_most else None
            ended = children.train(tmp_path / f"run-{number}", ranks=2, epochs=EPOCHS, guard=GUARD, by_rank=by_rank)
            codes = [each.code for each in ended]
            assert codes == [0, 0] or (-9 in codes and set(codes) <= {-9, 70, 0}), ended[0].said + ended[1].said
            deaths += codes != [0, 0]
        assert [each.outcome.weights for each in ended] == 2 * [expected.weights]
        assert ended[0].outcome.loss == expected.loss, "and the statistics of BatchNorm"
        return deaths

    killed_so_often(one_run)


@pytest.mark.parametrize("count", range(1, FSYNCS + 1) if KILLS > 5 else [3])
def test_a_checkpoint_that_is_cut_off_leaves_the_one_before(children, unbroken, tmp_path, count):
    """At each of its moments; here, of the first two."""
    killed = children.train(tmp_path, epochs=EPOCHS, guard=GUARD, kill_at_fsync=count)
    assert killed.code == -9
    ended = children.train(tmp_path, epochs=EPOCHS, guard=GUARD)
    assert ended.code == 0, ended.said
    assert "checkpoint-damaged" not in ended.outcome.told, "what has its name is whole"
    assert ended.outcome.weights == unbroken(1).weights
