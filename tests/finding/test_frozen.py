"""Records against what they stand for: frozen dataclasses with slots."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding.frozen import Frozen


class Point(Frozen):
    __slots__ = ("y", "x")  # noqa: RUF023 (the order is what is tested)

    def __init__(self, y, x=None):
        self.y, self.x = y, x


@dataclasses.dataclass(frozen=True, slots=True)
class Oracle:
    y: object
    x: object = None


VALUES = st.none() | st.integers(0, 2) | st.text("ab", max_size=1) | st.tuples(st.integers(0, 1))


@given(VALUES, VALUES, VALUES, VALUES)
def test_equal_hashed_and_shown_as_a_dataclass(a, b, c, d):
    one, other = Point(a, b), Point(c, d)
    assert (one == other) == (Oracle(a, b) == Oracle(c, d))
    assert hash(one) == hash(Oracle(a, b))
    assert repr(one) == repr(Oracle(a, b)).replace("Oracle", "Point")


@given(VALUES, VALUES, VALUES)
def test_changed_as_a_dataclass(a, b, c):
    one, oracle = Point(a, b), Oracle(a, b)
    assert repr(one.but(x=c)) == repr(dataclasses.replace(oracle, x=c)).replace("Oracle", "Point")
    assert one == Point(a, b)
    assert list(one.parts().items()) == list(dataclasses.asdict(oracle).items())


@given(VALUES, VALUES)
def test_copies_and_crosses_processes(a, b):
    one = Point(a, b)
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert again == one
        with pytest.raises(dataclasses.FrozenInstanceError):
            again.x = 1


def test_nothing_is_assigned_added_or_deleted():
    one = Point(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        one.x = 3
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del one.x
    with pytest.raises(AttributeError):
        one.z = 3
    assert (one.y, one.x) == (1, 2)


def test_another_kind_with_the_same_parts_is_not_equal():
    class Other(Point):
        __slots__ = ()

    assert Point(1, 2) != Other(1, 2)
    assert Point(1, 2) != (1, 2)
