"""What is made of a ratio: thresholds, noise, and which row is the best."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ampwise.tune.bench.result import problem_of, speed_headline, speed_table, split_of
from ampwise.tune.bench.speeds import LossCheck, PrecisionRow, StepMemory, TimeSpread, quantile
from ampwise.tune.bench.verdict import DEFINITELY, OPTIONAL, USE, SpeedVerdict, ratio_text, verdict_of

from ...for_each import for_each
from .bench_toys import row, speeds, split

RATIOS = st.floats(0.01, 100)
VALUES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


@for_each(
    ("ratio", "expected"),
    [
        (0.2, "stay"),
        (1.0999, "stay"),
        (1.1, "optional"),
        (1.4999, "optional"),
        (1.5, "use"),
        (2.5, "use"),
        (2.5001, "definitely"),
    ],
)
def test_the_thresholds_people_use(ratio, expected):
    assert verdict_of(ratio) == expected
    assert (OPTIONAL, USE, DEFINITELY) == (1.1, 1.5, 2.5)


@given(RATIOS, st.floats(0, 3))
def test_a_difference_no_larger_than_noise_is_noise_in_both_directions(ratio, noise):
    assume(not any(math.isclose(edge, ratio) for edge in (1 + noise, 1 / (1 + noise))))
    assert (verdict_of(ratio, noise) is SpeedVerdict.NOISE) == (1 / (1 + noise) < ratio < 1 + noise)


@given(RATIOS, RATIOS)
def test_faster_is_never_judged_worse(one, other):
    order = list(SpeedVerdict)[1:]
    slow, fast = sorted((one, other))
    assert order.index(verdict_of(slow)) <= order.index(verdict_of(fast))


@given(VALUES, st.floats(0, 1))
def test_quantiles_agree_with_torch(values, share):
    torch = pytest.importorskip("torch")
    expected = torch.quantile(torch.tensor(values, dtype=torch.float64), share).item()
    assert quantile(values, share) == pytest.approx(expected, rel=1e-9)


@given(VALUES)
def test_a_spread_is_in_order_and_does_not_mind_the_order_of_rounds(values):
    spread = TimeSpread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert spread == TimeSpread.of(values[::-1])


def test_the_fastest_is_the_best_and_of_equals_the_one_that_is_less_trouble():
    assert speeds(row("fp16", 2.0), row("bf16", 2.6)).best.precision == "bf16"
    assert speeds(row("fp16", 2.60), row("bf16", 2.59)).best.precision == "bf16", "no scaler, and noise between them"
    assert speeds(row("fp16", 2.60), row("bf16", 2.40)).best.precision == "fp16"
    assert speeds(row("tf32", 2.0), row("bf16", 2.01)).best.precision == "tf32"
    assert speeds(row("bf16", 2.0), row("bf16", 5.0, compiled=True)).best.label == "bf16", "compiling is another choice"
    assert speeds().best is None


def test_another_loss_is_never_called_faster():
    off = LossCheck(loss=3.0, reference=2.0, tolerance=0.1)
    wrong = speeds(row("fp16", 9.0, loss=off), row("bf16", 2.0))
    assert wrong.best.precision == "bf16"
    assert wrong.verdict(wrong.rows[1]) is None
    assert [problem_of(each) for each in wrong.rows] == ["", "not the same computation: loss 3, but 2 in fp32", ""]
    assert speed_headline(speeds(row("fp16", 9.0, loss=off))) == (
        "stay with fp32: fp16: not the same computation: loss 3, but 2 in fp32"
    )


@for_each("loss", [math.nan, math.inf, 2.11])
def test_a_loss_that_is_off_or_not_finite_is_another(loss):
    assert LossCheck(loss=loss, reference=2.0, tolerance=0.1).same is False
    assert LossCheck(loss=loss, reference=None, tolerance=None).same is None


@for_each(
    ("ratio", "expected"),
    [
        (6.02, "definitely bf16: 6.02× as fast as fp32 (noise ±1.0%)"),
        (1.8, "use bf16: 1.80× as fast as fp32 (noise ±1.0%)"),
        (1.2, "optional: bf16 is 1.20× as fast as fp32 (noise ±1.0%)"),
        (1.05, "stay with fp32: bf16, the fastest alternative, is 1.05× as fast (noise ±1.0%)"),
        (1.005, "stay with fp32: the difference to bf16 (1.00× as fast) is within the noise of ±1.0%"),
    ],
)
def test_the_headline(ratio, expected):
    assert speed_headline(speeds(row("bf16", ratio))) == expected


def test_the_headline_names_what_compiling_brings():
    told = speed_headline(speeds(row("bf16", 6.0), row("bf16", 9.1, compiled=True)))
    assert told == "definitely bf16: 6.00× as fast as fp32 (noise ±1.0%); bf16 compiled, 9.10× as fast as eager fp32"


def test_without_fp32_there_is_no_verdict():
    out = PrecisionRow(precision="fp32", problem="out of memory")
    fast = row("bf16", step_s=0.5)
    told = speed_headline(speeds(fast, noise=None).__class__(**{**_parts(speeds(fast)), "rows": (out, fast)}))
    assert told == "nothing to compare with: fp32 out of memory; the fastest alternative is bf16"


def _parts(made):
    return {name: getattr(made, name) for name in ("name", "command", "device", "device_name")}


def test_one_given_up_says_how_slow_it_was():
    slow = PrecisionRow(precision="bf16", problem="given up after two passes", slower=351.2)
    assert speed_headline(speeds(slow)) == (
        "stay with fp32: bf16: takes 351 times as long as fp32: given up after two passes"
    )


def test_shares_of_a_step_sum_to_one():
    busy = row("bf16", 2.0, split=split(busy=0.3, matrix=0.2, casts=0.1))
    shares = split_of(busy)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["idle"] == pytest.approx(0.4)
    assert shares["matrix"] == pytest.approx(0.4)
    assert split_of(row("bf16", 2.0)) == {}
    assert "idle" not in split_of(row("bf16", 2.0, split=split(on_device=False, matrix=1.0)))


def test_rates_and_the_share_of_the_peak_follow_from_the_time():
    one = row("bf16", 2.0, peak_flops=1000.0)
    made = speeds(one, flops=100.0, tokens=1024)
    data = made.as_dict()["rows"][1]
    assert (data["samples_per_s"], data["tokens_per_s"], data["flops_per_s"]) == (32.0, 2048.0, 200.0)
    assert data["peak_share"] == pytest.approx(0.2)
    assert speeds(row("bf16", 2.0), flops=100.0).as_dict()["rows"][1]["peak_share"] is None, "no peak is known"


def test_columns_without_anything_are_left_out():
    assert speed_table(speeds(row("bf16", 2.0)))[0] == [
        "precision", "step", "×fp32", "samples/s", "loss", "verdict",
    ]  # fmt: skip


def test_ratios_keep_their_digits():
    assert [ratio_text(ratio) for ratio in (0.031, 1.0, 9.994, 9.996, 123.4)] == [
        "0.03×",
        "1.00×",
        "9.99×",
        "10.0×",
        "123.4×",
    ]


def test_rows_whose_rounds_overlap_are_as_fast_as_each_other():
    waits = row("fp16", 3.0)
    straying = replace(waits, ratio=TimeSpread(median=3.0, low=2.5, high=3.2))
    assert speeds(straying, row("bf16", 2.6)).best.precision == "bf16"
    assert speeds(waits, row("bf16", 2.6)).best.precision == "fp16"


def test_the_table_fits_into_a_log_and_cuts_no_verdict(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "110")
    from ampwise.tune.bench.result import BenchResult

    full = {"memory": StepMemory(peak=19 * 2**30, parameters=1, gradients=1, optimizer=1), "peak_flops": 1e3}
    strays = TimeSpread(median=0.2916, low=0.2912, high=0.2919)
    rows = [replace(row("bf16", 12.3, compiled=each, **full), step_s=strays) for each in (False, True)]
    off = LossCheck(loss=3.0, reference=2.0, tolerance=0.1)
    rows += [
        row("fp16", 9.0, loss=off),
        PrecisionRow(precision="fp8", problem="not run: there are no FP8 tensor cores on cpu."),
    ]
    shown = str(BenchResult(speeds(*rows, flops=100.0, tokens=16384))).splitlines()
    table = shown[3:9]
    assert max(map(len, table)) <= 110
    ends = ("definitely", "definitely", "not the same", "not run")
    assert [line for line, end in zip(table[2:], ends, strict=True) if not line.endswith(end)] == []
    assert "fp8: not run: there are no FP8 tensor cores on cpu." in shown
