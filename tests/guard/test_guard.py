"""A guard around a training: it begins, looks, saves, goes back and ends as it says."""

import gc
import os
import random
import signal
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampwise
from ampwise import BadInput, Engine, Guard, Ladder, Run, Stopped
from ampwise.guard.data_position import PASSED_OVER
from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.disk.lock import DirectoryLock

NAN = float("nan")
PATIENT = Ladder(skips=2, healthy=3)


@pytest.fixture(scope="module", autouse=True)
def small_operations_are_cheap():
    """oneDNN sets up for a millisecond where the multiplication takes ten microseconds."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(onednn)


def data(count=20, bad=()):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(count)]
    return [batch * NAN if number in bad else batch for number, batch in enumerate(batches)]


def training(directory, *, precision="fp32", seed=1, accumulate=1, engine=None, **options):
    """A model with dropout, its engine and a guard over them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    made = Engine(model, optimizer, precision, accumulate=accumulate, **(engine or {}))
    guard = Guard(made, directory, **{"snapshot_every": 5, "ladder": PATIENT, "every": "1000 steps", **options})

    def loss(x):
        return F.mse_loss(model(x).float(), x.sum(1, keepdim=True))

    return SimpleNamespace(model=model, optimizer=optimizer, engine=made, guard=guard, loss=loss)


def train(run, batches, *, epochs=1, seen=None):
    with run.guard:
        for batch in run.guard.batches(batches, epochs=epochs):
            if seen is not None:
                seen.append(batch)
            run.guard.step(run.loss, batch)
    return run


def told(run):
    names = [event.name for event in run.guard.events]
    return [name for name in names if name != "checkpoint-late"]  # a disk may be slow on the day


def weights(run):
    return torch.cat([each.detach().double().flatten() for each in run.model.state_dict().values()])


def free(directory):
    """Whether another run may have it."""
    lock = DirectoryLock(directory)
    lock.acquire()
    lock.release()
    return True


# Begin and end


def test_without_trouble_it_changes_nothing_and_leaves_one_checkpoint(tmp_path):
    run = train(training(tmp_path / "run"), data())
    plain = training(tmp_path / "unused")
    for batch in data():
        plain.engine.step(plain.loss, batch)
    assert torch.equal(weights(run), weights(plain))
    assert run.guard.events == []
    assert [each.step for each in checkpoints(tmp_path / "run")] == [20]
    assert run.guard.last_checkpoint.path == checkpoints(tmp_path / "run")[0].path
    assert not (tmp_path / "unused").exists()  # nothing is touched before it begins


def test_it_says_what_it_guards(tmp_path):
    run = training(tmp_path)
    assert repr(run.guard) == f"<Guard of <Engine in fp32 on cpu, AdamW> in {tmp_path}, step 0>"
    train(run, data(3))
    assert repr(run.guard) == f"<Guard of <Engine in fp32 on cpu, AdamW> in {tmp_path}, step 3>"


def test_it_is_what_the_package_names():
    assert ampwise.Guard is Guard
    assert ampwise.Ladder is Ladder


def test_it_begins_by_itself_once_and_ends_once(tmp_path):
    run = training(tmp_path)
    run.guard.step(run.loss, data()[0])
    run.guard.begin()
    with pytest.raises(BadInput, match="is in use by process"):
        free(tmp_path)
    run.guard.close()
    run.guard.close()
    assert free(tmp_path)
    assert checkpoints(tmp_path) == []  # close() begins none
    before = weights(run)
    for after in (run.guard.begin, run.guard.save, lambda: run.guard.step(run.loss, data()[0])):
        with pytest.raises(BadInput, match=r"^this guard is closed: create a new one\.$"):
            after()
    assert torch.equal(weights(run), before)


def test_one_that_never_began_ends_quietly(tmp_path):
    guard = training(tmp_path).guard
    guard.close()
    assert list(tmp_path.iterdir()) == []
    assert guard.last_checkpoint is None


