"""The error, against the same written out in FP64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.tune.search.fp32_error import LEAST, ErrorTally, Fp32Reference, ParameterGroups
from ampwise.tune.search.passes import PassResult


def a_model():
    return nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(2, 1, bias=False)})


def outcome(model, loss, seed, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    return PassResult(loss, tuple(scale * torch.randn(each.shape, generator=random) for each in model.parameters()))


def compared(model, wide, narrow):
    groups = ParameterGroups(model, list(model.parameters()))
    tally = ErrorTally(Fp32Reference(groups, wide, len(wide)))
    for each in narrow:
        tally.add(each)
    return tally.difference


def test_it_is_the_worst_module_by_half_of_the_squared_relative_error():
    model = a_model()
    wide = [outcome(model, 2.0, 1), outcome(model, 3.0, 2)]
    narrow = [outcome(model, 2.1, 3), outcome(model, 2.8, 4)]
    found = compared(model, wide, narrow)

    def half(places):
        pairs = [
            (a.gradients[p].double(), b.gradients[p].double())
            for a, b in zip(wide, narrow, strict=True)
            for p in places
        ]
        return sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs) / 2

    by_hand = {"one": half([0, 1]), "two": half([2])}
    assert found.gradient == pytest.approx(max(by_hand.values()))
    assert found.worst == max(by_hand, key=by_hand.get)
    assert found.loss == pytest.approx(math.sqrt(0.1**2 + 0.2**2) / math.sqrt(2**2 + 3**2))
    assert found.error == found.gradient


def test_it_is_one_minus_the_cosine_where_lengths_agree():
    model = nn.Linear(2, 1, bias=False)
    turned = PassResult(1.0, (torch.tensor([[math.cos(0.3), math.sin(0.3)]]),))
    found = compared(model, [PassResult(1.0, (torch.tensor([[1.0, 0.0]]),))], [turned])
    assert found.gradient == pytest.approx(1 - math.cos(0.3), rel=1e-5)
    assert found.worst == ""


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 99)), min_size=1, max_size=4))
def test_it_only_grows_with_the_batches(narrow):
    model = a_model()
    wide = [outcome(model, 1.0, 100 + place) for place in range(len(narrow))]
    tally = ErrorTally(Fp32Reference(ParameterGroups(model, list(model.parameters())), wide, len(wide)))
    before = 0.0
    for loss, seed in narrow:
        tally.add(outcome(model, loss, seed))
        assert tally.difference.error >= before
        before = tally.difference.error


def test_nothing_else_is_nothing():
    model = a_model()
    same = [outcome(model, 1.5, 7)]
    found = compared(model, same, same)
    assert (found.error, found.worst) == (0.0, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    model = a_model()
    wide = [outcome(model, 1.0, 1)]
    assert compared(model, wide, [outcome(model, bad, 1)]).loss == math.inf
    gradients = (*wide[0].gradients[:2], torch.full((1, 2), bad))
    assert compared(model, wide, [PassResult(1.0, gradients)]).gradient == math.inf


def test_a_gradient_that_cancels_to_nothing_counts_as_a_small_one():
    """Its own relative error would be a million."""
    model = a_model()
    first, second, third = outcome(model, 1.0, 1).gradients
    wide = [PassResult(1.0, (first, second, third * 1e-9))]
    narrow = [PassResult(1.0, (first, second, third * 1e-6))]
    found = compared(model, wide, narrow)
    usual = (first.square().sum() + second.square().sum()) / 10  # a mean over all ten values
    assert found.gradient == pytest.approx(float((third * 1e-6).square().sum() / (LEAST**2 * usual * 2) / 2), rel=0.01)


def test_a_gradient_that_is_gone_is_all_wrong():
    """As that of an expert that a narrow format sends no rows."""
    model = a_model()
    whole = outcome(model, 1.0, 1)
    gone = PassResult(1.0, (*whole.gradients[:2], None))
    found = compared(model, [whole], [gone])
    assert (found.gradient, found.worst) == (pytest.approx(0.5), "two")
    assert compared(model, [gone], [whole]).gradient > 0.5


def test_what_was_not_used_has_no_part_in_it():
    model = a_model()
    first, second, _ = outcome(model, 1.0, 1).gradients
    found = compared(model, [PassResult(1.0, (first, second, None))], [PassResult(1.0, (first, second, None))])
    assert found.error == 0.0
