"""What an engine refuses, in which words, and that it goes on afterwards as if nothing had been."""

import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ampwise import BadInput, Engine, Policy, PrecisionUnavailable
from ampwise.errors import UnknownName

from ..for_each import for_each
from .engine_toys import PRECISIONS, data, everything, net, same, train, training

X, Y = data(0)


def optimizer_of(model, **options):
    return SGD(model.parameters(), **{"lr": 0.1, **options})


def refused(match, *args, error=BadInput, **options):
    model = net()
    with pytest.raises(error, match=match):
        Engine(*(args or (model, optimizer_of(model))), **{"precision": "fp32", **options})


# --- what an engine is made of -------------------------------------------------------------------------------------


@for_each(("model", "wrong"), [(3, "int"), ([], "nothing"), ([nn.Linear(1, 1), "x"], "str")])
def test_what_is_no_model_is_refused(model, wrong):
    refused(re.escape(f"Engine(model=...): expected a torch.nn.Module or a list of them, got {wrong}."), model, [])


def test_a_model_with_nothing_to_train_is_refused():
    model = net().requires_grad_(False)
    refused("no parameter requires a gradient, so there is nothing to train", model, optimizer_of(model))


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    refused("its parameters are on the meta device, without values. Initialise it first", model, optimizer_of(model))


def test_an_optimizer_of_a_model_that_was_replaced_is_refused():
    refused("4 of its 4 parameters do not belong to the model. Create the optimizer after", net(), optimizer_of(net()))


def test_an_optimizer_that_has_parameters_of_the_loss_too_is_reported_how():
    model, criterion = net(), nn.Linear(1, 1)
    optimizer = SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    refused(re.escape("2 of its 6 parameters do not belong to the model"), model, optimizer)
    assert Engine([model, criterion], optimizer, "fp32").precision == "fp32"


def test_a_parameter_in_two_optimizers_is_refused():
    model = net()
    two = [optimizer_of(model), SGD(model[0].parameters(), lr=0.1)]
    refused("2 parameters are in two optimizers or groups, and would be updated twice per step", model, two)


def test_lbfgs_is_refused_with_a_reason():
    model = net()
    refused(re.escape("Engine(optimizer=LBFGS): it computes gradients in a closure"), model, LBFGS(model.parameters()))