def test_with_nothing_trained_nothing_is_saved(tmp_path):
    with training(tmp_path).guard:
        pass
    assert checkpoints(tmp_path) == []
    assert free(tmp_path)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_goes_through_and_everything_is_let_go(tmp_path, error):
    run = training(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def guarded():
        with run.guard:
            run.guard.step(run.loss, data()[0])
            assert signal.getsignal(signal.SIGTERM) != handler
            raise error

    with pytest.raises(type(error)) as raised:
        guarded()
    assert raised.value is error
    assert checkpoints(tmp_path) == []
    assert free(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert run.engine.scaler.collapses
    run.engine.step(run.loss, data()[1])
    assert run.guard.events == []


def test_a_guard_that_nobody_holds_any_more_lets_go_of_the_directory(tmp_path):
    run = training(tmp_path)
    run.guard.begin()
    del run
    gc.collect()
    assert free(tmp_path)


def test_one_guard_is_enough_and_a_second_leaves_it_alone(tmp_path):
    first = training(tmp_path / "first")
    first.guard.begin()
    second = Guard(first.engine, tmp_path / "second")
    for _ in range(2):
        with pytest.raises(BadInput) as refused:
            second.begin()
    assert "guard" in str(refused.value)
    assert not (tmp_path / "second").exists()
    for batch in data(3):
        first.guard.step(first.loss, batch)
    assert repr(first.guard).endswith("step 3>")
    assert first.engine.scaler.collapses is False
    first.guard.close()
    with Guard(first.engine, tmp_path / "third"):
        first.engine.step(first.loss, data()[0])
    assert len(checkpoints(tmp_path / "third")) == 1


def test_a_directory_that_another_has_is_refused_and_may_be_had_later(tmp_path):
    first = training(tmp_path)
    first.guard.begin()
    second = training(tmp_path)
    with pytest.raises(BadInput, match="Two runs would overwrite each other"):
        second.guard.begin()
    first.guard.close()
    again = Guard(second.engine, tmp_path)
    again.begin()
    again.close()


# What it is given


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": "often"}, "Guard(every='often'): expected a duration such as '10min', '90s', '2h'."),
        ({"every": "0 steps"}, "Guard(every='0 steps'): expected a whole number of steps, 1 or more."),
        ({"signal_grace": "soon"}, "Guard(signal_grace='soon'): expected a duration such as '10min', '90s', '2h'."),
        ({"patience": 0}, "Guard(patience=0): expected a duration such as '10min', '90s', '2h'."),
        ({"keep": 0}, "Guard(keep=0): expected a whole number, 1 or more."),
        ({"keep": True}, "Guard(keep=True): expected a whole number, 1 or more."),
        ({"snapshot_every": 1.5}, "Guard(snapshot_every=1.5): expected a whole number, 1 or more."),
        ({"snapshots_on": "disk"}, "Guard(snapshots_on='disk'): expected 'host' or 'device'."),
        ({"signals": ["TERM"]}, "Guard(signals=['TERM']): expected the name of a signal, such as 'SIGTERM'."),
        ({"signals": [15]}, "Guard(signals=[15]): expected the name of a signal, such as 'SIGTERM'."),
        ({"state": {"ema": 3}}, "Guard(state={'ema': ...}): int has no state_dict and load_state_dict."),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_touched(tmp_path, options, words):
    run = training(tmp_path / "fine")
    with pytest.raises(BadInput) as refused:
        Guard(run.engine, tmp_path / "run", **options)
    assert str(refused.value) == words
    assert not (tmp_path / "run").exists()
    assert run.guard not in run.engine.callbacks


def test_an_engine_is_expected(tmp_path):
    with pytest.raises(BadInput) as refused:
        Guard(nn.Linear(1, 1), tmp_path)
    assert str(refused.value) == "Guard(Linear): expected an ampwise.Engine, then the directory."


def test_who_is_reported_is_a_function(tmp_path):
    with pytest.raises(BadInput, match=r"^Guard\(on_event='mail me'\): expected a function that takes an event\.$"):
        training(tmp_path, on_event="mail me")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    run = training(tmp_path / "file" / "run")
    with pytest.raises(BadInput, match=r"cannot create this directory: Not a directory\.$"):
        run.guard.begin()
    assert run.guard not in run.engine.callbacks


def test_a_state_that_cannot_be_saved_is_refused_when_it_begins_and_not_in_an_hour(tmp_path):
    class Odd:
        def state_dict(self):
            return {"function": print}

        def load_state_dict(self, state):
            pass

    run = training(tmp_path, state={"odd": Odd()})
    with pytest.raises(BadInput, match=r"other.odd\['function'\] is a builtin_function_or_method"):
        run.guard.begin()
    assert free(tmp_path)
    assert run.guard not in run.engine.callbacks


# Saving and resuming


def test_every_so_many_steps(tmp_path):
    run = training(tmp_path, every="3 steps", keep=2)
    with run.guard:
        for batch in run.guard.batches(data(11)):
            run.guard.step(run.loss, batch)
            run.guard._checkpointing.collect(wait=True)
    assert [(each.step, each.good) for each in checkpoints(tmp_path)] == [(11, False), (9, False), (6, True)]
    assert run.guard.events == []


def test_save_writes_now_and_not_twice_the_same(tmp_path):
    run = training(tmp_path)
    run.guard.step(run.loss, data()[0])
    first = run.guard.save()
    assert (first.step, first.trouble) == (1, "")
    assert run.guard.save() == first == run.guard.last_checkpoint
    run.guard.step(run.loss, data()[1])
    assert run.guard.save().step == 2
    assert [each.step for each in checkpoints(tmp_path)] == [2, 1]
    run.guard.close()


def test_save_in_the_middle_of_a_window_is_refused(tmp_path):
    run = training(tmp_path, accumulate=2)
    run.guard.step(run.loss, data()[0])
    with pytest.raises(BadInput) as refused:
        run.guard.save()
    assert str(refused.value) == "guard.save() in the middle of gradient accumulation: save when step.closed is true."
    assert run.engine.accumulating
    run.guard.step(run.loss, data()[1])
    assert run.guard.save().step == 1
    run.guard.close()


@pytest.mark.half_by_day
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stop", [1, 7, 14])
def test_a_run_that_ends_and_goes_on_is_an_unbroken_one(tmp_path, stop, accumulate, capsys):
    def started(folder, seed):
        random.seed(seed)
        return training(tmp_path / folder, seed=seed, accumulate=accumulate)

    unbroken = train(started("unbroken", 1), data(8), epochs=2)
    first = started("run", 1)
    taken = 0
    with first.guard:
        for batch in first.guard.batches(data(8), epochs=2):
            taken += first.guard.step(first.loss, batch).closed
            if taken == min(stop, 5 if accumulate == 3 else stop):
                break
    second = train(started("run", 2), data(8), epochs=2)
    assert torch.equal(weights(second), weights(unbroken))
    assert second.engine.applied_steps == unbroken.engine.applied_steps
    assert second.guard.epoch == 1
    assert f"after step {taken:,}" in capsys.readouterr().err


def test_a_run_that_is_over_is_over_when_it_is_resumed(tmp_path):
    train(training(tmp_path), data(5))
    seen = []
    again = train(training(tmp_path, seed=2), data(5), seen=seen)
    assert seen == []
    assert again.guard.last_checkpoint.step == 5
    assert [each.step for each in checkpoints(tmp_path)] == [5]


def test_without_resuming_a_used_directory_is_refused_and_let_go(tmp_path):
    train(training(tmp_path), data(3))
    run = training(tmp_path, resume=False)
    with pytest.raises(BadInput) as refused:
        run.guard.begin()
    assert str(refused.value) == (
        f"Guard({str(tmp_path)!r}, resume=False): the directory has checkpoints. Name another directory, or "
        "resume from it: resume=True."
    )
    assert free(tmp_path)
    assert train(training(tmp_path / "new", resume=False), data(3)).guard.last_checkpoint.step == 3


def test_other_batches_than_those_of_guard_batches_are_the_users_to_place(tmp_path):
    run = training(tmp_path)
    with run.guard:
        for batch in data(4):
            run.guard.step(run.loss, batch)
    again = training(tmp_path, seed=2)
    with again.guard:
        assert again.engine.applied_steps == 4
        for batch in data(8)[4:]:
            again.engine.step(again.loss, batch)  # guarded as well
    assert again.guard.last_checkpoint.step == 8


def test_batches_are_handed_out_once(tmp_path):
    run = training(tmp_path)
    run.guard.batches(data())
    with pytest.raises(BadInput, match=r"guard\.batches\(\) was already called"):
        run.guard.batches(data())
    run.guard.close()


def test_a_checkpoint_is_good_when_healthy_steps_came_after_it(tmp_path):
    run = training(tmp_path, every="4 steps", keep=9)
    good = []
    with run.guard:
        for batch in run.guard.batches(data(9)):
            run.guard.step(run.loss, batch)
            run.guard._checkpointing.collect(wait=True)
            good.append([each.step for each in checkpoints(tmp_path) if each.good])
    assert good[5] == []
    assert good[-1] == [4]  # three healthy steps after it, and one after the other


def test_a_checkpoint_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path, capsys):
    run = training(tmp_path / "run", every="5 steps")
    with run.guard:
        for number, batch in enumerate(run.guard.batches(data(12))):
            if number == 7:
                (tmp_path / "run").rename(tmp_path / "elsewhere")
                (tmp_path / "run").write_text("a file in its place")
            run.guard.step(run.loss, batch)
            run.guard._checkpointing.collect(wait=True)
    assert told(run) == ["checkpoint-failed", "checkpoint-failed"]
    assert run.engine.applied_steps == 12
    assert [each.step for each in checkpoints(tmp_path / "elsewhere")] == [5]
    assert "training continues" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_not_saved(tmp_path, capsys):
    run = training(tmp_path, every="4 steps", ladder=Ladder(skips=50))
    with run.guard:
        for number, batch in enumerate(run.guard.batches(data(9))):
            if number == 6:
                with torch.no_grad():
                    run.model[4].bias.fill_(NAN)
            run.guard.step(run.loss, batch)
            run.guard._checkpointing.collect(wait=True)
    assert "weights-not-finite" in told(run)
    assert [each.step for each in checkpoints(tmp_path)] == [4]
    capsys.readouterr()


# The ladder


@pytest.fixture(params=[0, 1], ids=["at once", "a step late"])
def lag(request):
    """When the host knows of a step: on a GPU when the next is under way."""
    return request.param


def lagging(run, lag):
    run.guard._lag = lag
    return run


def test_a_bad_batch_is_skipped_and_reported(tmp_path, lag, capsys):
    run = train(lagging(training(tmp_path), lag), data(12, bad=[6]))
    assert told(run) == ["step-skipped"]
    assert run.guard.events[0].step == 7
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (11, 1)
    assert run.guard.passed_over == []
    assert run.guard.last_checkpoint.step == 12
    capsys.readouterr()


@pytest.mark.half_by_day
@pytest.mark.parametrize("bad", [(10, 11), (18, 19)], ids=["in the middle", "at the end"])
def test_batches_that_fail_are_passed_over_and_nothing_else_is_lost(tmp_path, lag, bad, capsys):
    """Also when it is the last ones that fail, which is known after the data has ended."""
    run = train(lagging(training(tmp_path / "run"), lag), data(20, bad))
    assert told(run) == ["step-skipped", "rolled-back"]
    assert run.guard.passed_over == [(0, number) for number in bad]
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (18, 0)
    without = training(tmp_path / "without")
    train(without, [batch for number, batch in enumerate(data(20)) if number not in bad])
    assert run.engine.applied_steps == without.engine.applied_steps
    assert torch.equal(weights(run), weights(without))
    assert run.guard.last_checkpoint.step == 18
    capsys.readouterr()


def test_a_resumed_run_passes_over_the_same_batches(tmp_path, capsys):
    unbroken = train(training(tmp_path / "unbroken"), data(12, [6, 7]), epochs=2)
    first, steps = training(tmp_path / "run"), 0
    with first.guard:
        for batch in first.guard.batches(data(12, [6, 7]), epochs=2):
            first.guard.step(first.loss, batch)
            steps += 1
            if steps == 14:
                break
    assert (tmp_path / "run" / PASSED_OVER).exists()
    second = train(training(tmp_path / "run", seed=2), data(12, [6, 7]), epochs=2)
    assert second.guard.passed_over == unbroken.guard.passed_over == [(0, 6), (0, 7), (1, 6), (1, 7)]
    assert torch.equal(weights(second), weights(unbroken))
    capsys.readouterr()


class Shuffles:
    """A sampler with random numbers of its own."""

    def __init__(self):
        self.rng = random.Random(0)

    def __iter__(self):
        order = list(range(12))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self):
        return 12


