"""Windows: the mean over the micro-batches there are, wherever the data ends."""

import itertools

import pytest
import torch
from torch.optim import SGD

from ..for_each import for_each
from .engine_toys import PRECISIONS, data, everything, same, train, training, weights


def close(run, twin, precision="fp32"):
    tolerance = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}[precision]
    for one, other in zip(weights(run.model), weights(twin.model), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


def mean_of(*numbers, window, **options):
    """A model after one step on these, in a window of just that many."""
    twin = training(make=SGD, lr=0.1, accumulate=window, **options)
    train(twin, *numbers)
    return twin


def over(run, loader, skip=(), stop=None):
    """An epoch: batches are numbers of data."""
    steps = []
    for number in run.engine.batches(loader):
        if number == stop:
            break
        if number in skip:
            continue
        steps += train(run, number)
    return steps


# --- flush ---------------------------------------------------------------------------------------------------------


@for_each("clip", [None, 0.05])
@for_each("precision", PRECISIONS)
def test_a_window_that_is_flushed_is_one_of_that_size(precision, clip):
    run = training(precision, make=SGD, lr=0.1, accumulate=5, clip_norm=clip)
    train(run, 1, 2, 3)
    step = run.engine.flush()
    twin = mean_of(1, 2, 3, window=3, precision=precision, clip_norm=clip)
    other = twin.engine.history[-1]
    assert (step.number, step.closed, step.applied, run.engine.accumulating) == (1, True, True, False)
    assert step.loss == pytest.approx(other.loss, rel=1e-5)
    assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)
    close(run, twin, precision)


def test_flushing_nothing_is_nothing():
    run = training(accumulate=2)
    assert run.engine.flush() is None
    train(run, 1, 2)
    was = everything(run)
    assert run.engine.flush() is None
    assert same(everything(run), was)


def test_flushing_ends_a_micro_batch_that_was_not_applied():
    run = training(make=SGD, lr=0.1, accumulate=3)
    run.engine.backward(run.loss(*data(1)))
    assert run.engine.flush().applied
    close(run, mean_of(1, window=1))


@for_each("as_tensor", [False, True])
@for_each("precision", PRECISIONS)
def test_weighed_micro_batches_are_the_mean_over_all_their_rows(precision, as_tensor):
    def rows(x, y):
        return torch.tensor(len(x)) if as_tensor else len(x)

    run = training(precision, make=SGD, lr=0.1, accumulate=3, weight=rows)
    twin = training(precision, make=SGD, lr=0.1)
    x, y = data(1, rows=12)
    for part in (slice(0, 2), slice(2, 9), slice(9, 12)):
        step = run.engine.step(run.loss, x[part], y[part])
    assert step.applied
    assert step.loss == pytest.approx(twin.engine.step(twin.loss, x, y).loss, rel=1e-2)
    close(run, twin, precision)


def test_a_weighed_window_that_is_flushed_is_the_mean_over_its_rows():
    run = training(make=SGD, lr=0.1, accumulate=7, weight=lambda x, y: len(x))
    twin = training(make=SGD, lr=0.1)
    x, y = data(1, rows=12)
    losses = [run.engine.step(run.loss, x[part], y[part]).loss for part in (slice(0, 4), slice(4, 12))]
    assert losses[0] == pytest.approx(twin.loss(x[:4], y[:4]).item())
    assert run.engine.flush().loss == pytest.approx(twin.engine.step(twin.loss, x, y).loss)
    close(run, twin)


def test_a_micro_batch_of_no_weight_does_not_count():
    weight = iter([0, 3, 3, 0])
    run = training(make=SGD, lr=0.1, accumulate=2, weight=lambda x, y: next(weight))
    train(run, 1, 2)
    close(run, mean_of(2, window=1))
    train(run, 3, 4)
    assert run.engine.applied_steps == 2


def test_a_window_of_no_weight_at_all_is_skipped():
    run = training(accumulate=2, weight=lambda x, y: 0)
    was = weights(run.model)
    assert train(run, 1, 2)[-1].skipped
    assert same(weights(run.model), was)


# --- batches -------------------------------------------------------------------------------------------------------


