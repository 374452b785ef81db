"""A training that goes on in another precision: as if it had been begun in it, with the weights and moments it has."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ampwise import Engine, Policy
from ampwise.errors import BadInput, PrecisionUnavailable, UnknownName
from ampwise.train.precision.call_in_precision import is_wrapped_forward

from ..for_each import for_each
from .engine_toys import LOW, data, everything, net, same, train, training

pytestmark = pytest.mark.usefixtures("small_operations_are_cheap")

WAY = ["fp16", "bf16", "fp32", "fp16", "fp32"]


def decaying(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def dtypes_of(model):
    """What each linear layer has put out, in the order of calls."""
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, out: seen.append(str(out.dtype).removeprefix("torch.")))
    return seen


def kept_modules(model):
    return [name for name, module in model.named_modules() if is_wrapped_forward(module.__dict__.get("forward"))]


# It goes on


@pytest.mark.half_by_day
@pytest.mark.parametrize("norm", [False, True])
def test_each_stretch_is_that_of_an_engine_made_in_its_precision(norm):
    run = training(WAY[0], norm=norm, schedule=decaying, clip_norm=1.0, scaling=LOW)
    train(run, 0, 1)
    for precision in WAY[1:]:
        twin = training(precision, norm=norm, schedule=decaying, clip_norm=1.0, scaling=LOW)
        twin.model.load_state_dict(run.model.state_dict())
        twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # else they share moments
        twin.scheduler.load_state_dict(run.scheduler.state_dict())
        before = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
        run.engine.change_precision(precision)
        assert same([run.model.state_dict(), run.optimizer.state_dict()], before)
        taken = [train(each, 3, 4, None, 5) for each in (run, twin)]
        for ours, theirs in zip(*taken, strict=True):
            assert ours.precision == precision == run.engine.precision
            assert (ours.skipped, ours.scale, ours.lr) == (theirs.skipped, theirs.scale, theirs.lr)
            assert same([ours.loss, ours.grad_norm], [theirs.loss, theirs.grad_norm]) or ours.skipped
        assert same(run.model.state_dict(), twin.model.state_dict())
        assert same(run.optimizer.state_dict(), twin.optimizer.state_dict())
        assert run.engine.lr == twin.engine.lr


def test_steps_are_counted_on_and_the_history_is_kept():
    run = training(WAY[0], scaling=LOW)
    for precision in WAY:
        run.engine.change_precision(precision)
        train(run, 1, None)
    history = run.engine.history
    assert [step.number for step in history] == list(range(1, 11))
    assert history["precision"] == [precision for precision in WAY for _ in range(2)]
    assert history["skipped"] == [False, True] * 5
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (5, 5)


def test_the_scale_is_found_anew_only_where_there_was_none():
    run = training("fp16", scaling={"init_scale": 2.0**6, "growth_interval": 1})
    train(run, 1, 2)
    assert run.engine.scaler.get_scale() == 2.0**8
    scaler = run.engine.scaler
    run.engine.change_precision(Policy("fp16").keep("fp32", "0"))
    assert run.engine.scaler is scaler
    run.engine.change_precision("bf16")
    assert not run.engine.scaler.is_enabled()
    run.engine.change_precision("fp16")
    assert run.engine.scaler.is_enabled()
    assert run.engine.scaler.get_scale() == 2.0**6  # the option that was given
    assert train(run, 1)[0].scale == 2.0**7


@pytest.mark.parametrize("collapses", [True, False])
def test_whether_the_scale_may_collapse_stays_as_it_was_set(collapses):
    run = training("bf16", scaling=None)
    run.engine.scaler.collapses = collapses
    for precision in ("fp16", "fp32", "fp16"):
        run.engine.change_precision(precision)
        assert run.engine.scaler.collapses is collapses


def test_auto_is_chosen_and_said_why():
    run = training("fp16")
    run.engine.change_precision("auto")
    assert run.engine.precision in ("fp32", "bf16")
    assert run.engine.why.startswith(run.engine.precision)
    assert run.engine.policy == Policy("auto")
    train(run, 1)


# Exceptions by module


def test_exceptions_are_taken_off_and_put_on():
    run = training(Policy("bf16").keep("fp32", "0"))
    seen, plain = dtypes_of(run.model), list(run.model.state_dict())
    wanted = [
        (Policy("bf16").keep("fp32", "0"), ["0"], ["float32", "bfloat16"]),
        (Policy("bf16"), [], ["bfloat16", "bfloat16"]),
        (Policy("fp16").keep("fp32", "3"), ["3"], ["float16", "float32"]),
        (Policy("fp32").keep("bf16", "0").keep("fp16", "3"), ["0", "3"], ["bfloat16", "float16"]),
        (Policy("fp32"), [], ["float32", "float32"]),
    ]
    for policy, modules, dtypes in wanted:
        run.engine.change_precision(policy)
        assert run.engine.policy == policy
        assert kept_modules(run.model) == modules
        seen.clear()
        train(run, 1)
        assert seen == dtypes
        assert list(run.model.state_dict()) == plain
    assert not any("forward" in module.__dict__ for module in run.model.modules())


def test_a_step_after_it_is_explained_by_what_runs_then(capsys):
    """The first layer overflows in FP16; the finding names the module, and a policy that keeps it ends the trouble."""
    run = training("bf16")
    with torch.no_grad():
        run.model[0].weight.fill_(3e4)
    x, y = torch.ones(6, 4), torch.ones(6, 1)
    assert not run.engine.step(run.loss, x, y).skipped
    run.engine.change_precision("fp16")
    assert run.engine.explained == []
    run.engine.step(lambda x, y: run.loss(x, y) + run.model[0](x).square().mean(), x, y)
    assert run.engine.explained
    assert run.engine.explained == run.engine.findings
    run.engine.change_precision("bf16")
    assert run.engine.explained == []  # of what ran then
    assert run.engine.findings  # which were
    capsys.readouterr()


# What is refused has changed nothing


@for_each(
    ("asked", "error", "words"),
    [
        ("fp17", UnknownName, "unknown precision 'fp17'"),
        (Policy("fp16").keep("fp32", "head"), UnknownName, "unknown module 'head'"),
        ("tf32", PrecisionUnavailable, "has no TF32"),
        (16, BadInput, "expected a name"),
    ],
)
def test_what_cannot_be_had_is_refused_and_nothing_changes(asked, error, words):
    run = training(Policy("bf16").keep("fp32", "0"))
    train(run, 1)
    before = everything(run), run.engine.policy, kept_modules(run.model), run.engine.scaler, run.engine.why
    with pytest.raises(error) as refused:
        run.engine.change_precision(asked)
    assert words in str(refused.value)
    now = everything(run), run.engine.policy, kept_modules(run.model), run.engine.scaler, run.engine.why
    assert same(list(now), list(before))
    assert run.engine.precision == "bf16"


@pytest.mark.parametrize("pieces", [False, True])
def test_in_an_open_window_it_is_refused(pieces):
    run = training("fp16", accumulate=2)
    if pieces:
        with run.engine.autocast():
            loss = run.loss(*data(1))
        run.engine.backward(loss)
    else:
        train(run, 1)
    before = everything(run)
    with pytest.raises(BadInput) as refused:
        run.engine.change_precision("bf16")
    assert str(refused.value) == (
        "change_precision() between the micro-batches of a step: call it when step.closed is true."
    )
    assert same(everything(run), before)
    assert run.engine.precision == "fp16"


def test_inside_of_a_step_it_is_refused():
    run = training()
    with pytest.raises(BadInput, match=r"^engine\.change_precision\(\) inside engine\.step\(\)"):
        run.engine.step(lambda: run.engine.change_precision("bf16"))
    assert run.engine.precision == "fp32"


def test_with_graphs_it_is_refused():
    """They need a GPU; the words do not."""
    run = training()
    run.engine._graphs = SimpleNamespace()
    with pytest.raises(BadInput) as refused:
        run.engine.change_precision("bf16")
    assert str(refused.value) == "change_precision(): not with graph=True: the captured graphs contain the precision."
    assert run.engine.precision == "fp32"


# Saved and loaded


@for_each("change", [*pairwise(WAY)])
def test_the_state_after_it_is_that_of_the_new_precision(change):
    before, after = change
    run = training(before, scaling=LOW)
    train(run, 1)
    policy = Policy(after).keep("fp32", "0")
    run.engine.change_precision(policy)
    train(run, 2)
    saved = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict(), run.engine.state_dict()])
    assert saved[2]["precision"] == after
    assert Policy.from_dict(saved[2]["policy"]) == policy
    ended = train(run, 3, 4)[-1].loss

    fresh, changed = training(policy, scaling=LOW), training(before, scaling=LOW)
    changed.engine.change_precision(policy)
    for other in (fresh, changed):
        other.model.load_state_dict(saved[0])
        other.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        other.engine.load_state_dict(saved[2])
        assert train(other, 3, 4)[-1].loss == ended
        assert same(other.model.state_dict(), run.model.state_dict())


def test_a_state_from_before_it_is_loaded_only_if_asked():
    run = training("fp16", scaling=LOW)
    train(run, 1)
    saved = copy.deepcopy(run.engine.state_dict())
    run.engine.change_precision("bf16")
    with pytest.raises(BadInput, match="saved in fp16, but this engine trains in bf16"):
        run.engine.load_state_dict(saved)
    train(run, 2, 3)
    run.engine.load_state_dict(saved, other_precision=True)
    assert (run.engine.precision, run.engine.applied_steps) == ("bf16", 1)
    assert not train(run, 4)[0].skipped


# Wrapped models


@pytest.fixture
def a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_ddp(model):
    return DistributedDataParallel(model)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
@pytest.mark.parametrize("wrap", [in_ddp, compiled])
def test_models_that_something_wraps_go_on_as_plain_ones_do(wrap, a_group):
    plain, inner = training("fp16"), net()
    model = wrap(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    engine = Engine(model, optimizer, "fp16", scaling=LOW)
    wrapped = SimpleNamespace(
        model=inner, optimizer=optimizer, engine=engine, loss=lambda x, y: F.mse_loss(model(x).float(), y)
    )
    # Without hooks on its modules, which the compiler would see: the weights tell.
    for precision in ("fp16", Policy("bf16").keep("fp32", "0"), "bf16", Policy("fp16").keep("fp32", "3"), "fp32"):
        for run in (plain, wrapped):
            run.engine.change_precision(precision)
            train(run, 1, 2)
        assert kept_modules(inner) == kept_modules(plain.model)
        assert same(inner.state_dict(), plain.model.state_dict()), precision
