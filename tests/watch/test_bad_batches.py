"""A bad batch is drawn again: the line of the dataset that made the NaN is named, and the script does not notice."""

import logging
import math
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

import ampwise
from ampwise.watch.watch import Watch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's

BAD, COUNT, WIDTH = 7, 24, 4


LOGGER = logging.getLogger("data")


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


class Samples(Dataset):
    """Samples of which one is constant."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.rand(COUNT, WIDTH, generator=generator)
        self.rows[BAD] = 0.5
        self.calls = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):  # plain getitem
        self.calls += 1
        return self.sample(self.rows[index], index)


class TorchScore(Samples):
    def sample(self, row, index):
        LOGGER.warning("sample %s", index)
        return (row - row.mean()) / row.std()  # torch score


class NumpyScore(Samples):
    def sample(self, row, index):
        row = row.numpy()
        score = (row - row.mean()) / row.std()  # numpy score
        return torch.from_numpy(score)


class NumpyChain(Samples):
    def sample(self, row, index):
        row = row.numpy()
        masked = numpy.where(row > 0.5, 1 / (row - 0.5), 0.0)  # its zero divisors are replaced
        inverse = 1.0 / row.std()  # numpy chain
        return torch.as_tensor((row + masked - masked) * 0 * inverse)


class NumpyUnclear(Samples):
    def sample(self, row, index):
        row = row.numpy()
        one = 1.0 / row.std()
        other = 1.0 / (row.max() - row.min())
        return torch.as_tensor(row * one * other)


class PlainPython(Samples):
    def sample(self, row, index):
        return torch.tensor([each * (math.inf if index == BAD else 1.0) for each in row.tolist()])


class Held(Samples):
    def __init__(self):
        super().__init__()
        self.table = (self.rows - self.rows.mean(1, keepdim=True)) / self.rows.std(1, keepdim=True)  # held table

    def sample(self, row, index):
        return self.table[index]


class HeldInNumpy(Samples):
    def __init__(self):
        super().__init__()
        with numpy.errstate(all="ignore"):
            self.array = numpy.where(self.rows.numpy() == 0.5, numpy.nan, 1.0)  # held array

    def sample(self, row, index):
        return numpy.float32(self.array[index])


class NanLabels(PlainPython):
    """Labels are missing on purpose, and have nothing to do with the fault."""

    def __init__(self):
        super().__init__()
        self.labels = torch.full((COUNT,), math.nan)

    def __getitem__(self, index):  # getitem with labels
        return super().__getitem__(index), self.labels[index]


class Nested(TorchScore):
    def __getitem__(self, index):
        return {"inputs": {"x": super().__getitem__(index)}, "label": math.nan}  # the label is not used


class ManyAtOnce(TorchScore):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def log_collate(samples):
    x = default_collate(samples)
    return torch.log(x.std(1, keepdim=True)) + x  # log collate


def centred(samples):
    x = numpy.stack([numpy.asarray(each) for each in samples])
    spread = x[:, 0].max() - x[:, 0].max()
    return torch.from_numpy(x / spread)  # centred collate


def train(loader, prepare=lambda batch: batch, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(loader):
        if number == steps:
            break
        x = prepare(batch)
        loss = model(x).square().mean()  # model
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def explained(loader, prepare=lambda batch: batch, **options):
    """Return the only finding about a cause."""
    with Watch(timing=False) as watch:
        train(loader, prepare, **options)
    assert not watch.failures
    (seen,) = [each for each in watch.seen() if each.finding.rule.names_the_cause]
    assert seen.finding.rule.name == "bad-batch"
    return seen.finding


def named(batch):
    return batch["inputs"]["x"]


CASES = {
    "torch": (TorchScore(), "torch score", "the divisor is 0", {}),
    "numpy": (NumpyScore(), "numpy score", "NumPy reports an invalid value", {}),
    "two errors of numpy, one of them repaired": (NumpyChain(), "numpy chain", "NumPy reports a division by zero", {}),
    "two errors of numpy": (NumpyUnclear(), "plain getitem", "`__getitem__` returns inf", {}),
    "plain python": (PlainPython(), "plain getitem", "`__getitem__` returns inf", {}),
    "held": (Held(), "held table", "`table` holds it already", {}),
    "held in numpy": (HeldInNumpy(), "held array", "`array` holds it already", {}),
    "collate": (
        Samples,
        "log collate",
        "in `log_collate`, the logarithm (log) gives -inf",
        {"collate_fn": log_collate},
    ),
    "workers": (TorchScore(), "torch score", "the divisor is 0", {"num_workers": 2}),
    "persistent workers": (NumpyScore(), "numpy score", "invalid", {"num_workers": 1, "persistent_workers": True}),
    "many at once": (ManyAtOnce(), "torch score", "the divisor is 0", {}),
    "no batches": (TorchScore(), "torch score", "the divisor is 0", {"batch_size": None}),
}


class RowsOnly(Samples):
    def sample(self, row, index):
        return row


@pytest.mark.parametrize("case", CASES)
def test_the_line_that_made_it_is_named(case):
    dataset, line, text, options = CASES[case]
    dataset = RowsOnly() if dataset is Samples else dataset
    finding = explained(DataLoader(dataset, **{"batch_size": 8, **options}), steps=10)
    assert (finding.place.file, finding.place.line) == (__file__, line_of(line))
    assert text in finding.message
    assert f"(index {BAD} of `{type(dataset).__name__}`)" in finding.message
    assert finding.evidence["index"] == str(BAD)
    assert f":{line_of('model')}" in finding.evidence["first_read"]
    source = finding.evidence["trace"]["source"]
    assert source["drawn_again"]["index"] == str(BAD)
    assert source.get("samples", [BAD])[0] == (0 if options.get("batch_size", 8) is None else BAD)


def test_data_without_a_line_of_its_own_are_named_by_their_index():
    x = torch.ones(COUNT, WIDTH)
    x[BAD] = math.nan
    reverse = Subset(TensorDataset(x), list(range(COUNT))[::-1])
    loader = DataLoader(ConcatDataset([TensorDataset(torch.ones(2, WIDTH)), reverse]), batch_size=COUNT + 2)
    finding = explained(loader, lambda batch: batch[0])
    assert finding.message.startswith(
        f"`x` was NaN before the model: `tensors[0]` holds it already (index {BAD} of `TensorDataset`); 4 NaN"
    )
    assert finding.place.line == line_of("model")
    rows = [(list(row), 0) for row in x.tolist()]
    finding = explained(DataLoader(rows, batch_size=8, collate_fn=lambda rows: torch.tensor([x for x, _ in rows])))
    assert f"the list that serves as dataset holds it already (index {BAD} of the list)" in finding.message


def test_a_collate_function_may_need_the_whole_batch():
    finding = explained(DataLoader(RowsOnly(), batch_size=8, shuffle=True, collate_fn=centred))
    assert "in `centred`, NumPy reports" in finding.message
    assert finding.place.line == line_of("centred collate")


def test_other_parts_of_a_sample_are_not_blamed():
    finding = explained(DataLoader(NanLabels(), batch_size=8), lambda batch: batch[0])
    assert "`__getitem__` returns inf" in finding.message
    assert finding.place.line == line_of("getitem with labels")


def test_a_nested_batch():
    finding = explained(DataLoader(Nested(), batch_size=8), named)
    assert finding.place.line == line_of("torch score")
    assert finding.evidence["index"] == str(BAD)


MOVES = {
    "cast": lambda x: x.half().float(),
    "view": lambda x: x[:, None],
    "transposed": lambda x: x.reshape(2, -1, WIDTH).transpose(0, 1).contiguous(),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_batch_that_was_only_moved_is_recognised(move):
    with_nan = HeldInNumpy()  # its other values are exact in every format
    finding = explained(DataLoader(with_nan, batch_size=8), MOVES[move])
    assert finding.place.line == line_of("held array")


class Mapped(dict):
    """A mapping of a library, as tokenizers return."""


def test_a_batch_prepared_by_a_library():
    loader = DataLoader(TorchScore(), batch_size=8, collate_fn=lambda rows: Mapped(x=torch.stack(rows)))
    finding = explained(loader, lambda batch: batch["x"])
    assert finding.place.line == line_of("torch score")


class Augmented(Samples):
    def sample(self, row, index):
        scale = float(numpy.random.rand() < self.chance) * random.random() * torch.rand(())
        return row / scale


class Cropped(Dataset):
    """Random crops, of which few are silent."""

    def __init__(self, made_by):
        self.made_by = made_by
        self.wave = torch.linspace(0.1, 1.0, 300)
        self.wave[120:140] = 0.0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        start = int(self.made_by(300 - WIDTH))
        crop = self.wave[start : start + WIDTH]
        return crop / crop.max()  # the crop's peak


OWN = numpy.random.default_rng(3)
GENERATOR = torch.Generator().manual_seed(1)
CROPPED_BY = {
    "its own generator": OWN.integers,
    "torch": lambda most: torch.randint(most, ()),
    "a generator of torch": lambda most: torch.randint(most, (), generator=GENERATOR),
    "Python": random.randrange,
    "numpy": numpy.random.randint,
}


class Draining(TorchScore):
    def __init__(self):
        super().__init__()
        self.stream = iter(range(1000))

    def sample(self, row, index):
        next(self.stream)
        return super().sample(row, index)


class Overwriting(TorchScore):
    def __init__(self):
        super().__init__()
        self.array = numpy.zeros(COUNT)

    def sample(self, row, index):
        self.array[index] += 1
        return super().sample(row, index)


def assert_not_drawn(loader, prepare=lambda batch: batch):
    with Watch(timing=False) as watch:
        train(loader, prepare)
    assert not watch.failures
    (seen,) = [each for each in watch.seen() if each.finding.rule.names_the_cause]
    assert "index" not in seen.finding.evidence
    return seen.finding


@pytest.mark.parametrize("kind", [Draining, Overwriting])
def test_nothing_is_drawn_that_the_script_would_notice(kind):
    dataset = kind()
    assert_not_drawn(DataLoader(dataset, batch_size=8))
    assert dataset.calls == COUNT
    if kind is Draining:
        assert next(dataset.stream) == COUNT
    else:
        assert dataset.array.tolist() == [1] * COUNT
        dataset.array[0] = 5  # it can be written to again


@pytest.mark.parametrize("by", CROPPED_BY)
def test_a_random_crop_is_drawn_with_its_own_random_numbers(by):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    dataset = Cropped(CROPPED_BY[by])
    with Watch(timing=False) as watch:
        for _ in range(40):
            batches = list(DataLoader(dataset, batch_size=8))
            if any(not batch.isfinite().all() for batch in batches):
                break
        train(batches)
    (seen,) = [each for each in watch.seen() if each.finding.rule.names_the_cause]
    assert seen.finding.place.line == line_of("the crop's peak")
    assert "drawn" not in seen.finding.message
    assert not watch.failures


@pytest.mark.parametrize("by", CROPPED_BY)
def test_trace_and_engine_draw_from_the_loader_that_is_being_read(by):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    iterator = iter(DataLoader(Cropped(CROPPED_BY[by]), batch_size=8))
    bad = next(iterator).clone()
    bad[3] = math.nan
    before = torch.get_rng_state(), random.getstate(), OWN.bit_generator.state, GENERATOR.get_state().tolist()
    (found,) = ampwise.trace(lambda x: model(x).mean(), bad)
    after = torch.get_rng_state(), random.getstate(), OWN.bit_generator.state, GENERATOR.get_state().tolist()
    assert (found.rule.name, found.place.line) == ("bad-batch", line_of("the crop's peak"))
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    engine = ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    engine.step(lambda x: model(x).mean(), bad)
    assert [each.place.line for each in engine.findings] == [line_of("the crop's peak")]
    assert next(iterator).isfinite().any()


class Counted(TensorDataset):
    """Counts its samples in a tensor of its own; the last one is bad."""

    def __init__(self):
        super().__init__(torch.rand(COUNT, WIDTH))
        self.uses = torch.zeros(COUNT)

    def __getitem__(self, index):
        self.uses[index] += 1
        (row,) = super().__getitem__(index)
        return row.log() * (0 if index < COUNT - 1 else math.nan)


def test_trace_undoes_what_a_dataset_writes():
    dataset, model = Counted(), nn.Linear(WIDTH, 1)
    iterator = iter(DataLoader(dataset, batch_size=COUNT))
    bad = next(iterator)
    (found,) = ampwise.trace(lambda x: model(x).mean(), bad.clone())
    assert found.evidence["index"] == repr(COUNT - 1)
    assert dataset.uses.tolist() == [1.0] * COUNT


def test_trace_does_not_blame_a_dataset_whose_samples_are_finite():
    model = nn.Linear(WIDTH, 1)
    iterator = iter(DataLoader(TensorDataset(torch.rand(COUNT, WIDTH)), batch_size=8))
    (bad,) = next(iterator)
    (found,) = ampwise.trace(lambda x: model(x).mean(), bad.masked_fill(bad > 0.9, math.nan))
    assert "index" not in found.evidence


def test_random_augmentation_that_does_not_repeat():
    dataset = Augmented()
    dataset.chance = 0.0
    loader = DataLoader(dataset, batch_size=8)
    with Watch(timing=False) as watch:
        iterator = iter(loader)
        batch = next(iterator)
        dataset.chance = 1.0
        train([batch])
    (seen,) = [each for each in watch.seen() if each.finding.rule.names_the_cause]
    assert "was passed to the step with" in seen.finding.message


def test_a_value_that_the_loop_makes_is_not_the_dataset_s():
    assert_not_drawn(DataLoader(RowsOnly(), batch_size=8), lambda x: torch.log(x - 1))  # loop log

    def normalised(x):  # the loader's NaN are replaced, and new ones arise in the same place
        x = x.nan_to_num()
        return x / x.norm(dim=1, keepdim=True)

    assert_not_drawn(DataLoader(TorchScore(), batch_size=8), normalised)


def test_data_that_are_repaired_are_not_reported():
    with Watch(timing=False) as watch:
        train(DataLoader(TorchScore(), batch_size=8), torch.nan_to_num)
    assert not watch.seen()


def states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())


@pytest.mark.parametrize("kind", [Augmented, TorchScore, NumpyScore])
def test_the_script_does_not_notice(kind, capsys, caplog):
    found = []
    for watched in (False, True):
        caplog.clear()
        numpy.random.seed(0)
        random.seed(0)
        dataset = kind()
        dataset.chance = 0.5
        if watched:
            with Watch(timing=False) as watch:
                train(DataLoader(dataset, batch_size=8, shuffle=True), steps=10)
            assert not watch.failures
        else:
            train(DataLoader(dataset, batch_size=8, shuffle=True), steps=10)
        found.append((dataset.calls, dataset.rows.tolist(), len(caplog.records), *states()))
    assert found[0] == found[1]
    assert capsys.readouterr() == ("", "")


def test_few_batches_are_drawn_again():
    seen = []

    class Counting(TorchScore):
        def sample(self, row, index):
            seen.append(index)
            return super().sample(self.rows[BAD] if index % 2 else row, index)

    with Watch(timing=False) as watch:
        train(DataLoader(Counting(), batch_size=1), steps=COUNT)
    (found,) = [each for each in watch.seen() if each.finding.rule.names_the_cause]
    assert found.count > 3, "they count as one finding"
    assert len(seen) == COUNT + 2
