"""Time to equal held-back loss: curves whose answer is known, and small models that are trained."""

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from benchmarks import equal_loss as benchmark
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise.errors import BadInput
from ampwise.tune.bench import equal_loss as module
from ampwise.tune.bench import equal_loss_result as result_module
from ampwise.tune.bench.equal_loss import equal_loss
from ampwise.tune.bench.equal_loss_result import EqualLoss, TrainingCurve, compare_curves, falling, steps_to

POINTS = [50 * point for point in range(17)]
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr(result_module, "DRAWS", 100)


def curves(label, step_s, *, pace=1.0, floor=1.0, noise=0.01, seeds=3):
    """Losses that fall to ``floor``, as fast as ``pace``; seeds and batches differ by chance."""
    found = []
    for seed in range(seeds):
        numbers = random.Random(f"{label}{seed}")
        own = 0.02 * random.Random(seed).random()  # a seed's own luck, which all precisions share
        losses = tuple(
            tuple(floor + own + 4 * math.exp(-step * pace / 300) + numbers.gauss(0, noise) for _ in range(4))
            for step in POINTS
        )
        found.append(TrainingCurve(label=label, seed=seed, step_s=step_s * (1 + 0.002 * seed), losses=losses))
    return found


def compared(**others):
    runs = [*curves("wide", 0.02), *(each for label, how in others.items() for each in curves(label, **how))]
    rows = compare_curves(runs, POINTS, "wide")
    return EqualLoss(name="m", device_name="d", base="wide", points=tuple(POINTS), runs=tuple(runs), rows=rows)


def test_a_faster_step_that_needs_twice_the_steps_is_slower():
    result = compared(narrow={"step_s": 0.02 / 1.5, "pace": 0.5})
    row = result.rows[1]
    assert row.verdict == "slower"
    assert row.speed.value == pytest.approx(1.5)
    assert row.steps == pytest.approx(2, rel=0.03)
    assert row.gain.value == pytest.approx(0.75, rel=0.03)
    assert row.gain.low <= row.gain.value <= row.gain.high < 1
    assert result.verdict.startswith("stay with wide: narrow reaches the same loss only 0.7")
    assert "a step is 1.50× as fast, and it takes" in result.verdict


def test_one_that_ends_at_a_higher_loss_is_compared_at_that_loss():
    row = compared(narrow={"step_s": 0.02 / 1.5, "floor": 1.3}).rows[1]
    assert row.target == pytest.approx(row.final, abs=0.02)
    assert row.gain.value < 1.2, "the wide one was there long before"


@pytest.mark.parametrize(("pace", "verdict"), [(0.92, "faster"), (2 / 3, "no difference shown")])
def test_near_misses_are_not_called_slower(pace, verdict):
    row = compared(narrow={"step_s": 0.02 / 1.5, "pace": pace}).rows[1]
    assert row.gain.value == pytest.approx(1.5 * pace, rel=0.04)
    assert row.verdict == verdict


def test_what_differs_by_chance_alone_is_not_a_difference():
    row = compared(narrow={"step_s": 0.02, "noise": 0.05}).rows[1]
    assert row.gain.low < 1 < row.gain.high
    assert "may be chance" in compared(narrow={"step_s": 0.02, "noise": 0.05}).verdict


def test_one_that_does_not_learn_has_no_verdict():
    still = [
        TrainingCurve(label="narrow", seed=seed, step_s=0.01, losses=((2.0,) * 4,) * len(POINTS)) for seed in range(3)
    ]
    broken = [
        TrainingCurve(label="broken", seed=seed, step_s=0.01, losses=((5.0,) * 4, *((math.nan,) * 4,) * 16))
        for seed in range(3)
    ]
    rows = compare_curves([*curves("wide", 0.02), *still, *broken], POINTS, "wide")
    assert [row.verdict for row in rows[1:]] == ["not compared"] * 2
    assert all("did not fall" in row.problem for row in rows[1:])


@given(st.floats(0.1, 10), st.lists(st.floats(0.1, 5), min_size=3, max_size=3))
def test_only_the_time_of_a_step_counts_where_curves_are_equal(factor, tail):
    losses = tuple((each,) * 2 for each in (9.0, 8.0, *sorted(tail, reverse=True)))
    wide, narrow = (
        [TrainingCurve(label=label, seed=seed, step_s=step_s, losses=losses) for seed in range(2)]
        for label, step_s in (("wide", 1.0), ("narrow", 1 / factor))
    )
    row = compare_curves([*wide, *narrow], [0, 1, 2, 3, 4], "wide")[1]
    assert row.gain.value == pytest.approx(factor)
    assert row.gain.low == pytest.approx(factor)
    assert row.gain.high == pytest.approx(factor)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
@example([0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, -0.25, 0.5])
def test_the_falling_curve_falls_and_keeps_the_mean(losses):
    found = falling(range(len(losses)), losses)
    assert all(after[1] < before[1] for before, after in pairwise(found))
    assert falling(*zip(*found, strict=True)) == found
    assert steps_to(found, found[-1][1]) <= found[-1][0]


