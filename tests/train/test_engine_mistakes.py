"""Leftovers of a loop written by hand, and other ways to get it wrong: told, or without effect."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from ampwise import BadInput, Engine, Policy

from ..for_each import for_each

X = torch.linspace(-1, 1, 24).reshape(6, 4)
Y = torch.linspace(1, 0, 6).reshape(6, 1)


def setting(precision="fp32", *, norm=False, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 1)]
    model = nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), lr=0.1)

    def loss(x=X, y=Y):
        return mse_loss(model(x).float(), y)

    return model, optimizer, Engine(model, optimizer, precision, **options), loss


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_tensor_is_not_a_loss_function():
    _, _, engine, loss = setting()
    with pytest.raises(BadInput, match=r"engine\.step\(loss_fn, x, y\)"):
        engine.step(loss())


def test_clearing_gradients_of_an_open_window_is_reported():
    _, optimizer, engine, loss = setting(accumulate=2)
    engine.step(loss)
    optimizer.zero_grad()
    with pytest.raises(BadInput, match=r"changed between the micro-batches of a step: by zero_grad\(\)"):
        engine.step(loss)
    assert not engine.accumulating


def test_clearing_gradients_between_windows_does_nothing():
    model, optimizer, engine, loss = setting()
    twin, _, plain, same = setting()
    for _ in range(3):
        optimizer.zero_grad()
        engine.step(loss)
        plain.step(same)
    assert all(map(torch.equal, weights(model), weights(twin)))


def test_an_optimizer_that_is_stepped_in_an_open_window_is_stopped():
    model, optimizer, engine, loss = setting("fp16", accumulate=2)
    engine.step(loss)
    before = weights(model)
    with pytest.raises(
        BadInput, match=r"optimizer\.step\(\) was called between the micro-batches of a step: the engine calls it"
    ):
        optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    assert engine.step(loss).applied


def test_an_optimizer_outlives_its_engine():
    _, optimizer, engine, loss = setting(accumulate=2)
    engine.step(loss)
    del engine
    loss().backward()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_pre_hooks


def test_clipping_scaled_gradients_by_hand_is_reported():
    model, _, engine, loss = setting("fp16")
    with engine.autocast():
        now = loss()
    engine.backward(now)
    clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(BadInput, match=r"changed between the micro-batches of a step: by zero_grad\(\) or clipping"):
        engine.apply()


def test_another_backward_pass_through_an_open_window_is_reported():
    discriminator, _, engine, loss = setting(accumulate=2)
    generator = nn.Linear(4, 4)
    other = Engine(generator, SGD(generator.parameters(), lr=0.1), "fp32")
    engine.step(loss)
    other.step(lambda: discriminator(generator(X)).mean())
    with pytest.raises(BadInput, match="another backward pass through these parameters"):
        engine.step(loss)


def test_another_backward_pass_between_forward_and_backward_does_not_count():
    discriminator, _, engine, loss = setting()
    generator = nn.Linear(4, 4)
    other = Engine(generator, SGD(generator.parameters(), lr=0.1), "fp32")
    with engine.autocast():
        now = loss()
    other.step(lambda: discriminator(generator(X)).mean())
    engine.backward(now)
    _, _, plain, same = setting()
    assert engine.apply().grad_norm == plain.step(same).grad_norm


def test_a_weight_given_to_the_engine_is_wanted_in_pieces_too():
    _, _, engine, loss = setting(weight=lambda: 3)
    with pytest.raises(BadInput, match=r"Call backward\(loss, weight=\.\.\.\)"):
        engine.backward(loss())


@for_each(
    "weight",
    [
        torch.tensor(True),
        torch.tensor(100, dtype=torch.uint8),
        torch.tensor(100, dtype=torch.int8),
        torch.tensor(60000.0, dtype=torch.float16),
        np.int64(7),
        np.float32(7),
    ],
)
def test_weights_of_any_kind_add_up(weight):
    _, _, engine, loss = setting(accumulate=4, weight=lambda: weight)
    _, _, plain, same = setting()
    step = [engine.step(loss) for _ in range(4)][-1]
    right = plain.step(same)
    assert (step.loss, step.grad_norm) == pytest.approx((right.loss, right.grad_norm), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.tensor(torch.inf), torch.tensor(torch.nan)])
@pytest.mark.parametrize("turn", [0, 1])
def test_one_bad_weight_corrupts_one_step(bad, turn):
    given = iter([torch.tensor(1.0)] * turn + [bad] + [torch.tensor(1.0)] * 4)
    _, _, engine, loss = setting(weight=lambda: next(given))
    for _ in range(turn + 4):
        engine.step(loss)
    assert (engine.applied_steps, engine.skipped_steps) == (turn + 3, 1)


def test_many_losses_in_16_bits_add_up():
    model, _, engine, _ = setting("bf16", accumulate=512)
    with engine.autocast(), torch.no_grad():
        right = float(model(X).square().mean())
    for _ in range(512):
        step = engine.step(lambda: model(X).square().mean())
    assert step.loss == pytest.approx(right, rel=1e-2)


def test_a_scheduler_that_ends_leaves_a_closed_window():
    model, optimizer, _, loss = setting()
    engine = Engine(model, optimizer, "fp32", scheduler=OneCycleLR(optimizer, max_lr=0.1, total_steps=2))
    engine.step(loss)
    with pytest.raises(ValueError, match="total steps is 2"):
        [engine.step(loss) for _ in range(3)]
    assert not engine.accumulating
    assert all(parameter.grad is None for parameter in model.parameters())
    assert engine.flush() is None


def test_the_class_of_a_scheduler_is_no_scheduler():
    with pytest.raises(BadInput, match="got the class"):
        setting(scheduler=ExponentialLR)


def test_layers_that_come_into_training_within_a_window_are_kept_too():
    model, _, engine, loss = setting(norm=True, accumulate=2)
    model.eval()
    engine.step(loss)
    model.train()
    before = copy.deepcopy(list(model.buffers()))
    assert engine.step(loss, X * torch.nan).skipped
    assert all(map(torch.equal, model.buffers(), before))


def test_what_is_refused_leaves_no_policy_behind():
    model, optimizer, _, _ = setting()
    with pytest.raises(BadInput, match="callbacks"):
        Engine(model, optimizer, Policy("bf16").keep("fp32", "1"), callbacks=[3])
    Engine(model, optimizer, Policy("bf16").keep("fp32", "0"))


def test_looking_at_batches_in_the_middle_of_a_window_trains_nothing():
    model, _, engine, loss = setting(accumulate=4)
    steps = []
    for number, _ in enumerate(engine.batches(range(6))):
        steps.append(engine.step(loss))
        if number == 1:
            before = weights(model)
            with torch.no_grad(), engine.autocast():
                assert list(engine.batches("abc")) == ["a", "b", "c"]
            assert all(map(torch.equal, weights(model), before))
    assert [step.closed for step in steps] == [False, False, False, True, False, True]


def test_batches_without_a_length_can_be_asked_whether_there_are_any():
    _, _, engine, _ = setting()
    assert engine.batches(iter(()))


@pytest.mark.parametrize("clip", [{"clip_norm": 0.01}, {"clip_value": 0.01}])
def test_sparse_gradients_are_clipped(clip):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True)
    dense = copy.deepcopy(table)
    dense.sparse = False
    for each in (table, dense):
        engine = Engine(each, SGD(each.parameters(), lr=1.0), "fp32", **clip)
        engine.step(lambda each=each: each(torch.tensor([1, 1, 4])).square().sum())
    torch.testing.assert_close(table.weight, dense.weight)


def test_an_optimizer_that_cannot_be_referred_to_weakly_steps():
    class Wrapped:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    model = nn.Linear(4, 1)
    engine = Engine(model, Wrapped(SGD(model.parameters(), lr=0.1)), "fp32")
    assert engine.step(lambda: model(X).mean()).applied


def test_other_generators_of_numpy_go_on_too():
    _, _, engine, _ = setting()
    bits = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state = engine.state_dict()
        first = np.random.random(3)
        engine.load_state_dict(state)
        assert (np.random.random(3) == first).all()
    finally:
        np.random.set_bit_generator(bits)


@for_each(("key", "value"), [("count", "x"), ("unit", "x"), ("length", None), ("loss", "x")])
def test_a_damaged_window_is_refused(key, value):
    _, _, engine, loss = setting(accumulate=2)
    engine.step(loss)
    state = engine.state_dict()
    state["window"][key] = value
    with pytest.raises(BadInput, match=f"the window's {key} is damaged"):
        engine.load_state_dict(state)
    assert engine.accumulating


def test_a_whole_checkpoint_is_not_the_engines_state():
    _, _, engine, _ = setting()
    with pytest.raises(BadInput, match=r"Try state\['engine'\]"):
        engine.load_state_dict({"model": {}, "engine": engine.state_dict()})


def test_random_numbers_of_another_rank_are_left_alone(capsys):
    _, _, engine, _ = setting()
    state = engine.state_dict()
    state["rng"]["rank"] = 3
    torch.manual_seed(5)
    engine.load_state_dict(state)
    assert "saved on rank 3 and is not loaded on rank 0" in capsys.readouterr().err
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("wrap", [lambda loss: (loss,), lambda loss: [loss]])
def test_a_loss_alone_in_a_tuple_is_the_loss(wrap):
    _, _, engine, loss = setting()
    assert engine.step(lambda: wrap(loss())).extra is None
