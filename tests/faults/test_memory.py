"""Out of memory: the same effective batch in pieces, if that is allowed."""

import pytest
import torch
from torch import nn

from ampwise import Engine, Guard
from ampwise.guard.disk.catalog import checkpoints

from .programs import BATCH, Plan, Run, data, train


class Net(nn.Module):
    """Without randomness or statistics of a batch, which pieces would have their own of."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("largest", [8, 4, 2, 1])
def test_pieces_have_the_gradient_of_the_whole_batch(tmp_path, largest):
    def weights(room, directory):
        torch.manual_seed(0)
        model = Net()
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.5), "fp32")
        sizes = []

        def loss(x, y):
            if len(x) > room:
                raise torch.OutOfMemoryError("no room")
            sizes.append(len(x))
            return (model(x) - y).square().mean()

        _, x, y = data().tensors
        with Guard(engine, directory, split=True) as guard:
            for batch in range(4):
                step = guard.step(loss, x[7 * batch : 7 * batch + 7], y[7 * batch : 7 * batch + 7])  # no power of two
                assert step.closed
        return guard, sizes, torch.cat([each.detach().flatten() for each in model.parameters()])

    _, _, whole = weights(100, tmp_path / "whole")
    guard, sizes, pieces = weights(largest, tmp_path / "pieces")
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)
    assert max(sizes) <= largest
    assert sum(sizes[-4 * 7 :]) >= 7
    assert {event.name for event in guard.events} == ({"out-of-memory"} if largest < 7 else set())
    assert [each.step for each in checkpoints(tmp_path / "pieces")] == [4], "no step was counted twice"


def test_training_goes_on_with_every_batch(tmp_path):
    outcome = train(tmp_path, fault="out of memory", at=(20,), guard={"split": True})
    assert outcome.told == ["out-of-memory"]
    assert "in 2 pieces and the same effective batch" in outcome.messages[0]
    assert sorted(outcome.lineage) == list(range(1, 49))
    assert outcome.loss < 0.6


def test_what_may_not_be_split_is_raised(tmp_path):
    run = Run(Plan(directory=str(tmp_path), fault="out of memory", at=(20,)))
    with pytest.raises(torch.OutOfMemoryError, match=f"room for {BATCH} samples"):
        run.to_the_end()
    assert [event.name for event in run.guard.events] == ["out-of-memory"]
    assert "splitting the batch is not allowed" in run.guard.events[0].message
    assert max(each.step for each in checkpoints(tmp_path)) <= 20
    outcome = train(tmp_path)
    assert outcome.weights == train(tmp_path / "whole").weights, "it goes on where it was"


def test_a_moment_without_memory_is_tried_again_as_it_was(tmp_path):
    """What others held is let go of: the batch has room then, and nothing is cut."""
    run = Run(Plan(directory=str(tmp_path / "run")))
    loss, failed = run.loss, []

    def short(x, y):
        if run.seen == 21 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no room for a moment")
        return loss(x, y)

    run.loss = short
    outcome = run.to_the_end()
    assert failed
    assert outcome.told == []
    assert outcome.weights == train(tmp_path / "whole").weights


def test_a_single_sample_without_room_is_the_end_of_it(tmp_path):
    run = Run(Plan(directory=str(tmp_path), guard={"split": True}))
    run.largest = 0
    with pytest.raises(torch.OutOfMemoryError):
        run.to_the_end()
    assert [event.name for event in run.guard.events] == 4 * ["out-of-memory"]


def test_a_window_that_ran_out_of_memory_is_gone_through_again(tmp_path):
    options = {"engine": {"accumulate": 3}}
    outcome = train(tmp_path / "run", fault="out of memory", at=(20,), guard={"split": True}, **options)
    assert outcome.told == ["out-of-memory"]
    assert checkpoints(tmp_path / "run")[0].step == 16
    assert outcome.loss < 0.8
