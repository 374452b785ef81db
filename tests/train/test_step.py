"""What one knows of a step, and of the steps before it."""

import json
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD

from ampwise import BadInput, Engine

from ..for_each import for_each
from .engine_toys import OVERFLOW, PRECISIONS, data, train, training

FACTS = ["number", "loss", "skipped", "grad_norm", "scale", "precision", "lr"]


def test_a_step_is_plain_data():
    run = training("fp16", accumulate=2)
    for step in train(run, 1, 2, 3, None):
        facts = json.loads(json.dumps(step.as_dict(), allow_nan=False))
        assert list(facts) == FACTS
        for name in FACTS:
            told = getattr(step, name)
            assert facts[name] == (None if isinstance(told, float) and not math.isfinite(told) else told)
    assert pickle.loads(pickle.dumps(run.engine.history.rows()))[0]["number"] == 1


def test_steps_are_numbered_from_1_and_micro_batches_have_the_number_of_their_step():
    run = training(accumulate=2)
    assert [step.number for step in train(run, 1, 2, 3, None, 5)] == [1, 1, 2, 2, 3]


def test_a_step_is_closed_then_applied_or_skipped():
    run = training("fp16", accumulate=2)
    steps = train(run, 1, 2, 3, None)
    assert [(step.closed, step.applied, step.skipped) for step in steps] == [
        (False, False, False),
        (True, True, False),
        (False, False, False),
        (True, False, True),
    ]


def test_of_an_open_window_the_loss_is_known_and_nothing_else():
    run = training(accumulate=3)
    losses = [run.loss(*data(number)).item() for number in (1, 2)]
    first, second = train(run, 1, 2)
    assert (first.loss, second.loss) == (pytest.approx(losses[0]), pytest.approx(sum(losses) / 2))
    assert all(math.isnan(number) for number in (first.grad_norm, first.scale, first.lr))
    assert first.lrs == ()


@for_each("precision", PRECISIONS)
def test_the_norm_is_that_before_clipping_in_true_units(precision):
    clipped, free = training(precision, clip_norm=1e-3), training(precision)
    (one,), (other,) = train(clipped, 1), train(free, 1)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    run = training()
    gradients = torch.autograd.grad(run.loss(*data(1)), list(run.model.parameters()))
    norm = nn.utils.get_total_norm(gradients) if hasattr(nn.utils, "get_total_norm") else None
    assert norm is None or one.grad_norm == pytest.approx(norm.item(), rel=0.02)


def test_a_step_in_words():
    run = training("fp16", accumulate=2, make=SGD, lr=0.5)
    accumulating, applied, _, skipped = train(run, 1, 2, 3, None)
    assert repr(accumulating) == "<Step 1, fp16, accumulating>"
    norm = f"{applied.grad_norm:.4g}"
    assert repr(applied) == f"<Step 1, fp16, loss {applied.loss:.4g}, grad_norm {norm}, scale 256, lr 0.5>"
    assert repr(skipped) == "<Step 2, fp16, skipped, loss nan, grad_norm nan, scale 256, lr 0.5>"
    (plain,) = train(training("bf16", make=SGD, lr=0.5), 1)
    assert "scale" not in repr(plain)


def test_facts_are_those_of_the_step_whatever_comes_after():
    run = training("fp16")
    first, second = train(run, 1, OVERFLOW)
    train(run, 2, OVERFLOW, 3)
    assert (first.skipped, first.scale, second.skipped, second.scale) == (False, 256.0, True, 128.0)
    assert first.loss == pytest.approx(training().loss(*data(1)).item(), rel=1e-2)


def test_rates_of_several_groups():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters()}]
    engine = Engine(model, SGD(groups, lr=0.5), "fp32")
    step = engine.step(lambda: model(torch.ones(1, 4)).sum())
    assert (step.lr, step.lrs, engine.lr) == (0.25, (0.25, 0.5), 0.25)


# --- history -------------------------------------------------------------------------------------------------------


def test_a_history_keeps_the_last_steps_that_were_closed():
    run = training("fp16", accumulate=2)
    history = run.engine.history
    assert history.limit == 1000
    history.limit = 3
    train(run, 1, 2, 3, 4, 5, None, 7, 8, 9)
    assert (len(history), [step.number for step in history]) == (3, [2, 3, 4])
    assert repr(history) == "<History of 3 steps>"
    assert history["skipped"] == [False, True, False]
    assert history["scale"] == [256.0, 256.0, 256.0]
    assert history["precision"] == ["fp16"] * 3
    assert history[-1].number == 4
    assert [step.number for step in history[1:]] == [3, 4]
    assert [row["number"] for row in history.rows()] == [2, 3, 4]
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (3, 1)


@for_each("column", ["loss", "grad_norm", "lr"])
def test_a_column_is_what_the_steps_say(column):
    run = training("bf16")
    steps = train(run, *range(7))
    assert run.engine.history[column] == [getattr(step, column) for step in steps]


def test_a_column_that_is_not_there_is_refused_and_those_there_are_named():
    text = r"history\['norm'\]: expected one of loss, skipped, grad_norm, scale, precision, lr\."
    with pytest.raises(BadInput, match=text):
        training().engine.history["norm"]


def test_a_step_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError):
        training().engine.history[0]


def test_a_history_of_none_keeps_none():
    run = training()
    run.engine.history.limit = 0
    assert train(run, *range(6))[-1].applied
    assert (len(run.engine.history), run.engine.applied_steps) == (0, 6)


def test_the_rate_before_the_first_step_is_the_optimizers():
    run = training(lr=0.3)
    assert run.engine.lr == 0.3
    assert (run.engine.applied_steps, run.engine.skipped_steps, len(run.engine.history)) == (0, 0, 0)
