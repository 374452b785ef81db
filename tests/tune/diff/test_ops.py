"""Operation by operation: the same one on both sides, forward and backward, with what it was given."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ampwise.tune.diff.diff import diff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        hidden = torch.sigmoid(self.one(x))
        hidden = hidden * 3
        hidden.add_(1)
        return self.two(hidden).exp()


def ops_of(b="bf16", **options):
    torch.manual_seed(0)
    model = Net()
    return diff(lambda x: model(x).mean(), torch.randn(5, 6), b=b, ops=True, floor=False, **options)


def test_each_operation_is_compared_where_it_ran():
    result = ops_of()
    forward = [(row.module, row.op) for row in result.ops if row.phase == "forward"]
    assert forward == [
        ("one", "aten.addmm.default"),
        ("", "aten.sigmoid.default"),
        ("", "aten.mul.Tensor"),
        ("", "aten.add_.Tensor"),
        ("two", "aten.addmm.default"),
        ("", "aten.exp.default"),
        ("the function", "aten.mean.default"),
    ]
    backward = {(row.module, row.op) for row in result.ops if row.phase == "backward"}
    assert {("two", "aten.mm.default"), ("one", "aten.mm.default"), ("", "aten.sigmoid_backward.default")} <= backward
    assert all(row.compared.error < 0.05 for row in result.ops)
    assert all(row.compared.beyond is False for row in result.ops)


def test_errors_are_those_of_modules_and_of_fp64():
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(5, 6)
    result = diff(lambda x: model(x).mean(), batch, ops=True, floor=False)
    ops = {(row.module, row.op): row.compared.error for row in result.ops if row.phase == "forward"}
    rows = {row.name: row.error for row in result.rows}
    assert ops["one", "aten.addmm.default"] == rows["one"]
    assert ops["two", "aten.addmm.default"] == rows["two"]
    assert ops["", "aten.exp.default"] == rows[""]
    with torch.no_grad():
        a = torch.sigmoid(model.one(batch))
        with torch.autocast("cpu", torch.bfloat16):
            b = torch.sigmoid(model.one(batch))
    expected = (b.double() - a.double()).norm() / a.double().norm()
    assert ops["", "aten.sigmoid.default"] == pytest.approx(expected.item(), rel=1e-9)


def test_what_an_operation_was_given_counts():
    rows = {row.op: row.compared for row in ops_of().ops if row.phase == "forward" and row.module != "two"}
    first = rows["aten.addmm.default"]
    assert first.given == 0.0  # the batch and the weights are the same on both sides
    assert rows["aten.sigmoid.default"].given == first.error
    assert rows["aten.mul.Tensor"].given == rows["aten.sigmoid.default"].error
    assert rows["aten.add_.Tensor"].given == rows["aten.mul.Tensor"].error  # as it was before it was written over


def test_lines_are_the_users():
    site = next(row.site for row in ops_of().ops if row.op == "aten.exp.default")
    assert Path(site.file).name == Path(__file__).name
    assert "exp()" in Path(__file__).read_text().split("\n")[site.line - 1]


def test_only_those_of_modules_that_match():
    assert {row.module for row in ops_of(modules=["two"]).ops} == {"two"}


def test_emulated_products_are_operations_of_their_own_name():
    ops = [row.op for row in ops_of(b="e4m3").ops if row.phase == "forward"]
    assert ops.count("aten.addmm.default") == 2
    assert len(ops) == 7


def test_a_scaled_backward_pass_is_unscaled():
    rows = [row for row in ops_of(b="fp16").ops if row.phase == "backward"]
    assert len(rows) > 5
    assert max(row.compared.error for row in rows) < 0.02
    assert max(row.compared.measured.largest_a for row in rows) < 10
