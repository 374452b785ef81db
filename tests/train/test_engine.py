"""The step: what is skipped leaves no trace, what is trained is what torch trains, and schedulers move with it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, LinearLR, StepLR

from ampwise import Engine, Policy, ScaleCollapsed

from ..for_each import for_each
from .engine_toys import LOW, OVERFLOW, PRECISIONS, data, everything, net, same, train, training, weights

X, Y = data(0)


# --- what it computes ----------------------------------------------------------------------------------------------


def by_hand(precision, numbers, *, clip=None, window=1):
    """The loop one would write, with what torch has."""
    model = net(norm=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **LOW, enabled=precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.bfloat16)
    for place, number in enumerate(numbers, start=1):
        x, y = data(number)
        with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss / window).backward()
        if place % window == 0:
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


@pytest.mark.half_by_day
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_and_batch_norm_are_those_of_a_loop_by_hand(precision, clip, window):
    run = training(precision, norm=True, clip_norm=clip, accumulate=window)
    train(run, *range(1, 7))
    assert same(run.model.state_dict(), by_hand(precision, range(1, 7), clip=clip, window=window).state_dict())


@for_each("precision", PRECISIONS)
def test_the_pieces_make_the_step(precision):
    run, twin = (training(precision, norm=True, accumulate=2, clip_value=0.1) for _ in range(2))
    for number in range(5):
        x, y = data(number)
        with run.engine.autocast():
            loss = run.loss(x, y)
        run.engine.backward(loss)
        one, (other,) = run.engine.apply(), train(twin, number)
        assert repr(one.as_dict()) == repr(other.as_dict())
    assert same(everything(run), everything(twin))


@for_each("precision", PRECISIONS)
def test_several_losses_of_a_micro_batch_are_their_sum(precision):
    run, twin = training(precision, make=SGD), training(precision, make=SGD)
    for part in (0.25, 0.75):
        with run.engine.autocast():
            loss = part * run.loss(X, Y)
        run.engine.backward(loss)
    step = run.engine.apply()
    other = twin.engine.step(lambda: twin.loss(X, Y))
    assert step.loss == pytest.approx(other.loss, rel=1e-3)
    for one, two in zip(weights(run.model), weights(twin.model), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-4)


def test_arguments_of_backward_are_passed_on():
    run = training()
    loss = run.loss(X, Y)
    run.engine.backward(loss, retain_graph=True)
    first = run.model[0].weight.grad.clone()
    run.engine.backward(loss)
    torch.testing.assert_close(run.model[0].weight.grad, 2 * first)


def test_auto_says_what_it_came_to_and_why(capsys):
    run = training("auto")
    assert capsys.readouterr().err == f"ampwise: {run.engine.why}\n"
    assert run.engine.why.startswith(run.engine.precision)
    training("fp32")
    assert capsys.readouterr().err == ""


def test_an_engine_in_words():
    assert repr(training("bf16").engine) == "<Engine in bf16 on cpu, AdamW>"
    assert repr(training("fp16", accumulate=4).engine) == "<Engine in fp16 on cpu, AdamW, accumulate 4>"


def test_the_census_is_by_the_names_of_the_model_and_in_true_units():
    run = training("fp16")
    (step,) = train(run, 1)
    census = run.engine.census()
    assert list(census) == [name for name, _ in run.model.named_parameters()]
    assert 0 < max(census[name].amax for name in census) <= step.grad_norm


# --- skipped steps -------------------------------------------------------------------------------------------------


def without_gradients(run):
    return {key: value for key, value in everything(run).items() if key not in ("scaler", "counts", "gradients", "rng")}


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [(None,), (None, 7), (7, None), (None, None)], ids=str)
def test_a_skipped_step_leaves_no_trace(bad, precision):
    def schedule(optimizer):
        return ExponentialLR(optimizer, 0.5)

    run, twin = (training(precision, norm=True, accumulate=len(bad), schedule=schedule) for _ in range(2))
    good = [1] * len(bad) + [2] * len(bad)
    train(run, *good)
    train(twin, *good)
    step = train(run, *bad)[-1]
    assert (step.closed, step.skipped, step.applied) == (True, True, False)
    assert same(without_gradients(run), without_gradients(twin))
    assert all(buffer.isfinite().all() for buffer in run.model.buffers())
    assert run.engine.scaler.get_scale() == (LOW["init_scale"] if precision == "fp16" else 1)
    train(run, *good)
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (4, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_first_step_that_is_skipped_leaves_the_optimizer_without_state(precision):
    run = training(precision, norm=True)
    train(run, None)
    assert run.optimizer.state_dict()["state"] == {}
    assert run.model[1].num_batches_tracked == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_statistics_survive_a_skip_after_an_evaluation_in_autocast(precision):
    run = training(precision, norm=True)
    train(run, 1)
    run.model.eval()
    with run.engine.autocast():  # gradients were not turned off, which is easily forgotten
        run.model(X)
    run.model.train()
    train(run, 2)
    run.model.eval()
    with run.engine.autocast():
        run.model(X)
    run.model.train()
    was = copy.deepcopy(run.model.state_dict())
    assert train(run, None)[0].skipped
    assert same(run.model.state_dict(), was)


@for_each("precision", PRECISIONS)
def test_gradients_of_others_after_an_evaluation_in_autocast_do_not_count(precision):
    run, twin = training(precision, make=SGD), training(precision, make=SGD)
    with run.engine.autocast():
        loss = run.loss(X, Y)
    loss.backward()
    train(run, 1)
    train(twin, 1)
    assert same(weights(run.model), weights(twin.model))


# --- which parameters ----------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_as_they_are_and_get_no_gradient():
    model = net()
    model[0].requires_grad_(False)
    engine = Engine(model, SGD(model.parameters(), lr=0.1), "bf16", clip_norm=1.0)
    was = weights(model)
    assert engine.step(lambda: F.mse_loss(model(X), Y)).applied
    assert [torch.equal(*pair) for pair in zip(was, weights(model), strict=True)] == [True, True, False, False]


def test_parameters_unfrozen_and_added_later_are_trained_from_then_on():
    model = net()
    model[0].requires_grad_(False)
    optimizer = SGD(model[-1].parameters(), lr=0.1)
    engine = Engine(model, optimizer, "fp16", scaling=LOW, clip_norm=1.0)

    def loss_fn(number):
        x, y = data(number)
        return F.mse_loss(model(x).float(), y)

    engine.step(loss_fn, 1)
    was = weights(model)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    step = engine.step(loss_fn, 2)
    assert step.lrs == (0.1, 0.2)
    assert not any(torch.equal(*pair) for pair in zip(was, weights(model), strict=True))
    other = net()
    other.load_state_dict(model.state_dict())
    engine.step(loss_fn, 3)
    gradients = torch.autograd.grad(F.mse_loss(other(data(3)[0]), data(3)[1]), list(other.parameters()))
    norm = math.sqrt(sum(gradient.square().sum() for gradient in gradients))
    assert engine.history[-1].grad_norm == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("frozen_at_first", [False, True])
def test_gradients_of_parameters_that_no_optimizer_has_are_dropped(frozen_at_first):
    model = net()
    model[0].requires_grad_(not frozen_at_first)
    engine = Engine(model, SGD(model[-1].parameters(), lr=0.1), "fp32", accumulate=2)
    model[0].requires_grad_(True)
    was = model[0].weight.detach().clone()
    for _ in range(4):
        engine.step(lambda: F.mse_loss(model(X), Y))
    assert torch.equal(model[0].weight, was)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("pieces", [True, False])
def test_gradients_that_others_left_do_not_count(pieces):
    run, twin = (training("fp16", make=SGD) for _ in range(2))
    for number in (1, 2):
        (run.model(X).sum() * 1e4).backward()
        if pieces:
            run.engine.backward(run.loss(*data(number)))
            run.engine.apply()
            twin.engine.backward(twin.loss(*data(number)))
            twin.engine.apply()
        else:
            train(run, number)
            train(twin, number)
    assert same(weights(run.model), weights(twin.model))


@for_each("precision", PRECISIONS)
def test_two_engines_over_the_same_discriminator(precision):
    def gan():
        torch.manual_seed(3)
        return nn.Linear(4, 4), nn.Linear(4, 1)

    def losses(maker, judge):
        return (
            lambda x: judge(x).float().square().mean() + (1 - judge(maker(x).detach()).float()).square().mean(),
            lambda x: judge(maker(x)).float().square().mean(),
        )

    maker, judge = gan()
    scaling = {"scaling": LOW} if precision == "fp16" else {}
    of_judge = Engine(judge, SGD(judge.parameters(), lr=0.1), precision, **scaling)
    of_maker = Engine(maker, SGD(maker.parameters(), lr=0.1), precision, **scaling)
    judge_loss, maker_loss = losses(maker, judge)
    twins = gan()
    optimizers = [SGD(twin.parameters(), lr=0.1) for twin in (twins[1], twins[0])]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scale = LOW["init_scale"] if precision == "fp16" else 1.0
    for number in range(4):
        x, _ = data(number)
        assert of_judge.step(judge_loss, x).applied
        assert of_maker.step(maker_loss, x).applied
        for optimizer, loss_fn in zip(optimizers, losses(*twins), strict=True):
            for twin in twins:
                twin.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_fn(x)
            (loss * scale).backward()
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= scale
            optimizer.step()
    assert same(weights(maker) + weights(judge), weights(twins[0]) + weights(twins[1]))


def test_several_models_and_optimizers_are_trained_and_clipped_together():
    body, head, body2, head2 = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 8), nn.Linear(8, 1)
    body2.load_state_dict(body.state_dict())
    head2.load_state_dict(head.state_dict())
    optimizers = [SGD(body.parameters(), lr=0.1), AdamW(head.parameters(), lr=0.2)]
    engine = Engine([body, head], optimizers, "fp32", clip_norm=0.1)
    step = engine.step(lambda: F.mse_loss(head(body(X)), Y))
    F.mse_loss(head2(body2(X)), Y).backward()
    norm = nn.utils.clip_grad_norm_([*body2.parameters(), *head2.parameters()], 0.1)
    SGD(body2.parameters(), lr=0.1).step()
    AdamW(head2.parameters(), lr=0.2).step()
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert step.lrs == (0.1, 0.2)
    assert same(weights(body) + weights(head), weights(body2) + weights(head2))


def test_of_several_optimizers_all_are_skipped_together():
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    engine = Engine([one, two], [SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)], "fp32")
    was = weights(one) + weights(two)
    step = engine.step(lambda: one(X).mean() + two(X * math.inf).mean())
    assert step.skipped
    assert same(weights(one) + weights(two), was)


def test_an_optimizer_without_a_gradient_stands_aside():
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    engine = Engine([one, two], [AdamW(one.parameters()), AdamW(two.parameters())], "fp16", scaling=LOW)
    was = weights(two)
    assert engine.step(lambda: one(X).mean()).applied
    assert same(weights(two), was)
    assert engine.step(lambda: two(X).mean()).applied
    assert engine.applied_steps == 2


# --- schedulers ----------------------------------------------------------------------------------------------------


def test_a_scheduler_moves_once_a_window_and_stands_still_on_skips():
    run = training(
        "fp16", accumulate=2, lr=1.0, make=SGD, schedule=lambda it: LambdaLR(it, lambda step: 1 / (1 + step))
    )
    train(run, 1, 2, 3, None, 4, 5, 6)
    assert run.engine.history["skipped"] == [False, True, False]
    assert run.engine.history["lr"] == [1.0, 0.5, 0.5]
    assert run.engine.lr == pytest.approx(1 / 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_is_a_tensor_moves_in_place_and_a_step_knows_the_one_it_used(fused):
    rate = torch.tensor(0.5)
    make = lambda parameters, lr: AdamW(parameters, lr=lr, fused=fused, foreach=False)  # noqa: E731
    run = training("bf16", make=make, lr=rate, schedule=lambda it: ExponentialLR(it, 0.5))
    steps = train(run, 1, 2, None, 3)
    assert run.optimizer.param_groups[0]["lr"] is rate
    assert [step.lr for step in steps] == [0.5, 0.25, 0.125, 0.125]
    assert run.engine.lr == rate.item() == 0.0625


@for_each(
    "schedule",
    [
        lambda it: [ExponentialLR(it, 0.5), StepLR(it, 2, 0.1)],
        lambda it: ChainedScheduler([ExponentialLR(it, 0.5), StepLR(it, 2, 0.1)], it),
        lambda it: (each for each in [ExponentialLR(it, 0.5), StepLR(it, 2, 0.1)]),
    ],
)
def test_several_schedulers_move_together(schedule):
    run = training(lr=1.0, make=SGD, schedule=schedule)
    train(run, 1, None, 2, 3)
    assert run.engine.history["lr"] == pytest.approx([1.0, 0.5, 0.5, 0.025])
    assert run.engine.lr == pytest.approx(0.0125)


def test_schedulers_of_two_optimizers():
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [SGD(one.parameters(), lr=1.0), SGD(two.parameters(), lr=4.0)]
    schedulers = [ExponentialLR(optimizers[0], 0.5), LinearLR(optimizers[1], 0.25, total_iters=2)]
    engine = Engine([one, two], optimizers, "fp32", scheduler=schedulers)
    for _ in range(3):
        engine.step(lambda: one(X).mean() + two(X).mean())
    assert [step.lrs for step in engine.history] == [(1.0, 1.0), (0.5, 2.5), (0.25, 4.0)]


def test_one_may_set_the_rate_between_steps():
    run = training(lr=1.0, make=SGD)
    train(run, 1)
    run.optimizer.param_groups[0]["lr"] = 0.25
    assert run.engine.lr == 0.25
    assert train(run, 2)[0].lr == 0.25
    assert run.engine.history["lr"] == [1.0, 0.25]


# --- autocast ------------------------------------------------------------------------------------------------------


@for_each(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_what_is_computed_in_autocast_has_the_type_of_the_precision(precision, dtype):
    run = training(precision)
    with run.engine.autocast():
        assert run.model(X).dtype == dtype
    with torch.no_grad(), run.engine.autocast():
        assert run.model(X).dtype == dtype
    assert run.model(X).dtype == torch.float32
    assert run.engine.step(lambda: (run.loss(X, Y), run.model(X).dtype)).extra == dtype


def test_a_policy_is_on_from_then_on():
    run = training(Policy("bf16").keep("fp32", "3"))
    with run.engine.autocast():
        assert (run.model[:3](X).dtype, run.model(X).dtype) == (torch.bfloat16, torch.float32)


@for_each("precision", PRECISIONS)
def test_nothing_is_left_switched_on_after_an_exception(precision):
    run = training(precision)
    with pytest.raises(KeyError), run.engine.autocast():
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


class Spy(torch.autograd.Function):
    seen: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Spy.seen.append(torch.is_autocast_enabled("cpu"))
        return grad


@for_each("precision", PRECISIONS)
def test_a_backward_pass_in_autocast_is_one_outside(precision):
    Spy.seen.clear()
    run, twin = training(precision), training(precision)
    with run.engine.autocast():
        run.engine.backward(Spy.apply(run.loss(X, Y)))
        assert torch.is_autocast_enabled("cpu") == (precision != "fp32")
    with twin.engine.autocast():
        loss = Spy.apply(twin.loss(X, Y))
    twin.engine.backward(loss)
    assert Spy.seen == [False, False]
    assert same(everything(run), everything(twin))


# --- gradients as part of the loss ---------------------------------------------------------------------------------


def test_gradients_come_in_true_units_at_a_scale_at_which_fp16_holds_them():
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 2.0**-20)  # below what FP16 can hold without a scale
    engine = Engine(model, SGD(model.parameters(), lr=0.1), "fp16")
    x = torch.ones(3, 4, requires_grad=True)
    with engine.autocast():
        (gradient,) = engine.grad(model(x).float().sum() * 2.0**-8, x)
    assert engine.scaler.get_scale() == 65536
    torch.testing.assert_close(gradient, torch.full((3, 4), 2.0**-28), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_penalty_on_gradients_can_be_trained(precision):
    run = training(precision)
    x = X.clone().requires_grad_()

    def loss_fn():
        out = run.model(x)
        (gradient,) = run.engine.grad(out.float().sum(), x)
        return gradient.norm(dim=1).sub(1).square().mean(), gradient

    first = run.engine.step(loss_fn)
    (true,) = torch.autograd.grad(training().model(x).sum(), x)
    torch.testing.assert_close(first.extra, true, rtol=0.05, atol=0.02)
    losses = [first.loss] + [run.engine.step(loss_fn).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert run.engine.skipped_steps == 0


def test_an_input_that_is_not_used_has_no_gradient():
    run = training("fp16")
    x, other = X.clone().requires_grad_(), torch.ones(2, requires_grad=True)
    assert run.engine.grad(run.model(x).sum(), [x, other], allow_unused=True)[1] is None


# --- a scale that collapses ----------------------------------------------------------------------------------------


def test_rare_bad_batches_leave_the_loss_scale_alone():
    run = training("fp16", scaling={"init_scale": 4.0, "min_scale": 2.0, "growth_interval": 20})
    for _ in range(12):
        train(run, 1, 2, 3, None, None, 4)
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (48, 24)
    assert run.engine.scaler.get_scale() == 16.0  # grown after 20 and 40 good steps, as if there were no bad ones


@pytest.mark.parametrize("trace", [True, False])
def test_a_loss_that_stays_bad_ends_in_a_collapse(trace):
    run = training("fp16", scaling={"init_scale": 4.0, "min_scale": 2.0}, trace=trace)
    train(run, *[None] * 31)
    assert run.engine.scaler.get_scale() == 2.0
    with pytest.raises(ScaleCollapsed):
        train(run, None)


@for_each("options", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}, {"accumulate": 2}])
@for_each("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite_skips_the_step_though_gradients_are_finite(precision, options):
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    for optimizer in (torch.optim.AdamW(layer.parameters(), 0.1), torch.optim.SGD(layer.parameters(), 0.1)):
        scaling = {"scaling": {"init_scale": 4.0}} if precision == "fp16" else {}
        engine = Engine(layer, optimizer, precision, trace=False, **options, **scaling)
        x, was = torch.rand(4, 3), copy.deepcopy(layer.state_dict())
        for bad in (-1.0, 0.0):  # NaN, and an infinity, whose derivative is masked
            for sign in (bad, 1.0) if "accumulate" in options else (bad,):
                step = engine.step(lambda x, sign=sign: (layer(x) * 0 + 1).mean() + torch.tensor(sign).log(), x)
            assert step.skipped
            assert not math.isfinite(step.loss)
        assert same(layer.state_dict(), was)
        for _ in range(options.get("accumulate", 1)):
            step = engine.step(lambda x: layer(x).square().mean(), x)
        assert step.applied
        assert not same(layer.state_dict(), was)


def test_a_skip_that_no_scale_would_have_helped_is_undone_when_the_replay_says_so():
    run = training("fp16", scaling={"init_scale": 64.0, "growth_interval": 5})
    bad, y = data(1)

    def loss(x, y):  # the root of 0 is 0, and its derivative is infinite
        return run.loss(x, y) + 0 * (run.model[0].weight * x.abs().max()).square().sum().sqrt()

    for place in range(10):
        run.engine.step(loss, *data(place)) if place % 3 else run.engine.step(loss, bad * 0, y)
    assert run.engine.skipped_steps == 4
    assert [finding.rule.name for finding in run.engine.findings] == ["infinite-derivative"]
    assert run.engine.scaler.get_scale() == 128.0  # grown once after 5 good steps
    train(run, OVERFLOW)
    assert run.engine.scaler.get_scale() == 64.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_collapse_leaves_the_weights_and_training_may_go_on(accumulate):
    run = training("fp16", norm=True, accumulate=accumulate, scaling={"init_scale": 4.0, "min_scale": 2.0})
    good = [1, 2][:accumulate]
    train(run, *good)
    was = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    assert train(run, *[OVERFLOW] * accumulate)[-1].skipped
    train(run, *[OVERFLOW] * (accumulate - 1))
    with pytest.raises(ScaleCollapsed, match=r"The weights are unchanged"):
        train(run, OVERFLOW)
    assert same((run.model.state_dict(), run.optimizer.state_dict()), was)
    assert not run.engine.accumulating
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (1, 2)
    run.engine.scaler.update(64.0)
    step = train(run, *good)[-1]
    assert (step.applied, step.scale, step.number) == (True, 64.0, 4)
    other = Engine(run.model, run.optimizer, "bf16", accumulate=accumulate)
    assert [other.step(run.loss, *data(number)) for number in good][-1].applied


def test_many_skips_without_a_scale_are_reported_once():
    run = training("bf16")
    train(run, *[None] * 29)
    with pytest.warns(RuntimeWarning, match="30 steps in a row were skipped because gradients are not finite"):
        train(run, None)
    train(run, None)


# --- around it -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_changes_nothing_for_finite_steps_and_raises_on_others():
    run, twin = training("fp16", norm=True), training("fp16", norm=True)
    train(twin, 1, 2)
    with torch.autograd.set_detect_anomaly(True):
        train(run, 1)
        with pytest.raises(RuntimeError, match="returned nan values"):
            run.engine.step(lambda: run.loss(X, Y) + (run.model[0].weight.sum() * 0).sqrt())
        train(run, 2)
    assert same(everything(run)["model"], everything(twin)["model"])


@for_each("off", [torch.inference_mode, torch.no_grad])
@for_each("precision", PRECISIONS)
def test_a_step_where_gradients_are_off_is_refused_and_an_evaluation_there_changes_nothing(off, precision):
    run, twin = training(precision, norm=True), training(precision, norm=True)
    train(run, 1)
    train(twin, 1)
    with off():
        run.model.eval()
        with run.engine.autocast():
            run.model(X)
        run.model.train()
        with pytest.raises(ValueError, match="gradients are disabled here"):
            run.engine.step(lambda: run.model[0](X).sum())
    train(run, 2, None)
    train(twin, 2, None)
    assert same(everything(run), everything(twin))


def test_an_engine_made_where_gradients_are_off_trains():
    with torch.no_grad():
        run = training("fp16", norm=True)
    twin = training("fp16", norm=True)
    train(run, 1, None, 2)
    train(twin, 1, None, 2)
    assert same(everything(run), everything(twin))


@for_each("precision", PRECISIONS)
def test_training_in_evaluation_mode_leaves_statistics_alone(precision):
    run = training(precision, norm=True)
    train(run, 1)
    run.model.eval()
    was = copy.deepcopy(list(run.model.buffers()))
    before = weights(run.model)
    train(run, 2, None, 3)
    assert same(list(run.model.buffers()), was)
    assert not same(weights(run.model), before)
    run.model.train()
    train(run, 4)
    assert run.model[1].num_batches_tracked == 2
