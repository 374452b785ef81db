"""The ladder: what a step calls for, from its facts alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise import Ladder
from ampwise.errors import BadInput
from ampwise.guard.ladder import LadderFacts, LadderState, RecoveryAction

GOOD = LadderFacts(1, False, 1.0, 1.0, False, 1.0)
BAD = GOOD._replace(skipped=True)
NAN = GOOD._replace(skipped=True, loss=math.nan)
APPLIED_NAN = GOOD._replace(loss=math.inf)  # its gradients were finite
SETTLING = LadderFacts(1, True, 1.0, 256.0, True, 1.0)
AT_FLOOR = SETTLING._replace(scale=1.0)
SCALED_NAN = SETTLING._replace(loss=math.nan)
SPIKE = GOOD._replace(loss=50.0, spike=True)


def in_turn(facts):
    return [each._replace(number=number) for number, each in enumerate(facts, start=1)]


def moves(ladder, *facts):
    standing = LadderState(ladder)
    return [standing.move(each).name for each in in_turn(facts)]


@pytest.mark.parametrize(
    ("facts", "bad", "settling", "at_floor"),
    [
        (GOOD, False, False, False),
        (BAD, True, False, False),
        (NAN, True, False, False),
        (APPLIED_NAN, True, False, False),
        (SETTLING, True, True, False),
        (AT_FLOOR, True, False, True),
        (SCALED_NAN, True, False, False),
        (SETTLING._replace(skipped=False), False, False, False),
        (AT_FLOOR._replace(skipped=False), False, False, True),
        (AT_FLOOR._replace(scale=0.5), True, False, True),
    ],
)
def test_what_facts_say(facts, bad, settling, at_floor):
    assert (facts.bad, facts.settling, facts.at_floor) == (bad, settling, at_floor)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([GOOD, GOOD], ["GO_ON", "GO_ON"]),
        ([BAD, GOOD, BAD, GOOD], ["SKIP", "GO_ON", "SKIP", "GO_ON"]),
        ([NAN, BAD, APPLIED_NAN], ["SKIP", "SKIP", "ROLL_BACK"]),
        ([SETTLING] * 40, ["SETTLE"] * 40),
        ([SETTLING, SETTLING, AT_FLOOR, AT_FLOOR, AT_FLOOR], ["SETTLE", "SETTLE", "SKIP", "SKIP", "ROLL_BACK"]),
        ([SCALED_NAN, SETTLING, SCALED_NAN, SCALED_NAN], ["SKIP", "SETTLE", "SKIP", "ROLL_BACK"]),
        ([SPIKE, SPIKE], ["GO_ON", "GO_ON"]),
        ([BAD._replace(spike=True)], ["SKIP"]),
    ],
)
def test_moves(facts, expected):
    assert moves(Ladder(), *facts) == expected


def test_a_spike_goes_back_at_once_if_asked():
    ladder = Ladder(on_spike="rollback")
    assert moves(ladder, GOOD, SPIKE) == ["GO_ON", "ROLL_BACK"]
    standing = LadderState(ladder)
    standing.move(SPIKE._replace(number=7))
    assert standing.streak == [7]
    assert standing.healthy == 0


def test_one_skip_is_enough_if_asked():
    assert moves(Ladder(skips=1), NAN) == ["ROLL_BACK"]


@pytest.mark.parametrize(
    ("ladder", "rollbacks", "goes_back", "cause", "wider", "expected"),
    [
        # What changes something is tried first, as often as it may be.
        (Ladder(), 0, True, "", True, RecoveryAction.ROLL_BACK),
        (Ladder(), 1, True, "half-overflow", True, RecoveryAction.ROLL_BACK),
        (Ladder(), 2, True, "", True, RecoveryAction.WIDEN),
        (Ladder(), 0, False, "", True, RecoveryAction.WIDEN),
        (Ladder(), 0, False, "half-overflow", True, RecoveryAction.WIDEN),
        # No precision mends a batch: it is passed over, or that is the end.
        (Ladder(), 0, False, "bad-batch", True, RecoveryAction.ROLL_BACK),
        (Ladder(), 2, True, "bad-batch", True, RecoveryAction.STOP),
        (Ladder(rollbacks=0), 0, True, "bad-batch", True, RecoveryAction.STOP),
        # Nothing is wider, or nothing is allowed.
        (Ladder(), 2, True, "", False, RecoveryAction.STOP),
        (Ladder(), 0, False, "", False, RecoveryAction.STOP),
        (Ladder(rollbacks=0), 0, True, "", True, RecoveryAction.WIDEN),
        (Ladder(change_precision=False), 2, True, "", True, RecoveryAction.STOP),
        (Ladder(rollbacks=0, change_precision=False), 0, True, "", True, RecoveryAction.STOP),
    ],
)
def test_rungs(ladder, rollbacks, goes_back, cause, wider, expected):
    standing = LadderState(ladder)
    standing.rollbacks = rollbacks
    assert standing.rung(goes_back=goes_back, cause=cause, wider=wider) is expected


def test_a_rung_taken_begins_those_below_it_anew():
    standing = LadderState(Ladder(skips=2))
    for _ in range(2):
        standing.move(NAN)
    standing.taken(RecoveryAction.ROLL_BACK, "rollback to step 0")
    assert (standing.streak, standing.healthy, standing.rollbacks, standing.widened) == ([], 0, 1, 0)
    assert standing.move(NAN) is RecoveryAction.SKIP
    standing.taken(RecoveryAction.WIDEN, "BF16")
    assert (standing.rollbacks, standing.widened) == (0, 1)
    assert standing.tried == ["rollback to step 0", "BF16"]
    standing.taken(RecoveryAction.CLIMB, "FP16 again")
    assert standing.widened == 0


def test_a_healthy_stretch_makes_earlier_trouble_forgotten():
    standing = LadderState(Ladder(healthy=5))
    standing.taken(RecoveryAction.ROLL_BACK, "going back")
    first, *others = in_turn([GOOD, GOOD, GOOD, SETTLING, GOOD, GOOD])  # an ordinary overflow is no trouble
    standing.move(first)
    for facts in others:
        assert (standing.rollbacks, standing.tried) == (1, ["going back"])
        standing.move(facts)
    assert (standing.rollbacks, standing.tried) == (0, [])


def test_steps_that_are_taken_again_make_nothing_forgotten():
    """They were well the first time; what counts is how it goes where it went wrong. Else it would go back for ever."""
    standing = LadderState(Ladder(healthy=5, skips=1))
    for facts in in_turn([*[GOOD] * 20, NAN]):
        standing.move(facts)
    standing.taken(RecoveryAction.ROLL_BACK, "rollback to step 0")
    for facts in in_turn([GOOD] * 25):
        standing.move(facts)
        assert standing.rollbacks == 1
    standing.move(GOOD._replace(number=26))
    assert (standing.rollbacks, standing.tried) == (0, [])


def test_a_bad_step_begins_the_stretch_anew():
    standing = LadderState(Ladder(healthy=5))
    standing.taken(RecoveryAction.ROLL_BACK, "going back")
    for facts in in_turn([GOOD] * 4 + [BAD] + [GOOD] * 4):
        standing.move(facts)
    assert standing.rollbacks == 1


def test_the_precision_before_is_tried_again_if_asked():
    standing = LadderState(Ladder(climb_after=3))
    assert [standing.move(GOOD).name for _ in range(4)] == ["GO_ON"] * 4  # there is none before
    standing.taken(RecoveryAction.WIDEN, "BF16")
    assert [standing.move(GOOD).name for _ in range(3)] == ["GO_ON", "GO_ON", "CLIMB"]
    standing.taken(RecoveryAction.CLIMB, "FP16 again")
    assert [standing.move(GOOD).name for _ in range(4)] == ["GO_ON"] * 4


def test_each_climb_that_ends_in_a_fall_makes_the_next_wait_twice_as_long():
    standing = LadderState(Ladder(climb_after=3))
    for expected in (3, 6, 12):
        standing.taken(RecoveryAction.WIDEN, "BF16")
        moves = [standing.move(GOOD).name for _ in range(expected)]
        assert moves == ["GO_ON"] * (expected - 1) + ["CLIMB"]
        standing.taken(RecoveryAction.CLIMB, "FP16 again")


def test_without_being_asked_it_never_climbs():
    standing = LadderState(Ladder())
    standing.taken(RecoveryAction.WIDEN, "BF16")
    assert {standing.move(GOOD) for _ in range(200)} == {RecoveryAction.GO_ON}


ANY = st.sampled_from([GOOD, BAD, NAN, APPLIED_NAN, SETTLING, AT_FLOOR, SCALED_NAN, SPIKE])
LADDERS = st.builds(
    Ladder,
    skips=st.integers(1, 4),
    rollbacks=st.integers(0, 3),
    change_precision=st.booleans(),
    on_spike=st.sampled_from(["tell", "rollback"]),
    healthy=st.integers(1, 6),
    climb_after=st.none() | st.integers(1, 8),
)


@given(LADDERS, st.lists(st.tuples(ANY, st.booleans(), st.booleans(), st.sampled_from(["", "bad-batch"])), max_size=60))
def test_laws_of_any_climb(ladder, run):
    standing = LadderState(ladder)
    since, widened, rolled = 0, 0, 0  # bad steps since the last rung or good step; rungs
    for number, (facts, goes_back, wider, cause) in enumerate(run, start=1):
        facts = facts._replace(number=number)
        move = standing.move(facts)
        if not facts.bad:
            since = 0
        elif not facts.settling:
            since += 1
        assert (move is RecoveryAction.SETTLE) == facts.settling
        if move in (RecoveryAction.GO_ON, RecoveryAction.CLIMB):
            assert not facts.bad
            assert standing.streak == []
        if move is RecoveryAction.SKIP:
            assert facts.bad
            assert 0 < since < ladder.skips
            assert len(standing.streak) == since
        if move is RecoveryAction.CLIMB:
            assert ladder.climb_after is not None
            assert widened > 0
            standing.taken(RecoveryAction.CLIMB, "")
            widened -= 1
        if move is not RecoveryAction.ROLL_BACK:
            continue
        of_spike = facts.spike and not facts.bad
        assert ladder.on_spike == "rollback" if of_spike else since == ladder.skips  # nothing more before that
        rung = standing.rung(goes_back=goes_back, cause=cause, wider=wider)
        if rung is RecoveryAction.STOP:
            return
        if rung is RecoveryAction.ROLL_BACK:
            rolled += 1
            assert ladder.rollbacks > 0
        else:
            assert ladder.change_precision
            assert wider
            assert cause != "bad-batch"
            widened += 1
        standing.taken(rung, "")
        since = 0
        assert standing.rollbacks <= ladder.rollbacks
        assert standing.widened == widened


@given(LADDERS, st.sampled_from([NAN, AT_FLOOR, BAD]))
def test_what_never_gets_better_ends(ladder, facts):
    """Whatever the ladder, after skips × (rollbacks + 1) × (precisions + 1) bad steps at most."""
    standing, precisions, steps = LadderState(ladder), 3, 0
    while True:
        steps += 1
        if standing.move(facts._replace(number=steps)) is RecoveryAction.ROLL_BACK:
            rung = standing.rung(goes_back=True, cause="", wider=precisions > 0)
            if rung is RecoveryAction.STOP:
                break
            precisions -= rung is RecoveryAction.WIDEN
            standing.taken(rung, "")
        assert steps <= ladder.skips * (ladder.rollbacks + 1) * 4
    assert steps >= ladder.skips


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("skips", 0, 1),
        ("skips", True, 1),
        ("skips", 2.0, 1),
        ("rollbacks", -1, 0),
        ("healthy", 0, 1),
        ("healthy", None, 1),
        ("climb_after", 0, 1),
        ("climb_after", "5", 1),
    ],
)
def test_numbers_that_make_no_sense_are_refused(field, value, least):
    with pytest.raises(BadInput) as refused:
        Ladder(**{field: value})
    assert str(refused.value) == f"Ladder({field}={value!r}): expected a whole number, {least} or more."


@pytest.mark.parametrize("value", ["stop", None, True])
def test_what_to_do_about_a_spike_is_one_of_two(value):
    with pytest.raises(BadInput) as refused:
        Ladder(on_spike=value)
    assert str(refused.value) == f"Ladder(on_spike={value!r}): expected 'tell' or 'rollback'."


def test_a_ladder_as_plain_data_makes_the_same_ladder():
    ladder = Ladder(skips=5, on_spike="rollback", climb_after=7)
    assert Ladder(**ladder.as_dict()) == ladder
    assert list(ladder.as_dict()) == ["skips", "rollbacks", "change_precision", "on_spike", "healthy", "climb_after"]
