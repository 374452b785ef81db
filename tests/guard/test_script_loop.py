"""A guard of a loop without an engine: its arguments, what it refuses, and what it leaves alone."""

import math

import pytest
import torch
from torch import nn

from ampwise import Engine, GradScaler, Guard, Ladder, Stopped
from ampwise.errors import BadInput


def parts(**more):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), **more}


def loss_of(given, x):
    return given["model"](x).square().mean()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, r"Guard\('checkpoints', model=model, optimizer=optimizer\)"),
        ({"model": "gpt2"}, r"Guard\(model=...\): expected a torch.nn.Module or a list of them, got str"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"Guard\(scheduler=...\): expected a scheduler, got 'StepLR'"),
        ({"scaler": 2.0**16}, r"Guard\(scaler=...\): expected a GradScaler, got float"),
        ({"clip_norm": -1}, r"Guard\(clip_norm=-1\): expected a number above 0"),
        ({"accumulate": 0}, r"Guard\(accumulate=0\): expected the number of micro-batches"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, change, words):
    with pytest.raises(BadInput, match=words):
        Guard(tmp_path, **parts(**change))


def test_an_engine_has_its_own_parts(tmp_path):
    given = parts()
    engine = Engine(given["model"], given["optimizer"], "fp32")
    with pytest.raises(BadInput, match="the engine has its own"):
        Guard(engine, tmp_path, optimizer=given["optimizer"])
    with Guard(engine, tmp_path) as guard, pytest.raises(BadInput, match="an engine ends its steps itself"):
        guard.end_step(1.0)


def test_a_step_before_the_guard_has_begun_would_train_on_weights_that_are_not_resumed(tmp_path):
    given = parts()
    guard = Guard(tmp_path, **given)
    with pytest.raises(BadInput, match="before the guard has begun"):
        guard.step(loss_of(given, torch.ones(2, 4)))


def test_checkpoints_of_an_engine_and_of_a_loop_are_not_mixed(tmp_path):
    given = parts()
    with Guard(tmp_path, **given) as guard:
        for x in guard.batches([torch.ones(2, 4)]):
            guard.step(loss_of(given, x))
    given = parts()
    engine = Engine(given["model"], given["optimizer"], "fp32")
    with pytest.raises(BadInput, match=r"saved by the guard of a loop of the script's own .* this is one of an Engine"):
        Guard(engine, tmp_path).begin()


def test_a_closure_is_refused(tmp_path):
    given = parts()
    with Guard(tmp_path, **given), pytest.raises(BadInput, match="computes gradients that the guard cannot check"):
        given["optimizer"].step(lambda: 0.0)


@pytest.mark.parametrize("kind", [None, torch.amp.GradScaler, GradScaler])
def test_a_bad_step_changes_nothing_and_the_optimizer_is_let_go_of(tmp_path, kind):
    scaler = None if kind is None else kind("cpu", init_scale=4.0)
    given = parts(scaler=scaler)
    model, optimizer = given["model"], given["optimizer"]
    with Guard(tmp_path, **given, clip_norm=1.0) as guard:
        for number, x in enumerate(guard.batches([torch.ones(2, 4)] * 3)):
            before = [each.clone() for each in (*model.parameters(), *optimizer_tensors(optimizer))]
            step = guard.step(loss_of(given, x * (math.nan if number == 1 else 1)))
            assert (step.applied, step.skipped) == (number != 1, number == 1)
            if number == 1:
                after = [*model.parameters(), *optimizer_tensors(optimizer)]
                assert all(map(torch.equal, before, after))
    optimizer.zero_grad()
    model(torch.full((1, 4), math.nan)).sum().backward()
    optimizer.step()  # the guard is closed: what the script does now is its own
    assert model.weight.isnan().all()


def optimizer_tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def test_gradients_whose_squares_overflow_are_no_reason_to_skip(tmp_path):
    given = parts()
    with Guard(tmp_path, **given) as guard:
        for x in guard.batches([torch.ones(2, 4)]):
            (loss_of(given, x) * 1e30).backward()
            given["optimizer"].step()  # noqa: AMP208 (one step)
            assert guard.end_step(1.0).applied


def test_micro_batches_of_a_shorter_last_window_are_averaged(tmp_path):
    batches = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    given, plain = parts(), parts()
    with Guard(tmp_path, **given, accumulate=3) as guard:
        steps = [guard.step(loss_of(given, x)) for x in guard.batches(batches)]
    assert [step.closed for step in steps] == [False, False, True, False, True]
    for window in (batches[:3], batches[3:]):
        for x in window:
            (loss_of(plain, x) / len(window)).backward()
        plain["optimizer"].step()
        plain["optimizer"].zero_grad()
    assert torch.equal(given["model"].weight, plain["model"].weight)


def test_a_batch_that_holds_the_nan_is_named(tmp_path):
    given = parts()
    bad = {"x": torch.tensor([[1.0, math.nan, 1.0, 1.0]]), "y": torch.ones(1)}
    with Guard(tmp_path, **given, ladder=Ladder(skips=1, rollbacks=0)) as guard:
        batch = next(guard.batches([bad]))
        with pytest.raises(Stopped):
            guard.step(loss_of(given, batch["x"]))
    assert "`batch['x']` has 1 NaN or inf among 4 values" in guard.events[-1].message
    assert "the guard cannot change the precision" in guard.events[-1].message
