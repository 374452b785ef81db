"""How long the loop waits for its data, on a clock of our own and on the real one."""

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ampwise.rules.amp5xx_speed import data_stall
from ampwise.watch.patches import Patches
from ampwise.watch.timing import RunTiming


class Slow(Dataset):
    def __init__(self, wait):
        self.wait = wait

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.wait()
        return torch.tensor(float(index))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def patches():
    made = Patches()
    yield made
    made.undo()


def train(timing, loader, work):
    seen = []
    for number, x in enumerate(loader, start=1):
        work()
        seen.append(x.item())
        timing.step_ended(number)
    return seen


def test_the_share_is_exact_on_a_clock_of_our_own(patches):
    clock = Clock()
    timing = RunTiming(patches, profile_at=(), clock=clock)
    loader = DataLoader(Slow(lambda: clock.wait(3)), batch_size=None)
    assert train(timing, loader, lambda: clock.wait(1)) == [float(index) for index in range(12)]
    use = timing.use()
    assert (use.steps, use.seconds, use.data_wait_seconds, use.data_wait_share) == (9, 36, 27, 0.75)
    (site,) = use.data_waits
    assert site.file == __file__
    assert site.function == "train"
    (finding,) = data_stall.check_time(use)
    assert finding.place == site.place
    assert finding.message == "75% of the time is spent waiting for data: 3000 ms per step"


@pytest.mark.parametrize("workers", [0, 1])
def test_waits_are_measured_on_the_real_clock(patches, workers):
    timing = RunTiming(patches, profile_at=())
    loader = DataLoader(Slow(lambda: time.sleep(0.03)), batch_size=None, num_workers=workers)
    train(timing, loader, lambda: None)
    use = timing.use()
    assert 6 * 0.02 < use.data_wait_seconds < use.seconds  # one that works may be a few batches ahead


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fast_dataset_stays_silent(patches, workers):
    clock = Clock()
    timing = RunTiming(patches, profile_at=(), clock=clock)
    loader = DataLoader(Slow(lambda: None), batch_size=None, num_workers=workers)
    train(timing, loader, lambda: clock.wait(1))
    use = timing.use()
    assert use.steps == 9
    assert not list(data_stall.check_time(use))


class Nested(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


def test_a_loader_that_reads_another_waits_once(patches):
    clock = Clock()
    timing = RunTiming(patches, profile_at=(), clock=clock)
    inner = DataLoader(Slow(lambda: clock.wait(3)), batch_size=None)
    train(timing, DataLoader(Nested(inner), batch_size=None), lambda: clock.wait(1))
    assert timing.use().data_wait_share == 0.75


def test_a_thread_that_fetches_ahead_keeps_nobody_waiting(patches):
    timing = RunTiming(patches, profile_at=())
    fetched = []
    thread = threading.Thread(target=lambda: fetched.extend(DataLoader(Slow(lambda: None), batch_size=None)))
    timing.step_ended(4)
    thread.start()
    thread.join()
    timing.step_ended(5)
    assert len(fetched) == 12
    assert timing.use().data_wait_seconds == 0


def test_what_a_dataset_raises_comes_through(patches):
    def broken():
        raise KeyError("no such image")

    timing = RunTiming(patches, profile_at=())
    with pytest.raises(KeyError, match="no such image"):
        next(iter(DataLoader(Slow(broken), batch_size=None)))
    timing.step_ended(4)
    iterator = iter(DataLoader(Slow(lambda: None), batch_size=None))
    assert next(iterator).item() == 0
