"""Where a run is in its data: which batches were which step's, and which are passed over, now and in the next run."""

import json

import pytest
import torch

from ampwise.errors import BadInput
from ampwise.guard.data_position import PASSED_OVER, STEPS_KEPT, DataPosition, epoch_start

SAID = []
LOADER = [torch.tensor([float(number)]) for number in range(5)]


@pytest.fixture(autouse=True)
def said():
    SAID.clear()
    return SAID


@pytest.fixture
def position(tmp_path):
    position = DataPosition(tmp_path, writes=True, log=SAID.append)
    position.begin()
    return position


def walk(position, placed, count, first_step=1, each=1):
    """Take so many batches, as a loop with windows of ``each`` would; their places."""
    places = []
    for number in range(count):
        place, _ = next(placed)
        position.taken(place)
        places.append(place)
        if (number + 1) % each == 0:
            position.closed(first_step + number // each)
    return places


def test_batches_are_of_the_step_that_was_closed_after_them(position):
    placed = position.hand_out(LOADER, 2)
    assert walk(position, placed, 6, each=2) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]
    assert position.batches_of([1]) == [(0, 0), (0, 1)]
    assert position.batches_of([2, 3, 9]) == [(0, 2), (0, 3), (0, 4), (1, 0)]
    assert position.epoch == 1


def test_what_was_handed_out_and_not_trained_on_is_of_the_next_step(position):
    placed = position.hand_out(LOADER, 1)
    walk(position, placed, 2, each=3)
    position.closed(1)
    assert position.batches_of([1]) == [(0, 0), (0, 1)]


def test_steps_of_long_ago_are_forgotten(position):
    placed = position.hand_out(LOADER, None)
    walk(position, placed, STEPS_KEPT + 2)
    assert position.batches_of([1, 2]) == []
    assert len(position.batches_of(range(3, STEPS_KEPT + 3))) == STEPS_KEPT


def test_a_rollback_goes_back_in_the_data_and_passes_over_what_failed(position):
    placed = position.hand_out(LOADER, 1)
    walk(position, placed, 1)
    after_one = position.state()
    walk(position, placed, 2, first_step=2)
    failed = position.batches_of([3])
    position.go_to(after_one)
    assert position.pass_over(failed)
    assert [place for place, _ in placed] == [(0, 1), (0, 3), (0, 4)]
    assert position.passed_over == [(0, 2)]


def test_the_batches_of_an_open_window_are_none_after_going_back(position):
    placed = position.hand_out(LOADER, 1)
    start = position.state()
    walk(position, placed, 2, each=9)
    position.go_to(start)
    walk(position, placed, 1)
    assert position.batches_of([1]) == [(0, 0)]


def test_a_run_that_is_resumed_goes_on_there_and_passes_over_the_same(position, tmp_path):
    placed = position.hand_out(LOADER, 2)
    walk(position, placed, 2)
    state = position.state()
    position.pass_over([(0, 3), (1, 1), (0, 3)])
    assert json.loads((tmp_path / PASSED_OVER).read_text()) == {"passed_over": [[0, 3], [1, 1]]}

    again = DataPosition(tmp_path, writes=False, log=SAID.append)
    again.begin()
    assert again.passed_over == [(0, 3), (1, 1)]
    again.go_to(state)  # before there is a loader
    rest = [place for place, _ in again.hand_out(LOADER, 2)]
    assert rest == [(0, 2), (0, 4), (1, 0), (1, 2), (1, 3), (1, 4)]


def test_only_the_first_rank_writes(tmp_path):
    position = DataPosition(tmp_path, writes=False, log=SAID.append)
    position.hand_out(LOADER, 1)
    position.pass_over([(0, 1)])
    assert position.passed_over == [(0, 1)]
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_written_the_training_goes_on(tmp_path, said):
    position = DataPosition(tmp_path / "gone", writes=True, log=SAID.append)
    placed = position.hand_out(LOADER, 1)
    assert position.pass_over([(0, 0)])
    assert [place for place, _ in placed] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert said == [f"{tmp_path}/gone/{PASSED_OVER} cannot be written: No such file or directory"]


def test_data_that_cannot_go_back_goes_on(position):
    placed = position.hand_out(iter(LOADER), 1)
    start = position.state()
    walk(position, placed, 2)
    position.go_to(start)
    assert not position.pass_over(position.batches_of([2]))
    assert [place for place, _ in placed] == [(0, 2), (0, 3), (0, 4)]


def test_without_a_loader_the_data_is_the_users_own(position, tmp_path):
    position.closed(1)
    assert position.state() is None
    assert position.batches_of([1]) == []
    assert not position.pass_over([])
    position.go_to(None)
    assert position.epoch == 0
    assert not list(tmp_path.iterdir())


