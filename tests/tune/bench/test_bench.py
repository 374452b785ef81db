"""The whole comparison on small models, with a clock that says what it is told: no time decides."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from ampwise.cli.schema import SCHEMAS
from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.finding.strict_json import dumps
from ampwise.tune.bench import bench as bench_module
from ampwise.tune.bench import measurement as measuring
from ampwise.tune.bench.bench import bench
from ampwise.tune.bench.result import BenchResult
from ampwise.tune.train_case import make_factory

from .bench_toys import Clock, mlp, other_under_autocast, runs_out_of_memory

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16

FASTER = {"fp32": 0.6, "fp32 again": 0.6, "fp16": 0.3, "bf16": 0.1}


def compared(make=mlp, precisions=("fp16", "bf16"), seconds=None, **options):
    options = {"device": "cpu", "rounds": 2, "steps": 1, "clock": Clock(seconds or FASTER), **options}
    return bench(make, precisions, **options)


@pytest.fixture(autouse=True)
def _one_profile(monkeypatch):
    """Three take three times as long; `result` has them."""
    monkeypatch.setattr(measuring, "PROFILED", 1)


@pytest.fixture(scope="module")
def result():
    return compared()


def test_the_numbers_follow_from_the_clock(result):
    assert [(row.label, row.step_s.median) for row in result.rows] == [("fp32", 0.6), ("fp16", 0.3), ("bf16", 0.1)]
    assert [row.ratio.median for row in result.rows] == [1.0, pytest.approx(2.0), pytest.approx(6.0)]
    assert (result.speeds.noise, result.speeds.rounds, result.speeds.batch) == (0.0, 2, 8)
    assert result.best.label == "bf16"
    assert result.verdict == "definitely bf16: 6.00× as fast as fp32 (noise ±0.0%)"
    assert [row.loss.same for row in result.rows] == [True, True, True]


def test_what_was_looked_at_is_there(result):
    assert result.speeds.flops == 3 * 2 * 8 * (16 * 32 + 32 * 32 + 32 * 4) - 2 * 8 * 16 * 32
    assert {layer.kind for layer in result.speeds.layers} >= {"Linear", "GELU"}
    assert all(set(layer.seconds) == {"fp32", "fp16", "bf16"} for layer in result.speeds.layers)
    for row in result.rows:
        assert row.split.share("matrix") > 0
        assert row.memory is None
        assert row.idle_share is None
        assert {product.precision for product in row.products} == {row.precision}
    assert any("CUDA" in note for note in result.speeds.not_measured)


def test_a_difference_below_that_of_two_equal_runs_is_noise():
    noisy = {"fp32": 0.6, "fp32 again": 0.7, "bf16": 0.55}
    result = compared(precisions=["bf16"], seconds=noisy)
    assert result.speeds.noise == pytest.approx(1 / 6)
    assert result.speeds.verdict(result.rows[1]) == "noise"
    assert result.verdict.startswith("stay with fp32: the difference to bf16 (1.09× as fast) is within the noise")


def test_another_loss_is_refused():
    result = compared(other_under_autocast)
    assert result.best is None
    assert [finding.rule.name for finding in result.findings if finding.severity == "error"] == [
        "not-the-same-loss"
    ] * 2
    assert result.verdict.startswith("stay with fp32: fp16: not the same computation: loss ")


def test_out_of_memory_is_a_row():
    result = compared(runs_out_of_memory())
    fp32, fp16, bf16 = result.rows
    assert (bf16.problem, bf16.step_s, bf16.ratio) == ("out of memory", None, None)
    assert fp32.step_s is not None
    assert result.best == fp16
    assert "bf16" in str(result)
    assert "out of memory" in str(result)


def test_fp32_out_of_memory_leaves_nothing_to_compare_with():
    def make():
        model, batch, loss_fn = mlp()

        def loss(x, y):
            if not torch.is_autocast_enabled("cpu"):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss_fn(x, y)

        return model, batch, loss

    result = compared(make)
    assert result.rows[0].problem == "out of memory"
    assert [row.ratio for row in result.rows] == [None, None, None]
    assert result.rows[2].loss.same is None
    assert result.speeds.noise is not None, "another one ran twice"
    assert result.verdict == "nothing to compare with: fp32 out of memory; the fastest alternative is bf16"


class Slow(Clock):
    """Says that the first passes under autocast took 500 times as long."""

    def __init__(self, slow_passes):
        super().__init__(other=0.1)
        self.slow_passes, self.seen = slow_passes, []

    def __call__(self, work, times):
        said = super().__call__(work, times)
        return 500 * said if self.seen[-1] and sum(self.seen) <= self.slow_passes else said

    def make(self):
        model, batch, loss_fn = mlp()

        def loss(x, y):
            self.seen.append(torch.is_autocast_enabled("cpu"))
            return loss_fn(x, y)

        return model, batch, loss


def test_one_that_is_hopelessly_slow_is_given_up():
    clock = Slow(slow_passes=2)
    result = compared(clock.make, ["bf16"], clock=clock)
    row = result.rows[1]
    assert (row.problem, row.step_s) == ("given up after two passes", None)
    assert row.slower == pytest.approx(500)
    assert sum(clock.seen) == 2, "two passes have said it all"
    assert "bf16: takes 500 times as long as fp32: given up after two passes" in str(result)


def test_one_that_is_slow_only_in_its_first_pass_is_measured():
    clock = Slow(slow_passes=1)
    row = compared(clock.make, ["bf16"], clock=clock).rows[1]
    assert (row.problem, row.slower) == (None, None)
    assert row.step_s is not None


def test_compiled_rows_come_beside_eager_ones(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    seconds = {"fp32": 0.6, "bf16": 0.3, "fp32 compiled": 0.5, "bf16 compiled": 0.1, "fp32 again": 0.6}
    result = compared(precisions=["bf16"], seconds=seconds, compiled=True)
    assert [row.label for row in result.rows] == ["fp32", "bf16", "fp32 compiled", "bf16 compiled"]
    last = result.rows[3]
    assert (last.ratio.median, last.ratio_to_eager.median) == (pytest.approx(5.0), pytest.approx(6.0))
    assert len(compiled) == 2
    assert {label for layer in result.speeds.layers for label in layer.seconds} == {"fp32", "bf16"}
    assert result.verdict.endswith("bf16 compiled, 6.00× as fast as eager fp32")


@pytest.mark.nightly
def test_what_torch_gives_up_compiling_is_not_called_compiled(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend="eager", dynamic=False))

    def make():
        model, batch, loss_fn = mlp()
        seen = {"steps": 0}  # another number each time, by which the code is compiled anew
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        optimizer.register_step_post_hook(lambda *_: seen.update(steps=seen["steps"] + 1))
        return model, batch, lambda x, y: loss_fn(x, y) + 0 * seen["steps"], optimizer

    result = compared(make, ["fp32"], compiled=True, steps=6)
    assert [row.step_s is None for row in result.rows] == [False, True]
    assert result.rows[1].problem.startswith("failed: torch.compile reached its recompile limit")
    assert result.verdict.startswith("stay with fp32: fp32 compiled: failed: torch.compile")


class Infinite(torch.autograd.Function):
    """Whose gradient overflows as soon as it is scaled."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf") if gradient.abs().max() > 1 else gradient


