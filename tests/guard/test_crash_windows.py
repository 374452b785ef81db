"""What falls between two moments: a save under way while the run goes back, an end in the middle of a window, and such.

Each of these went wrong once.
"""

import contextlib
import errno
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampwise import Engine, Guard, Ladder, Stopped
from ampwise.guard import checkpointing as saving
from ampwise.guard.disk import writing
from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.state import _device_here
from ampwise.runs.plain_data import PlainDecoder, PlainEncoder

from .disk.disk_toys import FILE, forge
from .test_guard import NAN, data, small_operations_are_cheap, told, train, training, weights
from .test_snapshots import bytes_of

__all__ = ["small_operations_are_cheap"]  # a fixture for this module, too

INF = float("inf")


@pytest.fixture(autouse=True)
def quiet(capsys):
    """Findings are printed for people."""
    yield
    capsys.readouterr()


class Killed(Exception):
    """Nothing is saved on its account, as after a kill."""


def train_until(run, batches, ends, *, collects=True):
    """Until ``ends`` says so, when it is killed; checkpoints are written before the next step, if not told otherwise.

    Returns whether it came to that.
    """
    try:
        with run.guard:
            for batch in run.guard.batches(batches):
                run.guard.step(run.loss, batch)
                if collects:
                    run.guard._checkpointing.keep_wanted()
                    run.guard._checkpointing.collect(wait=True)
                if ends(run):
                    raise Killed
    except Killed:
        return True
    return False


def train_collecting(run, batches):
    assert not train_until(run, batches, lambda run: False)
    return run


def of_steps(directory, fact):
    return {each.step: getattr(each, fact) for each in checkpoints(directory)}


def without(directory, batches, left_out):
    """A run that never met these batches."""
    kept = [batch for number, batch in enumerate(batches) if number not in left_out]
    return train(training(directory), kept)


class Gate:
    """The save of one step takes until it is opened; then it is written, or fails."""

    def __init__(self, monkeypatch, step, error=None):
        self.opened = threading.Event()
        write = writing.write_checkpoint

        def slow(directory, **options):
            if options["step"] == step and not self.opened.is_set():
                assert self.opened.wait(120)
                if error is not None:
                    raise error
            return write(directory, **options)

        monkeypatch.setattr(writing, "write_checkpoint", slow)

    def open(self, run):
        """And the thread is at its end, which nobody has looked at."""
        self.opened.set()
        if (thread := run.guard._checkpointing.saver._thread) is not None:
            thread.join(120)


# Saves under way when a run goes back. Steps 9 and 10 are bad: it goes back to step 5, behind the checkpoint of step 8.


@pytest.mark.parametrize("finished", ["before it goes back", "after it went back"])
def test_a_checkpoint_that_is_finished_while_the_run_goes_back_is_no_good(tmp_path, monkeypatch, finished):
    gate = Gate(monkeypatch, 8)
    run = training(tmp_path / "run", every="8 steps", keep=9)
    next_rung = run.guard._recovery._next_rung

    def slow_rung(facts):
        if finished == "before it goes back":
            gate.open(run)
        return next_rung(facts)

    monkeypatch.setattr(run.guard._recovery, "_next_rung", slow_rung)

    def ends(run):
        if run.guard._recovery.rollbacks and not gate.opened.is_set():
            gate.open(run)
            # A kill may come now, before the training has looked.
            assert of_steps(tmp_path / "run", "undone") == {8: True}
        return run.guard._number == 12 and run.guard._recovery.rollbacks > 0

    batches = data(24, bad=[8, 9])
    assert train_until(run, batches, ends, collects=False)
    assert told(run) == ["step-skipped", "rolled-back"]
    assert run.guard.events[-1].fields["to_step"] == 5
    assert run.guard.last_checkpoint is None
    (undone,) = checkpoints(tmp_path / "run")
    assert (undone.step, undone.good, undone.undone) == (8, False, True), "seven healthy steps came after it"
    assert undone.trouble == "the run was rolled back to step 5"
    again = training(tmp_path / "run")
    again.guard.begin()
    assert again.engine.applied_steps == 0
    again.guard.close()
    finished_run = train(training(tmp_path / "run"), batches)
    assert torch.equal(weights(finished_run), weights(without(tmp_path / "without", data(24), [8, 9])))


