"""Slicing back on tapes made by hand, without torch running anything."""

import math

import pytest
import torch

from ampwise.trace.recorder import RecordedOp, RecordedStorage, Tape, TensorRead, TensorWrite
from ampwise.trace.slicing import BackwardSlice, is_literal_infinity, slice_back
from ampwise.trace.value_ranges import ALWAYS_FINITE

NAN, INF, ONE = (math.nan, math.nan), (0.0, math.inf), (1.0, 1.0)


class Reel:
    """A tape, an operation at a time."""

    def __init__(self):
        self.tape = Tape()

    def slot(self, held):
        self.tape.ranges._read.append(held)
        return len(self.tape.ranges._read) - 1

    def leaf(self, held=ONE):
        return TensorRead(RecordedStorage(leaf=torch.ones(1)), 0, self.slot(held))

    def op(self, *inputs, gives, name="aten.mul.Tensor", scalars=(), into=None):
        index, slot = len(self.tape.ops), self.slot(gives)
        self.tape.ops.append(
            RecordedOp(index=index, name=name, dtype="fp32", inputs=inputs, outputs=(slot,), scalars=scalars)
        )
        storage = into.storage if into is not None else RecordedStorage()
        storage.writers.append(TensorWrite(index, slot))
        return TensorRead(storage, len(storage.writers), slot)

    def read(self, given, held):
        """Another view of the same memory, as it is now."""
        return TensorRead(given.storage, len(given.storage.writers), self.slot(held))


@pytest.fixture
def reel():
    return Reel()


def origins(ancestry):
    return [op.index for op in ancestry.computed]


def test_nan_is_followed_to_the_operation_whose_inputs_were_finite(reel):
    x = reel.op(reel.leaf(), gives=ONE)
    born = reel.op(x, gives=NAN)
    loss = reel.op(reel.op(born, gives=NAN), reel.leaf(), gives=NAN)
    assert origins(slice_back(reel.tape, [loss])) == [1]


def test_infinities_that_become_nan_are_followed_too(reel):
    inf = reel.op(reel.leaf(), gives=INF)
    nan = reel.op(reel.op(inf, gives=INF), gives=NAN)
    found = slice_back(reel.tape, [nan])
    assert origins(found) == [0]
    assert [op.index for op in found.from_infinities] == [2]


def test_an_innocent_infinity_beside_the_way_of_the_nan_is_left_alone(reel):
    mask = reel.op(reel.leaf(), gives=(-math.inf, 0.0))
    born = reel.op(reel.leaf(), gives=NAN)
    loss = reel.op(mask, born, gives=NAN)
    found = slice_back(reel.tape, [loss])
    assert origins(found) == [1]
    assert not found.from_infinities


def test_an_infinity_written_on_purpose_is_not_an_origin(reel):
    mask = reel.op(reel.leaf(), gives=(-math.inf, 1.0), name="aten.masked_fill.Scalar", scalars=(-math.inf,))
    nan = reel.op(mask, gives=NAN, name="aten._softmax.default")
    found = slice_back(reel.tape, [nan])
    assert [op.index for op in found.literal] == [0]
    assert [op.index for op in found.from_infinities] == [1]
    assert not found.computed


def test_a_finite_number_that_overflows_where_it_is_filled_in_is_not_by_hand(reel):
    reel.op(reel.leaf(), gives=INF, name="aten.masked_fill.Scalar", scalars=(-1e9,))
    assert not is_literal_infinity(reel.tape.ops[0])


def test_bad_leaves_are_sources_with_their_reader(reel):
    weight = reel.leaf(NAN)
    reel.op(reel.leaf(), gives=ONE)
    loss = reel.op(weight, gives=NAN)
    ((reader, given, kind),) = slice_back(reel.tape, [loss]).sources
    assert (reader.index, given.storage, kind) == (1, weight.storage, "nan")


def test_memory_that_was_written_over_is_known_by_its_last_writer(reel):
    buffer = reel.op(gives=NAN, name="aten.empty.memory_format")  # whatever was there
    reel.op(buffer, gives=ONE, name="aten.zero_.default", into=buffer)
    written = reel.op(reel.read(buffer, ONE), gives=NAN, name="aten.sqrt_.default", into=buffer)
    loss = reel.op(reel.read(written, NAN), gives=NAN)
    assert origins(slice_back(reel.tape, [loss])) == [2]


def test_a_part_that_was_written_to_before_another_is_found(reel):
    """x[0] = bad; x[1] = fine; then all of x is read."""
    x = reel.op(gives=ONE)
    reel.op(reel.leaf(), gives=NAN, name="aten.copy_.default", into=x)
    reel.op(reel.leaf(), gives=ONE, name="aten.copy_.default", into=x)
    loss = reel.op(reel.read(x, NAN), gives=NAN)
    assert origins(slice_back(reel.tape, [loss])) == [1]


def test_only_the_writers_before_a_reading_count(reel):
    x = reel.op(reel.leaf(), gives=NAN)
    before = reel.read(x, NAN)
    reel.op(reel.leaf(), gives=NAN, name="aten.copy_.default", into=x)
    loss = reel.op(before, gives=NAN)
    assert origins(slice_back(reel.tape, [loss])) == [0]


def test_several_targets_have_the_earliest_first(reel):
    late, early = reel.leaf(), reel.leaf()
    first = reel.op(early, gives=NAN)
    second = reel.op(late, gives=INF)
    assert origins(slice_back(reel.tape, [second, first])) == [0, 1]


def test_finite_targets_have_no_ancestry(reel):
    found = slice_back(reel.tape, [reel.op(reel.leaf(NAN), gives=ONE), TensorRead(RecordedStorage(), 0, ALWAYS_FINITE)])
    assert found == BackwardSlice()