def test_steps_that_a_scaler_skips_are_counted():
    def make():
        model = nn.Linear(4, 1)
        return model, (torch.randn(8, 4),), lambda x: Infinite.apply(model(x).float()).sum()

    result = compared(make, ["fp16"], seconds={})
    assert [row.skipped for row in result.rows] == [0, 2], "two rounds of one step; what is not timed is not counted"
    assert "skipped-while-measured" in [finding.rule.name for finding in result.findings]


def test_an_optimizer_that_looks_itself_for_what_is_not_finite_skips_them_too():
    def make():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        return model, (torch.randn(8, 4),), lambda x: Infinite.apply(model(x).float()).sum(), optimizer

    assert [row.skipped for row in compared(make, ["fp16"], seconds={}).rows] == [0, 2]


def spoilt_by(loss_of):
    """A maker, whose loss in BF16 is what is made of it; and the models that it makes."""
    models = []

    def make():
        model = nn.Linear(8, 8)
        models.append(model)

        def loss(x):
            y = model(x)
            return loss_of(y.float()) if y.dtype == torch.bfloat16 else y.float().square().mean()

        return model, (torch.randn(4, 8),), loss

    return make, models


class NoGradient(torch.autograd.Function):
    """A number whose gradient is none."""

    @staticmethod
    def forward(ctx, x):
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((4, 8), torch.nan)


