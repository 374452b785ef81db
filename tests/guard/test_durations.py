"""How often, in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.guard.checkpointing import UNITS, Interval, seconds


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10min", 600.0),
        ("90s", 90.0),
        (" 2 h ", 7200.0),
        ("1.5h", 5400.0),
        ("0.5m", 30.0),
        ("30 sec", 30.0),
        ("1d", 86400.0),
        (45, 45.0),
        (0.25, 0.25),
    ],
)
def test_a_duration(given, expected):
    assert seconds(given, "patience") == expected
    assert Interval.checked(given) == Interval(expected, None)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_a_number_and_a_unit_are_their_product(number, unit):
    assert seconds(f"{number} {unit}", "every") == number * UNITS[unit] == seconds(number * UNITS[unit], "every")


@pytest.mark.parametrize(("given", "steps"), [("500 steps", 500), ("1 step", 1), ("20steps", 20)])
def test_a_number_of_steps(given, steps):
    assert Interval.checked(given) == Interval(None, steps)
    assert str(Interval.checked(given)) == f"{steps} steps"


def test_a_duration_in_words():
    assert str(Interval.checked("10min")) == "600 s"


@pytest.mark.parametrize(
    "given",
    [
        *("", "min", "10", "10 years", "-5s", "0s", "0", "1e3s", "5 MIN", "٣s", "10min 5s", "9" * 400 + "s"),
        *(0, -1, math.nan, math.inf, True, None, [5], b"5s"),
    ],
)
def test_what_is_no_duration_is_refused_with_examples(given):
    for refuse, name in ((lambda: seconds(given, "patience"), "patience"), (lambda: Interval.checked(given), "every")):
        with pytest.raises(BadInput) as refused:
            refuse()
        assert str(refused.value) == f"Guard({name}={given!r}): expected a duration such as '10min', '90s', '2h'."


@pytest.mark.parametrize("given", ["0 steps", "1.5 steps", "0.0steps"])
def test_steps_are_whole(given):
    with pytest.raises(BadInput) as refused:
        Interval.checked(given)
    assert str(refused.value) == f"Guard(every={given!r}): expected a whole number of steps, 1 or more."


def test_steps_are_no_duration():
    with pytest.raises(BadInput, match=r"^Guard\(patience='5 steps'\): expected a duration"):
        seconds("5 steps", "patience")
