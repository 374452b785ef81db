"""The demo: it trains, it counts unscaled gradients, and what it prints is what was counted."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from ampwise import Census, GradScaler, find_format  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "examples" / "char_gpt.py"
PARTS = ("norms", "attention", "mlp")
LAYERS = ["embedding", *(f"block {number} {part}" for number in (1, 2, 3, 4) for part in PARTS), "final norm", "head"]


@pytest.fixture(scope="module")
def demo(load_script):
    return load_script(SCRIPT)


@pytest.fixture
def small(demo, monkeypatch):
    """The same demo with less of everything; on one thread, since the tests around it use the others."""
    for name, value in {"WIDTH": 32, "CONTEXT": 32, "BATCH": 4}.items():
        monkeypatch.setattr(demo, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield demo
    torch.set_num_threads(threads)


def train(demo, steps, scale_exponent=16):
    torch.manual_seed(0)
    text = demo.TEXT.read_text(encoding="utf-8")
    training = demo.Training(demo.CharGPT(len(set(text))), scale_exponent)
    data = demo.batches(text)
    for _ in range(steps):
        training.step(next(data))
    return training


def test_it_runs_and_prints_every_layer(small, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert small.main(["--steps", "3", "--json", str(tmp_path / "counts.json")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [name for name in [*LAYERS, small.WHOLE] if not any(line.startswith(name + " ") for line in lines)] == []
    assert all(len(line) <= 110 for line in lines)
    assert "\x1b" not in out
    assert "steps 3, skipped 0, loss scale 65536" in out
    assert "steps 1, skipped 0" in err
    for heading in ("FP16", "BF16", "FP8 E4M3", "FP8 E5M2", "Hit hardest", "Autocast", "Not said"):
        assert any(line.startswith(heading) for line in lines), heading


@pytest.mark.parametrize("words", [["--steps", "2"], ["--help"]], ids=" ".join)
def test_a_terminal_without_arrows_is_shown_what_one_types(small, monkeypatch, words):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    try:
        code = small.main(words)
    except SystemExit as leaving:  # with which argparse ends its help
        code = leaving.code
    assert code == 0
    for stream in streams.values():
        stream.flush()
        assert (b" -> " in stream.buffer.getvalue()) == ("--steps" in words)


def test_a_narrow_terminal_gets_two_tables(small):
    training = train(small, 1)
    file = io.StringIO()
    small.show(training, next(small.batches(small.TEXT.read_text(encoding="utf-8"))), Console(file=file, width=80))
    assert sum(line.startswith("layer  ") for line in file.getvalue().splitlines()) == 2


def test_the_json_agrees_with_the_gradients_themselves(small, monkeypatch, tmp_path):
    kept = []
    check, census = GradScaler.check, GradScaler.census

    def keep_and_check(scaler, optimizers, *given, **options):
        kept.append({id(p): p.grad / scaler.get_scale() for p in optimizers[0].param_groups[0]["params"]})
        return check(scaler, optimizers, *given, **options)

    def name_and_count(scaler, model):
        kept[-1] = {name: kept[-1][id(p)] for name, p in model.named_parameters()}
        return census(scaler, model)

    monkeypatch.setattr(GradScaler, "check", keep_and_check)
    monkeypatch.setattr(GradScaler, "census", name_and_count)
    path = tmp_path / "counts.json"
    small.main(["--steps", "2", "--json", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    assert list(told["census"]) == [*LAYERS, small.WHOLE]
    assert len(told["losses"]) == len(kept) == 2
    for row in told["lost"]:
        mine = [g.flatten() for step in kept for n, g in step.items() if row["layer"] in (small.row_of(n), small.WHOLE)]
        flushed, overflowed = lost_by_casting(torch.cat(mine), row["format"], row["exponent"])
        assert row["flushed"] == flushed, row
        assert row["overflowed"][0] <= overflowed <= row["overflowed"][1], row


def lost_by_casting(gradients, name, exponent):
    """The oracle: torch's own casts."""
    fmt = find_format(name)
    scaled = gradients.double().mul(2.0**exponent).float()
    cast = scaled.to(getattr(torch, fmt.torch_dtype)).float()
    # torch's cast to E4M3 turns what is too large into NaN, or saturates, by version; the threshold is what counts
    return int(((scaled != 0) & (cast == 0)).sum()), int((scaled.abs() > fmt.overflow_threshold).sum())


