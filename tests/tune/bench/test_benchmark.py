"""The benchmark of the comparison, on a model that is small enough: it runs, and publishes what was measured."""

import json
from dataclasses import replace

import pytest
from benchmarks import harness, precisions, subjects
from benchmarks.gpt import GPT_ONE_LAYER

from ampwise.tune.bench import measurement as measuring
from ampwise.tune.bench.speeds import PrecisionRow

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16

NANO = replace(GPT_ONE_LAYER, width=16, vocabulary=16, length=4, batch=2)


@pytest.mark.nightly
def test_a_tiny_one_is_published(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(measuring, "PROFILED", 1)
    monkeypatch.setattr(subjects, "small_gpt", lambda: subjects.gpt(NANO))
    precisions.small_gpt(rounds=2, precisions=["bf16"]).publish()
    record = json.loads((tmp_path / "precisions_gpt4m_cpu.json").read_text())
    assert [row[0] for row in record["rows"]] == ["fp32", "bf16"]
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    assert record["rows"][0][2] == 1.0
    assert any(note.startswith("Noise: ±") for note in record["notes"])
    assert "2 rows, 8 tokens a step" in record["title"]
    assert "bf16" in capsys.readouterr().out


def test_a_row_without_numbers_has_its_reason():
    row = precisions._row(PrecisionRow(precision="fp8", problem="not run: no units"), None)
    assert row == ["fp8", *["-"] * 9, "not run: no units"]
    assert len(row) == len(precisions.COLUMNS)