@pytest.mark.parametrize(
    ("loss_of", "problem", "message"),
    [
        (lambda y: y.sum() * torch.nan, "not finite: the loss is nan", "the loss is nan in bf16"),
        (lambda y: y.sum() / 0, "not finite: the loss is", "inf in bf16"),
        (NoGradient.apply, "not finite: the gradients are not finite", "gradients are not finite in bf16, but"),
    ],
)
def test_what_is_not_finite_does_not_train_the_weights_of_the_others(loss_of, problem, message):
    make, models = spoilt_by(loss_of)
    result = compared(make)
    assert [row.problem is None for row in result.rows] == [True, True, False]
    assert result.rows[2].problem.startswith(problem)
    assert result.rows[1].skipped == 0
    assert result.best.label == "fp16"
    (finding,) = (finding for finding in result.findings if finding.severity == "error")
    assert message in finding.message
    assert models[0].weight.isfinite().all()


def test_one_that_corrupts_the_weights_in_its_steps_is_out_and_they_are_put_back():
    make, models = spoilt_by(lambda y: y.square().mean() * (torch.nan if calls.append(1) or len(calls) > 1 else 1))
    calls = []  # the loss is asked for once; then there are steps
    result = compared(make)
    assert result.rows[2].problem == "not finite: the weights, after a few steps"
    assert [row.step_s is not None for row in result.rows] == [True, True, False]
    assert result.rows[1].skipped == 0
    assert models[0].weight.isfinite().all()


def test_the_weights_of_all_are_the_same_ones():
    models = []

    def make():
        made = mlp()
        models.append(made[0])
        return made

    compared(make)
    assert len(models) == 1


def test_the_callers_random_numbers_go_on_as_if_nothing_had_been():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()

    def make():
        random.random()
        np.random.rand(3)
        return mlp()

    compared(make, precisions=["bf16"])
    assert torch.equal(torch.rand(2), expected)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_users_own_optimizer_is_the_one():
    steps = []

    def make():
        model, batch, loss_fn = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return model, batch, loss_fn, optimizer

    compared(make, ["bf16"])
    assert len(steps) > 10


def test_progress_reaches_its_end_and_never_goes_back():
    told = []
    compared(progress=lambda done, total, doing: told.append((done, total, doing)))
    done = [each for each, _, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]
    phases = list(dict.fromkeys(doing.partition(":")[0] for _, _, doing in told))
    assert phases == ["comparing losses", "warming up", "counting memory", "measuring", "profiling"]


def test_a_function_is_named_so_that_the_command_can_be_typed(result):
    asked = "--device cpu --precisions fp16,bf16 --rounds 2 --steps 1"
    assert result.speeds.command == f"ampwise bench {mlp.__module__}:mlp {asked}"
    assert result.speeds.experiment("--compile") == f"{result.speeds.command} --compile"
    assert result.speeds.larger().endswith("--batch 32")


def test_the_command_has_every_option_and_an_experiment_replaces_them():
    options = {"batch": 4, "optimizer": "sgd", "clip_norm": None, "keep_fp32": ["4", "0"]}
    found = compared(precisions=["bf16"], **options).speeds
    head = f"ampwise bench {mlp.__module__}:mlp --device cpu"
    rest = "--optimizer sgd --clip none --rounds 2 --steps 1 --keep fp32=4 --keep fp32=0"
    assert found.command == f"{head} --precisions bf16 --batch 4 {rest}"
    assert found.larger() == f"{head} --precisions bf16 {rest} --batch 16"
    assert found.experiment("--precisions fp32,tf32") == f"{head} --batch 4 {rest} --precisions fp32,tf32"
    assert found.experiment("--keep fp32=PATTERN") == f"{found.command} --keep fp32=PATTERN"


def test_tf32_that_is_on_is_noted_where_it_has_an_effect(monkeypatch):
    assert compared(precisions=["bf16"]).speeds.tf32_was_on == ()
    on = type("Switches", (), {"matmul_tf32": True, "convolution_tf32": True})
    ampere = type("Ampere", (), {"has_tensor_cores": lambda self, fmt: True})()
    monkeypatch.setattr(bench_module, "read_device", lambda *_: ampere)
    monkeypatch.setattr(bench_module, "read_fp32_switches", lambda _: on)

    def asked(model):
        found = make_factory(lambda: (model, (torch.zeros(1),), lambda x: x)).make()
        pretended = dataclasses.make_dataclass("Subject", ["model", "device"])(found.model, torch.device("cuda", 0))
        return bench_module._tf32_was_on(pretended)

    assert asked(nn.Linear(2, 2)) == ("matmuls",)
    assert asked(nn.Conv1d(2, 2, 1)) == ("matmuls", "convolutions")


# Forms

SCHEMA = json.loads((SCHEMAS / "bench.json").read_text())


