import itertools

import numpy as np
import pytest

from ampwise.rules.amp6xx_gradients.underflow_rising import check_gradients

from ...for_each import for_each
from .runs import sample_of, sampled, through_fp16

N = 3000


def decaying(halving, start=2.0**-8, noise=0.3, seed=0):
    """Gradients that halve every ``halving`` samples, with noise of the batch on top, in octaves."""
    rng = np.random.default_rng(seed)
    return lambda number: {
        "body.weight": np.exp2(rng.normal(np.log2(start) - number / halving + rng.normal(0, noise), 2, N)),
        "head.weight": rng.normal(0, 1e-2, N),
    }


def first_alarm(gradients_at, scale, samples, every=10):
    """The number of the sample at which it is first said, the finding, and what was lost by then in truth."""
    health = sampled(gradients_at, 0)
    for number in range(samples):
        made = gradients_at(number)
        health.add_sample(sample_of((number + 1) * every, made, scale))
        for finding in check_gradients(health):
            return number, finding, (through_fp16(made["body.weight"], scale) == 0).mean()
    return None


@for_each("halving", [1, 2, 4, 8])
@for_each("seed", range(3))
def test_a_decay_is_found_long_before_half_is_lost(halving, seed):
    number, finding, lost = first_alarm(decaying(halving, seed=seed), 2.0**4, 40 * halving)
    # From 2**-8 at scale 2**4 it takes 21 halvings until the median is at 2**-25.
    truth = 21 * halving
    assert number <= 0.8 * truth
    assert lost < 0.1
    assert finding.place.parameter == "body.weight"
    assert finding.evidence["half_lost_at_step"] == pytest.approx(10 * (truth + 1), rel=0.2)
    assert f"by step {finding.evidence['half_lost_at_step']}" in finding.message
    assert -1 / finding.evidence["octaves_per_step"] == pytest.approx(10 * halving, rel=0.25)


def test_a_scaler_that_is_not_there_is_not_to_be_changed():
    (finding,) = check_gradients(sampled(decaying(2, start=2.0**-12), 20, scale=None))
    assert finding.fix.startswith("Use a GradScaler with FP32 parameters")
    (finding,) = check_gradients(sampled(decaying(2, start=2.0**-12), 20, scale=1.0))
    assert finding.fix == finding.rule.fix


def test_it_is_found_late_in_a_long_run_too():
    quiet, decay = decaying(1e9), decaying(2)
    number, _, lost = first_alarm(lambda n: quiet(n) if n < 400 else decay(n - 400), 2.0**4, 450)
    assert 410 < number < 440
    assert lost < 0.1


def silent(gradients_at, samples=100, scale=2.0**4):
    return not list(check_gradients(sampled(gradients_at, samples, scale=scale)))


def noise_of_batches(seed):
    return decaying(1e9, start=2.0**-15, noise=1.0, seed=seed)


def one_jump(seed):
    before, after = decaying(1e9, seed=seed), decaying(1e9, start=2.0**-15, seed=seed)
    return lambda number: (before if number < 20 + 5 * seed else after)(number)


def warm_up(seed):
    """Large gradients at first that settle within twenty samples."""
    rng = np.random.default_rng(seed)
    return lambda number: {"w": np.exp2(rng.normal(-15 + 6 * np.exp(-number / 7) + rng.normal(0, 0.3), 2, N))}


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("shape", [noise_of_batches, one_jump, warm_up])
@pytest.mark.parametrize("seed", range(8))
def test_noise_a_jump_and_warm_up_are_silent(shape, seed):
    gradients_at = shape(seed)
    health = sampled(gradients_at, 0)
    for number in range(80):
        health.add_sample(sample_of((number + 1) * 10, gradients_at(number), 16.0))
        if number > 45:  # when it has settled
            assert not list(check_gradients(health))


def test_a_scale_that_follows_is_silent():
    rng = np.random.default_rng(0)
    at = lambda number: {"w": np.exp2(rng.normal(-15 - number // 4, 2, N))}  # noqa: E731
    assert silent(at, 60, scale=lambda number: 2.0 ** (4 + number // 4))
    assert not silent(at, 40, scale=2.0**4)


def test_far_above_the_limit_a_fall_is_nobodys_business():
    assert silent(decaying(10, start=2.0**-2), 40, scale=2.0**8)


def test_a_fast_fall_is_nobodys_business_until_values_lose_bits():
    assert silent(decaying(1, start=1.0), 12)
    assert not silent(decaying(1, start=1.0), 20)


def test_less_than_one_halving_is_no_fall():
    assert silent(decaying(30, start=2.0**-26, noise=0.02), 24)
    assert not silent(decaying(12, start=2.0**-26, noise=0.02), 24)


def test_shrinking_by_two_takes_one_doubling_off_the_margin():
    rng = np.random.default_rng(7)
    gradient = np.exp2(rng.normal(-10, 2, 20_000))
    health = sampled(lambda number: {"w": gradient * 2.0**-number}, 14, scale=2.0**4)
    margins = [margin for _, margin in health.margins["w"].points]
    assert margins[0] == pytest.approx(19, abs=0.1)  # the median 2**-10 times 2**4 lies 19 octaves above 2**-25
    assert [a - b for a, b in itertools.pairwise(margins)] == pytest.approx([1.0] * 13, abs=0.15)
    higher = sampled(lambda number: {"w": gradient}, 1, scale=2.0**8).margins["w"].points[0][1]
    assert higher == pytest.approx(margins[0] + 4, abs=0.01)


@pytest.mark.parametrize("samples", [100, 1000])
def test_a_fall_over_the_whole_of_a_long_run_is_found(samples):
    """Slow enough that the last samples alone show nothing but noise."""
    health = sampled(decaying(samples / 7, start=2.0**-20, noise=0.05), 0)
    made = decaying(samples / 7, start=2.0**-20, noise=0.05)
    for number in range(samples):
        health.add_sample(sample_of((number + 1) * 10, made(number), 65536.0))
    assert list(check_gradients(health))