def test_a_save_that_fails_while_the_run_goes_back_leaves_the_next_one_alone(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, 8, OSError(errno.ENOSPC, "No space left on device"))
    run = training(tmp_path, every="8 steps", keep=9)

    def opens(run):
        if run.guard._recovery.rollbacks:
            gate.open(run)
        return False

    train_until(run, data(30, bad=[8, 9]), opens, collects=False)
    assert told(run) == ["step-skipped", "rolled-back", "checkpoint-failed"]
    assert of_steps(tmp_path, "trouble") == {13: "", 21: "", 28: ""}
    assert of_steps(tmp_path, "good")[13]
    assert run.guard.last_checkpoint.step == 28


def test_a_save_of_a_step_that_stays_is_kept_and_so_is_the_next(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, 5)
    run = training(tmp_path, every="5 steps", keep=9)

    def opens(run):
        if run.guard._recovery.rollbacks:
            gate.open(run)
        return False

    train_until(run, data(20, bad=[8, 9]), opens, collects=False)
    assert run.guard.events[-1].fields["to_step"] == 5
    assert of_steps(tmp_path, "trouble") == {5: "", 10: "", 15: "", 18: ""}
    assert of_steps(tmp_path, "good")[5]


def test_a_kill_after_going_back_behind_all_checkpoints_begins_anew_and_ends_the_same(tmp_path):
    batches, patient = data(20, bad=[7, 8]), Ladder(skips=2, healthy=12)
    run = training(tmp_path / "run", every="3 steps", ladder=patient)
    assert train_until(run, batches, lambda run: run.guard._recovery.rollbacks)
    assert of_steps(tmp_path / "run", "undone") == {3: True, 6: True}
    assert run.guard.events[-1].fields["to_step"] == 0
    again = training(tmp_path / "run", ladder=patient, every="3 steps")  # with the seed of the program
    again.guard.begin()
    assert again.engine.applied_steps == 0
    train(again, batches)
    assert told(again) == []
    assert again.guard.passed_over == [(0, 7), (0, 8)]
    assert torch.equal(weights(again), weights(without(tmp_path / "without", data(20), [7, 8])))
    assert again.guard.last_checkpoint.step == 18


# Values that are not finite, and are meant so


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x):
        return torch.softmax(self.linear(x)[:4] + self.mask, -1)


def masked(directory, seed=1):
    torch.manual_seed(seed)
    model = Masked()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 0.01), "fp32", trace=False)
    guard = Guard(engine, directory, every="2 steps", ladder=Ladder(skips=2, healthy=3), snapshot_every=5)
    return SimpleNamespace(model=model, engine=engine, guard=guard, loss=lambda x: model(x).square().mean())


def test_a_mask_of_inf_is_saved_and_gone_on_with(tmp_path):
    assert train_until(masked(tmp_path / "run"), data(), lambda run: run.guard._number == 11)
    assert of_steps(tmp_path / "run", "step") == {10: 10, 8: 8, 6: 6}
    again = masked(tmp_path / "run", seed=2)
    again.guard.begin()
    assert again.engine.applied_steps == 10
    train(again, data())
    assert told(again) == []
    unbroken = train(masked(tmp_path / "unbroken"), data())
    assert torch.equal(again.model.linear.weight, unbroken.model.linear.weight)
    assert torch.equal(again.model.mask, unbroken.model.mask)


def test_a_mask_of_inf_is_no_reason_to_go_back(tmp_path):
    """No step was taken and no weight is bad: the state to go back to is this one."""
    run = masked(tmp_path)
    with pytest.raises(Stopped):
        train(run, [batch * NAN for batch in data(20)])
    assert told(run) == ["step-skipped", "training-stopped"]


def test_nan_in_a_buffer_is_not_saved(tmp_path):
    run = masked(tmp_path)
    with run.guard:
        run.guard.step(run.loss, data()[0])
        run.model.mask[0, 0] = NAN
        assert run.guard.save() is None
    assert set(told(run)) == {"weights-not-finite"}
    assert run.guard.events[0].fields["names"] == ("model.mask",)
    assert checkpoints(tmp_path) == []


