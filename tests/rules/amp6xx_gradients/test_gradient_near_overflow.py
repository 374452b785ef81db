import numpy as np

from ampwise.rules.amp6xx_gradients.gradient_near_overflow import check_gradients

from .runs import gradients, sampled

RNG = np.random.default_rng(0)


def one_large(rest, large):
    return lambda number: {**gradients(RNG, rest), "layers.3.weight": RNG.normal(0, large / 4, 400)}


def test_one_large_gradient_that_costs_the_others_is_named():
    (finding,) = check_gradients(sampled(one_large(1e-9, 1.0), scale=2.0**15))
    assert finding.place.parameter == "layers.3.weight"
    assert finding.evidence["near"] == ["layers.3.weight"]
    assert "times the others," in finding.message


def test_a_scale_held_at_nothing_is_found():
    (finding,) = check_gradients(sampled(one_large(1e-1, 4e4), scale=1.0))
    assert "it keeps the scale at 1," in finding.message


def test_without_a_scaler_being_near_is_enough():
    (finding,) = check_gradients(sampled(one_large(1e2, 4e4), scale=None))
    assert finding.message.endswith(": no scaler skips a step that overflows")
    assert finding.fix.startswith("Use a GradScaler with FP32 parameters")
    assert None not in finding.evidence.values()


def test_near_the_limit_is_where_a_scaler_stays():
    assert not list(check_gradients(sampled(lambda number: gradients(RNG, 0.2), scale=2.0**16)))


def test_a_large_gradient_that_costs_nobody_is_fine():
    assert not list(check_gradients(sampled(one_large(1e-4, 1.0), scale=2.0**15)))


def test_one_that_is_not_far_above_the_next_does_not_decide_alone():
    def at(number):
        return {**one_large(1e-9, 1.0)(number), "layers.4.weight": RNG.normal(0, 0.02, 400)}

    assert not list(check_gradients(sampled(at, scale=2.0**15)))


def test_far_from_the_limit_is_fine_and_so_is_once():
    assert not list(check_gradients(sampled(one_large(1e-9, 1.0), scale=2.0**8)))
    once = one_large(1e-9, 1.0)
    assert not list(check_gradients(sampled(lambda n: once(n) if n == 7 else gradients(RNG, 1e-9), scale=2.0**15)))


def test_bf16_has_no_such_limit():
    assert not list(check_gradients(sampled(one_large(1e-9, 1e5), scale=None, precision="bf16")))
