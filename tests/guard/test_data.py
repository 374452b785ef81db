"""The place in the data: what comes after going to it is what came after it, to the bit."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ampwise.errors import BadInput
from ampwise.guard import data_sources as sources
from ampwise.guard.data_position import ResumableData
from ampwise.guard.data_sources import states_of
from ampwise.runs.plain_data import from_json, to_json
from ampwise.train.random_state import capture_random, restore_random

from ..night import NIGHTLY

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
CPU = torch.device("cpu")
# torchdata 0.11 with torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset):
    """Each is changed at random, by all three sources of random numbers."""

    def __init__(self, size=11):
        self.size, self.read = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read += 1
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        order = list(range(11))
        random.shuffle(order)
        for index in order:
            yield torch.tensor([float(index)])


class Own:
    """A loader of a user's, with a state."""

    def __init__(self, size=5):
        self.size, self.at, self.seed = size, {"next": 0}, 0

    def __iter__(self):
        while self.at["next"] < self.size:
            self.at["next"] += 1
            yield self.at["next"] + 100 * self.seed
        self.at, self.seed = {"next": 0}, self.seed + 1

    def state_dict(self):
        return {"at": self.at, "seed": self.seed}  # which goes on changing

    def load_state_dict(self, state):
        self.at, self.seed = state["at"], state["seed"]


def seed():
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def train(batch):
    """What else draws random numbers."""
    torch.rand(3)
    random.random()
    np.random.rand()


def saved(data):
    return json.dumps(to_json({"data": data.position(), "random": capture_random(CPU)}, "it"))


def go_to(data, text):
    """As the guard does: the data first, then the random numbers."""
    state = from_json(json.loads(text))
    before = capture_random(CPU)
    data.go_to(state["data"])
    assert to_json(capture_random(CPU), "it") == to_json(before, "it"), "random numbers were moved"
    restore_random(state["random"], CPU)


def bits(batch):
    return batch.numpy().tobytes() if isinstance(batch, torch.Tensor) else batch


def unbroken(data, at):
    """All batches, and the state after so many."""
    batches, text = [], saved(data) if at == 0 else None
    for batch in data:
        batches.append(((data.epoch, data.index), bits(batch)))
        train(batch)
        if len(batches) == at:
            text = saved(data)
    return batches, text


def rest(data):
    found = []
    for batch in data:
        found.append(((data.epoch, data.index), bits(batch)))
        train(batch)
    return found


def check_law(make, epochs, at, same_process=True):
    """``make`` a loader: after ``at`` batches, another one goes on as the first did; and so does the first itself."""
    seed()
    data = ResumableData(make(), epochs=epochs)
    batches, text = unbroken(data, at)
    assert len(batches) > at
    if same_process:
        go_to(data, text)
        assert rest(data) == batches[at:], "in the same process"
    random.seed(77)
    np.random.seed(78)
    torch.manual_seed(79)  # another process has other numbers
    data = ResumableData(make(), epochs=epochs)
    go_to(data, text)
    found, text = unbroken(data, 1)
    assert found == batches[at:], "in another"
    data = ResumableData(make(), epochs=epochs)
    go_to(data, text)
    assert rest(data) == batches[at + 1 :], "in a third, from what the second saved"


def generator(given):
    return torch.Generator().manual_seed(5) if given else None


SAMPLERS = {
    "in order": lambda dataset, numbers: {},
    "shuffled": lambda dataset, numbers: {"shuffle": True},
    "drawn": lambda dataset, numbers: {"sampler": RandomSampler(dataset, replacement=True, generator=numbers)},
    "subset": lambda dataset, numbers: {"sampler": SubsetRandomSampler(range(7), generator=numbers)},
    "weighted": lambda dataset, numbers: {"sampler": WeightedRandomSampler([1.0] * 11, 9, generator=numbers)},
    "distributed": lambda dataset, numbers: {"sampler": DistributedSampler(dataset, num_replicas=2, rank=1)},
}


@given(
    st.sampled_from(sorted(SAMPLERS)), st.booleans(), st.sampled_from([1, 2, 3]), st.integers(1, 4), st.data(),
    st.sampled_from([DataLoader, StatefulDataLoader]),
)  # fmt: skip
def test_a_loader_goes_on_as_an_unbroken_one(sampler, owns_numbers, epochs, batch_size, choice, kind):
    def make():
        dataset, numbers = Numbers(), generator(owns_numbers)
        given = SAMPLERS[sampler](dataset, numbers)
        return kind(dataset, batch_size=batch_size, generator=numbers, **given)

    total = epochs * len(make())
    check_law(make, epochs, choice.draw(st.integers(0, total - 1)))


