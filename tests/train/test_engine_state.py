"""A run that is broken off and resumed by other objects is, to the last bit, the run that was not."""

import copy
import io
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from ampwise import BadInput, Policy

from ..for_each import for_each
from .engine_toys import PRECISIONS, data, everything, same, train, training

SCHEDULES = {
    "none": None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=8),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "chained": lambda optimizer: [CosineAnnealingLR(optimizer, T_max=8), LambdaLR(optimizer, lambda step: 0.9**step)],
}


def sequential(optimizer):
    parts = [LambdaLR(optimizer, lambda step: (1 + step) / 4), CosineAnnealingLR(optimizer, T_max=6)]
    return SequentialLR(optimizer, parts, milestones=[2])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(run):
    return through_a_file(
        {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "engine": run.engine.state_dict()}
    )


def load(run, state, order=("model", "optimizer", "engine")):
    for name in order:
        getattr(run, name).load_state_dict(state[name])


def forget_randomness():
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)


def noisy(run, number):
    """A step on data with noise from every source there is."""
    x, y = data(number)
    x = x + 0.1 * torch.randn_like(x) + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.standard_normal())
    return run.engine.step(run.loss, x if number != 3 else x * torch.inf, y)


def resumed_like_unbroken(make, stop, end=11, order=("model", "optimizer", "engine"), go=noisy):
    """Steps 0 to end: in one go, and broken off before ``stop``."""
    forget_randomness()
    one = make()
    forget_randomness()
    facts = [go(one, number).as_dict() for number in range(end)]
    first = make()
    forget_randomness()
    for number in range(stop):
        go(first, number)
    state = saved(first)
    forget_randomness()
    second = make()
    load(second, state, order)
    rest = [go(second, number).as_dict() for number in range(stop, end)]
    assert same(everything(second) | {"counts": 0}, everything(one) | {"counts": 0})  # whose history is shorter
    assert (one.engine.applied_steps, one.engine.skipped_steps) == (
        second.engine.applied_steps,
        second.engine.skipped_steps,
    )
    assert repr(rest) == repr(facts[stop:])  # NaN is not equal to itself
    return one


@pytest.mark.half_by_day
@pytest.mark.parametrize("stop", [2, 6, 7], ids=lambda stop: f"at {stop}")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_is_the_unbroken_one(precision, stop):
    scaling = {"scaling": {"init_scale": 2.0**8, "growth_interval": 2}} if precision == "fp16" else {}
    one = resumed_like_unbroken(
        lambda: training(precision, norm=True, dropout=0.3, accumulate=3, clip_norm=0.5, **scaling), stop
    )
    assert (one.engine.applied_steps, one.engine.skipped_steps) == (2, 1)


@pytest.mark.parametrize("order", [("engine", "model", "optimizer"), ("optimizer", "engine", "model")])
def test_model_optimizer_and_engine_are_loaded_in_whatever_order(order):
    resumed_like_unbroken(
        lambda: training("fp16", norm=True, accumulate=3, schedule=SCHEDULES["cosine"]), stop=7, order=order
    )


@pytest.mark.half_by_day
@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "sequential"])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # SequentialLR's own
def test_schedulers_go_on_where_they_were(schedule, stop):
    make = sequential if schedule == "sequential" else SCHEDULES[schedule]
    resumed_like_unbroken(lambda: training("bf16", schedule=make), stop)


@for_each("precision", ["fp16", "fp32"])
@for_each("count", [lambda x, y: (x[:, 0] > 0).sum(), lambda x, y: int((x[:, 0] > 0).sum())])
def test_weighed_windows_go_on_where_they_were(count, precision):
    resumed_like_unbroken(lambda: training(precision, accumulate=3, weight=count), stop=7)


def test_a_policy_goes_on():
    policy = Policy("bf16").keep("fp32", "3")
    resumed_like_unbroken(lambda: training(policy, accumulate=2), stop=5)


def test_momentum_goes_on():
    make = lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9)  # noqa: E731
    resumed_like_unbroken(lambda: training("fp16", make=make, accumulate=3), stop=7)


def test_numbers_of_steps_go_on_and_the_history_is_new():
    run, other = training("fp16"), training("fp16")
    train(run, 1, None, 2)
    other.engine.load_state_dict(through_a_file(run.engine.state_dict()))
    assert (other.engine.applied_steps, other.engine.skipped_steps, len(other.engine.history)) == (2, 1, 0)
    assert train(other, 3)[0].number == 4


def test_a_state_is_of_its_moment():
    run = training("fp16", accumulate=2, norm=True)
    train(run, 1, 2, 3)
    state = run.engine.state_dict()
    was = copy.deepcopy(state)
    train(run, 4, 5, None)
    assert same(state, was)


def test_saving_changes_nothing():
    run, twin = (training("fp16", accumulate=3, norm=True, schedule=SCHEDULES["cosine"]) for _ in range(2))
    for number in range(8):
        train(run, number)
        train(twin, number)
        run.engine.state_dict()
    assert same(everything(run), everything(twin))


