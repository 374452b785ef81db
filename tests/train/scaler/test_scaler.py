"""What our scaler does beyond torch's: facts, clipping, census, limits, the guard, and clear refusals."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ampwise import BadInput, GradScaler, ScaleCollapsed
from ampwise.train.scaler import grad_stats as reading
from ampwise.train.scaler.collapse import SKIPS_BEFORE_WARNING

from ...for_each import for_each

SCALE = 4.0
INF, NAN = math.inf, math.nan
IMPLEMENTATIONS = ["for-loop", "foreach", "fused"]


def weight_with(*grad, dtype=torch.float32):
    """A parameter of zeros that has this gradient, still multiplied by SCALE."""
    weight = nn.Parameter(torch.zeros(len(grad), dtype=dtype))
    weight.grad = torch.tensor(grad, dtype=dtype) * SCALE
    return weight


def held(*grad, implementation="for-loop"):
    """The parameter, and plain SGD for it: a step subtracts the gradient."""
    weight = weight_with(*grad)
    return weight, SGD([weight], lr=1.0, fused=implementation == "fused", foreach=implementation == "foreach")


def started(**options):
    """A scaler whose scale tensor exists already."""
    scaler = GradScaler("cpu", **{"init_scale": SCALE, **options})
    scaler.scale(torch.zeros(1))
    return scaler


def disabled(**options):
    return GradScaler("cpu", enabled=False, **options)


def give(weight, *grad):
    """A new gradient in true units."""
    weight.grad = torch.tensor(grad) * SCALE


def turn(scaler, optimizer, *grad):
    """An iteration, with a new gradient if one is given."""
    if grad:
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.tensor(grad) * (scaler.get_scale() if scaler.is_enabled() else 1.0)
    scaler.step(optimizer)
    scaler.update()


def collapse(scaler, *optimizers):
    for optimizer in optimizers:
        scaler.step(optimizer)
    with pytest.raises(ScaleCollapsed) as error:
        scaler.update()
    return str(error.value)


# --- what happened -------------------------------------------------------------------------------------------------


def facts(scaler):
    return scaler.skipped, scaler.applied_steps, scaler.skipped_steps


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_facts_of_a_step_are_there_at_once_and_counts_after_update(implementation):
    scaler = started()
    weight, optimizer = held(3.0, 4.0, implementation=implementation)
    assert (facts(scaler), scaler.skipped_for(optimizer)) == ((False, 0, 0), False)
    assert math.isnan(scaler.grad_norm)
    scaler.step(optimizer)
    assert (facts(scaler), scaler.grad_norm) == ((False, 0, 0), 5.0)
    scaler.update()
    assert (facts(scaler), scaler.grad_norm) == ((False, 1, 0), 5.0)
    give(weight, 1.0, -INF)
    scaler.step(optimizer)
    assert (facts(scaler), scaler.skipped_for(optimizer), scaler.grad_norm) == ((True, 1, 0), True, INF)
    scaler.update()
    assert (facts(scaler), scaler.skipped_for(optimizer), scaler.grad_norm) == ((True, 1, 1), True, INF)
    turn(scaler, optimizer, NAN, INF)
    assert (facts(scaler), math.isnan(scaler.grad_norm)) == ((True, 1, 2), True)
    turn(scaler, optimizer, 0.0, 2.0)
    assert (facts(scaler), scaler.skipped_for(optimizer), scaler.grad_norm) == ((False, 2, 2), False, 2.0)
    assert weight.tolist() == [-3.0, -6.0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_of_several_optimizers_the_bad_one_alone_is_skipped_and_all_share_the_scale(implementation):
    scaler = started()
    pairs = [held(value, implementation=implementation) for value in (1.0, NAN, 2.0)]
    for _, optimizer in pairs:
        scaler.step(optimizer)
    between = [scaler.skipped_for(optimizer) for _, optimizer in pairs]
    scaler.update()
    assert between == [scaler.skipped_for(optimizer) for _, optimizer in pairs] == [False, True, False]
    assert (facts(scaler), scaler.grad_norm, scaler.get_scale()) == ((False, 2, 1), 2.0, SCALE / 2)
    assert [weight.item() for weight, _ in pairs] == [-1.0, 0.0, -2.0]


@for_each(("value", "scale"), [(1.0, SCALE), (INF, SCALE / 2)])
@for_each("look", ["unscale_", "clip_"])
def test_gradients_looked_at_and_not_stepped_move_the_scale_and_count_as_no_step(value, scale, look):
    scaler = started()
    weight, optimizer = held(value)
    getattr(scaler, look)(optimizer, *([1.0] if look == "clip_" else []))
    scaler.update()
    assert (facts(scaler), scaler.get_scale(), weight.item()) == ((False, 0, 0), scale, 0.0)
    assert scaler._get_growth_tracker() == (scale == SCALE)


def test_a_new_scale_ends_the_iteration_counts_its_steps_and_heeds_no_overflow():
    scaler = started(growth_interval=5, hysteresis=2)
    _, optimizer = held(1.0)
    turn(scaler, optimizer)
    turn(scaler, optimizer, INF)
    for grad in (INF, 1.0):
        give(optimizer.param_groups[0]["params"][0], grad)
        scaler.step(optimizer)
        scaler.update(64.0)
    assert facts(scaler) == (False, 2, 2)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 0)
    assert scaler.state_dict()["overflows_in_a_row"] == 1


@for_each("wrong", [0.0, -1.0, NAN, INF])
def test_a_new_scale_that_makes_no_sense_is_refused_and_nothing_changes(wrong):
    scaler = started()
    _, optimizer = held(1.0)
    scaler.step(optimizer)
    with pytest.raises(BadInput) as error:
        scaler.update(wrong)
    assert str(error.value) == f"update(): expected a positive, finite scale, got {wrong!r}."
    assert scaler.get_scale() == SCALE
    scaler.update()
    assert facts(scaler) == (False, 1, 0)


# --- clip_ ---------------------------------------------------------------------------------------------------------


def near(*numbers):
    return pytest.approx(numbers, rel=2e-6)


@for_each("implementation", IMPLEMENTATIONS)
def test_before_unscale_clipping_is_folded_into_the_step(implementation):
    scaler = started()
    weight, optimizer = held(3.0, 4.0, implementation=implementation)
    norm = scaler.clip_(optimizer, 1.0)
    assert (norm.item(), norm.shape, norm.dtype) == (5.0, (), torch.float32)
    assert weight.grad.tolist() == [12.0, 16.0]
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.6, -0.8)
    assert scaler.grad_norm == 5.0
    assert weight.grad.tolist() == near(0.6, 0.8)


@for_each("implementation", IMPLEMENTATIONS)
def test_after_unscale_gradients_are_clipped_at_once_and_again(implementation):
    scaler = started()
    weight, optimizer = held(3.0, 4.0, implementation=implementation)
    scaler.unscale_(optimizer)
    assert scaler.clip_(optimizer, 10.0).item() == 5.0
    assert weight.grad.tolist() == [3.0, 4.0]
    assert scaler.clip_(optimizer, 1.0).item() == 5.0
    assert weight.grad.tolist() == near(0.6, 0.8)
    assert scaler.clip_(optimizer, 0.5).item() == pytest.approx(1.0, rel=2e-6)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.3, -0.4)
    assert scaler.grad_norm == 5.0


def test_the_folded_clipping_is_torchs_clipping_after_unscale():
    torch.manual_seed(0)
    grads = [torch.randn(7, 5) * SCALE, torch.randn(5) * SCALE]
    results = []
    for fold in (True, False):
        weights = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        scaler, optimizer = started(), SGD(weights, lr=1.0)
        if fold:
            scaler.clip_(optimizer, 0.7)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, 0.7)
        turn(scaler, optimizer)
        results.append(weights)
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


@for_each("limits", [(1.0, 0.5), (2.0, 0.5, 0.5), (0.5, INF, 0.5)])
def test_clipping_again_before_the_step_measures_anew_and_the_narrowest_limit_counts(limits):
    scaler = started()
    weight, optimizer = held(3.0, 4.0)
    assert [scaler.clip_(optimizer, limit).item() for limit in limits] == [5.0] * len(limits)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.3, -0.4)


@pytest.mark.parametrize("wider", [1.0, INF])
def test_a_wider_limit_does_not_undo_a_narrower_one(wider):
    scaler = started()
    weight, optimizer = held(3.0, 4.0)
    scaler.clip_(optimizer, 0.5)
    scaler.clip_(optimizer, wider)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.3, -0.4)


def test_clip_then_unscale_settles_both_in_memory():
    scaler = started()
    weight, optimizer = held(3.0, 4.0)
    scaler.clip_(optimizer, 1.0)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == near(0.6, 0.8)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.6, -0.8)
    assert scaler.grad_norm == 5.0


@pytest.mark.parametrize("then", ["step", "unscale_"])
def test_gradients_changed_after_clip_are_read_again(then):
    scaler = started()
    weight, optimizer = held(3.0, 4.0)
    scaler.clip_(optimizer, 1.0)
    weight.grad.mul_(2.0)
    getattr(scaler, then)(optimizer)
    assert weight.grad.tolist() == near(0.6, 0.8)
    weight, optimizer = held(3.0, 4.0)
    scaler.clip_(optimizer, 1.0)
    weight.grad = torch.tensor([INF, 1.0])
    turn(scaler, optimizer)
    assert scaler.skipped_for(optimizer)


def test_a_backward_after_clip_accumulates_and_the_sum_is_clipped():
    scaler = started()
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    for _ in range(2):
        scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        norm = scaler.clip_(optimizer, 1.0)
    assert norm.item() == 10.0
    scaler.scale((weight * torch.tensor([0.0, 7.0])).sum()).backward()
    turn(scaler, optimizer)
    total = math.hypot(6.0, 15.0)
    assert scaler.grad_norm == pytest.approx(total)
    assert weight.tolist() == near(-6.0 / total, -15.0 / total)


def test_clip_after_step_is_refused():
    scaler = started()
    _, optimizer = held(1.0)
    scaler.step(optimizer)
    for optimizers in (optimizer, [held(1.0)[1], optimizer]):
        with pytest.raises(RuntimeError, match=r"^clip_\(\) is being called after step\(\)\. Was update\(\) missing"):
            scaler.clip_(optimizers, 1.0)
    scaler.update()
    scaler.clip_(optimizer, 1.0)


@for_each("unscaled", [(), (0,), (1,), (0, 1)])
@for_each("sequence", [list, tuple, iter])
def test_several_optimizers_are_clipped_by_their_joint_norm(unscaled, sequence):
    scaler = started()
    weights, optimizers = zip(held(3.0), held(4.0), strict=True)
    for index in unscaled:
        scaler.unscale_(optimizers[index])
    assert scaler.clip_(sequence(optimizers), 1.0).item() == 5.0
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.item() for weight in weights] == near(-0.6, -0.8)
    assert facts(scaler) == (False, 2, 0)


def test_clipped_together_optimizers_skip_together():
    scaler = started()
    weights, optimizers = zip(held(3.0), held(INF), strict=True)
    assert scaler.clip_(optimizers, 1.0).item() == INF
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert ([weight.item() for weight in weights], facts(scaler)) == ([0.0, 0.0], (True, 0, 2))


def test_gradients_clipped_together_must_not_change_one_by_one():
    scaler = started()
    weight, optimizer = held(3.0)
    scaler.clip_([optimizer, held(4.0)[1]], 1.0)
    weight.grad.mul_(2.0)
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    assert str(error.value) == (
        "gradients changed after clip_(), which covers other ranks or optimizers too. Call clip_() last."
    )


@for_each("norm_type", [INF, 1.0])
@for_each("make", [started, disabled])
def test_other_norms_are_torchs_in_true_units(norm_type, make):
    scaler = make()
    weight, optimizer = held(3.0, -4.0)
    if not scaler.is_enabled():
        weight.grad /= SCALE
    expected = {INF: 4.0, 1.0: 7.0}[norm_type]
    assert scaler.clip_(optimizer, 1.0, norm_type).item() == expected
    assert weight.grad.tolist() == near(3.0 / expected, -4.0 / expected)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-3.0 / expected, 4.0 / expected)


@pytest.mark.parametrize("make", [started, disabled])
def test_a_limit_of_infinity_only_measures(make):
    scaler = make()
    weight, optimizer = held(3.0, 4.0)
    unit = 1.0 if scaler.is_enabled() else SCALE
    assert scaler.clip_(optimizer, INF).item() == 5.0 * unit
    turn(scaler, optimizer)
    assert weight.tolist() == [-3.0 * unit, -4.0 * unit]


@for_each("wrong", [0.0, -1.0, NAN, -INF, None, "1"])
@for_each("make", [started, disabled])
def test_a_limit_that_makes_no_sense_is_refused(wrong, make):
    with pytest.raises(BadInput) as error:
        make().clip_(held(1.0)[1], wrong)
    assert str(error.value) == (f"clip_(max_norm={wrong!r}): expected a number above 0; float('inf') only measures.")


def test_clip_needs_a_scale():
    with pytest.raises(AssertionError, match=r"^Attempted clip_ but _scale is None"):
        GradScaler("cpu").clip_(held(1.0)[1], 1.0)


@for_each("unscaled", [True, False])
@for_each("make", [started, disabled])
def test_without_gradients_the_norm_is_zero_and_joint_clipping_is_of_the_others(make, unscaled):
    scaler, unit = make(), SCALE if make is disabled else 1.0
    empty, (_, full) = SGD([nn.Parameter(torch.zeros(1))], lr=1.0), held(2.0)
    if unscaled:
        scaler.unscale_(full)
    assert scaler.clip_(empty, 1.0).item() == 0.0
    assert scaler.clip_([empty, full], 1.0).item() == 2.0 * unit


def test_clip_takes_the_optimizer_and_not_its_parameters():
    weight, optimizer = held(1.0)
    for wrong in ([weight], iter([weight]), []):
        with pytest.raises(BadInput) as error:
            started().clip_(wrong, 1.0)
        assert str(error.value) == "clip_() takes the optimizer, not its parameters: scaler.clip_(optimizer, max_norm)."
    with pytest.raises(BadInput) as error:
        started().clip_(optimizer, 1.0, "fro")
    assert str(error.value) == "clip_(norm_type='fro'): expected a number, such as 2.0 or float('inf')."


@pytest.mark.parametrize("make", [started, disabled])
def test_a_limit_is_forgotten_with_the_gradients_it_was_for(make):
    scaler = make()
    weight, optimizer = held(3.0, 4.0)
    scaler.clip_(optimizer, 0.5)
    optimizer.zero_grad()  # the step is left out
    weight.grad = torch.tensor([3.0, 4.0]) * scaler.get_scale()
    scaler.clip_(optimizer, 1.0)
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.6, -0.8)


@for_each("guard", [True, False])
@for_each("implementation", IMPLEMENTATIONS)
def test_a_disabled_scaler_clips_too(guard, implementation):
    scaler = disabled(guard=guard)
    weight, optimizer = held(3.0, 4.0, implementation=implementation)
    assert scaler.clip_(optimizer, 1.0).item() == 20.0
    turn(scaler, optimizer)
    assert weight.tolist() == near(-0.6, -0.8)
    assert facts(scaler) == (False, 1, 0)


@pytest.mark.parametrize("jointly", [True, False])
def test_a_disabled_scaler_clips_several_optimizers(jointly):
    scaler = disabled()
    weights, optimizers = zip(held(3.0), held(4.0), strict=True)
    for each in [optimizers] if jointly else optimizers:
        scaler.clip_(each, 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [weight.item() for weight in weights] == (near(-0.6, -0.8) if jointly else near(-1.0, -1.0))


def test_a_clipping_that_no_fp32_could_hold_skips_the_step():
    scaler = started()
    weight, optimizer = held(1e30)
    assert scaler.clip_(optimizer, 1e-20).item() == pytest.approx(1e30)
    turn(scaler, optimizer)
    assert (weight.item(), scaler.skipped) == (0.0, True)


# --- census --------------------------------------------------------------------------------------------------------


def trained(scaler, named=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = model.named_parameters() if named else [{"params": layer.parameters()} for layer in model]
    optimizer = AdamW(groups, lr=0.1)
    scaler.scale(model(torch.ones(4, 2)).sum()).backward()
    true = {name: parameter.grad.clone() / scaler.get_scale() for name, parameter in model.named_parameters()}
    turn(scaler, optimizer)
    return model, optimizer, true


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("scaler", [started(), disabled()], ids=["enabled", "disabled"])
def test_the_census_is_of_true_gradients_by_the_best_names_there_are(scaler):
    model, _, true = trained(scaler)
    assert {name: each.amax for name, each in scaler.census(model).items()} == {
        name: gradient.abs().max().item() for name, gradient in true.items()
    }
    assert list(scaler.census()) == ["0.0", "0.1", "1.0", "1.1"]
    assert [each.amax for each in scaler.census().values()] == [each.amax for each in scaler.census(model).values()]


def test_names_are_the_models_before_the_optimizers_before_numbers():
    scaler = started()
    model, optimizer, _ = trained(scaler, named=True)
    assert list(scaler.census()) == NAMES
    assert list(scaler.census(nn.ModuleDict({"net": model}))) == [f"net.{name}" for name in NAMES]
    assert list(scaler.census(nn.Linear(1, 1))) == NAMES  # another model knows none of them
    assert optimizer.param_groups[0]["param_names"] == NAMES


def test_parameters_without_a_gradient_are_left_out():
    scaler = started()
    optimizer = SGD([weight_with(1.0), nn.Parameter(torch.zeros(2)), weight_with(2.0, 3.0)], lr=1.0)
    turn(scaler, optimizer)
    assert {name: each.count for name, each in scaler.census().items()} == {"0.0": 1, "0.2": 2}


def test_several_optimizers_are_distinguished_by_their_number():
    scaler = started()
    weights, optimizers = zip(held(1.0), held(2.0, 3.0), strict=True)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert {name: each.amax for name, each in scaler.census().items()} == {"0:0.0": 1.0, "1:0.0": 3.0}
    model = nn.ParameterDict({"first": weights[0]})
    assert list(scaler.census(model)) == ["first", "1:0.0"]


def test_two_optimizers_with_the_same_names_are_distinguished():
    scaler = started()
    optimizers = [SGD([("weight", weight_with(*grad))], lr=1.0) for grad in ([1.0], [2.0, 3.0])]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [each.count for each in scaler.census().values()] == [1, 2]


def test_the_census_is_of_the_last_iteration_alone():
    scaler = started()
    pairs = [held(1.0), held(2.0)]
    for _, optimizer in pairs:  # turn and turn about, as the two parts of a GAN
        turn(scaler, optimizer)
    assert {name: each.amax for name, each in scaler.census().items()} == {"0.0": 2.0}


def test_a_census_stays_what_it_was_whatever_happens_after():
    scaler = started()
    weight, optimizer = held(1.0, 2.0)
    scaler.clip_(optimizer, 0.1)
    during = scaler.census()
    turn(scaler, optimizer)
    after = scaler.census()
    weight.grad.fill_(100.0)
    kept = []
    for value in (7.0, INF, 8.0):
        turn(scaler, optimizer, value, value)
        kept.append(scaler.census())
    assert [each["0.0"].amax for each in (during, after)] == [2.0, 2.0]  # before clipping
    assert [each["0.0"].infs for each in kept] == [0, 2, 0]
    assert [each["0.0"].amax for each in (kept[0], kept[2])] == [7.0, 8.0]


def test_before_the_first_step_the_census_is_empty():
    assert dict(started().census()) == {}


# --- limits of the scale -------------------------------------------------------------------------------------------

START = "GradScaler: gradients overflowed with the loss scale at its floor, min_scale=1, for a step. "
MIDDLE = "The weights are unchanged. "
END = " A min_scale of 1 is high: try a lower one first."
CAUSES = {
    (INF, NAN, INF): "All 3 gradients have inf or NaN in them, so the loss itself was probably not finite.",
    (1.0, INF, 1.0): (
        "1 of 3 gradients have inf or NaN in them; the last ones in parameter order: parameter 1 of group 0 "
        "(1 inf). Backward runs from the last layer to the first, so look at parameter 1 of group 0 or just after it."
    ),
    (NAN, INF, 1.0): (
        "2 of 3 gradients have inf or NaN in them; the last ones in parameter order: parameter 0 of group 0 "
        "(1 NaN), parameter 1 of group 0 (1 inf). Backward runs from the last layer to the first, so look at "
        "parameter 1 of group 0 or just after it."
    ),
}


@for_each("fused", [True, False])
@for_each("values", CAUSES)
def test_an_overflow_at_the_floor_raises_with_the_likely_cause(values, fused):
    scaler = started(init_scale=1.0, min_scale=1.0)
    weights = [weight_with(value) for value in values]
    optimizer = AdamW(weights, lr=0.1, fused=fused)
    before = [weight.clone() for weight in weights]
    assert collapse(scaler, optimizer) == START + MIDDLE + CAUSES[values] + END
    assert all(map(torch.equal, weights, before))
    assert (scaler.get_scale(), facts(scaler)) == (1.0, (True, 0, 1))


def test_at_most_three_bad_gradients_are_named():
    scaler = started(init_scale=1.0, min_scale=1.0)
    weights = [weight_with(value) for value in (INF, NAN, 1.0, INF, NAN)]
    text = collapse(scaler, SGD(weights, lr=1.0))
    assert "4 of 5 gradients" in text
    assert ": parameter 1 of group 0 (1 NaN), parameter 3 of group 0 (1 inf), parameter 4 of group 0 (1 NaN). " in text


def test_parameters_with_names_are_named_and_a_low_floor_is_not_blamed():
    scaler = started(min_scale=2.0**-3, init_scale=2.0**-3)
    text = collapse(scaler, SGD([("head.weight", weight_with(NAN)), ("head.bias", weight_with(1.0))], lr=1.0))
    assert "so look at head.weight or just after it." in text
    assert text.endswith("A lower scale would not help: look for inf or NaN in the forward pass, or train in BF16.")


def test_training_goes_on_after_a_collapse():
    scaler = started(init_scale=2.0, min_scale=1.0, growth_interval=1)
    weight, optimizer = held(INF)
    turn(scaler, optimizer)  # from 2 to 1, which is no collapse yet
    assert scaler.get_scale() == 1.0
    for in_a_row in (2, 3):
        assert f"{in_a_row} steps in a row" in collapse(scaler, optimizer)
    turn(scaler, optimizer, 3.0)
    assert (weight.item(), scaler.get_scale(), facts(scaler)) == (-3.0, 2.0, (False, 1, 3))


def test_after_a_collapse_a_new_scale_may_be_set():
    scaler = started(min_scale=SCALE)
    collapse(scaler, held(INF)[1])
    scaler.update(1024.0)
    assert scaler.get_scale() == 1024.0


def test_a_collapse_is_reported_where_there_is_no_census_too(monkeypatch):
    monkeypatch.setattr(reading, "_reader", lambda value: reading.NormStats)
    collapse(started(min_scale=SCALE), held(INF)[1])


def test_without_kernels_all_but_the_census_works(monkeypatch):
    monkeypatch.setattr(reading, "_reader", lambda value: reading.NormStats)
    scaler = started()
    weight, optimizer = held(3.0, 4.0)
    assert scaler.clip_(optimizer, 1.0).item() == 5.0
    turn(scaler, optimizer)
    turn(scaler, optimizer, 1.0, NAN)
    assert weight.tolist() == near(-0.6, -0.8)
    assert (facts(scaler), scaler.get_scale()) == ((True, 1, 1), SCALE / 2)
    assert dict(scaler.census()) == {}


def test_a_tensor_may_set_the_scale_below_the_floor_and_it_collapses_at_the_next_overflow():
    scaler = started(min_scale=1.0)
    scaler.update(torch.tensor(0.25))
    collapse(scaler, held(INF)[1])
    assert scaler.get_scale() == 0.25


def test_hysteresis_lowers_the_scale_at_the_nth_overflow_in_a_row_and_every_further_one():
    scaler = started(hysteresis=2)
    _, optimizer = held(1.0)
    scales = []
    for grad in (INF, 1.0, INF, INF, INF, 1.0, NAN):
        turn(scaler, optimizer, grad)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert facts(scaler) == (True, 2, 5)


@for_each(("loss", "scale"), [(NAN, SCALE), (-INF, SCALE), (1.0, SCALE / 2), (None, SCALE / 2)])
def test_an_overflow_whose_loss_is_not_finite_itself_leaves_the_scale_and_the_wait_for_growth(loss, scale):
    scaler = started(growth_interval=3)
    _, optimizer = held(1.0)
    for _ in range(2):
        turn(scaler, optimizer, 1.0)
    give(optimizer.param_groups[0]["params"][0], INF)
    scaler.step(optimizer)
    scaler.update(loss=None if loss is None else torch.tensor(loss))
    assert facts(scaler) == (True, 2, 1)
    assert scaler.get_scale() == scale
    turn(scaler, optimizer, 1.0)
    assert scaler.get_scale() == (2 * SCALE if scale == SCALE else scale)


def test_the_loss_for_update_is_one_number():
    scaler = started()
    _, optimizer = held(1.0)
    scaler.step(optimizer)
    for wrong in (1.0, torch.zeros(2), "loss"):
        with pytest.raises(BadInput, match="expected the loss of the step, a tensor with one number"):
            scaler.update(loss=wrong)
    scaler.update(loss=torch.zeros(1))
    assert facts(scaler) == (False, 1, 0)


def test_hysteresis_is_patient_at_the_floor_too():
    scaler = started(min_scale=SCALE, hysteresis=3)
    _, optimizer = held(INF)
    for _ in range(2):
        turn(scaler, optimizer)
    assert "3 steps in a row" in collapse(scaler, optimizer)


def test_the_scale_grows_to_its_ceiling_and_no_further():
    scaler = started(max_scale=10.0, growth_interval=1)
    _, optimizer = held(1.0)
    scales = []
    for _ in range(3):
        turn(scaler, optimizer, 1.0)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 10.0, 10.0]


@for_each(
    ("options", "text"),
    [
        ({"init_scale": 0.0}, "GradScaler(init_scale=0.0): expected a positive, finite number."),
        ({"min_scale": NAN}, "GradScaler(min_scale=nan): expected a positive, finite number."),
        ({"max_scale": -INF}, "GradScaler(max_scale=-inf): expected a positive, finite number."),
        ({"hysteresis": 0}, "GradScaler(hysteresis=0): expected a whole number of steps, 1 or more."),
        (
            {"init_scale": 2.0, "min_scale": 4.0, "max_scale": 8.0},
            "GradScaler(init_scale=2): a scale of 2 is below min_scale=4. Set min_scale lower.",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, text):
    with pytest.raises(BadInput) as error:
        GradScaler("cpu", **options)
    assert str(error.value) == text


# --- the guard -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [INF, NAN])
def test_the_guard_skips_bad_steps_without_scaling(implementation, value):
    scaler = disabled()
    weight, optimizer = held(1.0, value, implementation=implementation)
    turn(scaler, optimizer)
    assert (weight.tolist(), facts(scaler), scaler.skipped_for(optimizer)) == ([0.0, 0.0], (True, 0, 1), True)
    turn(scaler, optimizer, 1.0, 2.0)
    assert (weight.tolist(), facts(scaler)) == ([-1.0, -2.0], (False, 1, 1))
    assert scaler.grad_norm == pytest.approx(math.sqrt(5.0))
    assert scaler.get_scale() == 1.0


def test_the_guard_takes_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        weights = [weight_with(value, dtype=dtype) for value in (1.0, NAN)]
        scaler = disabled()
        for weight in weights:
            scaler.step(SGD([weight], lr=1.0))
        assert [weight.item() for weight in weights] == [-SCALE, 0.0]
        assert facts(scaler) == (True, 1, 1)


def test_the_guard_warns_once_when_every_step_is_skipped():
    scaler = disabled()
    _, optimizer = held(NAN)
    for _ in range(SKIPS_BEFORE_WARNING - 1):
        scaler.step(optimizer)
    with pytest.warns(RuntimeWarning) as caught:
        scaler.step(optimizer)
    scaler.step(optimizer)  # any further warning would be an error
    assert str(caught[0].message) == (
        f"GradScaler: {SKIPS_BEFORE_WARNING} steps in a row were skipped because gradients are not "
        f"finite. The only gradient has "
        "inf or NaN in it, so the loss itself was probably not finite. Look for inf or NaN in the data, the "
        "loss or the weights."
    )
    assert caught[0].filename == __file__


def test_without_the_guard_a_disabled_scaler_is_torchs():
    scaler = disabled(guard=False)
    weight, optimizer = held(NAN)
    turn(scaler, optimizer)
    assert math.isnan(weight.item())
    assert not scaler.skipped


def test_without_scaling_a_step_without_gradients_is_the_optimizers():
    weight, optimizer = held(1.0)
    weight.grad = None
    disabled().step(optimizer)
    assert weight.item() == 0.0


@pytest.mark.parametrize("as_keyword", [True, False])
def test_without_scaling_a_closure_goes_to_the_optimizer(as_keyword):
    weight, optimizer = held(1.0)

    def closure():
        give(weight, 2.0)
        return 7.0

    arguments = ((), {"closure": closure}) if as_keyword else ((closure,), {})
    assert disabled().step(optimizer, *arguments[0], **arguments[1]) == 7.0
    assert weight.item() == -8.0


def test_no_closure_is_none_and_is_guarded():
    for arguments in (((None,), {}), ((), {"closure": None})):
        weight, optimizer = held(NAN)
        scaler = disabled()
        scaler.step(optimizer, *arguments[0], **arguments[1])
        assert (weight.item(), scaler.skipped) == (0.0, True)


def test_a_step_with_a_closure_was_not_skipped():
    scaler = disabled()
    weight, optimizer = held(NAN)
    scaler.step(optimizer)
    give(weight, 1.0)
    scaler.step(optimizer, lambda: 0.0)
    assert not scaler.skipped


def test_lbfgs_trains_without_scaling_and_is_refused_with_it():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight])

    def closure():
        optimizer.zero_grad()
        loss = (weight - 3.0).square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError) as error:
        started().step(optimizer, closure)
    assert str(error.value) == (
        "Closure use is not currently supported if GradScaler is enabled. "
        "LBFGS needs one: train in FP32 or BF16, with GradScaler(enabled=False)."
    )
    assert weight.tolist() == [1.0, 1.0]
    disabled().step(optimizer, closure)
    assert weight.tolist() == pytest.approx([3.0, 3.0])


@for_each(
    "arguments",
    [((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0}), ((), {"closure": None})],
)
def test_with_scaling_closures_are_refused(arguments):
    _, optimizer = held(1.0)
    with pytest.raises(RuntimeError) as error:
        started().step(optimizer, *arguments[0], **arguments[1])
    assert str(error.value) == (
        "Closure use is not currently supported if GradScaler is enabled. "
        "Compute the gradients before scaler.step(optimizer)."
    )


# --- a skipped step leaves no trace --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [started, disabled])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [SGD, torch.optim.Adam, AdamW])
def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_new(kind, implementation, make):
    options = {"momentum": 0.9} if kind is SGD else {}
    weights = [weight_with(1.0, 2.0) for _ in range(2)]
    flags = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    optimizer, control = (kind([weight], lr=0.1, **options, **flags) for weight in weights)
    turn(make(), optimizer, INF, 1.0)
    for state in optimizer.state.values():  # what there is may be made already, and holds nothing
        assert not any(value.any() for value in state.values() if value is not None)
    for each, weight in zip((optimizer, control), weights, strict=True):
        weight.grad = torch.tensor([1.0, 2.0])
        each.step()
    assert torch.equal(*weights)


# --- refusals leave the scaler unharmed ----------------------------------------------------------------------------


def works_on(scaler):
    """A good step is still possible."""
    weight, optimizer = held(1.0)
    turn(scaler, optimizer)
    return weight.item() == -1.0 and not scaler.skipped


@pytest.mark.parametrize("unscaled", [True, False])
def test_without_gradients_a_step_is_refused_and_the_next_one_works(unscaled):
    scaler = started()
    weight, optimizer = held(1.0)
    weight.grad = None
    if unscaled:
        scaler.unscale_(optimizer)  # which torch allows
    with pytest.raises(AssertionError) as error:
        scaler.step(optimizer)
    assert str(error.value) == (
        "No inf checks were recorded for this optimizer. None of its parameters has a gradient: was "
        "backward() called, on a loss that depends on them, after the last zero_grad() and before unscale_()?"
    )
    scaler.update(SCALE)
    turn(scaler, optimizer, 1.0)
    assert (weight.item(), facts(scaler)) == (-1.0, (False, 1, 0))


@for_each("acts", [["step"], ["unscale_"], ["clip_", "step"], ["clip_", "unscale_"]])
def test_half_gradients_are_refused_untouched(acts):
    weight = weight_with(1.0, dtype=torch.float16)
    scaler, optimizer = started(), SGD([weight], lr=1.0)
    if len(acts) > 1:
        scaler.clip_(optimizer, 1.0)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\. The parameters are FP16: keep"):
        getattr(scaler, acts[-1])(optimizer)
    assert (weight.item(), weight.grad.item()) == (0.0, SCALE)
    assert works_on(scaler)


@pytest.mark.parametrize("act", ["step", "unscale_"])
def test_what_is_no_optimizer_is_refused(act):
    scaler = started()
    with pytest.raises(BadInput, match=r"^expected an optimizer; Linear has no param_groups\.$"):
        getattr(scaler, act)(nn.Linear(1, 1))
    assert works_on(scaler)


@for_each("wrong", [[], 5, object()])
@for_each("act", ["step", "unscale_"])
def test_what_cannot_be_an_optimizer_is_refused_in_the_same_words(act, wrong):
    with pytest.raises(BadInput, match=f"^expected an optimizer; {type(wrong).__name__} has no param_groups"):
        getattr(started(), act)(wrong)


def test_an_optimizer_that_fails_leaves_the_step_untaken():
    scaler = started()
    weight, optimizer = held(1.0)

    def fail(*args):
        raise OSError("planted")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="planted"):
        scaler.step(optimizer)
    hook.remove()
    turn(scaler, optimizer, 1.0)
    assert (weight.item(), facts(scaler)) == (-1.0, (False, 1, 0))


# --- what is saved -------------------------------------------------------------------------------------------------


def with_a_past():
    """A scaler after two good steps and one overflow."""
    scaler = started(hysteresis=3, min_scale=0.5, max_scale=64.0)
    _, optimizer = held(1.0)
    for grad in (1.0, 1.0, INF):
        turn(scaler, optimizer, grad)
    return scaler


STATE = {
    "scale": SCALE,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
    "overflows_in_a_row": 1,
    "applied_steps": 2,
    "skipped_steps": 1,
}


def copied(scaler):
    twin = started(hysteresis=3, min_scale=0.5, max_scale=64.0)
    twin.load_state_dict(scaler.state_dict())
    return twin


@pytest.mark.parametrize(
    "again", [copied, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))], ids=["state", "copy", "pickle"]
)
def test_a_saved_scaler_goes_on_as_the_first_would(again):
    scaler = with_a_past()
    assert scaler.state_dict() == STATE
    twin = again(again(scaler))
    assert twin.state_dict() == STATE
    assert (twin.skipped, twin.applied_steps, twin.skipped_steps, len(twin.census())) == (False, 2, 1, 0)
    for each in (scaler, twin):
        each.scale(torch.zeros(1))
        _, optimizer = held(INF)
        for _ in range(2):  # the second and third overflow in a row
            turn(each, optimizer)
    assert scaler.state_dict() == twin.state_dict() == {
        **STATE, "scale": SCALE / 2, "overflows_in_a_row": 3, "skipped_steps": 3
    }  # fmt: skip
    assert twin._limits == scaler._limits


def test_a_copy_keeps_the_guard_as_it_was():
    for guard in (True, False):
        weight, optimizer = held(NAN)
        copy.deepcopy(disabled(guard=guard)).step(optimizer)
        assert math.isnan(weight.item()) != guard


def test_a_copy_in_training_has_no_part_in_what_follows():
    scaler = with_a_past()
    twin = copy.deepcopy(scaler)
    turn(scaler, held(1.0)[1])
    assert (scaler.applied_steps, twin.applied_steps) == (3, 2)


@pytest.mark.parametrize("grad", [INF, 1.0])
def test_a_state_loaded_between_step_and_update_is_moved_by_that_step(grad):
    scales = []
    for scaler in (started(growth_interval=1), torch.amp.GradScaler("cpu", SCALE, growth_interval=1)):
        scaler.scale(torch.zeros(1))
        _, optimizer = held(grad)
        scaler.step(optimizer)
        scaler.load_state_dict({**STATE, "scale": 32.0, "growth_interval": 1})
        if isinstance(scaler, GradScaler):
            assert scaler.skipped is (grad == INF)
        scaler.update()
        scales.append((scaler.get_scale(), scaler._growth_tracker.item()))
        if isinstance(scaler, GradScaler):
            assert facts(scaler) == (grad == INF, 2 + (grad != INF), 1 + (grad == INF))
    assert scales[0] == scales[1]
    assert scales[0][0] == (16.0 if grad == INF else 64.0)


def test_torch_loads_our_state_and_we_load_torchs():
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(with_a_past().state_dict())
    assert theirs.get_scale() == SCALE
    ours = with_a_past()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == {**STATE, "overflows_in_a_row": 0, "applied_steps": 0, "skipped_steps": 0}


WRONG_STATES = {
    "zero": ({"scale": 0.0}, "expected a positive, finite scale, got 0.0."),
    "NaN": ({"scale": NAN}, "scale=nan: expected a finite number."),
    "inf": ({"scale": INF}, "scale=inf: expected a finite number."),
    "negative": ({"scale": -4.0}, "expected a positive, finite scale, got -4.0."),
    "text": ({"scale": "4"}, "scale='4': expected a finite number."),
    "none": ({"scale": None}, "scale=None: expected a finite number."),
    "bool": ({"scale": True}, "scale=True: expected a finite number."),
    "below the floor": (
        {"scale": 0.25},
        "a scale of 0.25 is below min_scale=0.5. Set min_scale lower.",
    ),
    "above the ceiling": (
        {"scale": 128.0},
        "a scale of 128 is above max_scale=64. Set max_scale higher.",
    ),
    "growth": ({"growth_factor": 1.0}, "growth_factor=1.0: expected a number above 1."),
    "backoff": ({"backoff_factor": 1.0}, "backoff_factor=1.0: expected a number from 0 to 1."),
    "no backoff": ({"backoff_factor": 0.0}, "backoff_factor=0.0: expected a number from 0 to 1."),
    "interval": ({"growth_interval": 0}, "growth_interval=0: expected a whole number, 1 or more."),
    "tracker": ({"_growth_tracker": -1}, "_growth_tracker=-1: expected a whole number, 0 or more."),
    "count": ({"applied_steps": "two"}, "applied_steps='two': expected a finite number."),
}


@for_each("name", WRONG_STATES)
@for_each("lazy", [True, False])
def test_a_state_that_makes_no_sense_is_refused_and_nothing_changes(name, lazy):
    entries, words = WRONG_STATES[name]
    scaler = pickle.loads(pickle.dumps(with_a_past())) if lazy else with_a_past()
    with pytest.raises(BadInput) as error:
        scaler.load_state_dict({**STATE, "growth_interval": 7, **entries})
    assert str(error.value) == f"load_state_dict(): {words}"
    assert scaler.state_dict() == STATE


def test_missing_entries_are_named():
    scaler = with_a_past()
    with pytest.raises(BadInput) as error:
        scaler.load_state_dict({"scale": 2.0, "growth_factor": 2.0, "applied_steps": 9})
    words = "load_state_dict(): not the state of a GradScaler. "
    assert str(error.value) == f"{words}Missing: backoff_factor, growth_interval, _growth_tracker."
    for wrong, hint in (({"model": {}, "amp": STATE}, "Try state['amp']."), ([STATE], "Got list.")):
        with pytest.raises(BadInput) as error:
            scaler.load_state_dict(wrong)
        assert str(error.value) == words + hint
    assert scaler.state_dict() == STATE


@for_each("entry", ["growth_interval", "_growth_tracker", "applied_steps"])
def test_counts_in_a_state_are_whole_numbers(entry):
    with pytest.raises(BadInput):
        with_a_past().load_state_dict({**STATE, entry: 2.5})


def test_a_disabled_scaler_saves_nothing_and_takes_any_state():
    scaler = disabled()
    turn(scaler, held(1.0)[1])
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": NAN})
    assert scaler.applied_steps == 1


# --- the constructor -----------------------------------------------------------------------------------------------


@for_each("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_a_device_may_be_spelled_in_every_way(device):
    scaler = GradScaler(device, 8.0)
    assert (scaler._device, scaler.get_scale(), scaler.is_enabled()) == ("cpu", 8.0, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda:1")])
def test_any_cuda_device_without_cuda_warns_and_disables(device):
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling."):
        assert not GradScaler(device).is_enabled()


@pytest.mark.parametrize("first", [1024.0, 1024])
def test_a_number_first_is_a_scale_in_the_order_of_old(first):
    with pytest.warns(FutureWarning) as caught:
        scaler = GradScaler(first, enabled=False)
    assert str(caught[0].message) == (
        f"GradScaler({first}): the first argument is the device, as in torch.amp. Use GradScaler('cuda', {first})."
    )
    assert caught[0].filename == __file__
    assert (scaler._device, scaler._limits) == ("cuda", GradScaler("cuda", 1024.0, enabled=False)._limits)


def test_in_the_order_of_old_further_numbers_need_names():
    with pytest.raises(BadInput) as error:
        GradScaler(1024.0, 4.0)
    assert str(error.value) == (
        "GradScaler(init_scale, growth_factor, ...) in torch.cuda.amp's order: use keyword arguments."
    )


@for_each("wrong", [True, None, [1], 0])
def test_a_device_is_a_name(wrong):
    with pytest.raises(BadInput) as error:
        GradScaler(wrong)
    assert str(error.value) == (
        f"GradScaler({wrong!r}): the first argument is a device, such as 'cuda', 'cuda:0' or 'cpu'."
    )


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.half_by_day
@pytest.mark.parametrize("scaler", [started(), disabled()], ids=["enabled", "disabled"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_keeps_no_model_and_no_optimizer_alive(scaler, fused):
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters(), fused=fused)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.clip_(optimizer, 1.0)
        turn(scaler, optimizer)
    census = scaler.census(model)
    gone = [weakref.ref(each) for each in (*model.parameters(), model.weight.grad, optimizer)]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    assert census["weight"].count == 9
    assert len(scaler.census()) == 0
    assert scaler.applied_steps >= 2


def test_gradients_may_go_as_soon_as_the_step_is_taken():
    scaler = started()
    weight, optimizer = held(1.0)
    scaler.clip_(optimizer, 1.0)
    scaler.step(optimizer)
    gone = weakref.ref(weight.grad)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert gone() is None


def test_a_fused_optimizer_that_has_loaded_an_unfused_state_goes_on_unfused():
    """Torch takes "fused" from the checkpoint, and the optimizer still says that it divides gradients by itself."""
    plain, fused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    before = torch.optim.AdamW([plain], lr=0.1)
    plain.grad = torch.ones(3)
    before.step()
    optimizer = torch.optim.AdamW([fused], lr=0.1, fused=True)
    with torch.no_grad():
        fused.copy_(plain)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((fused * 2.0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    plain.grad = torch.full((3,), 2.0)
    before.step()
    torch.testing.assert_close(fused, plain)
