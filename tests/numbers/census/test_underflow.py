"""What FP16 lost at least, against gradients whose truth is known."""

import math
from functools import cache

import numpy as np

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.underflow import NO_UNDERFLOW, scale_exponent, underflow

from ...for_each import for_each

RNG = np.random.default_rng(7)


def census_of(values):
    """By its definition, in FP64."""
    magnitudes = np.abs(values[values != 0]).astype(np.float64)
    exponents, counts = np.unique(np.ceil(np.log2(magnitudes)).astype(int) - 1, return_counts=True)
    return Census(
        binades=dict(zip(exponents.tolist(), counts.tolist(), strict=True)),
        zeros=int((values == 0).sum()),
        amax=float(magnitudes.max(initial=0.0)),
        amin=float(magnitudes.min(initial=np.inf)) if magnitudes.size else 0.0,
    )


def through_fp16(gradient, scale):
    return (gradient * scale).astype(np.float16).astype(np.float64) / scale


def lognormal(octaves, n=40_000):
    return np.exp2(RNG.normal(-30, octaves, n)) * RNG.choice([-1, 1], n)


def layers_of_many_sizes(n=40_000):
    return RNG.normal(0, 1, n) * np.exp2(RNG.normal(-30, 2, n))


TRUTH = {
    "log-normal, 1 octave": lognormal(1),
    "log-normal, 2 octaves": lognormal(2),
    "log-normal, 3 octaves": lognormal(3),
    "log-normal, 4 octaves": lognormal(4),
    "normal": RNG.normal(0, 2.0**-28, 40_000),
    "Laplace": RNG.laplace(0, 2.0**-28, 40_000),
    "Student": RNG.standard_t(3, 40_000) * 2.0**-28,
    "normal of many sizes": layers_of_many_sizes(),
}


@cache
def cases():
    """Which gradient, a scale, and what FP16 leaves of it: where it loses some and not nearly all."""
    every = ((name, 2.0**k, through_fp16(gradient, 2.0**k)) for name, gradient in TRUTH.items() for k in range(20))
    found = [case for case in every if 0.02 <= (case[2] == 0).mean() <= 0.6]
    assert len(found) > 40
    return found


def test_at_least_that_much_is_lost_of_values_densest_at_zero():
    for name, scale, left in cases():
        if "log-normal" in name:
            continue
        lost = int((left == 0).sum())
        among = np.concatenate([left, np.zeros(10 * len(left))])  # unused rows, ten times as many
        found = underflow(census_of(among), scale)
        assert found.nonzero == len(left) - lost, (name, scale)
        assert found.lost <= lost, (name, scale)
        least = (0.6 if lost <= 0.12 * len(left) else 0.25) * lost  # a bound worth having
        assert found.lost >= least, (name, scale)


def test_whatever_the_shape_a_loss_shows_in_what_is_left():
    for name, scale, left in cases():
        found = underflow(census_of(left), scale)
        assert found.share > 0.5, (name, scale)
        assert found.lost <= (left == 0).sum(), (name, scale, "no more than there are zeros")


def test_the_subnormal_share_is_counted():
    for name, scale, held in cases()[::4]:
        left = held * scale
        # Values equal to the smallest normal itself may or may not be counted: they share its power of two.
        inside = ((left != 0) & (np.abs(left) < 2.0**-14)).sum()
        found = underflow(census_of(held), scale).subnormal
        assert 0.9 * inside - (np.abs(left) > 2.0**-15).sum() <= found <= inside, (name, scale)


def embedding():
    rows = np.zeros((2000, 50))
    rows[:40] = RNG.normal(0, 1e-4, (40, 50))
    return rows.reshape(-1)


def relu_sparse():
    return RNG.normal(0, 1e-5, 50_000) * (RNG.random(50_000) < 0.1)


CLEAN = {
    "embedding, 98% zeros": embedding(),
    "behind ReLU": relu_sparse(),
    "dead": np.zeros(1000),
    "normal, well inside": RNG.normal(0, 1e-3, 20_000),
    "wide, well inside": np.exp2(RNG.normal(-14, 3, 20_000)),
}


@for_each("name", CLEAN)
@for_each("scale", [2.0**12, 2.0**16])
def test_honest_zeros_are_not_lost(name, scale):
    found = underflow(census_of(through_fp16(CLEAN[name], scale)), scale)
    assert found.lost_share < 0.01


def test_values_below_the_limit_show_that_it_never_was_fp16():
    gradient = np.exp2(RNG.normal(-40, 2, 5000))
    assert underflow(census_of(gradient), 1.0) == NO_UNDERFLOW


def test_gradients_that_are_not_finite_say_nothing():
    assert (
        underflow(Census(binades={-24: 100}, zeros=100, infs=1, amax=2.0**-23.5, amin=2.0**-23.5), 1.0) == NO_UNDERFLOW
    )
    assert underflow(Census(zeros=5), 1.0).lost_share == underflow(Census(), None).share == 0.0


def test_two_gradients_add_up():
    low, high = (underflow(census_of(np.exp2(RNG.normal(-20, 2, 2000))), scale) for scale in (2.0**10, 2.0**14))
    assert (low + high).values == low.values + high.values
    assert low + NO_UNDERFLOW == low


@for_each(("scale", "k"), [(None, 0), (1.0, 0), (65536.0, 16), (1000.0, 9), (0.25, -2), (0.0, 0)])
def test_the_exponent_of_a_scale(scale, k):
    assert scale_exponent(scale) == k


def test_where_values_thin_out_towards_zero_none_is_counted_as_lost():
    """With zeros of another kind: all values are of about one size, just above FP16's smallest number."""
    values = np.random.default_rng(0).lognormal(math.log(4 * 2.0**-24), 0.5, 100_000)
    held = values.astype(np.float16).astype(np.float64)
    assert (held == 0).mean() < 0.003
    found = underflow(census_of(np.concatenate([held, np.zeros(100_000)])), None)
    assert found.lost == 0
    flat = np.abs(np.random.default_rng(0).normal(0, 64 * 2.0**-24, 100_000)).astype(np.float16).astype(np.float64)
    assert 0 < underflow(census_of(flat), None).lost <= (flat == 0).sum()