def test_the_best_scale_is_one_for_the_model_and_overflows_nowhere(small, tmp_path):
    path = tmp_path / "counts.json"
    small.main(["--steps", "2", "--json", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    whole = Census.from_dict(told["census"][small.WHOLE])
    for row in told["lost"]:
        if row["scale"] == "best":
            assert row["exponent"] == whole.best_scale(row["format"])
            assert row["overflowed"] == [0, 0]


def test_a_skipped_step_moves_nothing(small):
    training = train(small, 0, scale_exponent=40)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step(next(small.batches(small.TEXT.read_text(encoding="utf-8"))))
    assert (training.skipped, training.scale_exponent) == (1, 39)
    assert training.scheduler.last_epoch == 0
    assert training.rows == {}
    assert all(torch.equal(before[name], value) for name, value in training.model.state_dict().items())


@pytest.mark.nightly
def test_the_schedule_follows_the_steps_that_counted(small):
    training = train(small, 20, scale_exponent=30)
    applied = len(training.losses) - training.skipped
    assert 0 < training.skipped < 20
    assert training.scale_exponent == 30 - training.skipped
    assert training.scheduler.last_epoch == applied
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {applied}
    assert training.rows[small.WHOLE].finite
    assert training.rows[small.WHOLE].count == applied * sum(p.numel() for p in training.model.parameters())


def test_nothing_to_show_is_said(small, capsys):
    assert small.main(["--steps", "1", "--scale-exponent", "60"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no step was completed without overflow" in err


def test_the_census_is_unscaled_whatever_the_scale(small):
    low, high = (train(small, 1, scale_exponent).rows for scale_exponent in (10, 14))
    for name in low:
        a, b = low[name], high[name]
        assert a.count == b.count
        assert a.norm == pytest.approx(b.norm, rel=1e-3)
        assert a.amax == pytest.approx(b.amax, rel=1e-2)
        moved = sum(abs(a.binades.get(e, 0) - b.binades.get(e, 0)) for e in {*a.binades, *b.binades})
        # Only what FP16 holds with few bits, or none, at the lower scale may change its binade.
        assert moved <= 0.02 * a.count, name


def test_gradients_are_counted_before_they_are_clipped(small, monkeypatch):
    expected = train(small, 1).rows
    monkeypatch.setattr(small, "MAX_NORM", 1e-6)
    assert train(small, 1).rows == expected


def test_emulated_tensor_cores_agree_with_torch_in_fp16(demo):
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    results = []
    for multiply in (torch.nn.functional.linear, lambda *xs: demo.as_on_tensor_cores(torch.nn.functional.linear, *xs)):
        with torch.autocast("cpu", dtype=torch.float16):
            product = multiply(x, weight)
        (gradient,) = torch.autograd.grad((product.float() ** 2).sum(), weight)
        results.append((product, gradient))
    (expected, expected_gradient), (product, gradient) = results
    assert product.dtype == expected.dtype == torch.float16
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(product, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-2, atol=1e-1)


def test_without_autocast_nothing_is_rounded(demo):
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    product = demo.as_on_tensor_cores(torch.nn.functional.linear, x, weight)
    assert torch.equal(product, torch.nn.functional.linear(x, weight))


@pytest.mark.nightly
def test_it_learns(small):
    losses = train(small, 40).losses
    assert losses[0] == pytest.approx(math.log(46), abs=0.1)  # all 46 letters alike
    assert losses[-1] < 3.2


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 7, "0"),
        (7, 7, "100"),
        (0, 0, "0"),
        (1, 10**6, "<0.01"),
        (123, 10_000, "1.23"),
        (9_994, 100_000, "9.99"),
        (9_996, 100_000, "10.0"),
        (4_136, 10_000, "41.4"),
        (999_999, 10**6, ">99.9"),
    ],
)
def test_a_share_never_claims_more_than_it_knows(demo, part, whole, text):
    assert demo.percent(part, whole) == text
    assert len(text) <= 5