def test_a_sampler_with_random_numbers_of_its_own_goes_on_as_in_an_unbroken_run(tmp_path, capsys):
    samples = torch.cat(data(2))

    def loader():
        return torch.utils.data.DataLoader(samples, 2, sampler=Shuffles())

    expected, seen = [], []
    unbroken = train(training(tmp_path / "unbroken"), loader(), epochs=3, seen=expected)
    first = training(tmp_path / "run")
    with first.guard:
        for batch in first.guard.batches(loader(), epochs=3):
            seen.append(batch)
            first.guard.step(first.loss, batch)
            if len(seen) == 9:
                break
    second = train(training(tmp_path / "run", seed=2), loader(), epochs=3, seen=seen)
    assert torch.equal(torch.cat(seen), torch.cat(expected))
    assert torch.equal(weights(second), weights(unbroken))
    assert "differs" not in capsys.readouterr().err


@pytest.mark.half_by_day
def test_in_a_loop_of_the_users_own_the_state_goes_back_and_the_data_goes_on(tmp_path, lag, capsys):
    run = lagging(training(tmp_path), lag)
    with run.guard:
        for batch in data(20, bad=[10, 11]):
            run.guard.step(run.loss, batch)
    assert told(run) == ["step-skipped", "rolled-back"]
    assert run.guard.events[1].fields["rewound"] is False
    assert run.guard.passed_over == []
    assert run.engine.applied_steps == 20 - 2 - (10 - 5 if lag == 0 else 10 - 5 + 1)
    capsys.readouterr()


