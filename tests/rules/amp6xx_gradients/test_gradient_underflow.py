import numpy as np
import pytest

from ampwise.rules.amp6xx_gradients.gradient_underflow import RULE, check_gradients

from .runs import NAMES, gradients, sample_of, sampled

RNG = np.random.default_rng(0)


def small_first_layer(size):
    return lambda number: {**gradients(RNG), "layers.0.weight": np.exp2(RNG.normal(np.log2(size), 2, 4000))}


def test_what_is_lost_is_found_and_a_scale_is_named():
    health = sampled(small_first_layer(2.0**-24), scale=1.0)
    (finding,) = check_gradients(health)
    assert finding.rule is RULE
    assert finding.place.parameter == "layers.0.weight"
    assert finding.place.step == 100
    # The median is at 2**-24 and the limit at 2**-25, half a standard deviation below: 31%.
    assert 0.15 < finding.evidence["lost_share_at_least"] < 0.5
    assert "of this gradient to zero and stores" in finding.message
    assert finding.fix.startswith("Use `GradScaler(init_scale=")
    scale = eval(finding.fix.split("init_scale=")[1].split(")")[0])  # digits, or 2**k
    assert np.log2(scale) == int(np.log2(scale))
    assert scale >= 2.0**8
    assert scale * 5e-3 * 4 < 65504


def test_where_there_is_no_room_bf16_is_the_fix():
    wide = {**gradients(RNG), "layers.0.weight": np.exp2(RNG.normal(-24, 2, 4000)), "layers.7.weight": np.full(50, 6e4)}
    (finding,) = check_gradients(sampled(lambda number: wide, scale=1.0))
    assert finding.fix.startswith("Train in BF16")


def test_many_values_with_few_bits_are_found():
    (finding,) = check_gradients(sampled(small_first_layer(2.0**-18), scale=1.0))
    assert finding.evidence["subnormal_share"] > 0.9
    assert finding.evidence["lost_share_at_least"] < 0.01


def test_all_parameters_hit_are_counted():
    (finding,) = check_gradients(sampled(lambda number: gradients(RNG, 2.0**-24), scale=None))
    assert finding.evidence["parameters"] == len(NAMES)
    assert "without a loss scale" in finding.message
    assert None not in finding.evidence.values()
    assert f"(and {len(NAMES) - 1} more parameters)" in finding.message


def test_a_scaler_that_is_not_there_is_not_to_be_changed():
    """As in a model that is FP16 throughout, whose gradients torch would refuse to unscale."""
    (finding,) = check_gradients(sampled(small_first_layer(2.0**-24), scale=None))
    assert finding.fix.startswith("Use a GradScaler with FP32 parameters under autocast (`init_scale=")
    wide = {**gradients(RNG), "layers.0.weight": np.exp2(RNG.normal(-24, 2, 4000)), "layers.7.weight": np.full(50, 6e4)}
    (finding,) = check_gradients(sampled(lambda number: wide, scale=None))
    assert finding.fix == "Train in BF16: the largest gradients do not allow a loss scale in FP16."


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_only_fp16_underflows(precision):
    assert not list(check_gradients(sampled(small_first_layer(2.0**-24), scale=1.0, precision=precision)))


def test_a_scale_that_lifts_them_is_fine():
    assert not list(check_gradients(sampled(small_first_layer(2.0**-24), scale=2.0**14)))


def test_a_handful_of_values_is_no_share():
    assert not list(check_gradients(sampled(lambda number: {"scalar": RNG.normal(0, 2.0**-24, 40)}, scale=1.0)))


def test_gradients_that_were_never_fp16_are_fine():
    health = sampled(lambda number: {}, 0)
    health.add_sample(sample_of(10, {"norm.weight": np.exp2(RNG.normal(-40, 3, 4000))}, 1.0, fp16=False))
    assert not list(check_gradients(health))


def test_when_nothing_is_left_that_is_said():
    health = sampled(lambda number: {name: np.zeros(100) for name in NAMES}, samples=4, scale=1.0)
    (finding,) = check_gradients(health)
    assert "every gradient is exactly zero at loss scale 1" in finding.message
    assert not list(
        check_gradients(
            sampled(lambda number: {"a": np.zeros(100), "b": np.full(100, 0.1)}, samples=4, names=["a", "b"])
        )
    )
