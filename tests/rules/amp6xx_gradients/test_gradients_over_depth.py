"""Vanishing and exploding gradients, over layers and over steps."""

import numpy as np
import pytest

from ampwise.rules.amp6xx_gradients import exploding_gradients, vanishing_gradients

from ...for_each import for_each
from .runs import NAMES, findings, sampled, stepped

RNG = np.random.default_rng(0)
DEPTH = [f"layers.{layer}.weight" for layer in range(12)]


def along_depth(per_layer, names=DEPTH):
    return lambda number: {name: RNG.normal(0, 1e-3 * per_layer**place, 300) for place, name in enumerate(names)}


def test_vanishing_is_found_at_the_first_layer():
    (finding,) = vanishing_gradients.check_gradients(sampled(along_depth(4.0), precision="bf16", names=DEPTH))
    assert finding.place.parameter == "layers.0.weight"
    # The median of three layers at either end: nine layers apart.
    assert finding.evidence["ratio"] == pytest.approx(4.0**-9, rel=0.2)
    assert "from the output to the input across 12 weights" in finding.message


def test_exploding_is_the_reverse():
    health = sampled(along_depth(0.25), precision="bf16", names=DEPTH)
    assert not list(vanishing_gradients.check_gradients(health))
    (finding,) = exploding_gradients.check_gradients(health)
    assert finding.evidence["ratio"] == pytest.approx(4.0**9, rel=0.2)


@for_each("per_layer", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_a_fall_within_hundreds_is_healthy(per_layer):
    assert not findings(sampled(along_depth(per_layer), precision="bf16", names=DEPTH))


def test_two_odd_layers_are_not_the_depth():
    def at(number):
        made = along_depth(1.0)(number)
        made[DEPTH[0]] = made[DEPTH[0]] * 1e-7
        made[DEPTH[7]] = made[DEPTH[7]] * 1e7
        return made

    assert not findings(sampled(at, precision="bf16", names=DEPTH))


def test_a_small_first_quarter_alone_is_not_the_depth():
    sizes = [1e-8, 1.2e-8, 1e-8, 3e-3, 1e-3, 2e-3, 1.5e-3, 2.5e-3, 1.2e-3, 2.8e-3, 1.1e-3, 2.2e-3]
    health = sampled(
        lambda number: {name: RNG.normal(0, size, 300) for name, size in zip(DEPTH, sizes, strict=True)},
        precision="bf16",
        names=DEPTH,
    )
    assert not findings(health)


def test_without_an_order_nothing_is_said_of_depth():
    assert not findings(sampled(along_depth(4.0), precision="bf16", names=()))


def test_biases_do_not_count_among_weights():
    def at(number):
        return {
            name: RNG.normal(0, 1e-3 if "weight" in name else 1e3 ** (-place), 50) for place, name in enumerate(NAMES)
        }

    assert not list(vanishing_gradients.check_gradients(sampled(at, precision="fp32")))


def norms(*values):
    return stepped([{"norm": float(value), "scale": None} for value in values], precision="bf16")


STEADY = [1.0, 1.2, 0.9, 1.1] * 10


def test_a_norm_that_grows_ten_thousandfold_is_found():
    (finding,) = exploding_gradients.check_gradients(norms(*STEADY, *(3.0**k for k in range(1, 11))))
    assert finding.place.step == 50
    assert finding.evidence == {"usual": pytest.approx(1.05, abs=0.1)}, "by how many times is no count"
    assert "times its usual value" in finding.message


def test_a_thousandfold_is_enough_where_it_ended_badly():
    growing = [2.6**k for k in range(1, 9)]
    assert not list(exploding_gradients.check_gradients(norms(*STEADY, *growing)))
    (finding,) = exploding_gradients.check_gradients(norms(*STEADY, *growing, np.inf, np.nan))
    assert finding.message.endswith("and gradients were not finite at step 49")


def test_one_large_norm_or_warm_up_is_not_growth():
    assert not list(exploding_gradients.check_gradients(norms(*STEADY, 1e6, *STEADY)))
    assert not list(exploding_gradients.check_gradients(norms(*STEADY, 1e6)))
    assert not list(exploding_gradients.check_gradients(norms(*(1e5 * 0.5**k for k in range(20)), *STEADY)))
    assert not list(exploding_gradients.check_gradients(norms(*(1.05**k for k in range(100)))))