def test_with_micro_batches_all_of_the_window_are_passed_over(tmp_path, capsys):
    run = train(training(tmp_path, accumulate=2, snapshot_every=2), data(20, bad=[10, 13]))
    assert told(run) == ["step-skipped", "rolled-back"]
    assert run.guard.passed_over == [(0, 10), (0, 11), (0, 12), (0, 13)]
    assert (run.engine.applied_steps, run.engine.skipped_steps) == (8, 0)
    capsys.readouterr()


@pytest.mark.half_by_day
def test_where_nothing_helps_it_stops_with_code_70_a_capsule_and_the_last_good_state(tmp_path, lag, capsys):
    run = lagging(training(tmp_path, every="5 steps"), lag)
    with pytest.raises(Stopped) as stopped:
        train(run, data(60, bad=range(20, 60)))
    assert stopped.value.code == 70
    assert str(stopped.value) == run.guard.events[-1].message
    assert told(run)[-1] == "training-stopped"
    assert [finding.rule.code for finding in run.guard.findings] == ["AMP807"]
    assert run.guard.findings[0].evidence["capsule"] == run.guard.events[-1].fields["capsule"]
    assert list((tmp_path / "capsules").iterdir())
    assert weights(run).isfinite().all()
    assert free(tmp_path)
    assert "training was stopped" in capsys.readouterr().err


def test_a_bad_step_long_before_does_not_cost_the_capsule(tmp_path, lag, capsys):
    """Only the 1st, 2nd, 4th, 8th bad step is replayed: the one to save would be the 3rd."""
    run = lagging(training(tmp_path), lag)
    with pytest.raises(Stopped):
        train(run, data(60, bad=[3, *range(20, 60)]))
    assert run.guard.findings[-1].evidence["capsule"]
    capsys.readouterr()