def test_nan_in_a_buffer_on_disk_is_not_gone_on_from(tmp_path, monkeypatch):
    assert train_until(masked(tmp_path), data(), lambda run: run.guard._number == 3)
    run = masked(tmp_path)
    with monkeypatch.context() as careless:
        careless.setattr(saving, "non_finite_tensors", lambda *_: [])
        run.guard.begin()
        run.guard.step(run.loss, data()[0])
        run.model.mask[0, 0] = NAN
        assert run.guard.save().step == 3
        run.guard.close()
    again = masked(tmp_path)
    again.guard.begin()
    assert again.engine.applied_steps == 2
    assert told(again) == ["checkpoint-damaged"]
    assert "has inf or NaN in model.mask" in again.guard.events[0].message
    again.guard.close()


# How many are kept, and which


def test_one_becomes_good_though_newer_ones_push_it_out(tmp_path):
    run = train_collecting(training(tmp_path, every="2 steps", keep=2, ladder=Ladder(healthy=12)), data(40))
    good = [step for step, is_good in of_steps(tmp_path, "good").items() if is_good]
    assert good
    assert max(good) >= 40 - 2 * 12 - 2, "nor does it stay the only one"
    assert run.guard._checkpointing.last_good.step == max(good)
    assert len(checkpoints(tmp_path)) <= 4  # the newest, the good one, and the one that is next


def test_one_that_was_resumed_becomes_good_and_is_not_given_up_for_one_that_is_not_proven(tmp_path):
    ladder = Ladder(healthy=8)
    assert train_until(
        training(tmp_path, every="5 steps", keep=1, ladder=ladder), data(60), lambda run: run.guard._number == 6
    )
    assert of_steps(tmp_path, "good") == {5: False}
    kept = {}

    def note(run):
        kept[run.guard._number] = of_steps(tmp_path, "good")
        return run.guard._number == 22

    again = training(tmp_path, seed=2, every="15 steps", keep=1, ladder=ladder)
    assert train_until(again, data(60), note)
    assert kept[6] == {5: False}
    assert kept[14] == {5: True}
    assert kept[21] == {20: False, 5: True}
    third = training(tmp_path, seed=3, every="2 steps", keep=1, ladder=ladder)
    assert train_until(third, data(60), lambda run: note(run) or run.guard._number == 29)
    assert kept[22][5], "it stays until another is proven"
    again = training(tmp_path, seed=4, every="2 steps", keep=1, ladder=ladder)
    assert train_until(again, data(60), lambda run: run.guard._number == 45)
    assert 5 not in of_steps(tmp_path, "good")
    assert any(of_steps(tmp_path, "good").values())


def test_a_resumed_one_that_is_not_proven_outlives_those_after_it(tmp_path):
    """Every two steps one is written, and none is proven before ten: the one that is next to be is kept."""
    assert train_until(training(tmp_path, every="5 steps"), data(40), lambda run: run.guard._number == 6)
    again = training(tmp_path, seed=2, every="2 steps", keep=1, ladder=Ladder(healthy=10))
    assert train_until(again, data(40), lambda run: run.guard._number == 14)
    assert of_steps(tmp_path, "good") == {13: False, 5: False}


def test_a_bad_step_now_and_then_lets_nothing_pile_up(tmp_path):
    run = training(tmp_path, every="2 steps", snapshot_every=3, ladder=Ladder(healthy=10))
    counts = []

    def look(run):
        checkpointing = run.guard._checkpointing
        counts.append(
            (len(checkpointing.snapshots.kept), len(checkpointing._written), bytes_of(checkpointing.snapshots))
        )
        return False

    assert not train_until(run, data(63, bad=range(7, 63, 7)), look)  # never ten healthy ones in a row
    kept, jobs, size = (max(column) for column in zip(*counts, strict=True))
    assert kept <= 4
    assert jobs <= 2
    assert size <= 6 * bytes_of(run.guard._checkpointing.snapshots) / len(run.guard._checkpointing.snapshots.kept)
    assert [each[2] for each in counts][-1] <= max(each[2] for each in counts[:35])


# Where memory runs out


