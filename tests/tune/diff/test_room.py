"""What may be kept on a device, and what happens to gradients that there is no room for."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.tune.diff.diffing import Options, difference_of
from ampwise.tune.diff.room import LEAST, MORE, Room
from ampwise.tune.diff.shelf import Shelf
from ampwise.tune.diff.side import side_of

CPU = torch.device("cpu")


@given(st.integers(2**28, 2**40), st.floats(0, 2), st.integers(0, 2**30))
def test_what_is_kept_and_what_the_other_side_takes_stay_within_a_steps_peak(own, share, gradients):
    room = Room(CPU)
    room.saved(own)
    kept = room.beside(share, gradients)
    assert kept == LEAST or kept + gradients + share * own <= MORE * own * (1 + 1e-12)
    assert room.forward(own) == MORE * own + LEAST


def test_the_largest_that_was_seen_counts():
    room = Room(CPU)
    room.saved(2**30)
    room.saved(2**20)
    assert room.beside(0.0, 0) == MORE * 2**30
    room.made((torch.ones(2), None, [torch.ones(3)], torch.eye(2).to_sparse()), 0)  # where nobody counts
    assert room.beside(0.0, 0) == MORE * 2**30


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def difference(floor):
    model, said = model_of(), []
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    options = Options(floor=floor, progress=said.append)
    sides = side_of("fp32"), side_of("e4m3")
    result = difference_of(lambda x: model(x).square().mean(), (batch,), {}, {"": model}, *sides, options, subject="x")
    return result.as_dict(), [text for text in said if text.endswith("forward and backward")]


def test_gradients_that_do_not_fit_are_compared_in_a_second_round(monkeypatch):
    monkeypatch.setattr(Shelf, "fits", lambda self, tensor: True)
    roomy = {floor: difference(floor) for floor in (True, False)}
    assert roomy[True][1] == [
        f"{which}, forward and backward" for which in ("a (fp32)", "b (e4m3fn)", "a again (fp32)")
    ]
    assert len(roomy[False][1]) == 2
    monkeypatch.setattr(Shelf, "fits", lambda self, tensor: tensor.numel() != 64)
    for floor in (True, False):
        tight, said = difference(floor)
        assert said == [*roomy[True][1], "b (e4m3fn), forward and backward"]
        note = tight.pop("notes")[-1]
        assert note.endswith("were kept in the host's memory meanwhile.")  # the second time, and what is not a gradient
        wanted = roomy[floor][0]
        wanted.pop("notes")
        assert tight == wanted