def test_a_single_bad_step_is_not_saved(tmp_path, lag, capsys):
    run = train(lagging(training(tmp_path), lag), data(20, bad=[5, 12]))
    assert told(run) == ["step-skipped", "step-skipped"]
    assert not (tmp_path / "capsules").exists()
    capsys.readouterr()


def test_code_70_is_that_of_the_process(tmp_path, warm):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import torch
        from ampwise import Engine, Guard, Ladder
        model = torch.nn.Linear(4, 1)
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
        ladder = Ladder(skips=1, rollbacks=0, change_precision=False)
        with Guard(engine, "run", ladder=ladder) as guard:
            for batch in guard.batches([torch.ones(2, 4) * float("nan")] * 3):
                guard.step(lambda x: model(x).mean(), batch)
        print("never here")
        """)
    )
    done = warm.run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (70, "")
    assert "AMP807" in done.stderr


def test_under_ampwise_run_events_are_in_the_record(tmp_path, warm):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import torch
        from ampwise import Engine, Guard, Ladder
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), precision="fp32")
        batches = [torch.ones(2, 4) * (float("nan") if number in (6, 7) else 1.0) for number in range(12)]
        with Guard(engine, "checkpoints", snapshot_every=2, ladder=Ladder(skips=2, healthy=2)) as guard:
            for batch in guard.batches(batches):
                guard.step(lambda x: model(x).square().mean(), batch)
        """)
    )
    done = warm.run("-m", "ampwise", "run", "-o", "record", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = Run.read(tmp_path / "record")
    assert "bad-batch" in {seen.finding.rule.name for seen in record.findings}
    assert [(event.name, event.step) for event in record.events] == [("step-skipped", 7), ("rolled-back", 8)]
    assert "rolled-back at step 8: rolled back" in " ".join(done.stderr.split())


# Less memory


class Cramped:
    """A loss for which a batch of more than so many rows has no room."""

    def __init__(self, run, room, error=torch.OutOfMemoryError):
        self.run, self.room, self.error, self.rows = run, room, error, []

    def __call__(self, x):
        self.rows.append(len(x))
        if len(x) > self.room:
            raise self.error("no room for this batch\nand more words")
        return self.run.loss(x)


@pytest.mark.half_by_day
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_batch_that_has_no_room_is_cut_in_halves_and_in_halves_again(tmp_path, error, capsys):
    run = training(tmp_path, split=True)
    run.model[1].eval()  # as a piece may be one row, of which there are no statistics
    loss = Cramped(run, room=2, error=error)
    with run.guard:
        for batch in run.guard.batches(data(3)):
            assert run.guard.step(loss, batch).closed
    # As it is, and once more with memory let go; in 2; in 4, of which each is small enough. Then at once.
    assert loss.rows == [6, 6, 3, *[2, 1, 2, 1] * 3]
    assert told(run) == ["out-of-memory", "out-of-memory"]
    assert [event.fields["pieces"] for event in run.guard.events] == [2, 4]
    assert "no room for this batch" in run.guard.events[0].message
    assert "and more words" not in run.guard.events[0].message
    assert run.engine.applied_steps == 3
    capsys.readouterr()


def test_in_the_middle_of_a_window_the_whole_of_it_is_run_again(tmp_path, capsys):
    run, alike = training(tmp_path / "run", accumulate=3, split=True), training(tmp_path / "alike", accumulate=3)
    for each in (run, alike):
        for module in each.model:
            module.train(not isinstance(module, nn.BatchNorm1d | nn.Dropout))  # which see pieces
    batches = [batch[:2] for batch in data(2)] + data(3)[2:]
    loss = Cramped(run, room=3)
    with run.guard:
        steps = [run.guard.step(loss, batch) for batch in batches]
    assert [step.closed for step in steps] == [False, False, True]
    assert loss.rows == [2, 2, 6, 2, 2, 6, 1, 1, 1, 1, 3, 3]
    with alike.guard:
        for batch in batches:
            alike.guard.step(alike.loss, batch)
    assert torch.allclose(weights(run), weights(alike), atol=1e-6)
    capsys.readouterr()


def test_what_has_room_the_second_time_is_no_finding(tmp_path):
    run = training(tmp_path)
    failures = [torch.OutOfMemoryError("once")]

    def loss(x):
        if failures:
            raise failures.pop()
        return run.loss(x)

    with run.guard:
        assert run.guard.step(loss, data()[0]).closed
    assert run.guard.events == []


def test_without_leave_to_split_it_is_reported_and_raised(tmp_path, capsys):
    run = training(tmp_path)
    with pytest.raises(torch.OutOfMemoryError), run.guard:
        run.guard.step(Cramped(run, room=2), data()[0])
    assert told(run) == ["out-of-memory"]
    assert run.guard.events[0].fields["splits"] is False
    assert free(tmp_path)
    capsys.readouterr()


def test_a_row_that_has_no_room_is_the_end(tmp_path, capsys):
    run = training(tmp_path, split=True)
    loss = Cramped(run, room=0)
    with pytest.raises(torch.OutOfMemoryError), run.guard:
        run.guard.step(loss, data()[0])
    assert loss.rows == [6, 6, 3, 2, 1]
    assert [event.fields["splits"] for event in run.guard.events] == [True, True, True, False]
    capsys.readouterr()


# Signals


def test_a_signal_is_heeded_when_the_step_is_over(tmp_path, capsys):
    run, steps = training(tmp_path, exit_code=3), []
    before = signal.getsignal(signal.SIGTERM)

    def told_to_end():
        with run.guard:
            for batch in run.guard.batches(data()):
                if len(steps) == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                steps.append(run.guard.step(run.loss, batch))

    with pytest.raises(Stopped) as stopped:
        told_to_end()
    assert stopped.value.code == 3
    assert len(steps) == 5  # the fifth was finished, and what comes after it; then the loop ended
    assert run.guard.last_checkpoint.step == 5
    assert told(run) == ["preempted"]
    assert run.guard.events[0].fields["signal"] == "SIGTERM"
    signal.signal(signal.SIGTERM, before)  # the guard still expects duplicates
    assert free(tmp_path)
    second = train(training(tmp_path, seed=2), data())
    assert signal.getsignal(signal.SIGTERM) == before
    assert torch.equal(weights(second), weights(train(training(tmp_path / "unbroken"), data())))
    capsys.readouterr()


def test_a_signal_in_the_middle_of_a_window_waits_for_its_end(tmp_path, capsys):
    run, taken = training(tmp_path, accumulate=3, signals=["SIGUSR1"]), []

    def told_to_end():
        with run.guard:
            for batch in run.guard.batches(data(9)):
                taken.append(batch)
                if len(taken) == 4:
                    os.kill(os.getpid(), signal.SIGUSR1)
                run.guard.step(run.loss, batch)

    with pytest.raises(Stopped) as stopped:
        told_to_end()
    assert (stopped.value.code, len(taken)) == (0, 6)
    assert run.guard.last_checkpoint.step == 2
    capsys.readouterr()


@pytest.fixture
def came_through():
    """Signals that the guard let through, which end a process otherwise."""
    signals, caught = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), []
    before = {
        each: signal.signal(each, lambda number, frame: caught.append(signal.Signals(number).name)) for each in signals
    }
    yield caught
    for each, handler in before.items():
        signal.signal(each, handler)