@for_each("count", range(8))
def test_the_last_window_is_shorter(count):
    run, twin = training(make=SGD, lr=0.1, accumulate=3), training(make=SGD, lr=0.1, accumulate=3)
    steps = over(run, range(count))
    for number in range(count):
        train(twin, number)
    twin.engine.flush()
    assert [step.closed for step in steps] == [place % 3 == 2 or place == count - 1 for place in range(count)]
    assert len(run.engine.history) == len(twin.engine.history) == -(-count // 3)
    close(run, twin)


def test_batches_are_as_many_as_the_loader_has():
    run = training(accumulate=2)
    assert len(run.engine.batches([1, 2, 3])) == 3
    assert list(run.engine.batches(range(5))) == list(range(5))
    with pytest.raises(TypeError, match="has no len"):
        len(run.engine.batches(iter([1])))


def test_batches_come_from_a_generator_a_window_at_a_time():
    run, fetched = training(accumulate=2), []

    def loader():
        for number in itertools.count(1):
            fetched.append(number)
            yield number

    for number in run.engine.batches(loader()):
        train(run, number)
        assert len(fetched) <= number + 1
        if number == 6:
            break
    assert run.engine.applied_steps == 3


def test_an_exception_of_the_loader_passes_through_and_an_open_window_stays():
    def loader():
        yield from (1, 2, 3)
        raise OSError("disk")

    run = training(accumulate=2)
    with pytest.raises(OSError, match="disk"):
        over(run, loader())
    assert run.engine.applied_steps == 1


def test_batches_that_are_passed_over_do_not_count():
    run = training(make=SGD, lr=0.1, accumulate=2)
    steps = over(run, range(1, 6), skip=(2, 5))
    assert [step.closed for step in steps] == [False, True, False]
    assert (run.engine.applied_steps, run.engine.accumulating) == (2, False)
    twin = training(make=SGD, lr=0.1, accumulate=2)
    train(twin, 1, 3, 4)
    twin.engine.flush()
    close(run, twin)


def test_a_window_that_batches_were_passed_over_in_is_the_mean_of_the_others():
    run = training(make=SGD, lr=0.1, accumulate=4)
    over(run, range(1, 6), skip=(1, 2))
    assert run.engine.applied_steps == 1
    close(run, mean_of(3, 4, 5, window=3))
    assert run.engine.history[-1].loss == pytest.approx(mean_of(3, 4, 5, window=3).engine.history[-1].loss)


def test_a_window_that_goes_on_in_the_next_epoch_is_the_mean_of_all():
    run = training(make=SGD, lr=0.1, accumulate=4)
    over(run, [1, 2], stop=2)
    assert run.engine.accumulating
    over(run, [3, 4])
    assert (run.engine.applied_steps, run.engine.accumulating) == (1, False)
    close(run, mean_of(1, 3, 4, window=3))


def test_a_window_broken_off_goes_on_in_the_next_epoch():
    run = training(make=SGD, lr=0.1, accumulate=3)
    over(run, range(1, 9), stop=3)
    steps = over(run, range(3, 7))
    assert [step.closed for step in steps] == [True, False, False, True]
    twin = training(make=SGD, lr=0.1, accumulate=3)
    train(twin, 1, 2, 3, 4, 5, 6)
    close(run, twin)


@pytest.mark.parametrize("ending", ["passed over", "broken off"])
def test_after_a_short_window_without_a_batch_windows_are_as_long_as_ever(ending):
    run = training(accumulate=3)
    if ending == "passed over":
        over(run, [1, 2], skip=(1, 2))
    else:
        over(run, [1, 2], stop=1)
    assert [step.closed for step in train(run, 1, 2, 3)] == [False, False, True]


def test_an_empty_loader_is_an_empty_epoch():
    run = training(accumulate=3)
    was = everything(run)
    assert over(run, []) == []
    assert same(everything(run), was)


def test_a_window_open_before_the_batches_is_filled_first():
    run = training(make=SGD, lr=0.1, accumulate=3)
    train(run, 1)
    steps = over(run, [2, 3, 4, 5])
    assert [step.closed for step in steps] == [False, True, False, True]
    twin = training(make=SGD, lr=0.1, accumulate=3)
    train(twin, 1, 2, 3, 4, 5)
    twin.engine.flush()
    close(run, twin)