def test_loading_ends_a_window_that_was_open():
    run, other = training(accumulate=3), training(accumulate=3)
    train(other, 1, 2)
    other.engine.load_state_dict(run.engine.state_dict())
    assert not other.engine.accumulating
    assert all(parameter.grad is None for parameter in other.model.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_a_state_between_backward_and_apply_goes_on_or_is_refused(first):
    def go(run):
        run.engine.backward(run.loss(*data(8)))

    run, other = training(make=SGD, accumulate=3), training(make=SGD, accumulate=3)
    if not first:
        train(run, 1)
    go(run)
    try:
        state = saved(run)
    except BadInput:
        return
    load(other, state)
    for each in (run, other):
        each.engine.apply()
        train(each, 2, 3)
    assert same(everything(run)["model"], everything(other)["model"])


# --- states that are refused ---------------------------------------------------------------------------------------


def refused(run, state, match, **options):
    """With a window open, a scheduler and random numbers that a refusal must leave alone."""
    train(run, 5, 6, 7)
    was, drawn = everything(run), (random.getstate(), np.random.get_state()[1].tolist())
    with pytest.raises(BadInput, match=match):
        run.engine.load_state_dict(state, **options)
    assert same(everything(run), was)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn
    twin = training(**run.options)
    train(twin, 5, 6, 7, 8, 9)
    train(run, 8, 9)
    assert same(everything(run)["model"], everything(twin)["model"])


def a_run(**options):
    options = {"precision": "fp16", "accumulate": 2, "schedule": SCHEDULES["cosine"], "norm": True, **options}
    return SimpleNamespace(**vars(training(**options)), options=options)


def a_state(*numbers, **options):
    run = a_run(**options)
    train(run, *(numbers or (1, None, 2, 3, 4)))
    return saved(run)["engine"]


def test_a_state_of_another_precision_is_refused():
    text = "saved in fp16, but this engine trains in bf16. Create it with precision='fp16'; or resume in bf16"
    refused(a_run(precision="bf16"), a_state(), text)


@pytest.mark.parametrize(("old", "new"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "bf16")])
def test_one_may_go_on_in_another_precision(old, new):
    state, run = a_state(1, None, 2, 3, precision=old), a_run(precision=new)
    run.engine.load_state_dict(state, other_precision=True)
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (1, 1)
    assert run.scheduler.last_epoch == 1
    train(run, 1, 2)
    assert run.engine.applied_steps == 2


@pytest.mark.parametrize(("old", "new"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_an_open_window_goes_on_in_another_precision_in_true_units_or_is_refused(old, new):
    # Its gradients are multiplied by the loss scale of the precision they were computed in.
    options = {"make": SGD, "norm": False, "schedule": None}
    before, run, like = (a_run(precision=precision, **options) for precision in (old, new, new))
    train(before, 1)
    train(like, 1, 2)
    try:
        run.engine.load_state_dict(saved(before)["engine"], other_precision=True)
    except BadInput:
        return
    train(run, 2)
    for one, other in zip(run.model.parameters(), like.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)


def test_a_state_of_another_policy_is_refused():
    state = a_state(precision=Policy("bf16").keep("fp32", "0"))
    text = "saved with another policy. Create the engine with precision=Policy.from_dict"
    refused(a_run(precision=Policy("bf16").keep("fp32", "4")), state, re.escape(text))
    a_run(precision="bf16").engine.load_state_dict(state, other_precision=True)


@for_each("key", ["precision", "policy", "scaler", "schedulers", "applied_steps", "window", "rng"])
def test_a_state_that_lacks_something_is_refused(key):
    state = a_state()
    del state[key]
    refused(a_run(), state, f"not the state of an Engine. Missing or unexpected: {key}")


@for_each("wrong", [None, [], 3])
def test_what_is_no_state_is_refused(wrong):
    refused(a_run(), wrong, f"not the state of an Engine. Missing or unexpected: {type(wrong).__name__}")


@for_each("version", [0, 1, None, "2"])
def test_a_state_of_another_version_is_refused(version):
    refused(a_run(), a_state() | {"version": version}, f"expected version 2, got version {version}")


def test_a_state_with_another_number_of_schedulers_is_refused():
    refused(a_run(schedule=None), a_state(), "saved with 1 schedulers, but this engine has 0")


def test_a_state_in_a_longer_window_is_refused():
    text = "saved within a step of 3 micro-batches, but this engine has accumulate=2. Use the same"
    refused(a_run(), a_state(1, 2, 3, 4, accumulate=3), text)


def test_a_state_after_a_longer_window_is_not_refused():
    run = a_run()
    run.engine.load_state_dict(a_state(1, 2, 3, accumulate=3))
    assert [step.closed for step in train(run, 1, 2)] == [False, True]


@pytest.mark.parametrize("damage", ["shape", "number"])
def test_gradients_of_other_parameters_are_refused(damage):
    state = a_state()
    gradients = state["window"]["gradients"]
    if damage == "shape":
        gradients[0] = gradients[0].T
    else:
        gradients.pop()
    refused(a_run(), state, "the saved gradients belong to a different set of parameters")


@pytest.mark.parametrize("damage", ["shape", "number"])
def test_running_statistics_of_other_layers_are_refused(damage):
    state = a_state()
    statistics = state["window"]["statistics"]["norms"]
    if damage == "shape":
        statistics[0] = statistics[0][:3]
    else:
        statistics.pop()
    refused(a_run(), state, "the model (it was|they were) saved with")


@for_each(
    "damage",
    [
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": None},
        {"python": {}},
        {"python": {"version": 3, "words": [1, 2], "gauss": None}},
        {"numpy": {"name": "MT19937"}},
    ],
)
def test_a_damaged_state_of_random_numbers_is_refused(damage):
    state = a_state()
    refused(a_run(), state | {"rng": state["rng"] | damage}, "the saved random state is damaged")


@for_each(
    "damage",
    [
        {"window": {}},
        {"window": None},
        {"schedulers": 1},
        {"schedulers": [None]},
        {"applied_steps": None},
        {"policy": {}},
        {"scaler": {}},
        {"rng": None},
    ],
)
def test_a_state_damaged_elsewhere_is_refused(damage):
    refused(a_run(), a_state() | damage, "load_state_dict")


def test_a_damaged_state_of_the_scaler_is_refused():
    refused(a_run(), a_state() | {"scaler": {"scale": 4.0}}, "not the state of a GradScaler")
