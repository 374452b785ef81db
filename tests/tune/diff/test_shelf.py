"""What is kept stays as it was, whatever is written to its memory afterwards."""

import pytest
import torch

from ampwise.tune.diff.tensor_store import TensorStore, comparable_values, view_identity


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