SECOND = [
    # A scheduler signals all processes, and torchrun's agent forwards it: one request.
    (["SIGTERM", "SIGTERM"], "30s", []),
    (["SIGTERM", "SIGTERM", "SIGTERM"], "30s", []),
    (["SIGUSR1", "SIGTERM"], "30s", []),
    (["SIGINT", "SIGTERM"], "30s", []),
    # Somebody is in a hurry.
    (["SIGINT", "SIGINT"], "30s", ["SIGINT"]),
    (["SIGTERM", "SIGINT"], "30s", ["SIGINT"]),
    # Long after the first.
    (["SIGTERM", "SIGTERM"], 1e-9, ["SIGTERM"]),
    (["SIGUSR1", "SIGTERM"], 1e-9, ["SIGTERM"]),
]


@pytest.mark.parametrize(("sent", "grace", "expected"), SECOND)
def test_a_second_signal_is_part_of_the_first_unless_it_is_late_or_somebody_presses_ctrl_c_again(
    tmp_path, came_through, sent, grace, expected
):
    run = training(tmp_path, signals=["SIGTERM", "SIGINT", "SIGUSR1"], signal_grace=grace)
    run.guard.begin()
    os.kill(os.getpid(), signal.Signals[sent[0]])
    assert came_through == []
    for name in sent[1:]:
        os.kill(os.getpid(), signal.Signals[name])
    assert came_through == expected
    run.guard.close()
    assert came_through == [*expected, sent[0]], "nothing heeded the first, which is passed on"


@pytest.mark.parametrize(("grace", "expected"), [("30s", []), (1e-9, ["SIGTERM"])])
def test_a_duplicate_that_comes_after_the_guard_has_saved_does_not_end_the_program_half_way(
    tmp_path, came_through, grace, expected, capsys
):
    """It cleans up then: other ranks wait for it, loggers send the rest."""
    run = training(tmp_path, signal_grace=grace)
    with pytest.raises(Stopped):
        train(run, Loader([], fails_at=4))
    os.kill(os.getpid(), signal.SIGTERM)
    assert came_through == expected
    capsys.readouterr()


class Loader:
    """Notes what was fetched, and fails where it is told to."""

    def __init__(self, fetched, fails_at=None):
        self._fetched, self._fails_at = fetched, fails_at

    def __iter__(self):
        for number, batch in enumerate(data()):
            if number == self._fails_at:
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
            self._fetched.append(batch)
            yield batch


def test_alone_a_signal_during_an_evaluation_ends_before_another_batch_is_fetched(tmp_path, came_through, capsys):
    run, fetched = training(tmp_path), []

    def told_to_end():
        with run.guard:
            for number, batch in enumerate(run.guard.batches(Loader(fetched))):
                run.guard.step(run.loss, batch)
                if number == 4:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        told_to_end()
    assert len(fetched) == run.guard.last_checkpoint.step == 5
    capsys.readouterr()