def problem(batch=16):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    x = torch.randn(batch, 8)
    return model, (x, x[:, :3].argmax(1)), lambda x, y: F.cross_entropy(model(x).float(), y)


def loaded(*, pair):
    """A DataLoader, alone or with one that is held back."""

    def make():
        model, data, loss_fn = problem(2048)
        loader = DataLoader(TensorDataset(*data), 16, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, (loader, list(DataLoader(TensorDataset(*data), 64))[:3]) if pair else loader, loss_fn, optimizer

    return make


class Clock:
    """A step takes 10 ms in FP32 and 5 ms in BF16."""

    def __init__(self, monkeypatch):
        self.now, self.rows = 0.0, []
        monkeypatch.setattr(module, "FEWEST_STEPS", 20)
        real = module.Engine.step

        def step(engine, loss_fn, *args, **kwargs):
            self.now += 0.01 if engine.precision == "fp32" else 0.005
            self.rows.append(args)
            return real(engine, loss_fn, *args, **kwargs)

        monkeypatch.setattr(module.Engine, "step", step)

    def __call__(self):
        return self.now


@pytest.mark.parametrize("make", [problem, loaded(pair=True)], ids=["rows", "loaders"])
def test_models_are_trained_on_the_same_batches(monkeypatch, make):
    clock = Clock(monkeypatch)
    state = torch.get_rng_state()
    result = equal_loss(make, ["fp32", "bf16"], budget_s=0.7, seeds=2, device="cpu", clock=clock)
    assert torch.equal(torch.get_rng_state(), state)
    steps = result.points[-1]
    assert steps == int(0.7 / (2 * 0.015))
    assert result.rows[1].speed.value == pytest.approx(2)
    assert len(clock.rows) == 2 * (module.WARM_UP + module.PILOT) + 4 * steps
    trained = clock.rows[-4 * steps :]
    wide, narrow = trained[:steps], trained[steps : 2 * steps]
    assert all(
        torch.equal(one, other) for a, b in zip(wide, narrow, strict=True) for one, other in zip(a, b, strict=True)
    )
    other_seed = trained[3 * steps :]
    assert not torch.equal(wide[0][0], other_seed[0][0])
    first, second = result.runs[0].losses[0], result.runs[1].losses[0]
    assert first == pytest.approx(second, rel=0.02), "the same weights, and held-back batches"
    assert result.runs[0].final < sum(first) / len(first)


def test_rows_that_are_held_back_are_not_trained_on(monkeypatch):
    clock = Clock(monkeypatch)
    held = []
    real = module._of_rows

    def of_rows(*args):
        batches, held_back = real(*args)
        held.append(held_back)
        return batches, held_back

    monkeypatch.setattr(module, "_of_rows", of_rows)
    equal_loss(problem, ["fp32", "bf16"], budget_s=0.7, seeds=2, device="cpu", clock=clock)
    trained = torch.cat([args[0] for args in clock.rows])
    for (x, _), _ in held[2] + held[-1]:
        assert not (trained.unsqueeze(1) == x).all(-1).any()


def fixed():
    return problem()


def empty_loader():
    model, _, loss_fn = problem()
    return model, iter(()), loss_fn


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (fixed, {}, "it returns one batch"),
        (loaded(pair=False), {"budget_s": 50.0}, "its batches came to an end"),
        (loaded(pair=True), {"batch": 4}, "set the batch size in its DataLoader"),
        (empty_loader, {}, "is empty"),
        (problem, {"budget_s": 0.1}, "Give at least 1 s"),
        (problem, {"seeds": 1}, "at least 2 seeds"),
        (problem, {"precisions": ["fp32"]}, "at least two precisions"),
    ],
)
def test_what_cannot_be_compared_is_refused(monkeypatch, make, options, words):
    options = {"precisions": ["fp32", "bf16"], "budget_s": 0.7, "seeds": 2, **options}
    with pytest.raises(BadInput, match=words):
        equal_loss(make, device="cpu", clock=Clock(monkeypatch), **options)


def test_the_benchmark_publishes_verdicts_and_curves(monkeypatch):
    monkeypatch.setattr(benchmark, "text", lambda: SimpleNamespace(facts="two files"))
    result = compared(narrow={"step_s": 0.016})
    verdicts, points = benchmark.tables(result)
    assert [row[0] for row in verdicts.rows] == ["wide", "narrow"]
    assert [len(row) for row in verdicts.rows] == [len(verdicts.columns)] * 2
    assert (verdicts.rows[0][-1], verdicts.rows[1][-1]) == ("", "faster")
    assert points.columns == ["step", "wide s", "wide loss", "narrow s", "narrow loss"]
    assert [row[0] for row in points.rows] == POINTS
    assert points.rows[-1][3] == pytest.approx(800 * result.rows[1].step_s)
