"""The late update: with one optimizer the same as ever, with several one update for all of them."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ampwise import GradScaler  # noqa: E402
from ampwise.integrations.deferred_scaler import DeferredScaler  # noqa: E402

SLOPES = st.lists(st.sampled_from([1.0, -0.5, math.inf, math.nan]), min_size=1, max_size=6)


def make(kind, fused):
    weight = torch.nn.Parameter(torch.ones(2))
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
    return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused), scaler


def backward(scaler, weight, slope):
    weight.grad = None
    scaler.scale((weight * slope).sum()).backward()


@given(SLOPES, st.booleans(), st.sampled_from(["as it is", "unscale", "clip"]))
def test_with_one_optimizer_it_is_the_scaler_as_ever(slopes, fused, way):
    ends = []
    for kind in (GradScaler, DeferredScaler):
        weight, optimizer, scaler = make(kind, fused)
        for slope in slopes:
            backward(scaler, weight, slope)
            if way == "unscale":
                scaler.unscale_(optimizer)
            elif way == "clip":
                scaler.clip_(optimizer, 0.5)
            scaler.step(optimizer)  # noqa: AMP105 (it updates by itself)
            (scaler.update_later if kind is DeferredScaler else scaler.update)()
        skipped = scaler.skipped
        ends.append((weight.tolist(), skipped, scaler.get_scale(), scaler.state_dict()))
    assert ends[0] == ends[1]


def test_steps_without_a_loss_between_are_one_iteration_until_one_steps_again():
    weight, optimizer, scaler = make(DeferredScaler, False)
    other = torch.nn.Parameter(torch.ones(2))
    second = torch.optim.SGD([other], lr=0.1)
    scaler.scale((weight * math.inf).sum() + other.sum()).backward()
    for each in (optimizer, second):
        scaler.step(each)  # noqa: AMP105 (it updates by itself)
        scaler.update_later()
    assert [scaler.skipped_for(each) for each in (optimizer, second)] == [True, False]
    assert scaler._scale.item() == 1024.0  # not yet
    assert not scaler.is_unscaled(second)
    scaler.unscale_(second)  # the next iteration
    assert scaler._scale.item() == 512.0
    assert scaler.is_unscaled(second)


def test_a_copy_is_up_to_date():
    weight, optimizer, scaler = make(DeferredScaler, True)
    backward(scaler, weight, math.inf)
    scaler.step(optimizer)
    scaler.update_later()
    assert copy.deepcopy(scaler).get_scale() == 512.0


def test_without_a_scale_it_guards():
    weight, optimizer, _ = make(GradScaler, True)
    scaler = DeferredScaler("cpu", enabled=False)
    for slope in (math.nan, 1.0):
        backward(scaler, weight, slope)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update_later()
    assert weight.tolist() == pytest.approx([0.9, 0.9])
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("asks", [DeferredScaler.get_scale, DeferredScaler.state_dict])
@pytest.mark.parametrize("way", ["unscale", "clip"])
@pytest.mark.parametrize("fused", [False, True])
def test_asking_between_two_steps_changes_neither(asks, way, fused):
    scaler = DeferredScaler("cpu", init_scale=1024.0)
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0, fused=fused) for weight in weights]
    scaler.scale(4 * weights[0].sum() + 4 * weights[1].sum()).backward()
    for optimizer in optimizers:
        if way == "unscale":
            scaler.unscale_(optimizer)
        else:
            scaler.clip_(optimizer, 2.0)
    for optimizer in optimizers:
        scaler.step(optimizer)  # noqa: AMP105 (it updates by itself)
        scaler.update_later()
        asks(scaler)
    assert [weight.item() for weight in weights] == pytest.approx([-3.0, -3.0] if way == "unscale" else [-1.0, -1.0])


@pytest.mark.parametrize("slope", [1.0, math.nan])
def test_a_fused_optimizer_goes_on_from_a_checkpoint_of_one_that_was_not(slope):
    """Torch takes "fused" from the checkpoint, and the optimizer goes on saying that it scales by itself."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight, scaler = torch.nn.Parameter(torch.ones(2)), DeferredScaler("cpu", init_scale=1024.0)
        saved = torch.optim.AdamW([weight], lr=0.1)
        weight.grad = torch.ones(2)
        saved.step()
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        optimizer.load_state_dict(saved.state_dict())
        backward(scaler, weight, slope)
        scaler.clip_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update_later()
        ends.append((weight.tolist(), scaler.skipped_for(optimizer), scaler.get_scale()))
    assert ends[0] == ends[1]
    assert ends[0][1] == math.isnan(slope)
