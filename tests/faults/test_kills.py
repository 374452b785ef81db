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
TRIES = 4 * KILLS + 4
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


@pytest.mark.parametrize("way", [at_any_time, at_any_byte])
def test_a_process_that_is_killed_again_and_again(children, unbroken, logged, tmp_path, way):
    expected, drawn = unbroken(1), random.Random(KILLS)
    assert len(expected.lineage) == EPOCHS * BATCHES
    directory, log, deaths = tmp_path / "run", tmp_path / "log", 0
    for _ in range(TRIES):
        kill = way(drawn, expected) if deaths < KILLS else {}
        newest, seen = newest_whole(directory), len(logged(log))
        ended = children.train(directory, epochs=EPOCHS, guard=GUARD, log=str(log), **kill)
        if begun := logged(log)[seen:]:
            assert begun[0][0] == newest + 1, "none lost beyond the last checkpoint, and none before it made again"
        if ended.code == 0:
            break
        assert ended.code == -9, ended.said
        deaths += 1
    assert ended.code == 0, ended.said
    assert deaths
    assert ended.outcome.weights == expected.weights
    assert lineage(logged(log)) == expected.lineage, "each batch once, in its step"
    assert not list(directory.glob(".step-*")), "what was half written is gone"


def test_two_ranks_that_are_killed_again_and_again(children, unbroken, tmp_path):
    """Each by itself: one dies before the other, or the other ends because it is alone."""
    expected, drawn, deaths = unbroken(2), random.Random(KILLS), 0
    for _ in range(TRIES):
        kill = {rank: drawn.choice([at_any_time, at_any_byte])(drawn, expected) for rank in range(2)}
        ended = children.train(tmp_path, ranks=2, epochs=EPOCHS, guard=GUARD, by_rank=kill if deaths < KILLS else None)
        codes = [each.code for each in ended]
        if codes == [0, 0]:
            break
        assert set(codes) <= {-9, 70, 0}, ended[0].said + ended[1].said
        assert -9 in codes
        deaths += 1
    assert codes == [0, 0], ended[0].said + ended[1].said
    assert deaths
    assert [each.outcome.weights for each in ended] == 2 * [expected.weights]
    assert ended[0].outcome.loss == expected.loss, "and the statistics of BatchNorm"


@pytest.mark.parametrize("count", range(1, FSYNCS + 1) if KILLS > 5 else [3])
def test_a_checkpoint_that_is_cut_off_leaves_the_one_before(children, unbroken, tmp_path, count):
    """At each of its moments; here, of the first two."""
    killed = children.train(tmp_path, epochs=EPOCHS, guard=GUARD, kill_at_fsync=count)
    assert killed.code == -9
    ended = children.train(tmp_path, epochs=EPOCHS, guard=GUARD)
    assert ended.code == 0, ended.said
    assert "checkpoint-damaged" not in ended.outcome.told, "what has its name is whole"
    assert ended.outcome.weights == unbroken(1).weights
