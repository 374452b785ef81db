"""Contenders do the same work, and their times are what they are said to be. Speed is not tested."""

from dataclasses import replace

import pytest
import torch
from benchmarks import step
from benchmarks.contenders import Refused, Task, by_hand, engines, ready
from benchmarks.gpt import GPT_ONE_LAYER
from benchmarks.harness import Contender, Result, Times, alternate

NANO = replace(GPT_ONE_LAYER, width=16, vocabulary=16, length=4, batch=2)


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_the_engine_leaves_the_weights_that_the_loop_by_hand_leaves(precision, clip, monkeypatch):
    task, models = Task(shape=NANO, precision=precision, device="cpu", clip=clip), []
    trainee = Task.trainee

    def remembered(self):
        made = trainee(self)
        models.append(made[0])
        return made

    monkeypatch.setattr(Task, "trainee", remembered)
    for make in (by_hand, engines):
        ready(make, task)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)  # of 5e-4 that five steps move a weight


def test_contenders_take_turns_in_alternating_order():
    seen = []
    pair = [Contender(name=name, work=lambda name=name: seen.append(name)) for name in "ab"]
    times = alternate(pair, rounds=2, calls=1)
    assert "".join(seen) == "aabbbbaa"
    assert [(each.name, len(each.ms), len(each.host_ms)) for each in times] == [("a", 2, 2), ("b", 2, 2)]


def test_a_ratio_is_the_median_of_those_within_a_round():
    slow_machine_in_the_second = Times(name="a", ms=[2.0, 20.0, 2.0]), Times(name="b", ms=[1.0, 10.0, 4.0])
    assert slow_machine_in_the_second[0].ratio(slow_machine_in_the_second[1]) == 2.0


def test_who_refuses_is_noted_with_the_reason():
    def refuses(task):
        raise NotImplementedError("not with this\nand more")

    with pytest.raises(Refused, match=r"^NotImplementedError: not with this$"):
        ready(refuses, Task(shape=NANO, precision="fp32", device="cpu"))


def test_switches_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with Task(shape=NANO, precision="tf32", device="cpu").switches():
        assert torch.get_float32_matmul_precision() == "high"
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.nightly
def test_every_row_fits_its_columns(monkeypatch):
    monkeypatch.setattr(step, "ALL", step.OURS)
    monkeypatch.setattr(step, "has_gpu", lambda: False)
    monkeypatch.setattr(step, "GPT_ONE_LAYER", NANO)
    monkeypatch.setattr(step, "GPT_4M", NANO)
    turns = step.Turns(1, 1)
    for result in (step.tiny(turns), step.whole([step.Heat("fp32", False, step.OURS, turns)])):
        assert isinstance(result, Result)
        assert result.rows
        assert all(len(row) == len(result.columns) for row in result.rows)


def test_parts_that_need_a_gpu_say_so(monkeypatch, capsys):
    monkeypatch.setattr(step, "has_gpu", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    with pytest.raises(SystemExit):
        step.main(["--part", "graph"])
    assert "--part graph needs a CUDA device" in capsys.readouterr().err