@pytest.mark.half_by_day
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_begin_again_with_their_random_numbers(persistent):
    def make():
        return DataLoader(
            Numbers(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent, prefetch_factor=2
        )

    check_law(make, epochs=2, at=9)  # in the second epoch


def test_a_stateful_loader_with_workers():
    check_law(lambda: StatefulDataLoader(range(4), batch_size=2, shuffle=True, num_workers=2), epochs=2, at=2)
    if NIGHTLY:
        check_law(lambda: StatefulDataLoader(range(11), batch_size=2, shuffle=True, num_workers=2), epochs=2, at=8)


OWN = {
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "numpy": lambda: np.random.default_rng(0),
    "numpy, MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "numpy, Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "numpy, as it was": lambda: np.random.RandomState(0),
}


def drawn(rng):
    """A number below a thousand."""
    if isinstance(rng, torch.Generator):
        return int(torch.randint(1000, (), generator=rng))
    return rng.randrange(1000) if isinstance(rng, random.Random) else int(rng.choice(1000))


class Ordered:
    """A sampler that draws for each sample, when it is asked for it."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        for index in range(11):
            yield (index, drawn(self.rng))

    def __len__(self):
        return 11


class Changed(Dataset):
    def __init__(self, rng=None):
        self.inner = {"transforms": [[], [rng]]}

    def __len__(self):
        return 11

    def __getitem__(self, index):
        rng = self.inner["transforms"][1][0]
        return torch.tensor([*(index if isinstance(index, tuple) else [index]), drawn(rng) if rng else 0])

    def collated(self, batch):
        return torch.stack(batch) + 1000 * drawn(self.inner["transforms"][1][0])


class Drawing:
    """A loader of a user's, without a state."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        return (drawn(self.rng) for _ in range(6))


def noisy(rng):
    """A function that has its random numbers from around it."""
    return lambda batch: torch.stack(batch) * drawn(rng)


HOLDERS = {
    "sampler": lambda rng: DataLoader(Changed(), 2, sampler=Ordered(rng)),
    "batch sampler": lambda rng: DataLoader(Changed(), batch_sampler=BatchSampler(Ordered(rng), 2, drop_last=False)),
    "dataset": lambda rng: DataLoader(Changed(rng), 2),
    "method": lambda rng: DataLoader(data := Changed(rng), 2, collate_fn=data.collated),
    "closure": lambda rng: DataLoader(Changed(), 2, collate_fn=noisy(rng)),
    "partial": lambda rng: DataLoader(Changed(), 2, collate_fn=partial(lambda own, batch: noisy(own)(batch), rng)),
    "loader of one's own": lambda rng: Drawing(rng),
}


@pytest.mark.few_by_day(6)
@pytest.mark.parametrize("at", [0, 2, 6, 8])
@pytest.mark.parametrize("holder", sorted(HOLDERS))
@pytest.mark.parametrize("kind", sorted(OWN))
def test_random_numbers_that_somebody_keeps_for_himself(kind, holder, at):
    check_law(lambda: HOLDERS[holder](OWN[kind]()), epochs=2, at=at)


def test_with_workers_those_of_samplers_and_datasets_begin_again():
    check_law(lambda: DataLoader(Changed(random.Random(1)), 2, sampler=Ordered(random.Random(0)), num_workers=1), 2, 8)


def test_what_is_not_restored_is_named():
    numbers = Changed(random.SystemRandom())
    data = ResumableData(DataLoader(numbers, 2, sampler=Ordered(random.Random(0))))
    next(iter(data))
    position = data.position()
    assert data.unrestored == ["dataset.inner.transforms.1.0"], "the system's are nobody's to draw again"
    other = ResumableData(DataLoader(Changed(random.Random(0)), 2, shuffle=True))
    other.go_to(position)
    assert other.unrestored == ["dataset.inner.transforms.1.0", "sampler.rng"]


@pytest.mark.parametrize("kind", ["numpy, MT19937", "numpy, Philox", "numpy, as it was"])
@pytest.mark.parametrize("value", [-1, 625, 10**9])
def test_a_place_in_numpys_numbers_that_is_none(kind, value):
    """numpy would read there."""
    data = ResumableData(HOLDERS["sampler"](OWN[kind]()))
    next(iter(data))
    position = data.position()
    state = position["state"]["generators"]["sampler.rng"]
    (state if "buffer_pos" in state else state["state"])["buffer_pos" if "buffer_pos" in state else "pos"] = value
    with pytest.raises(BadInput, match="its state is invalid"):
        data.go_to(position)


def test_few_objects_are_looked_at(monkeypatch):
    """A dataset may hold millions; and an object that holds itself has an end."""
    numbers = Changed(random.Random(0))
    numbers.samples, numbers.self = [[random.Random(0)] for _ in range(200)], numbers
    assert list(states_of(DataLoader(numbers))) == ["dataset.inner.transforms.1.0"]
    monkeypatch.setattr("ampwise.guard.data_sources.MOST_OBJECTS", 3)
    assert states_of(DataLoader(numbers)) == {}


def test_global_random_numbers_are_left_to_the_process():
    assert states_of([random._inst, np.random.mtrand._rand, torch.default_generator]) == {}


@pytest.mark.parametrize("at", [0, 1, 5, 6, 13])
def test_streams_lists_and_loaders_of_ones_own(at):
    check_law(Own, epochs=3, at=at)
    check_law(lambda: list(range(5)), epochs=3, at=at)
    check_law(lambda: Shuffled(), epochs=3, at=at)
    check_law(lambda: StatefulDataLoader(Numbers(5), batch_size=None), epochs=3, at=at)


def test_a_stream_is_read_again():
    check_law(lambda: DataLoader(Stream(), batch_size=2), epochs=2, at=8)


class Shuffled:
    def __iter__(self):
        order = list(range(5))
        random.shuffle(order)
        return iter(order)


def test_what_is_passed_over_in_a_map_is_not_read():
    seed()
    data = ResumableData(DataLoader(Numbers(100), batch_size=2, shuffle=True))
    for _ in data:
        if data.index == 39:
            break
    data._loader.dataset.read = 0
    data.go_to(data.position())
    assert data._loader.dataset.read == 0


@pytest.mark.parametrize("kind", [Own, DataLoader, StatefulDataLoader])
def test_at_the_end_more_epochs_go_on(kind):
    """A position of a Data that is over, in one that has an epoch more."""

    def make():
        return Own() if kind is Own else kind(Numbers(5), shuffle=True)

    seed()
    expected = rest(ResumableData(make(), epochs=3))
    seed()
    data = ResumableData(make(), epochs=2)
    assert rest(data) == expected[:10]
    text = saved(data)
    ended = ResumableData(make(), epochs=2)
    go_to(ended, text)
    assert rest(ended) == []
    more = ResumableData(make(), epochs=3)
    go_to(more, text)
    assert rest(more) == expected[10:]


def test_in_another_process(warm, tmp_path):
    """Of which nothing is left but the JSON."""
    script = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mine import data\n"
        "from ampwise.runs.plain_data import from_json\n"
        "data.go_to(from_json(json.load(open(sys.argv[1]))))\n"
        "print([batch.tolist() for batch in data])\n"
    )
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from ampwise.guard.data_position import ResumableData\n"
        "data = ResumableData(DataLoader(torch.arange(20), batch_size=3, shuffle=True), epochs=2)\n"
    )
    data = ResumableData(DataLoader(torch.arange(20), batch_size=3, shuffle=True), epochs=2)
    batches = iter(data)
    for _ in range(4):
        next(batches)
    (tmp_path / "position.json").write_text(json.dumps(to_json(data.position(), "it")))
    expected = [batch.tolist() for batch in batches if data.epoch == 0]
    done = warm.run("-c", script, str(tmp_path / "position.json"), cwd=tmp_path)
    assert str(expected)[1:-1] in done.stdout, done.stderr


