"""Accelerate, mended: its own loop does what the conformance cases ask for, where by itself it does not."""

import math

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from ampwise.errors import BadInput  # noqa: E402
from ampwise.integrations.accelerate import fix  # noqa: E402

from ..conformance import loop_peers, trainer_peers  # noqa: E402
from ..conformance.registry import all_cases  # noqa: E402
from ..conformance.step_peers import SCALE  # noqa: E402

CASES = all_cases()
# What Accelerate gets wrong by itself and the step can set right; and what it gets right and has to stay so.
MENDED = [
    "bf16-inf-clipped-by-value",
    "bf16-nan-gradient",
    "bf16-nan-gradient-clipped",
    "bf16-nan-in-a-window",
    "scheduler-waits-for-skipped-step",
    "told-of-a-skipped-step",
    "two-optimizers-clipped-apart",
    "two-optimizers-clipped-together",
    "two-optimizers-first-overflows",
]
KEPT = [
    "accumulated-fused-and-clipped",
    "accumulated-mean",
    "bf16-fused-and-clipped",
    "clipping-leaves-small-gradients",
    "fp16-fused-and-clipped",
    "overflow-in-a-window",
    "overflow-lowers-the-scale",
    "resumed-scale",
    "two-optimizers-nan-in-one-clipped",
]


def fresh(precision="fp16", **options):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision, **options)


def mended(contender="accelerate", precision="fp16", **options):
    handler = accelerate.GradScalerKwargs(init_scale=SCALE)
    return fix(fresh(precision, kwargs_handlers=[handler] if precision == "fp16" else [], **options))


@pytest.mark.parametrize("name", MENDED + KEPT)
def test_the_peers_case_is_right_with_it(name, monkeypatch):
    for module in (trainer_peers, loop_peers):
        monkeypatch.setattr(module, "accelerator_of", mended)
    outcome = CASES[name].outcome("accelerate")
    assert outcome.right, outcome.seen


@pytest.mark.parametrize("name", MENDED)
def test_without_it_the_case_is_wrong(name):
    assert not CASES[name].outcome("accelerate").right


def test_only_the_optimizer_that_is_clipped_is_unscaled():
    accelerator = mended()
    layers = [accelerator.prepare(torch.nn.Linear(1, 1, bias=False)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in layers]
    accelerator.backward(sum(layer(torch.ones(1, 1)).sum() for layer in layers))
    accelerator.clip_grad_norm_(layers[0].parameters(), 100.0)
    assert [layer.weight.grad.item() for layer in layers] == [1.0, SCALE]
    assert [accelerator.scaler.is_unscaled(each.optimizer) for each in optimizers] == [True, False]
    accelerator.clip_grad_norm_(layers[0].parameters(), 100.0)  # again: nothing is divided twice
    assert layers[0].weight.grad.item() == 1.0


def test_two_optimizers_that_take_turns_have_a_scale_each_time():
    """As in a GAN: a loss and a step each. The scale may move between them, and each divides by what it was given."""
    accelerator = mended()
    layers = [accelerator.prepare(torch.nn.Linear(1, 1, bias=False)) for _ in range(2)]
    for layer in layers:
        torch.nn.init.ones_(layer.weight)
    optimizers = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in layers]
    for layer, optimizer, slope in zip(layers, optimizers, (math.nan, 1.0), strict=True):
        accelerator.backward(layer(torch.full((1, 1), slope)).sum())
        optimizer.step()
    assert [layer.weight.item() for layer in layers] == [1.0, 0.0]
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_within_a_window_is_refused_where_it_would_mix_units(clip):
    accelerator = mended(gradient_accumulation_steps=2)
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        with pytest.raises(BadInput, match=r"if accelerator\.sync_gradients:"):
            getattr(accelerator, clip)(model.parameters(), 1.0)
    assert layer.weight.grad.item() == SCALE / 2  # as it was
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        getattr(accelerator, clip)(model.parameters(), 100.0)
        assert layer.weight.grad.item() == 1.0
        optimizer.step()
    assert not optimizer.step_was_skipped


def test_without_a_scale_what_clipping_hides_in_the_middle_of_a_window_is_seen():
    accelerator = mended(precision="bf16", gradient_accumulation_steps=3)
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    for slope in (1.0, math.inf, 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), slope)).sum())
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert optimizer.step_was_skipped
    assert bool(accelerator.scaler.skipped_for(optimizer))


def test_fp16_on_a_cpu_is_fp16():
    accelerator = mended()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with accelerator.autocast():
        assert torch.nn.functional.linear(torch.ones(1, 2), model.weight).dtype == torch.float16
    assert fresh().scaler is None  # what would have trained in FP32


def test_settings_are_kept_and_a_subclass_stays_one():
    class Mine(accelerate.Accelerator):
        pass

    fresh()
    handler = accelerate.GradScalerKwargs(init_scale=8.0, growth_interval=7, growth_factor=3.0)
    accelerator = fix(Mine(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]))
    assert isinstance(accelerator, Mine)
    scaler = accelerator.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_growth_factor()) == (8.0, 7, 3.0)
    assert fix(accelerator) is accelerator
    assert accelerator.scaler is scaler


@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_checkpoints_are_those_of_accelerate_by_itself(tmp_path, precision):
    def prepared(accelerator):
        layer = torch.nn.Linear(1, 1)
        accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
        return accelerator

    theirs = prepared(fresh(precision))
    theirs.save_state(str(tmp_path / "theirs"))
    ours = prepared(mended(precision=precision))
    ours.save_state(str(tmp_path / "ours"))
    assert (tmp_path / "ours" / "scaler.pt").exists() == (precision == "fp16")
    prepared(mended(precision=precision)).load_state(str(tmp_path / "ours"))
    if precision == "no":
        prepared(mended(precision=precision)).load_state(str(tmp_path / "theirs"))


def test_refusals():
    with pytest.raises(BadInput, match=r"expected an accelerate\.Accelerator, got str"):
        fix("fp16")
    accelerator = fresh("no")
    accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0))
    with pytest.raises(BadInput, match=r"Call fix\(accelerator\) before prepare\(\)"):
        fix(accelerator)
    accelerator = fresh("no")
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(BadInput, match="DEEPSPEED runs the step itself"):
        fix(accelerator)
    fresh("no")
