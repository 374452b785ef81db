"""Predictions against what was measured on a GPU: recorded, and where there is one, anew."""

import pytest
import torch
from benchmarks import memory as benchmark
from benchmarks import subjects

from ampwise.train.precision.precision import PRECISIONS
from ampwise.tune.memory.device_memory import cublas_workspaces
from ampwise.tune.memory.setup import TrainingSetup
from ampwise.tune.train_case import make_factory

# torch.cuda.max_memory_allocated() and max_memory_reserved() of a step on an H200 with torch 2.11, AdamW fused.
MEASURED = [
    (subjects.relevance, 16, "bf16", 640_871_424, 717_225_984),
    (subjects.resnet50, 32, "bf16", 1_892_938_752, 1_981_808_640),
    (subjects.gpt2, 4, "fp16", 5_272_059_392, 6_417_285_120),
]


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize(
    ("function", "batch", "precision", "peak", "reserved"), MEASURED, ids=lambda value: getattr(value, "__name__", None)
)
def test_what_was_measured_is_predicted(function, batch, precision, peak, reserved):
    found, _ = benchmark.predicted(make_factory(function), batch, precision)
    assert found.peak == pytest.approx(peak, rel=0.01)
    assert found.reserved == pytest.approx(reserved, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_small_gpt_takes_what_was_predicted(precision):
    batch = 256
    torch.cuda.empty_cache()
    if torch.cuda.memory_allocated():
        pytest.skip("something else of this process is on the GPU")
    measured = benchmark.Measured(make_factory(subjects.small_gpt), batch, precision).run()
    capability = torch.cuda.get_device_capability()
    case = TrainingSetup(make_factory(subjects.small_gpt), optimizer="adamw", workspaces=cublas_workspaces(capability))
    found = case.step(PRECISIONS[precision], batch).usage
    assert found.peak == pytest.approx(measured["peak"], rel=0.05)


@pytest.mark.nightly
def test_without_a_gpu_the_benchmark_predicts_and_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "TASKS", (("small GPT", subjects.small_gpt, (1,)),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    details = tmp_path / "details.json"
    benchmark.main(["--precision", "bf16", "--details", str(details)])
    assert "small GPT, batch 1, bf16: predicted" in capsys.readouterr().out
    assert details.read_text().count('"peak"') == 1


@pytest.mark.nightly
def test_a_row_that_fails_is_recorded_too(tmp_path, capsys, monkeypatch):
    def broken(batch=1):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(benchmark, "TASKS", (("broken", broken, (1,)), ("small GPT", subjects.small_gpt, (1,))))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    details = tmp_path / "details.json"
    benchmark.main(["--precision", "fp32", "--details", str(details)])
    out = capsys.readouterr().out
    assert "broken, batch 1, fp32: FAILED: BadInput: broken: broken(batch=1) failed: RuntimeError: no such thing" in out
    assert "small GPT, batch 1, fp32: predicted" in out
