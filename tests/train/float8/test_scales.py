"""Delayed scaling against the same written out by hand, step by step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.train.float8.delayed_scaling import DelayedScales
from ampwise.train.float8.fp8_cast import E4M3, E5M2, LIMITS
from ampwise.train.float8.recipe import Fp8

from ...for_each import for_each

CPU = torch.device("cpu")
INF, NAN = torch.inf, torch.nan


def see(scales, layer, *amaxes, cut_off=0.0):
    """A backward pass."""
    slot = scales.slots[layer]
    (slot * torch.tensor([[amax, cut_off] for amax in amaxes])).sum().backward()
    assert slot.grad is None


def fitting(amax, dtype, margin=0):
    scale = 1.0
    while amax * scale > LIMITS[dtype] / 2**margin:
        scale /= 2
    while amax * scale * 2 <= LIMITS[dtype] / 2**margin:
        scale *= 2
    return scale


magnitudes = st.floats(min_value=2.0**-40, max_value=2.0**40, width=32)


@given(
    st.lists(magnitudes | st.sampled_from([0.0, INF, NAN]), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from(["max", "last"]),
)
def test_the_scale_is_that_of_the_last_finite_magnitudes(amaxes, history, margin, update):
    scales = DelayedScales(["a"], Fp8("delayed", history=history, margin=margin, update=update), CPU)
    counted, expected = [], [1.0, 1.0, 1.0]
    for amax in amaxes:
        see(scales, 0, amax, amax, amax)
        scales.update()
        if 0 < amax < INF:
            counted = [amax, *counted][:history]
            deciding = max(counted) if update == "max" else counted[0]
            expected = [fitting(deciding, dtype, margin) for dtype in (E4M3, E4M3, E5M2)]
        assert scales.values[0].tolist() == expected
    assert [each for each in scales.history[0, 0].tolist() if each] == counted


def test_of_several_passes_in_a_step_the_largest_counts():
    scales = DelayedScales(["a", "b"], Fp8("delayed"), CPU)
    see(scales, 0, 1.0, 2.0, 3.0)
    see(scales, 0, 4.0, 1.0, 1.0, cut_off=5.0)
    see(scales, 1, 9.0, 9.0, 9.0)
    scales.update()
    assert scales.history[:, :, 0].tolist() == [[4.0, 2.0, 3.0], [9.0] * 3]
    assert scales.cut_off[0].tolist() == [[1.0, 5.0]] * 3
    assert not scales.seen.any()
    assert scales.known() == [True, True]


def test_a_layer_that_was_not_used_stays_unknown():
    scales = DelayedScales(["a", "b"], Fp8("delayed"), CPU)
    see(scales, 0, 1.0, 2.0, 3.0)
    scales.update()
    assert scales.known() == [True, False]


def test_gradients_in_e4m3_have_its_limit():
    scales = DelayedScales(["a"], Fp8("delayed", gradients="e4m3"), CPU)
    see(scales, 0, 448.0, 448.0, 448.0)
    scales.update()
    assert scales.values.tolist() == [[1.0] * 3]


def test_a_state_goes_on_where_it_was_by_the_names_of_layers():
    old = DelayedScales(["a", "b"], Fp8("delayed", history=4), CPU)
    for amax in (1.0, 64.0):
        see(old, 0, amax, amax, amax)
        see(old, 1, 2 * amax, amax, amax)
        old.update()
    state = old.state()
    see(old, 0, 1e6, 1e6, 1e6)
    old.update()  # which a saved state does not feel
    new = DelayedScales(["b", "c"], Fp8("delayed", history=8), CPU)
    new.load(state)
    assert new.values[0].tolist() == state["scales"][1].tolist()
    assert new.history[0, 0].tolist() == [128.0, 2.0, 0, 0, 0, 0, 0, 0]
    assert new.known() == [True, False]
    assert new.steps == 2


@for_each("other", [{}, {"gradients": "e4m3"}, {"margin": 2}, {"update": "last"}, {"history": 2}])
def test_loaded_magnitudes_make_the_scales_that_they_would_have_made_here(other):
    old, here, new = (DelayedScales(["a", "b"], Fp8("delayed", **each), CPU) for each in ({}, other, other))
    for amax in (512.0, 64.0, 3.0):
        for scales in (old, here):
            see(scales, 0, amax, 2 * amax, 4 * amax)
            scales.update()
    new.load(old.state())
    assert new.values.tolist() == here.values.tolist()
    assert torch.equal(new.history, here.history)


def test_what_was_there_before_a_state_is_gone():
    scales = DelayedScales(["a", "b"], Fp8("delayed"), CPU)
    beginning = scales.state()
    see(scales, 0, 9.0, 9.0, 9.0, cut_off=3.0)
    scales.update()
    see(scales, 1, 9.0, 9.0, 9.0)
    scales.load(beginning)
    assert all(torch.equal(scales.state()[key], beginning[key]) for key in ("scales", "history", "cut_off"))
    assert scales.known() == [False, False]
    assert scales.steps == 0
    scales.update()
    assert not scales.history.any()


def test_states_that_do_not_fit_are_refused():
    scales = DelayedScales(["a"], Fp8("delayed"), CPU)
    state = scales.state()
    with pytest.raises(BadInput, match=r"scales belong to other layers \(a\). Use the policy"):
        DelayedScales(["z"], Fp8("delayed"), CPU).load(state)
    with pytest.raises(BadInput, match="are damaged: their shapes"):
        scales.load({**state, "history": torch.zeros(3, 3, 4)})