# --- the loop ------------------------------------------------------------------------------------------------------


def test_going_back_inside_the_loop():
    data = ResumableData(["a", "b", "c", "d"], epochs=2)
    seen, back, position = [], False, None
    for batch in data:
        seen.append(batch)
        if (data.epoch, data.index) == (0, 1):
            position = data.position()
        if (data.epoch, data.index) == (1, 0) and not back:
            back = True
            data.pass_over([(0, 2), (1, 3)])
            data.go_to(position)
    assert "".join(seen) == "abcda" + "dabc"
    assert data.passed_over == ((0, 2), (1, 3))


def test_what_is_passed_over_is_in_the_position():
    data = ResumableData("abcd")
    data.pass_over([(0, 1)])
    other = ResumableData("abcd")
    other.pass_over([(0, 3)])
    other.go_to(data.position())
    assert list(other) == ["a", "c"]


def test_passing_over_whole_epochs():
    data = ResumableData("ab", epochs=3)
    data.pass_over([(1, 0), (1, 1), (2, 1)])
    assert [(batch, data.epoch, data.index) for batch in data] == [("a", 0, 0), ("b", 0, 1), ("a", 2, 0)]


def test_who_leaves_the_loop_goes_on_with_the_next_batch():
    data = ResumableData("abcd", epochs=None)
    for batch in data:
        if batch == "b":
            break
    assert (data.epoch, data.index) == (0, 1)
    assert [batch for batch, _ in zip(data, range(5), strict=False)] == list("cdabc")