@for_each("wrong", [3, None, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(wrong):
    refused(rf"Engine\(optimizer=...\): expected an optimizer, got {type(wrong).__name__}\.", net(), wrong)


def test_no_optimizer_at_all_is_refused():
    refused("expected at least one optimizer", net(), [])


@for_each("wrong", [0, -1.0, "1", True, float("nan"), [1.0]])
@for_each("name", ["clip_norm", "clip_value"])
def test_clipping_by_what_is_no_limit_is_refused(name, wrong):
    refused(
        re.escape(f"Engine({name}={wrong!r}): expected a number above 0, or None for no clipping."), **{name: wrong}
    )


def test_clipping_in_two_ways_is_refused():
    refused("use one of them, not both", clip_norm=1.0, clip_value=1.0)


@for_each("wrong", [0, -2, True, 2.5, "2", None])
def test_a_window_of_what_is_no_number_of_micro_batches_is_refused(wrong):
    refused(
        re.escape(f"Engine(accumulate={wrong!r}): expected the number of micro-batches per step, 1 or more."),
        accumulate=wrong,
    )


def test_a_precision_nobody_has_heard_of_is_refused_and_the_nearest_named():
    refused("unknown precision 'bf61'. Did you mean bf16", precision="bf61", error=UnknownName)


@for_each("wrong", [16, None, torch.float16])
def test_a_precision_that_is_no_name_is_refused(wrong):
    refused("expected the name of a precision|expected a name", precision=wrong)


def test_tf32_on_a_cpu_is_refused_and_what_it_runs_is_named():
    refused(
        r"Engine\(precision='tf32'\): .* It runs fp32, fp16, bf16\. Use", precision="tf32", error=PrecisionUnavailable
    )


def test_a_scheduler_that_goes_by_a_metric_is_refused():
    model = net()
    optimizer = optimizer_of(model)
    plateau = ReduceLROnPlateau(optimizer)
    refused(
        "it needs a metric, which the engine does not have. Do not pass it; call", model, optimizer, scheduler=plateau
    )


def test_a_scheduler_of_another_optimizer_is_refused():
    other = LambdaLR(optimizer_of(net()), lambda step: 1.0)
    refused("its optimizer is not one of this engine's", scheduler=other)


@for_each("wrong", [3, object(), [4]])
def test_what_is_no_scheduler_is_refused(wrong):
    refused("expected a scheduler, got (int|object)", scheduler=wrong)


@for_each("precision", ["fp16", "bf16"])
@for_each("scaling", [{"initial": 4.0}, {"enabled": False}])
def test_an_option_that_the_scaler_does_not_have_is_refused(scaling, precision):
    refused(
        r"Engine\(scaling=...\): .*'?(initial|enabled)'?.* The options are those of",
        scaling=scaling,
        precision=precision,
    )


def test_a_policy_for_modules_that_are_not_there_is_refused_and_is_not_on():
    model = net()
    refused(
        "unknown module 'head'",
        model,
        optimizer_of(model),
        precision=Policy("bf16").keep("fp32", "head"),
        error=UnknownName,
    )
    Engine(model, optimizer_of(model), Policy("bf16").keep("fp32", "0"))


# --- what a loss function returns ----------------------------------------------------------------------------------


def bad_losses(run):
    return {
        "none": (lambda: None, "the loss function returned None. Is a `return loss` missing?"),
        "float": (
            lambda: run.loss(X, Y).item(),
            "returned float; expected the loss as a tensor. Remove .item() or",
        ),
        "dict": (
            lambda: {"loss": run.loss(X, Y)},
            "returned dict; expected the loss as a tensor. Return its 'loss'.",
        ),
        "object": (
            lambda: SimpleNamespace(loss=run.loss(X, Y)),
            "returned SimpleNamespace; expected the loss as a tensor.",
        ),
        "several": (
            lambda: run.model(X),
            "returned a tensor of shape (6, 1); expected the loss",
        ),
        "detached": (lambda: run.loss(X, Y).detach(), "a loss that does not require a gradient"),
        "tuple": (lambda: (None, run.loss(X, Y)), "the loss function returned None"),
        "raising": (lambda: run.loss(X, Y)[7], "dimension"),
        "step": (lambda: run.engine.step(run.loss, X, Y), "engine.step() inside engine.step()"),
        "backward": (
            lambda: run.engine.backward(run.loss(X, Y)),
            "engine.backward() inside engine.step(): the loss",
        ),
        "apply": (lambda: run.engine.apply(), "engine.apply() inside engine.step()"),
        "flush": (lambda: run.engine.flush(), "engine.flush() inside engine.step()"),
        "state_dict": (lambda: run.engine.state_dict(), "engine.state_dict() inside engine.step()"),
    }


BAD_LOSSES = sorted(bad_losses(None))
RUNNING = {"none": False, "apply": False, "flush": False, "state_dict": False, "step": False}  # of the model's forward


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("before", [(), (1, 2), (1, 2, 3)], ids=["at first", "between windows", "within a window"])
@pytest.mark.parametrize("kind", BAD_LOSSES)
def test_a_bad_loss_is_refused_and_training_goes_on_as_if_it_had_not_been(kind, before, precision):
    run, twin = (training(precision, accumulate=2, clip_norm=1.0) for _ in range(2))
    train(run, *before)
    train(twin, *before)
    loss_fn, text = bad_losses(run)[kind]
    was = everything(run)
    with pytest.raises((BadInput, IndexError), match=re.escape(text)):
        run.engine.step(loss_fn)
    assert same(everything(run), was)
    train(run, *range(4, 9))
    train(twin, *range(4, 9))
    assert same(everything(run), everything(twin))


@for_each("before", [(), (1,)])
@for_each("kind", ["float", "dict", "several", "detached", "raising"])
def test_a_bad_loss_leaves_batch_norm_as_it_was(kind, before):
    run = training("fp32", norm=True, accumulate=2)
    train(run, *before)
    was = everything(run)

    def loss_fn():
        run.model(X)
        return bad_losses(run)[kind][0]()

    with pytest.raises((BadInput, IndexError)):
        run.engine.step(loss_fn)
    assert same(everything(run), was)


def test_loading_a_state_inside_of_a_step_is_refused():
    run = training(accumulate=2)
    state = run.engine.state_dict()

    def loss_fn():
        run.engine.load_state_dict(state)
        return run.loss(X, Y)

    with pytest.raises(BadInput, match="inside engine"):
        run.engine.step(loss_fn)


@for_each("error", [KeyError("mine"), KeyboardInterrupt(), StopIteration(3)])
def test_any_exception_of_the_loss_function_passes_through_unchanged(error):
    run = training("bf16")

    def loss_fn():
        raise error

    with pytest.raises(type(error)) as caught:
        run.engine.step(loss_fn)
    assert caught.value is error
    assert not torch.is_autocast_enabled("cpu")
    assert train(run, 1)[0].applied


def test_a_loss_of_one_element_is_a_loss():
    run, twin = training(), training()
    step = run.engine.step(lambda: run.loss(X, Y).reshape(1))
    assert step.loss == twin.engine.step(twin.loss, X, Y).loss
    assert same(everything(run), everything(twin))


# --- what it returns besides ---------------------------------------------------------------------------------------


class Large:
    pass


@for_each(
    ("rest", "extra"),
    [(("a",), "a"), (("a", 2), ("a", 2)), (({"acc": 1.0},), {"acc": 1.0}), ((None,), None), ((), None)],
)
def test_what_comes_after_the_loss_is_the_extra(rest, extra):
    run = training(accumulate=2)
    steps = [run.engine.step(lambda: (run.loss(X, Y), *rest) if rest else run.loss(X, Y)) for _ in range(2)]
    assert [step.extra for step in steps] == [extra, extra]


def test_the_history_does_not_keep_the_extra_alive():
    run = training()
    step = run.engine.step(lambda: (run.loss(X, Y), Large()))
    gone = weakref.ref(step.extra)
    assert run.engine.history[-1].extra is None
    assert run.engine.history[-1].as_dict() == step.as_dict()
    assert gone() is not None
    del step
    gc.collect()
    assert gone() is None


# --- backward passes that fail -------------------------------------------------------------------------------------


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("midway")


@for_each("precision", PRECISIONS)
@for_each("before", [(1, 2), (1, 2, 3)])
@for_each("pieces", [False, True])
def test_a_backward_pass_that_raises_drops_the_window(before, precision, pieces):
    run, twin = (training(precision, norm=True, accumulate=2) for _ in range(2))
    train(run, *before)
    train(twin, *before[:2])

    def loss_fn():
        middle = Raising.apply(run.model[:2](X))  # the last layer has its gradient by then
        return run.model[2:](middle).float().square().mean()

    def in_pieces():
        with run.engine.autocast():
            loss = loss_fn()
        run.engine.backward(loss)

    with pytest.raises(OSError, match="midway"):
        in_pieces() if pieces else run.engine.step(loss_fn)
    assert not run.engine.accumulating
    assert same(everything(run), everything(twin))
    train(run, 5, 6, 7)
    train(twin, 5, 6, 7)
    assert same(everything(run), everything(twin))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_loss_function_that_calls_backward_itself_is_reported_not_to(retain_graph):
    run, twin = training("fp16"), training("fp16")

    def closure():
        run.optimizer.zero_grad()
        loss = run.loss(X, Y)
        loss.backward(retain_graph=retain_graph)
        return loss

    with pytest.raises(
        BadInput, match=r"the loss function must not call backward\(\) itself; it must return the loss\."
    ):
        run.engine.step(closure)
    train(run, 1, 2)
    train(twin, 1, 2)
    assert same(everything(run)["model"], everything(twin)["model"])


def test_a_loss_function_that_calls_backward_itself_within_a_window_is_reported_not_to():
    run = training(accumulate=2)
    run.engine.step(run.loss, X, Y)

    def closure():
        loss = run.loss(X, Y)
        loss.backward()
        return loss

    with pytest.raises(BadInput, match=r"the loss function must not call backward\(\) itself"):
        run.engine.step(closure)
    assert not run.engine.accumulating


class Failing(AdamW):
    """Fails once, when told to, before anything is changed."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise OSError("no luck")
        return super().step(closure)


@for_each("clipping", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}])
@for_each("precision", PRECISIONS)
def test_an_optimizer_that_raises_drops_the_window_and_may_go_on(precision, clipping):
    run, twin = (training(precision, make=Failing, accumulate=2, norm=True, **clipping) for _ in range(2))
    train(run, 1, 2, 3)
    train(twin, 1, 2)
    run.optimizer.fails = True
    with pytest.raises(OSError, match="no luck"):
        run.engine.flush()
    train(run, 5, 6, 7)
    train(twin, 5, 6, 7)
    assert same(everything(run), everything(twin))


@for_each("precision", ["fp32", "bf16", "fp16"])
def test_the_second_of_two_optimizers_may_raise_and_training_goes_on(precision):
    model = net()
    optimizers = [optimizer_of(model[0]), Failing(model[-1].parameters())]
    engine = Engine(model, optimizers, precision, clip_norm=0.1)
    optimizers[1].fails = True
    with pytest.raises(OSError, match="no luck"):
        engine.step(lambda: model(X).float().square().mean())
    assert not engine.accumulating
    assert [engine.step(lambda: model(X).float().square().mean()).applied for _ in range(3)] == [True] * 3


def test_a_loss_that_reaches_no_parameter_of_the_optimizer_is_refused():
    model = net()
    engine = Engine(model, SGD(model[0].parameters(), lr=0.1), "fp32")
    with pytest.raises(BadInput, match="the backward pass reached none of the optimizer's parameters"):
        engine.step(lambda: model[-1](torch.ones(1, 8)).sum())
    assert not engine.accumulating
    assert model[-1].weight.grad is None
    assert engine.step(lambda: model(X).sum()).number == 1


# --- the step in pieces --------------------------------------------------------------------------------------------


def test_applying_without_a_backward_pass_is_refused():
    run = training(accumulate=2)
    for _ in range(2):
        with pytest.raises(
            BadInput, match=re.escape("apply(): there are no gradients. Call engine.backward(loss) first")
        ):
            run.engine.apply()
        run.engine.backward(run.loss(X, Y))
        run.engine.apply()


@for_each(
    ("wrong", "text"),
    [
        (None, "backward() was given None"),
        (1.5, "backward() was given float; expected the loss as a tensor"),
        (torch.ones(3, requires_grad=True), "backward() was given a tensor of shape (3,)"),
        (torch.ones(()), "backward() was given a loss that does not require a gradient"),
    ],
)
def test_a_backward_pass_of_what_is_no_loss_is_refused(wrong, text):
    run = training(accumulate=2)
    train(run, 1)
    was = everything(run)
    with pytest.raises(BadInput, match=re.escape(text)):
        run.engine.backward(wrong)
    assert same(everything(run), was)


# --- weights -------------------------------------------------------------------------------------------------------


@for_each(
    ("weight", "text"),
    [
        (-1.0, "weight=-1.0: expected a finite number of 0 or more, such as the number of tokens."),
        (float("nan"), "weight=nan: expected a finite number"),
        ("5", "weight='5': expected a finite number"),
        (True, "weight=True: expected a finite number"),
        (torch.ones(2), "weight: expected a single number, got a tensor of shape (2,)."),
    ],
)
@for_each("norm", [False, True])
def test_a_weight_that_makes_no_sense_is_refused_and_nothing_changes(weight, text, norm):
    given = [3]
    run, twin = (training("fp16", accumulate=2, norm=norm, weight=lambda x, y: given[0]) for _ in range(2))
    train(run, 1, 2, 3)
    train(twin, 1, 2, 3)
    was = everything(run)
    given[0] = weight
    with pytest.raises(BadInput, match=re.escape(text)):
        train(run, 4)
    assert same(everything(run), was)
    given[0] = 2
    train(run, 4, 5)
    train(twin, 4, 5)
    assert same(everything(run), everything(twin))


@pytest.mark.parametrize(("first", "second"), [(None, 2.0), (2.0, None)])
def test_a_weight_for_some_micro_batches_only_is_refused(first, second):
    run = training(accumulate=2)
    run.engine.backward(run.loss(X, Y), weight=first)
    run.engine.apply()
    was = everything(run)
    with pytest.raises(BadInput, match="some micro-batches of this step have a weight and some do not"):
        run.engine.backward(run.loss(X, Y), weight=second)
    assert same(everything(run), was)
    run.engine.backward(run.loss(X, Y), weight=first)
    assert run.engine.apply().applied


def test_the_weight_of_a_micro_batch_comes_with_its_first_loss():
    run = training()
    run.engine.backward(run.loss(X, Y), weight=2.0)
    with pytest.raises(BadInput, match="with its first loss only"):
        run.engine.backward(run.loss(X, Y), weight=3.0)
    run.engine.backward(run.loss(X, Y))
    assert run.engine.apply().applied


def test_a_weight_that_is_no_function_is_refused_at_once():
    refused("weight", weight=3.0)


@for_each(
    ("wrong", "hint"),
    [
        (3, ""),
        ("tensorboard", r" For a sink: callbacks=\[ampwise\.Sinks\(...\)\]\."),
        ([print], " For a sink"),
        (None, ""),
    ],
)
def test_what_is_no_callback_is_refused(wrong, hint):
    refused(rf"Engine\(callbacks=\[.*\]\): expected a list of ampwise\.Callback\.{hint}", callbacks=wrong)


@for_each("wrong", [-1, "x", 2.5])
def test_a_history_of_no_length_is_refused(wrong):
    history = Engine(model := net(), optimizer_of(model), "fp32").history
    with pytest.raises(BadInput, match=re.escape(f"history.limit = {wrong!r}: expected the number of steps")):
        history.limit = wrong
