"""What is kept stays as it was, whatever is written to its memory afterwards, within a budget of memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.tune.diff.diff import DiffOptions, compare_sides
from ampwise.tune.diff.side import parse_side
from ampwise.tune.diff.tensor_store import LEAST, MORE, MemoryBudget, TensorStore, comparable_values, view_identity


def shelf():
    return TensorStore(lambda: 0)


def test_a_tensor_is_kept_by_reference_until_something_is_written_there():
    kept, values = shelf(), torch.arange(6.0)
    kept.put("x", values)
    assert kept["x"].data_ptr() == values.data_ptr()
    kept.before_write(values[2:])  # a part of that memory
    values.zero_()
    assert kept["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_all_that_is_kept_of_a_memory_becomes_a_copy():
    kept, values = shelf(), torch.arange(6.0)
    for name, part in {"all": values, "head": values[:3], "turned": values.view(2, 3).T}.items():
        kept.put(name, part)
    kept.before_write(values)
    values.fill_(9)
    assert kept["head"].tolist() == [0, 1, 2]
    assert kept["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_dropped_is_gone():
    kept, values = shelf(), torch.ones(3)
    kept.put("x", values)
    kept.drop("x")
    assert "x" not in kept
    kept.before_write(values)  # which is nobody's


def test_a_tensor_is_known_again_by_what_it_shows():
    values = torch.arange(6.0)
    assert view_identity(values) == view_identity(values.detach())
    assert view_identity(values) != view_identity(values[:3])
    before = view_identity(values)
    values.add_(1)
    assert view_identity(values) != before
    with torch.inference_mode():
        assert view_identity(torch.ones(2))  # which counts no writes


def test_what_has_values_to_compare():
    assert comparable_values(torch.ones(2, requires_grad=True)).requires_grad is False
    assert comparable_values(torch.tensor([1, 2])).tolist() == [1, 2]
    assert comparable_values(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert comparable_values(torch.empty(0)) is None
    assert comparable_values(torch.ones(2, device="meta")) is None
    assert comparable_values(torch.ones(2, dtype=torch.complex64)).shape == (2, 2)


@pytest.mark.gpu
def test_beyond_the_room_it_goes_to_the_host():
    kept = TensorStore(lambda: 5000)
    one, two = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    kept.put("one", one)
    kept.put("two", two)
    assert (kept["one"].device.type, kept["two"].device.type) == ("cuda", "cpu")
    assert torch.equal(kept["two"], two.cpu())
    assert (kept.on_device, kept.moved) == (4000, 4000)
    kept.drop("one")
    kept.drop("two")
    assert kept.on_device == 0


# Budgets


CPU = torch.device("cpu")


@given(st.integers(2**28, 2**40), st.floats(0, 2), st.integers(0, 2**30))
def test_what_is_kept_and_what_the_other_side_takes_stay_within_a_steps_peak(own, share, gradients):
    budget = MemoryBudget(CPU)
    budget.saved(own)
    kept = budget.beside(share, gradients)
    assert kept == LEAST or kept + gradients + share * own <= MORE * own * (1 + 1e-12)
    assert budget.forward(own) == MORE * own + LEAST


def test_the_largest_that_was_seen_counts():
    budget = MemoryBudget(CPU)
    budget.saved(2**30)
    budget.saved(2**20)
    assert budget.beside(0.0, 0) == MORE * 2**30
    budget.made((torch.ones(2), None, [torch.ones(3)], torch.eye(2).to_sparse()), 0)  # where nobody counts
    assert budget.beside(0.0, 0) == MORE * 2**30


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def difference(floor):
    model, said = model_of(), []
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    options = DiffOptions(floor=floor, progress=said.append)
    sides = parse_side("fp32"), parse_side("e4m3")
    result = compare_sides(lambda x: model(x).square().mean(), (batch,), {}, {"": model}, *sides, options, name="x")
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