def test_who_fails_in_the_loop_can_go_on():
    data = ResumableData("abcd")
    with pytest.raises(ZeroDivisionError):
        any(1 / 0 for _ in data)
    assert list(data) == ["b", "c", "d"]


def test_an_infinite_loader():
    class Endless:
        def __iter__(self):
            number = 0
            while True:
                yield number
                number += 1

    data = ResumableData(Endless(), epochs=None)
    for batch in data:
        if batch == 9:
            break
    other = ResumableData(Endless())
    other.go_to(data.position())
    assert next(iter(other)) == 10


def test_a_second_loop_is_refused():
    data = ResumableData("abcd")
    for _ in data:
        with pytest.raises(BadInput, match=r"is already running\. A second loop at a time needs its own Data"):
            iter(data)
        break
    first, second = iter(data), iter(data)
    next(first)
    with pytest.raises(BadInput, match="already running"):
        next(second)


def test_a_loop_after_the_last_epoch_is_refused():
    data = ResumableData("ab")
    list(data)
    with pytest.raises(BadInput, match=r"1 of 1 epochs\. Data\(loader, epochs=n\) has all epochs in one loop"):
        list(data)


@pytest.mark.parametrize(
    ("loader", "epochs", "said"),
    [
        ([], 1, r"the list yielded no batch in epoch 0\. It is empty"),
        ([], None, "yielded no batch in epoch 0"),
        (DataLoader(range(3), batch_size=4, drop_last=True), 1, r"smaller than a batch \(drop_last=True\)"),
        ("ab", 0, r"Data\(epochs=0\): expected a whole number, 1 or more, or None"),
        ("ab", "2", r"Data\(epochs='2'\)"),
        (iter("ab"), 2, r"Data\(epochs=2\): a str_ascii_iterator can be iterated only once\. Give a loader"),
        (3, 1, r"Data\(int\): expected a loader, a list or an iterator"),
    ],
)
def test_data_that_is_none(loader, epochs, said):
    with pytest.raises(BadInput, match=said):
        list(ResumableData(loader, epochs=epochs))


def test_one_that_is_used_up_is_reported():
    once = iter("ab")
    data = ResumableData(type("Mine", (), {"__iter__": lambda self: once})(), epochs=2)
    with pytest.raises(BadInput, match=r"the Mine yielded no batch in epoch 1\. .* can be iterated only once"):
        list(data)


def test_an_iterator_goes_forwards_only():
    data = ResumableData(iter("abcdef"), epochs=None)
    assert not data.rewinds
    assert ResumableData("abc").rewinds
    batches = iter(data)
    next(batches), next(batches)
    position = data.position()
    other = ResumableData(iter("abcdef"))
    other.go_to(from_json(to_json(position, "it")))
    assert list(other) == list("cdef")
    assert next(batches) == "c"
    with pytest.raises(BadInput, match="a str_ascii_iterator cannot go back from batch 3 to 2") as caught:
        data.go_to(position)
    assert "\n" not in str(caught.value)
    assert list(batches) == list("def")  # nothing was lost by asking


# --- positions of other data ---------------------------------------------------------------------------------------


def place_in(loader, count=2):
    data = ResumableData(loader, epochs=2)
    for _ in zip(range(count), data, strict=False):
        pass
    return data.position()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            lambda: "abcd",
            lambda: "abc",
            "in data of 4 batches an epoch, and this has 3 batches: use the same loader",
        ),
        (lambda: DataLoader(range(6)), lambda: list(range(6)), r"of another kind: got 'loader', expected 'iterable'"),
        (Own, lambda: [1, 2, 3, 4, 5], "got 'stateful', expected 'iterable'"),
        (lambda: iter("abcd"), lambda: "abcd", "got 'iterator', expected 'iterable'"),
        (
            lambda: StatefulDataLoader(range(6), num_workers=0),
            lambda: StatefulDataLoader(range(6), num_workers=1),
            r"the StatefulDataLoader cannot load its saved state \(AssertionError: State doesn't contain",
        ),
    ],
)
def test_a_position_in_other_data(one, other, said):
    data = ResumableData(one())
    for _ in data:
        break
    with pytest.raises(BadInput, match=said) as caught:
        ResumableData(other()).go_to(data.position())
    assert "\n" not in str(caught.value)


