"""The benchmark's models have modules to search, and its parts run."""

import pytest
import torch
from benchmarks import search as benchmark
from benchmarks.search_models import MODELS, chain

from ...for_each import for_each

CPU = torch.device("cpu")


@for_each("name", MODELS)
def test_each_model_has_a_loss_and_the_same_batch_for_the_same_step(name):
    torch.manual_seed(0)
    task = MODELS[name](CPU)
    first, again, other = task.batch(3), task.batch(3), task.batch(4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    loss = task.loss(*first)
    assert loss.shape == ()
    assert all(each is not None for each in torch.autograd.grad(loss, list(task.model.parameters())))


def test_a_part_has_a_row_for_each_of_its_cases(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", (3,))
    result = benchmark.cost()
    assert [row[:2] for row in result.rows] == [["3", "1"], ["3", "2"], ["3", "3"]]
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_a_model_has_a_row_for_chance_and_one_for_each_ladder(monkeypatch):
    for name, value in {"STEPS": 2, "LAST": 1, "WARM_UP": 1, "LADDERS": (("e4m3", "bf16", "fp32"),)}.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setitem(benchmark.MODELS, "chain", lambda device: chain(2, (), device))
    result = benchmark.one_model("chain")
    assert [row[0] for row in result.rows] == ["fp32, another start", "e4m3 bf16 fp32"]
    assert all(len(row) == len(result.columns) for row in result.rows)
    cells = dict(zip(result.columns, result.rows[1], strict=True))
    assert cells["products at best"].endswith("× FP32's speed (h200)")
    assert float(cells["loss, FP32"]) == pytest.approx(float(cells["loss, found"]), rel=0.05)
    assert result.rows[0][5] != result.rows[0][4]  # another start is another loss


def test_it_trains_by_what_is_found(monkeypatch):
    monkeypatch.setattr(benchmark, "STEPS", 3)
    monkeypatch.setattr(benchmark, "LAST", 2)
    wide = benchmark.trained(lambda device: chain(2, (), device), 0, None)
    task = chain(2, (), CPU)
    found = benchmark.search(task.loss, [task.batch(0)], tolerance=0.9, model=task.model)
    narrow = benchmark.trained(lambda device: chain(2, (), device), 0, found)
    assert narrow.loss != wide.loss
    assert narrow.loss == pytest.approx(wide.loss, rel=0.05)
