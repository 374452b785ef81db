"""Where a run is in its data: which batches were which step's, and which are passed over, now and in the next run."""

import json

import pytest
import torch

from ampwise.errors import BadInput
from ampwise.guard.position import PASSED_OVER, STEPS_KEPT, Position

LOADER = [torch.tensor([float(number)]) for number in range(5)]


@pytest.fixture
def position(tmp_path):
    position = Position(tmp_path, writes=True)
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

    again = Position(tmp_path, writes=False)
    again.begin()
    assert again.passed_over == [(0, 3), (1, 1)]
    again.go_to(state)  # before there is a loader
    rest = [place for place, _ in again.hand_out(LOADER, 2)]
    assert rest == [(0, 2), (0, 4), (1, 0), (1, 2), (1, 3), (1, 4)]


def test_only_the_first_rank_writes(tmp_path):
    position = Position(tmp_path, writes=False)
    position.hand_out(LOADER, 1)
    position.pass_over([(0, 1)])
    assert position.passed_over == [(0, 1)]
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_written_the_training_goes_on(tmp_path, capsys):
    position = Position(tmp_path / "gone", writes=True)
    placed = position.hand_out(LOADER, 1)
    assert position.pass_over([(0, 0)])
    assert [place for place, _ in placed] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    said = capsys.readouterr().err
    assert said == f"ampwise: {tmp_path}/gone/{PASSED_OVER} could not be written: No such file or directory\n"


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
        "guard.batches() was called before: it hands out all epochs of one loader, so that a resumed run knows where "
        "it was. Give it epochs=..., and loop over it once."
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
        Position(tmp_path, writes=True).begin()
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / PASSED_OVER} cannot be read (")
    assert said.endswith("): it says which batches to pass over. Remove it to forget them.")
    assert "\n" not in said