def test_a_loader_that_is_shorter_now():
    class Short:
        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return iter(range(self.size))

    data = ResumableData(Short(2))
    with pytest.raises(BadInput, match="the data has 2 batches in epoch 0, and the position is after 3"):
        data.go_to(place_in(Short(5), 3))
    with pytest.raises(BadInput, match="the position in the data was lost when go_to failed"):
        list(data)
    data.go_to(place_in(Short(2), 1))
    assert list(data) == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda position: None,
        lambda position: {},
        lambda position: {**position, "more": 1},
        lambda position: {**position, "epoch": -1},
        lambda position: {**position, "done": True},
        lambda position: {**position, "done": 2.0},
        lambda position: {**position, "over": 1},
        lambda position: {**position, "kind": None},
        lambda position: {**position, "batches": "6"},
        lambda position: {**position, "passed_over": 3},
        lambda position: {**position, "passed_over": [[0, -1]]},
        lambda position: {**position, "passed_over": [[0, 1, 2]]},
        lambda position: {**position, "state": None},
        lambda position: {**position, "state": {}},
        lambda position: {**position, "state": {"begins": 3, "generators": {}}},
        lambda position: {**position, "state": {"begins": [{}], "generators": {}}},
        lambda position: {**position, "state": {"begins": [{"random": {"torch": 3}}], "generators": {}}},
        lambda position: {**position, "state": {**position["state"], "generators": {"generator": torch.zeros(3)}}},
        lambda position: {
            **position,
            "state": {**position["state"], "generators": {"generator": torch.zeros(3).byte()}},
        },
    ],
)
def test_what_is_no_position(change):
    loader = DataLoader(range(6), generator=torch.Generator())
    before = to_json(capture_random(CPU), "it")
    with pytest.raises(BadInput) as caught:
        ResumableData(loader).go_to(change(place_in(DataLoader(range(6), generator=torch.Generator()))))
    assert "\n" not in str(caught.value)
    assert to_json(capture_random(CPU), "it") == before


def test_a_position_stays_as_it_was():
    """Loaders may hand out, and keep, what they go on writing to."""
    data = ResumableData(Own(), epochs=2)
    batches = iter(data)
    next(batches)
    position = data.position()
    for _ in range(3):  # as often as is wanted
        rests = [batch for batch, _ in zip(batches, range(3), strict=False)]
        data.go_to(position)
        assert rests == [2, 3, 4]


def test_asking_for_the_position_changes_nothing():
    def drawn(asks):
        seed()
        data = ResumableData(StatefulDataLoader(Numbers(), batch_size=2, shuffle=True), epochs=2)
        found = []
        if asks:
            data.position()
        for batch in data:
            found.append(bits(batch))
            if asks:
                data.position()
        return found

    assert drawn(True) == drawn(False)


def test_the_epoch_is_reported():
    told = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            told.append(epoch)
            super().set_epoch(epoch)

    dataset = Numbers(6)
    data = ResumableData(DataLoader(dataset, sampler=Sampler(dataset, num_replicas=2, rank=0, shuffle=True)), epochs=3)
    orders = {}
    for batch in data:
        orders.setdefault(data.epoch, []).append(batch[0, 0].item())
    assert told == [0, 1, 2]
    with pytest.raises(BadInput, match="this has 3 batches"):
        data.go_to({**data.position(), "batches": 4, "epoch": 0})
    assert told[-1] == 2  # a question changes nothing
    assert len({tuple(order) for order in orders.values()}) > 1


def test_who_waits_is_reported(monkeypatch, capsys):
    position = place_in(DataLoader(Stream(), batch_size=2), 3)
    ResumableData(DataLoader(Stream(), batch_size=2)).go_to(position)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sources, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sources._Progress, "advised", False)
    ResumableData(DataLoader(Stream(), batch_size=2)).go_to(position)
    said = capsys.readouterr().err
    assert "ampwise: skipping to the saved position in the data: 2 of 3 batches of epoch 0\n" in said
    assert said.count("StatefulDataLoader saves its position") == 1