def test_json_has_the_form_that_is_promised(result):
    for made in (result, compared(runs_out_of_memory()), compared(other_under_autocast)):
        data = json.loads(dumps({"version": 1, **made.as_dict()}))
        jsonschema.validate(data, SCHEMA)
    row = SCHEMA["properties"]["rows"]["items"]
    assert set(data["basis"]) <= {*row["properties"], *SCHEMA["properties"]}


def test_a_notebook_shows_it_with_nothing_of_the_users_as_markup(result):
    shown = result._repr_html_()
    assert "definitely bf16" in shown
    evil = "<script>alert(1)</script>"
    bad = dataclasses.replace(result.speeds, name=evil, device_name=evil, not_measured=(evil,))
    shown = BenchResult(bad)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_text_has_the_verdict_first_and_hides_nothing(result):
    lines = str(result).splitlines()
    assert lines[1] == result.verdict
    hidden = dataclasses.replace(result.speeds, name="\x1b[2Jx", device_name="a\u202eb")
    shown = str(BenchResult(hidden))
    assert "\x1b" not in shown
    assert "\u202e" not in shown


# Bad input


@pytest.mark.parametrize(("factor", "said"), [(float("inf"), "(-inf|inf)"), (float("nan"), "nan")])
def test_fp32_has_to_have_a_loss(factor, said):
    def make():
        model = nn.Linear(4, 4)
        return model, (torch.randn(2, 4),), lambda x: model(x).exp().mean() * factor

    with pytest.raises(BadInput, match=f"make: FP32's loss is {said} before any comparison: first make sure that"):
        compared(make)


def test_weights_that_fp32_itself_corrupts_are_refused():
    def make():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
        return model, (torch.randn(4, 8),), lambda x: model(x).float().pow(4).mean(), optimizer

    with pytest.raises(BadInput, match="the weights are not finite after a few steps in FP32: lower the learning rate"):
        compared(make, ["fp16"])


def test_a_model_of_which_nothing_is_trained():
    def make():
        model = nn.Linear(4, 4).requires_grad_(False)
        return model, (torch.randn(2, 4),), lambda x: model(x).sum()

    with pytest.raises(BadInput, match="make: no parameter has requires_grad=True, so there is no step"):
        compared(make)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rounds": 0}, BadInput, "bench: expected rounds of at least 1, got 0."),
        ({"steps": -1}, BadInput, "bench: expected steps of at least 1, got -1."),
        ({"batch": 0}, BadInput, "expected a batch of at least 1 row, got 0"),
        ({"optimizer": "adamm"}, UnknownName, "Did you mean adam"),
        ({"device": "gpu"}, BadInput, "--device gpu: not available here"),
        ({"precisions": ["fp8"]}, PrecisionUnavailable, "so fp32 has no counterpart: cpu has no FP8"),
        ({"keep_fp32": ["*.router"]}, UnknownName, "unknown module '*.router'"),
    ],
)
def test_bad_input_is_one_clear_line(options, error, text):
    with pytest.raises(error) as caught:
        compared(**options)
    assert text in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_gpu_when_one_was_asked_for():
    with pytest.raises(BadInput, match="not available here"):
        compared(device="cuda")


def test_a_loss_that_is_no_number():
    def make():
        model = nn.Linear(4, 2)
        return model, (torch.randn(8, 4),), lambda x: model(x)

    with pytest.raises(BadInput, match=r"the loss is a tensor of shape \(8, 2\), not a tensor with one element"):
        compared(make)


def test_a_step_that_fails_in_fp32():
    def make():
        model = nn.Linear(4, 2)
        return model, (torch.randn(8, 5),), lambda x: model(x).sum()

    with pytest.raises(BadInput, match=r"does not fit the loss function: .*shapes cannot be multiplied"):
        compared(make)


def test_what_cannot_be_looked_at_takes_no_row_with_it(monkeypatch):
    def refuses(contender):
        raise AssertionError("sizes of another kind")

    monkeypatch.setattr(measuring, "count_flops", refuses)
    monkeypatch.setattr(measuring, "profiled_step", refuses)
    found = compared(precisions=["bf16"])
    assert [(row.problem, row.split) for row in found.rows] == [(None, None), (None, None)]
    assert found.best.label == "bf16"
    assert found.speeds.flops is None
    assert found.speeds.layers == ()
    told = "\n".join(found.speeds.not_measured)
    assert "FLOPs, counted in a step of fp32: AssertionError: sizes of another kind" in told
    assert "The profile of bf16: AssertionError: sizes of another kind" in told
