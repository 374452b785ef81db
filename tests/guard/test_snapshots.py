"""Snapshots in memory: what is kept stays as it was, whatever happens to others, and memory is used again."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from ampwise.errors import BadInput
from ampwise.guard.snapshots import MemorySnapshots
from ampwise.guard.state import LiveState

CPU = torch.device("cpu")


def bytes_of(snapshots):
    """That all snapshots take, including buffers for reuse."""
    held = [*(each.values for each in snapshots.kept), *snapshots._spare]
    return sum(tensor.nbytes for values in held for tensor in values.values())


def live(number, size=3, **others):
    tensors = {"w": torch.full((size,), float(number)), "n": torch.tensor(number), **others}
    return LiveState(tensors, {"number": number}, frozenset())


class Kept(RuleBasedStateMachine):
    """Against a plain list of what is to be there. Who writes to disk holds one at a time, as the guard does."""

    def __init__(self):
        super().__init__()
        self.snapshots = MemorySnapshots(CPU, "host")
        self.kept, self.held, self.most = [], None, 0
        self.numbers = {}
        self.step = 0

    taken = Bundle("taken")

    @rule(target=taken, ago=st.integers(-3, 3), size=st.sampled_from([3, 5]))
    def take(self, ago, size):
        self.step = max(0, self.step + ago)
        number = len(self.numbers)
        state = live(number, size)
        found = self.snapshots.take(self.step, state)
        state.tensors["w"].fill_(-1.0)  # training goes on
        self.numbers[id(found)] = number, size
        self.kept.append(found)
        return found

    @rule(taken=taken)
    def promote(self, taken):
        if taken in self.kept:
            self.snapshots.promote(taken)
            self.kept = self.kept[self.kept.index(taken) :]

    @rule(taken=taken)
    def drop(self, taken):
        """Also one that is not there any more."""
        self.snapshots.drop(taken)
        self.kept = [each for each in self.kept if each is not taken]

    @rule(step=st.integers(0, 8))
    def go_back(self, step):
        self.snapshots.drop_after(step)
        self.kept = [each for each in self.kept if each.step <= step]
        self.step = min(self.step, step)

    @rule()
    def begin_writing(self):
        if self.held is None and self.kept:
            self.held = self.kept[-1]
            self.held.held = True

    @rule()
    def written(self):
        if self.held is not None:
            self.snapshots.release(self.held)
            self.held = None

    @property
    def in_use(self):
        return list({id(each): each for each in [*self.kept, *([self.held] if self.held else [])]}.values())

    @invariant()
    def each_has_what_it_was_taken_of(self):
        for each in self.in_use:
            number, size = self.numbers[id(each)]
            assert each.values["w"].tolist() == [float(number)] * size
            assert each.values["n"] == number
            assert each.plain == {"number": number}

    @invariant()
    def no_two_share_memory(self):
        places = [value.data_ptr() for each in self.in_use for value in each.values.values()]
        spare = [value.data_ptr() for values in self.snapshots._spare for value in values.values()]
        assert len(set(places)) == len(places)
        assert len(set(spare)) == len(spare)
        assert not set(places) & set(spare)

    @invariant()
    def good_is_the_last_that_was_promoted_and_is_there(self):
        assert self.snapshots.good is next((each for each in reversed(self.kept) if each.good), None)
        assert self.snapshots.candidates == [each for each in self.kept if not each.good]

    @invariant()
    def there_is_no_more_memory_than_was_needed_at_one_time(self):
        self.most = max(self.most, len(self.in_use))
        assert len(self.in_use) + len(self.snapshots._spare) <= self.most


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=30, stateful_step_count=40)


def test_memory_is_used_again_where_it_fits():
    snapshots = MemorySnapshots(CPU, "host")
    first = snapshots.take(1, live(1))
    places = {name: value.data_ptr() for name, value in first.values.items()}
    snapshots.drop(first)
    assert {name: value.data_ptr() for name, value in snapshots.take(2, live(2)).values.items()} == places
    other = snapshots.take(3, live(3, size=5, new=torch.ones(2, dtype=torch.int8)))
    assert [tuple(value.shape) for value in other.values.values()] == [(5,), (), (2,)]
    assert other.values["new"].dtype == torch.int8
    assert bytes_of(snapshots) == 3 * 4 + 8 + 5 * 4 + 8 + 2


def test_memory_is_counted():
    snapshots = MemorySnapshots(CPU, "device")
    assert bytes_of(snapshots) == 0
    taken = snapshots.take(1, live(1))
    assert bytes_of(snapshots) == 3 * 4 + 8
    snapshots.drop(taken)
    assert bytes_of(snapshots) == 3 * 4 + 8  # to be used again


def test_a_tensor_of_any_strides_is_kept_with_its_values():
    turned = torch.arange(6.0).reshape(2, 3).t()
    snapshots = MemorySnapshots(CPU, "host")
    assert torch.equal(snapshots.take(1, live(1, turned=turned)).values["turned"], turned)
    assert torch.equal(snapshots.take(1, live(1, expanded=torch.ones(1).expand(4))).values["expanded"], torch.ones(4))


def test_parameters_are_kept_without_their_history():
    parameter = torch.nn.Parameter(torch.ones(2))
    taken = MemorySnapshots(CPU, "host").take(1, live(1, parameter=parameter))
    assert not taken.values["parameter"].requires_grad
    with torch.no_grad():
        parameter += 1
    assert taken.values["parameter"].tolist() == [1.0, 1.0]


def test_before_an_update_there_is_nothing_to_wait_for_on_a_cpu():
    snapshots = MemorySnapshots(CPU, "host")
    taken = snapshots.take(1, live(1))
    snapshots.before_update()
    taken.wait()
    assert taken.copied is None


@pytest.mark.parametrize("place", ["tpu", "", None, 3])
def test_a_place_that_is_none_is_refused(place):
    with pytest.raises(BadInput) as refused:
        MemorySnapshots(CPU, place)
    assert str(refused.value) == f"Guard(snapshots_on={place!r}): expected 'host' or 'device'."
