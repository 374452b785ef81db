"""A guard over precisions that are more than autocast: what it goes on in when they do not hold."""

import pytest
import torch
from torch import nn

from ampwise import Engine, Guard, Policy
from ampwise.guard.ladder import Ladder
from ampwise.guard.recovery import _wider_than


@pytest.mark.parametrize(
    ("precision", "wider"),
    [
        ("fp16", ("bf16", "tf32", "fp32")),
        ("tf32", ("fp32",)),
        ("fp32", ()),
        ("fp8", ("bf16", "tf32", "fp32")),
        ("bf16-pure", ("bf16", "tf32", "fp32")),
        ("bf16-pure,kahan", ("bf16", "tf32", "fp32")),
        ("emulate:mxfp8", ("fp32",)),
        ("emulate:fp16", ("fp32",)),
    ],
)
def test_what_is_wider(precision, wider):
    assert tuple(_wider_than(precision)) == wider


def guarded(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight *= 1e6  # beyond FP16 as an operand, and BatchNorm makes it small again
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3), "emulate:fp16", scaling={"init_scale": 4.0})
    guard = Guard(engine, folder, ladder=Ladder(skips=2, healthy=3, rollbacks=0))
    return model, engine, guard


def test_what_an_emulated_format_cannot_hold_goes_on_in_fp32(tmp_path, capsys):
    model, engine, guard = guarded(tmp_path)
    with guard:
        for _ in range(12):
            guard.step(lambda x: model(x).square().mean(), torch.randn(6, 8))
    assert engine.precision == "fp32"
    assert not engine.history[-1].skipped
    changed = [event for event in guard.events if event.name == "precision-changed"]
    assert changed[0].message.startswith("the precision was changed from emulate:fp16 to fp32, because ")
    capsys.readouterr()


def test_modules_that_are_flagged_are_kept_in_fp32_first(tmp_path):
    _, engine, guard = guarded(tmp_path)
    with guard:
        found = guard._recovery._wider(["0"])
        assert found == Policy("emulate:fp16").keep("fp32", "0")
        engine.change_precision(found)
        assert guard._recovery._wider(["0"]).base == "fp32"
