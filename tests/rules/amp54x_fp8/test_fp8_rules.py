"""What FP8 layers lose: found where it is much, silent where it is little."""

import math

import pytest

from ampwise.numbers.formats.catalog import find_scalar_format
from ampwise.rules.amp54x_fp8 import fp8_saturates, fp8_underflows
from ampwise.train.float8.layer_stats import Float8LayerStats, Float8OperandStats


def layers(**known):
    operand = Float8OperandStats(**{"layer": "blocks.0.up", "operand": "gradient", "fmt": "e5m2", **known})
    return Float8LayerStats(step=100, operands=(operand,))


@pytest.mark.parametrize(("cut_off", "found"), [(0, False), (4, False), (9, False), (10, True), (100, True)])
def test_values_cut_off_in_a_tenth_of_the_steps(cut_off, found):
    evidence = layers(steps=100, cut_off_steps=cut_off, cut_off_values=7 * cut_off)
    assert bool(list(fp8_saturates.check_float8(evidence))) is found


def test_a_few_steps_are_not_again_and_again():
    assert not list(fp8_saturates.check_float8(layers(steps=8, cut_off_steps=4, cut_off_values=4)))
    assert not list(fp8_saturates.check_float8(layers()))


def test_what_is_said_of_values_cut_off():
    (found,) = fp8_saturates.check_float8(
        layers(steps=20, cut_off_steps=5, cut_off_values=17, scale=2.0, amaxes=(3.0,))
    )
    assert (found.place.module, found.place.step) == ("blocks.0.up", 100)
    assert found.message == (
        "values of its gradient saturated in 5 of 20 steps, 17 values in total: its E5M2 scale lags behind"
    )
    assert found.evidence["amaxes"] == (3.0,)


@pytest.mark.parametrize(("share", "found"), [(None, False), (0.0, False), (0.49, False), (0.5, True), (1.0, True)])
def test_half_of_the_values_gone(share, found):
    assert bool(list(fp8_underflows.check_float8(layers(flushed_share=share)))) is found


def test_what_is_said_of_values_gone():
    (found,) = fp8_underflows.check_float8(layers(flushed_share=0.62, scale=2.0))
    assert found.message == "62% of the nonzero values of its gradient become zero in E5M2 at its scale"
    assert "Fp8('rowwise')" in found.fix


def test_a_layer_that_has_a_scale_for_each_row_is_not_reported_to_have_them():
    (found,) = fp8_underflows.check_float8(layers(flushed_share=0.62, fmt="e4m3"))
    assert found.message == ("62% of the nonzero values of its gradient become zero in E4M3 at its per-row scales")
    assert found.fix == "Keep the layer in BF16: `Policy('fp8').keep('bf16', name)`."


def test_the_powers_of_two_that_are_reported_are_those_of_the_formats():
    e4m3, e5m2 = (math.log2(fmt.max / 1.75 / fmt.smallest) + 1 for fmt in map(find_scalar_format, ("e4m3", "e5m2")))
    assert f"E4M3 covers {e4m3:.0f} powers of two below that, and E5M2 {e5m2:.0f}:" in fp8_underflows.RULE.why


def test_the_table_says_what_is_not_known():
    lines = str(layers()).splitlines()
    assert lines[1].split() == ["blocks.0.up", "gradient", "e5m2", "-", "-", "-", "-"]
    lines = str(layers(scale=0.5, amaxes=(1.0, 2.0), steps=4, cut_off_steps=1, flushed_share=0.25)).splitlines()
    assert lines[1].split() == ["blocks.0.up", "gradient", "e5m2", "0.5", "1", "1", "of", "4", "steps", "25.0%"]
