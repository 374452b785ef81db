"""What may be kept on a device, and what happens to gradients that there is no room for."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.tune.diff.diff import DiffOptions, compare_sides
from ampwise.tune.diff.memory_budget import LEAST, MORE, MemoryBudget
from ampwise.tune.diff.side import parse_side
from ampwise.tune.diff.tensor_store import TensorStore

CPU = torch.device("cpu")


@given(st.integers(2**28, 2**40), st.floats(0, 2), st.integers(0, 2**30))
def test_what_is_kept_and_what_the_other_side_takes_stay_within_a_steps_peak(own, share, gradients):
    room = MemoryBudget(CPU)
    room.saved(own)
    kept = room.beside(share, gradients)
    assert kept == LEAST or kept + gradients + share * own <= MORE * own * (1 + 1e-12)
    assert room.forward(own) == MORE * own + LEAST


def test_the_largest_that_was_seen_counts():
    room = MemoryBudget(CPU)
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
    options = DiffOptions(floor=floor, progress=said.append)
    sides = parse_side("fp32"), parse_side("e4m3")
    result = compare_sides(lambda x: model(x).square().mean(), (batch,), {}, {"": model}, *sides, options, subject="x")
    return result.as_dict(), [text for text in said if text.endswith("forward and backward")]


def test_gradients_that_do_not_fit_are_compared_in_a_second_round(monkeypatch):
    monkeypatch.setattr(TensorStore, "fits", lambda self, tensor: True)
    roomy = {floor: difference(floor) for floor in (True, False)}
    assert roomy[True][1] == [
        f"{which}, forward and backward" for which in ("a (fp32)", "b (e4m3fn)", "a again (fp32)")
    ]
    assert len(roomy[False][1]) == 2
    monkeypatch.setattr(TensorStore, "fits", lambda self, tensor: tensor.numel() != 64)
    for floor in (True, False):
        tight, said = difference(floor)
        assert said == [*roomy[True][1], "b (e4m3fn), forward and backward"]
        note = tight.pop("notes")[-1]
        assert note.endswith(
            "were moved to host memory during the comparison."
        )  # the second time, and what is not a gradient
        wanted = roomy[floor][0]
        wanted.pop("notes")
        assert tight == wanted