def with_optimizer(directory, optimizer, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = Engine(model, optimizer(model.parameters()), "fp32", trace=False)
    guard = Guard(engine, directory, **options)
    return SimpleNamespace(model=model, engine=engine, guard=guard, loss=lambda x: model(x).square().mean())


class Starved(torch.optim.SGD):
    """Writes half of an update, and runs out of memory."""

    left = 3

    @torch.no_grad()
    def step(self, closure=None):
        self.left -= 1
        first = self.param_groups[0]["params"][0]
        first.sub_(1.0)
        if not self.left:
            raise self.error("no room for the rest")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("split_allowed", [False, True])
def test_out_of_memory_within_an_update_is_raised_and_nothing_is_run_again(tmp_path, error, split_allowed):
    run = with_optimizer(tmp_path, lambda parameters: Starved(parameters, 0.1), split=split_allowed)
    run.engine.optimizers[0].error = error
    first = run.model[0].weight.detach().clone()
    seen = []
    with pytest.raises(error, match="no room for the rest"):
        train(run, data(5), seen=seen)
    assert len(seen) == 3
    assert torch.allclose(run.model[0].weight, first - 3)
    assert run.engine.applied_steps == 2
    assert checkpoints(tmp_path) == [], "a state that is half updated is no state"


def test_out_of_memory_for_a_copy_of_the_state_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    run = training(tmp_path / "run", every="4 steps")
    snapshots = run.guard._checkpointing.snapshots
    take = snapshots.take

    def starved(step, live):
        if step in (4, 5):  # for a checkpoint, and for a snapshot
            raise torch.OutOfMemoryError("no room for a copy")
        return take(step, live)

    monkeypatch.setattr(snapshots, "take", starved)
    train(run, data(8))
    assert told(run) == ["checkpoint-failed", "checkpoint-failed"]
    assert all("no room for a copy" in event.message for event in run.guard.events)
    assert [event.step for event in run.guard.events] == [4, 5]
    assert run.engine.applied_steps == 8
    plain = train(training(tmp_path / "plain"), data(8))
    assert torch.equal(weights(run), weights(plain)), "no step was taken twice"
    assert [each.step for each in checkpoints(tmp_path / "run")] == [8]


@pytest.mark.parametrize("split_allowed", [False, True])
def test_out_of_memory_when_a_step_is_judged_is_raised_as_it_is(tmp_path, monkeypatch, split_allowed):
    """The step is taken by then: there is nothing to run again."""
    run = training(tmp_path, split=split_allowed)

    def starved(facts):
        raise torch.OutOfMemoryError("no room to look at weights")

    monkeypatch.setattr(run.guard._recovery, "judge", starved)
    with pytest.raises(torch.OutOfMemoryError, match="no room to look at weights"):
        train(run, data(2))
    assert run.engine.applied_steps == 1
    assert told(run) == []


class Noted:
    """A loss that notes which batch it is of, and fails as it is told to."""

    def __init__(self, run):
        self.run, self.seen, self.fails = run, [], []

    def __call__(self, x, number):
        self.seen.append(number)
        if self.fails and self.fails[0][0] == number:
            raise self.fails.pop(0)[1]
        return self.run.loss(x)


def test_a_window_that_was_flushed_is_not_run_again(tmp_path):
    run = training(tmp_path, accumulate=2)
    loss, batches = Noted(run), data(6)
    with run.guard:
        for number in range(3):
            run.guard.step(loss, batches[number], number)
        run.engine.flush()
        loss.fails = [(3, torch.OutOfMemoryError("once"))]
        for number in (3, 4):
            step = run.guard.step(loss, batches[number], number)
    assert loss.seen == [0, 1, 2, 3, 3, 4]
    assert (step.closed, run.engine.applied_steps) == (True, 3)


def test_a_batch_that_was_refused_is_not_run_again(tmp_path):
    run = training(tmp_path)
    loss, batches = Noted(run), data(3)
    loss.fails = [(0, torch.OutOfMemoryError("there is")), (0, torch.OutOfMemoryError("no room"))]
    with run.guard:
        with pytest.raises(torch.OutOfMemoryError):
            run.guard.step(loss, batches[0], 0)
        loss.fails = [(1, torch.OutOfMemoryError("once"))]
        assert run.guard.step(loss, batches[1], 1).closed
    assert loss.seen == [0, 0, 1, 1]
    assert run.engine.applied_steps == 1


class Unlucky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")


@pytest.mark.parametrize(
    ("where", "again"),
    [("backward", [2]), ("forward", [0, 2])],  # the engine drops the window, or goes on with what is in it
)
def test_after_an_exception_the_window_is_what_the_engine_still_has(tmp_path, where, again):
    run = training(tmp_path, accumulate=3)
    loss, batches = Noted(run), data(6)

    def unlucky(x, number):
        if where == "forward":
            loss.seen.append(number)
            raise ValueError("in the forward pass")
        return Unlucky.apply(loss(x, number))

    with run.guard:
        run.guard.step(loss, batches[0], 0)
        with pytest.raises(ValueError, match=where):
            run.guard.step(unlucky, batches[1], 1)
        loss.fails = [(2, torch.OutOfMemoryError("once"))]
        run.guard.step(loss, batches[2], 2)
        run.engine.drop_window()
    assert loss.seen == [0, 1, 2, *again]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_fails_otherwise_the_second_time_is_not_run_again(tmp_path, accumulate):
    run = training(tmp_path, accumulate=accumulate)
    loss, batches = Noted(run), data(6)
    loss.fails = [(0, torch.OutOfMemoryError("first")), (0, ValueError("then"))]
    with run.guard:
        with pytest.raises(ValueError, match="then"):
            run.guard.step(loss, batches[0], 0)
        loss.fails = [(2, torch.OutOfMemoryError("once"))]
        run.guard.step(loss, batches[2], 2)
        run.engine.drop_window()
    assert loss.seen == [0, 0, 2, 2]


# Left in the middle of a window


@pytest.mark.parametrize("leaves_after", [5, 6, 7])
def test_a_loop_that_is_left_in_a_window_ends_quietly_and_goes_on_from_its_last_step(tmp_path, leaves_after, capsys):
    first = training(tmp_path / "run", accumulate=4, every="1 steps")
    with first.guard:
        for number, batch in enumerate(first.guard.batches(data(16))):
            first.guard.step(first.loss, batch)
            if number + 1 == leaves_after:
                break
    assert "the training ended in the middle of gradient accumulation, which is not saved" in capsys.readouterr().err
    assert of_steps(tmp_path / "run", "trouble") == {1: ""}
    seen = []
    second = train(training(tmp_path / "run", seed=2, accumulate=4), data(16), seen=seen)
    assert len(seen) == 12
    unbroken = train(training(tmp_path / "unbroken", accumulate=4), data(16))
    assert torch.equal(weights(second), weights(unbroken))


def test_a_loop_that_is_left_between_backward_and_apply_ends_quietly(tmp_path):
    run = training(tmp_path)
    with run.guard:
        for number, batch in enumerate(run.guard.batches(data(6))):
            with run.engine.autocast():
                loss = run.loss(batch)
            run.engine.backward(loss)
            if number == 3:
                break
            run.engine.apply()
    assert run.guard.events == []
    assert run.engine.applied_steps == 3
    assert checkpoints(tmp_path) == []


# Signals that come late


@pytest.fixture
def caught():
    """Signals that came through, which end a process otherwise."""
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_a_signal_after_the_last_step_is_heeded(tmp_path, caught):
    run = training(tmp_path, exit_code=5)

    def told_to_end():
        with run.guard:
            for batch in run.guard.batches(data(4)):
                run.guard.step(run.loss, batch)
            os.kill(os.getpid(), signal.SIGTERM)  # while it evaluates, say

    with pytest.raises(Stopped) as stopped:
        told_to_end()
    assert stopped.value.code == 5
    assert told(run) == ["preempted"]
    assert run.guard.last_checkpoint.step == 4
    assert caught == []


@pytest.mark.parametrize("error", [KeyError("mine"), None])
def test_a_signal_that_came_with_an_exception_is_passed_on(tmp_path, caught, error):
    run = training(tmp_path)
    with pytest.raises(KeyError) if error else contextlib.nullcontext(), run.guard:
        run.guard.step(run.loss, data()[0])
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == []
        if error is None:
            run.guard.close()
        else:
            raise error
    assert caught == [signal.SIGTERM]
    run.guard.close()
    assert caught == [signal.SIGTERM], "once"


def test_a_signal_that_was_heeded_is_not_passed_on(tmp_path, caught):
    run = training(tmp_path)

    def told_to_end():
        with run.guard:
            for batch in run.guard.batches(data(4)):
                os.kill(os.getpid(), signal.SIGTERM)
                run.guard.step(run.loss, batch)

    with pytest.raises(Stopped):
        told_to_end()
    assert caught == []


def test_alone_there_is_nobody_to_tell_that_one_is_alive(tmp_path):
    run = training(tmp_path, patience="1s")
    run.guard.alive()
    train(run, data(2))
    run.guard.alive()
    assert run.guard.events == []


# Back to disk


def damage(checkpoint):
    with (checkpoint.path / FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


# A bad step leads to a rung at once; the second time it is back to disk.
IMPATIENT = Ladder(skips=1, healthy=3, rollbacks=2)
SAVING = {"every": "4 steps", "keep": 20, "ladder": IMPATIENT, "engine": {"trace": False}}


def sources(run):
    return [event.fields.get("source") for event in run.guard.events]


def test_what_did_not_help_once_is_helped_from_disk(tmp_path):
    """Without trouble on the way there: the checkpoint of step 12 is the last good one before that of 16."""
    run = train_collecting(training(tmp_path / "run", **SAVING), data(40, bad=[20, 21]))
    assert sources(run) == ["memory", "disk"]
    assert [event.fields["to_step"] for event in run.guard.events] == [16, 12]
    assert torch.equal(weights(run), weights(without(tmp_path / "without", data(40), [20, 21])))


def test_a_damaged_checkpoint_on_the_way_back_is_reported_and_the_one_before_it_is_used(tmp_path):
    run = training(tmp_path / "run", **SAVING)

    def damages(run):
        if run.guard._recovery.rollbacks == 1 and told(run)[-1] == "rolled-back" and not damaged:
            damaged.extend(each for each in checkpoints(tmp_path / "run") if each.step == 12)
            damage(damaged[0])
        return False

    damaged = []
    train_until(run, data(40, bad=[20, 21]), damages)
    assert told(run) == ["rolled-back", "checkpoint-damaged", "rolled-back"]
    assert run.guard.events[1].message.endswith("; another state is used instead")
    assert sources(run) == ["memory", None, "disk"]
    assert run.guard.events[-1].fields["to_step"] == 8
    assert torch.equal(weights(run), weights(without(tmp_path / "without", data(40), [20, 21])))


@pytest.mark.half_by_day
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_all_older_checkpoints_are_damaged_memory_is_used(tmp_path, precision):
    run = training(tmp_path / "run", precision=precision, **SAVING)
    damaged = []

    def damages(run):
        if run.guard._recovery.rollbacks == 1 and not damaged:
            run.engine.change_precision("fp32")  # as someone may, for a reason
            damaged.extend(each for each in checkpoints(tmp_path / "run") if each.good and each.step < 16)
            for each in damaged:
                damage(each)
        return False

    train_until(run, data(40, bad=[20, 21]), damages)
    assert len(damaged) > 1
    assert told(run) == ["rolled-back", *["checkpoint-damaged"] * len(damaged), "rolled-back"]
    assert run.guard.events[-1].fields["source"] == "memory"
    assert run.engine.precision == "fp32"
    assert run.engine.applied_steps == 38
    if precision == "fp32":
        assert torch.equal(weights(run), weights(without(tmp_path / "without", data(40), [20, 21])))


@pytest.mark.nightly
def test_a_precision_that_was_widened_stays_so_when_the_run_goes_back_to_disk(tmp_path):
    run = train_collecting(training(tmp_path, precision="bf16", **SAVING), data(60, bad=[30, 31, 32, 33]))
    assert told(run) == ["rolled-back", "rolled-back", "precision-changed", "rolled-back", "rolled-back"]
    assert sources(run) == ["memory", "disk", None, "memory", "disk"]
    assert run.engine.precision == "fp32"
    assert run.engine.applied_steps == 56
    resumed = training(tmp_path, precision="bf16", **SAVING)
    resumed.guard.begin()
    assert resumed.engine.precision == "fp32"
    assert resumed.guard._recovery.standing.widened == 1
    resumed.guard.close()


def test_a_directory_that_cannot_be_listed_does_not_end_a_run_that_goes_back(tmp_path):
    directory = tmp_path / "run"
    run = training(directory, **SAVING)

    def removes(run):
        if run.guard._number == 18 and directory.is_dir():
            shutil.rmtree(directory)
            directory.write_text("")
        return False

    train_until(run, data(30, bad=[20, 21]), removes)
    assert [source for source in sources(run) if source] == ["memory", "memory"]
    assert set(told(run)) == {"rolled-back", "checkpoint-failed"}
    assert run.engine.applied_steps == 28
    assert run.guard.last_checkpoint is None
    assert torch.equal(weights(run), weights(without(tmp_path / "without", data(30), [20, 21])))


# And besides


@pytest.mark.parametrize("number", [2**63, 2**53 + 1])
def test_a_sealed_manifest_with_a_number_that_nothing_can_follow_is_refused(tmp_path, number):
    assert train_until(training(tmp_path, every="2 steps"), data(6), lambda run: run.guard._number == 5)
    newest = checkpoints(tmp_path)[0]
    forge(newest, lambda facts: facts.update(number=number))
    again = train(training(tmp_path, seed=2), data(6))
    assert told(again) == ["checkpoint-damaged"]
    assert again.guard.last_checkpoint.step == 6
    assert not again.guard.last_checkpoint.trouble
    third = training(tmp_path, seed=3)
    third.guard.begin()
    assert third.engine.applied_steps == 6
    third.guard.close()


@pytest.mark.parametrize("graphed", [False, True])
def test_an_engine_in_graphs_has_no_wider_precision(tmp_path, monkeypatch, graphed):
    monkeypatch.setattr(Engine, "precision_locked_because", property(lambda engine: "in graphs" if graphed else ""))
    run = training(tmp_path, precision="bf16", ladder=Ladder(skips=1, rollbacks=0), engine={"trace": False})
    with pytest.raises(Stopped):
        train(run, data(12, bad=[5]))
    assert told(run) == ["training-stopped"] if graphed else ["precision-changed", "training-stopped"]
    assert run.engine.precision == ("bf16" if graphed else "fp32")


def test_a_spike_that_comes_again_after_all_rollbacks_is_lived_with(tmp_path):
    batches = [batch * 1e3 if number in (70, 72, 74) else batch for number, batch in enumerate(data(90))]
    ladder = Ladder(healthy=3, rollbacks=1, on_spike="rollback")
    run = train(training(tmp_path, precision="bf16", ladder=ladder), batches)
    assert told(run)[:3] == ["loss-spike", "rolled-back", "loss-spike"]
    assert told(run).count("rolled-back") == 1
    assert run.guard.passed_over == [(0, 70)]
    assert run.engine.applied_steps == 89
    assert run.engine.precision == "bf16"


def averaged(directory, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), "fp32")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    guard = Guard(engine, directory, state={"ema": ema}, every="4 steps")
    return SimpleNamespace(model=model, engine=engine, ema=ema, guard=guard, loss=lambda x: model(x).square().mean())


def test_an_average_of_weights_goes_on_from_where_it_was(tmp_path):
    def train_both(run, ends=None):
        with contextlib.suppress(Killed), run.guard:
            for batch in run.guard.batches(data(12)):
                run.guard.step(run.loss, batch)
                run.ema.update_parameters(run.model)
                if run.guard._number == ends:
                    raise Killed
        return run

    unbroken = train_both(averaged(tmp_path / "unbroken", 1))
    train_both(averaged(tmp_path / "run", 1), ends=7)
    resumed = averaged(tmp_path / "run", 2)
    resumed.guard.begin()
    assert resumed.engine.applied_steps == 4
    train_both(resumed)
    assert int(resumed.ema.n_averaged) == 12
    for name, value in unbroken.ema.state_dict().items():
        assert torch.equal(resumed.ema.state_dict()[name], value), name


@pytest.mark.parametrize("device", ["cuda", "nowhere", 3, None])
def test_a_tensor_from_a_device_that_is_not_here_comes_back_in_memory(device):
    """A state of a machine with a GPU is read on one without; and a state may be forged."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    found = {}
    node = PlainEncoder(found).encode({"shadow": torch.ones(2)}, "ema")
    assert node["dict"]["shadow"]["ref"]["on"] == "cpu"
    node["dict"]["shadow"]["ref"]["on"] = device
    back = PlainDecoder(found, _device_here).decode(node)["shadow"]
    assert back.device.type == "cpu"
    assert torch.equal(back, torch.ones(2))
    assert back is not found["ema['shadow']"]


@pytest.mark.gpu
def test_a_tensor_comes_back_to_the_device_it_was_on():
    found = {}
    node = PlainEncoder(found).encode({"shadow": torch.ones(2, device="cuda")}, "ema")
    back = PlainDecoder({name: value.cpu() for name, value in found.items()}, _device_here).decode(node)
    assert back["shadow"].device.type == "cuda"