@pytest.mark.half_by_day
@pytest.mark.parametrize(("accumulate", "fails_at", "saves"), [(1, 5, True), (1, 0, True), (3, 6, True), (3, 7, False)])
def test_a_signal_that_ends_the_workers_of_a_loader_ends_the_run_in_order(
    tmp_path, came_through, accumulate, fails_at, saves, capsys
):
    """While a batch is waited for; but in the middle of a window there is no place to go on from."""
    run = training(tmp_path, accumulate=accumulate)
    with pytest.raises(Stopped if saves else RuntimeError):
        train(run, Loader([], fails_at))
    assert came_through == ([] if saves else ["SIGTERM"])
    if saves:
        assert run.guard.last_checkpoint.step == fails_at // accumulate
        second = train(training(tmp_path, seed=2, accumulate=accumulate), Loader([]))
        unbroken = train(training(tmp_path / "unbroken", accumulate=accumulate), Loader([]))
        assert torch.equal(weights(second), weights(unbroken))
    capsys.readouterr()


def test_in_another_thread_it_guards_without_signals(tmp_path):
    run, before, ended = training(tmp_path), signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: ended.append(train(run, data(3))))
    thread.start()
    thread.join()
    assert ended
    assert signal.getsignal(signal.SIGTERM) == before
    assert run.guard.last_checkpoint.step == 3


# Who is told


def test_a_function_is_reported_of_every_event(tmp_path, capsys):
    got = []
    run = train(training(tmp_path, on_event=got.append), data(20, bad=[10, 11]))
    assert [event.name for event in got] == ["step-skipped", "rolled-back"]
    assert got == run.guard.events
    assert run.guard.findings == []  # nothing to act on
    assert "ampwise: step 12: rolled back " in capsys.readouterr().err


def test_of_what_comes_again_and_again_few_are_printed_and_all_are_kept(tmp_path, capsys):
    run = training(tmp_path, engine={"trace": False})
    train(run, data(20, bad=range(1, 20, 2)))
    assert told(run) == ["step-skipped"] * 10
    assert capsys.readouterr().err.count("the step was skipped") == 4  # the 1st, 2nd, 4th, 8th


# Before this run


