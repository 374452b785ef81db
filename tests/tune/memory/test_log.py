"""A log of allocations against the plainest way to count."""

from hypothesis import given
from hypothesis import strategies as st

from ampwise.tune.memory.allocation_log import STATE, AllocationLog, Phase, rounded

KINDS = ("parameters", STATE, "temporary", "activations")


@st.composite
def logs(draw):
    """Some blocks that are there before the step; then allocations and releases, in four phases."""
    sizes, kinds, events, alive = [], [], [], []

    def allocate():
        sizes.append(draw(st.integers(0, 3_000_000)))
        kinds.append(draw(st.sampled_from(KINDS)))
        events.append(len(sizes) - 1)
        alive.append(len(sizes) - 1)

    for _ in range(draw(st.integers(0, 5))):
        allocate()
    marks = [len(events)]
    first = len(sizes)
    for _ in range(4):
        for _ in range(draw(st.integers(0, 6))):
            own = [block for block in alive if block >= first]
            if own and draw(st.booleans()):
                block = draw(st.sampled_from(own))
                alive.remove(block)
                events.append(~block)
            else:
                allocate()
                kinds[-1] = "temporary" if kinds[-1] == STATE else kinds[-1]
        marks.append(len(events))
    phases = tuple(Phase(str(number), marks[number], marks[number + 1]) for number in range(4))
    return AllocationLog(sizes=tuple(sizes), kinds=tuple(kinds), events=tuple(events), phases=phases)


def counted(log, after):
    """Bytes by kind, by looking at every block."""
    found = {}
    for block, size in enumerate(log.sizes):
        events = log.events[:after]
        if events.count(block) > events.count(~block):
            found[log.kinds[block]] = found.get(log.kinds[block], 0) + rounded(size)
    return found


@given(logs())
def test_levels_and_splits_are_those_of_the_blocks_alive(log):
    levels = log.levels()
    for after in range(len(log.events) + 1):
        split = counted(log, after)
        assert log.split(after) == split
        assert levels[after] == sum(split.values())


@given(logs())
def test_the_peak_is_the_highest_level_and_is_reached(log):
    assert log.peak() == max(log.levels())
    for phase in log.phases:
        levels = log.levels()[phase.start : phase.end + 1]
        assert log.peak(phase) == max(levels)
        assert phase.start <= log.peak_at(phase) <= phase.end


@given(logs())
def test_the_most_of_a_kind_is_its_highest_share(log):
    start = log.phases[0].start
    shares = [log.split(after) for after in range(start, len(log.events) + 1)]
    for kind, most in log.most().items():
        assert most == max(share.get(kind, 0) for share in shares)


@given(logs(), st.integers(2, 4))
def test_a_step_among_others_is_the_same_step(log, steps):
    training = log.in_training(steps)
    assert [phase.name for phase in training.phases] == [phase.name for phase in log.phases]
    for before, after in zip(log.phases, training.phases, strict=True):
        assert after.end - after.start == before.end - before.start
        assert training.split(after.start) == log.split(before.start)
        assert training.split(after.end) == log.split(before.end)
        assert training.peak(after) == log.peak(before)


def test_the_first_step_has_no_state_until_it_updates():
    # Weights, state, and in the step an activation and a gradient.
    phases = (Phase("forward", 2, 3), Phase("backward", 3, 5), Phase("update", 5, 6))
    log = AllocationLog(
        sizes=(512,) * 4, kinds=("parameters", STATE, "x", "x"), events=(0, 1, 2, 3, ~2, ~3), phases=phases
    )
    assert log.in_training(2).events == (0, 2, 3, ~2, 1, ~3, 2, 3, ~2, ~3)