def test_a_second_loader_is_refused(position):
    position.hand_out(LOADER, 1)
    with pytest.raises(BadInput) as refused:
        position.hand_out(LOADER, 1)
    assert str(refused.value) == (
        "guard.batches() was already called. It iterates over all epochs of one loader, so that a run can resume "
        "there: call it once with epochs=..."
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"passed_over": 3}',
        '{"passed_over": [3]}',
        '{"passed_over": [[1]]}',
        '{"passed_over": [[0, -1]]}',
        '{"passed_over": [[0, true]]}',
        '{"passed_over": [[0, 1.5]]}',
        '{"passed_over": [[0, NaN]]}',
        '{"passed_over": ["ab"]}',
        '{"passed_over": [[[], 1]]}',
    ],
)
def test_a_file_that_is_damaged_is_said_to_be(tmp_path, text):
    (tmp_path / PASSED_OVER).write_text(text)
    with pytest.raises(BadInput) as refused:
        DataPosition(tmp_path, writes=True, log=SAID.append).begin()
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / PASSED_OVER} cannot be read (")
    assert said.endswith("). It lists the batches to leave out; remove it to use them again.")
    assert "\n" not in said


# What is not as it was


def resumed(tmp_path, position, **options):
    again = DataPosition(tmp_path, writes=True, log=SAID.append, **options)
    again.begin()
    again.resume(position)
    return again


def test_batches_that_are_passed_over_again_are_counted_aloud(tmp_path, said):
    (tmp_path / PASSED_OVER).write_text('{"passed_over": [[0, 1], [1, 2]]}')
    position = DataPosition(tmp_path, writes=True, log=SAID.append)
    position.begin()
    assert len(list(position.hand_out(LOADER, 2))) == 8
    assert said == [
        f"2 batches that failed before will be left out; to train on them again, remove {tmp_path / PASSED_OVER}"
    ]


def test_whoever_removes_the_list_trains_on_them_again(tmp_path, position, said):
    """Though the checkpoint was saved when they were passed over."""
    walk(position, position.hand_out(LOADER, 1), 2)
    position.pass_over([(0, 3)])
    state = position.state()
    assert [place for place, _ in resumed(tmp_path, state).hand_out(LOADER, 1)] == [(0, 2), (0, 4)]
    (tmp_path / PASSED_OVER).unlink()
    said.clear()
    assert [place for place, _ in resumed(tmp_path, state).hand_out(LOADER, 1)] == [(0, 2), (0, 3), (0, 4)]
    assert said == []


def test_a_loader_of_another_length_begins_the_epoch_if_that_is_asked_for(tmp_path, position, said):
    walk(position, position.hand_out(LOADER, 3), 7)
    state = position.state()
    position.pass_over([(1, 3)])
    with pytest.raises(BadInput) as refused:
        resumed(tmp_path, state).hand_out(LOADER[:4], 3)
    assert str(refused.value) == (
        "the position is in data of 5 batches an epoch, and this has 4 batches: use the same loader "
        "(dataset, batch size, number of ranks), or start over. To start its epoch over with this loader: "
        "Guard(override=['data'])."
    )
    again = resumed(tmp_path, state, override=True)
    assert [place for place, _ in again.hand_out(LOADER[:4], 3)] == [(epoch, n) for epoch in (1, 2) for n in range(4)]
    assert said == [
        "the data has changed: continuing at the start of epoch 1",
        "1 batch that failed before will be used again: batches have other numbers now",
    ]
    assert json.loads((tmp_path / PASSED_OVER).read_text()) == {"passed_over": []}


def test_what_may_be_overridden_goes_on_where_it_is_as_it_was(tmp_path, position, said):
    walk(position, position.hand_out(LOADER, 2), 3)
    again = resumed(tmp_path, position.state(), override=True)
    assert next(again.hand_out(LOADER, 2))[0] == (0, 3)
    assert said == []


@pytest.mark.parametrize(("taken", "rest"), [(3, [0, 1]), (5, [1]), (10, [])])
def test_the_beginning_of_an_epoch_fits_any_data(tmp_path, position, said, taken, rest):
    """As on another number of ranks. An epoch that is over stays over."""
    placed = position.hand_out(LOADER, 2)
    walk(position, placed, taken)
    if taken == 5:
        position._data._place = position._data._place._replace(over=True)
    elif taken == 10:
        assert list(placed) == []
    again = resumed(tmp_path, epoch_start(position.state()))
    assert again.state() == epoch_start(position.state()), "and is kept until there is a loader"
    assert [place for place, _ in again.hand_out(LOADER[:2], 2)] == [(epoch, n) for epoch in rest for n in range(2)]
    assert said == [f"the data has changed: continuing at the start of epoch {taken // 5}"]


def test_a_checkpoint_without_a_place_and_a_place_without_a_loader_are_said(tmp_path, position, said):
    list(resumed(tmp_path, None).hand_out(LOADER, 1))
    assert said.pop() == "the checkpoint has no position in the data, which starts at its first batch"
    walk(position, position.hand_out(LOADER, 1), 2)
    own_loop = resumed(tmp_path, position.state())
    own_loop.closed(3)
    own_loop.closed(4)
    assert said == ["the checkpoint has a position in the data; only guard.batches(loader) can continue from it"]