def test_the_lock_of_a_run_that_was_killed_is_taken_over_and_reported(tmp_path, warm, capsys):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, signal, torch
        from ampwise import Engine, Guard
        model = torch.nn.Linear(4, 1)
        guard = Guard(Engine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32"), "run")
        guard.begin()
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    assert warm.run("train.py", cwd=tmp_path).returncode == -signal.SIGKILL
    run = train(training(tmp_path / "run"), data(2))
    assert told(run) == ["lock-taken-over"]
    assert "by process" in run.guard.events[0].message
    capsys.readouterr()


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_gone_on_from(tmp_path, capsys):
    run = train(training(tmp_path, every="4 steps"), data(8))
    newest = run.guard.last_checkpoint
    with (newest.path / "tensors-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    again = training(tmp_path, seed=2)
    again.guard.begin()
    assert told(again) == ["checkpoint-damaged"]
    assert again.engine.applied_steps == 4
    again.guard.close()
    capsys.readouterr()


# Where it goes back to


@pytest.mark.half_by_day
def test_before_the_first_snapshot_it_goes_back_to_the_beginning_of_the_data(tmp_path, lag, capsys):
    seen = []
    run = train(lagging(training(tmp_path / "run"), lag), data(10, bad=[2, 3]), seen=seen)
    assert run.guard.passed_over == [(0, 2), (0, 3)]
    assert run.guard.events[-1].fields["to_step"] == 0
    assert run.engine.applied_steps == 8
    without = train(
        training(tmp_path / "without"), [batch for number, batch in enumerate(data(10)) if number not in (2, 3)]
    )
    assert torch.equal(weights(run), weights(without))
    capsys.readouterr()


def test_a_resumed_run_goes_back_to_where_it_was_resumed(tmp_path, capsys):
    first, bad = training(tmp_path / "run"), data(12, bad=[8, 9])
    with first.guard:
        for number, batch in enumerate(first.guard.batches(bad)):
            first.guard.step(first.loss, batch)
            if number == 6:
                break
    second = train(training(tmp_path / "run", seed=2), bad)
    assert second.guard.events[-1].fields["to_step"] == 7
    without = train(
        training(tmp_path / "without"), [batch for number, batch in enumerate(data(12)) if number not in (8, 9)]
    )
    assert torch.equal(weights(second), weights(without))
    capsys.readouterr()


def test_a_run_that_saves_before_it_has_its_data_keeps_its_place(tmp_path, capsys):
    first = training(tmp_path)
    with first.guard:
        for number, batch in enumerate(first.guard.batches(data(6))):
            first.guard.step(first.loss, batch)
            if number == 2:
                break
    second = training(tmp_path, seed=2)
    with second.guard:
        second.guard.step(second.loss, data()[0])  # a step of its own
        second.guard.save()
    seen = []
    train(training(tmp_path, seed=3), data(6), seen=seen)
    assert len(seen) == 3
    capsys.readouterr()


def test_trouble_that_stays_where_it_is_ends_though_steps_before_it_go_well_each_time(tmp_path, capsys):
    """Ten healthy steps lie between the state to go back to and the step that fails; three would do elsewhere."""
    run = training(tmp_path, snapshot_every=100, ladder=Ladder(skips=2, healthy=3, rollbacks=2, change_precision=False))
    with pytest.raises(Stopped):
        train(run, data(200, bad=range(10, 200)))
    assert told(run).count("rolled-back") == 2
    capsys.readouterr()


@pytest.mark.parametrize("on_spike", ["tell", "rollback"])
def test_a_spike_is_reported_and_gone_back_from_if_asked(tmp_path, on_spike, capsys):
    batches = data(90)
    batches[70] = batches[70] * 1e3
    run = train(training(tmp_path, ladder=Ladder(healthy=3, on_spike=on_spike)), batches)
    assert told(run) == ["loss-spike"] + ["rolled-back"] * (on_spike == "rollback")
    assert run.guard.passed_over == ([(0, 70)] if on_spike == "rollback" else [])
    assert run.engine.applied_steps == (89 if on_spike == "rollback" else 90)
    capsys.readouterr()


@pytest.mark.nightly
def test_a_model_that_fp16_cannot_hold_ends_in_a_wider_precision(tmp_path, capsys):
    run = training(tmp_path / "run", precision="fp16", engine={"scaling": {"init_scale": 4.0}}, every="5 steps")
    with torch.no_grad():
        run.model[0].weight *= 1e5  # beyond 65504, and BatchNorm makes it small again
    train(run, data(30))
    assert "precision-changed" in told(run)
    assert run.engine.precision == "bf16" or run.engine.policy.rules
    assert run.engine.applied_steps > 15
    assert not run.engine.history[-1].skipped
    resumed = training(tmp_path / "run", precision="fp16", seed=2)
    resumed.guard.begin()
    assert resumed.engine.policy == run.engine.policy
    assert resumed.guard._recovery.standing.widened == run.guard._recovery.standing.widened > 0
    resumed.guard.close()
    capsys.readouterr()


@pytest.mark.nightly
def test_after_a_healthy_stretch_the_precision_before_is_tried_again_if_asked(tmp_path, capsys):
    run = training(tmp_path, precision="fp16", ladder=Ladder(skips=2, healthy=3, climb_after=10, rollbacks=0))
    wild = [True]

    def loss(x):
        return run.loss(x) + (run.model[0](x) * 1e6).mean() if wild else run.loss(x)

    with run.guard:
        for number, batch in enumerate(run.guard.batches(data(40))):
            run.guard.step(loss, batch)
            if number == 4:
                wild.clear()  # what FP16 cannot hold
    assert [name for name in told(run) if name != "step-skipped"] == ["precision-changed", "climbed-back"]
    assert (run.engine.precision, run.engine.policy.rules) == ("fp16", ())
    capsys.readouterr()


# What the user keeps besides


class Ema:
    def __init__(self, model):
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def update(self, model):
        for mine, theirs in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = list(state["shadow"])


def with_ema(directory, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), "fp32")
    ema = Ema(model)
    guard = Guard(engine, directory, state={"ema": ema}, every="4 steps")
    return SimpleNamespace(model=model, engine=engine, ema=ema, guard=guard, loss=lambda x: model(x).square().mean())


def test_weights_that_follow_after_each_step_are_those_of_an_unbroken_run(tmp_path, capsys):
    def train_both(run, fails_at=None):
        with run.guard:
            for number, batch in enumerate(run.guard.batches(data(8))):
                run.guard.step(run.loss, batch)
                run.ema.update(run.model)
                run.guard._checkpointing.collect(wait=True)
                if number == fails_at:
                    raise ArithmeticError
        return run

    unbroken = train_both(with_ema(tmp_path / "unbroken", 1))
    with pytest.raises(ArithmeticError):
        train_both(with_ema(tmp_path / "run", 1), fails_at=5)
    resumed = train_both(with_ema(tmp_path / "run", 2))
    capsys.readouterr()
    assert torch.equal(resumed.model.weight, unbroken.model.weight)
    assert all(map(torch.equal, resumed.ema.shadow, unbroken.ema.shadow))


def test_a_checkpoint_of_steps_that_were_undone_is_not_gone_on_from(tmp_path, capsys):
    run, steps = training(tmp_path, every="4 steps"), []

    def broken_off():
        with run.guard:
            for batch in run.guard.batches(data(20, bad=[13, 14])):
                steps.append(run.guard.step(run.loss, batch))
                run.guard._checkpointing.collect(wait=True)
                if run.guard.passed_over:
                    raise ArithmeticError

    with pytest.raises(ArithmeticError):
        broken_off()
    assert run.guard.events[-1].fields["to_step"] == 10
    undone = {each.step: each.trouble for each in checkpoints(tmp_path)}
    assert undone == {12: "the run was rolled back to step 10", 8: "", 4: ""}
    second = training(tmp_path, seed=2)
    second.guard.begin()
    assert second.engine.applied_steps == 8
    second.guard.close()
    capsys.readouterr()
