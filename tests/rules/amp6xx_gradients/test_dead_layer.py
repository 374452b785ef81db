import numpy as np

from ampwise.numbers.census.algebra import Census
from ampwise.rules.amp6xx_gradients.dead_layer import check_gradients
from ampwise.runs.rows import LayerSample

from .runs import NAMES, gradients, sampled

RNG = np.random.default_rng(0)


def with_dead(*names, at=lambda number: True):
    return lambda number: {**gradients(RNG), **{name: np.zeros(400) for name in names if at(number)}}


def test_a_dead_layer_is_named():
    (finding,) = check_gradients(sampled(with_dead("layers.2.weight"), precision="bf16"))
    assert finding.place.parameter == "layers.2.weight"
    assert finding.message == "this gradient is zero in all 10 samples: the layer learns nothing"


def test_in_fp16_it_may_have_been_flushed():
    (finding,) = check_gradients(sampled(with_dead("layers.2.weight"), precision="fp16"))
    assert finding.message.endswith(": the layer learns nothing, or it underflows in FP16")


def test_several_are_one_finding():
    (finding,) = check_gradients(sampled(with_dead("layers.2.weight", "layers.2.bias")))
    assert finding.evidence["names"] == ["layers.2.weight", "layers.2.bias"]
    assert "(and 1 more parameters)" in finding.message


def test_one_sign_of_life_is_enough():
    assert not list(check_gradients(sampled(with_dead("layers.2.weight", at=lambda number: number != 4))))


def test_two_samples_are_too_few():
    assert not list(check_gradients(sampled(with_dead("layers.2.weight"), 2)))
    assert list(check_gradients(sampled(with_dead("layers.2.weight"), 3)))


def test_where_all_are_zero_it_is_not_a_layer():
    assert not list(check_gradients(sampled(with_dead(*NAMES))))


def test_an_empty_census_is_not_dead():
    health = sampled(lambda number: gradients(RNG))
    health.add_sample(LayerSample(first=200, last=200, layers={"empty": Census()}))
    assert not list(check_gradients(health))


def test_what_is_not_finite_is_not_dead():
    assert not list(
        check_gradients(sampled(lambda number: {**gradients(RNG), "layers.0.bias": np.array([0.0, np.nan])}))
    )
