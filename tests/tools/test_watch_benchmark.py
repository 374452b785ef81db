"""Contenders train alike, see what they are said to see, and are watched in their own turns. Speed is not tested."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from benchmarks import harness, watch, watch_contenders
from benchmarks.contenders import Task
from benchmarks.gpt import GPT_ONE_LAYER
from benchmarks.harness import Times, alternate
from benchmarks.watch_contenders import (
    ENGINE,
    ENGINE_RUN,
    PLAIN,
    RUN,
    DebugHooks,
    HistogramHooks,
    Loop,
    ParameterLoop,
    demo_task,
    engine_alone,
    engine_watched,
    unwatched,
    watched,
    watched_turn,
)

NANO = Task(
    shape=replace(GPT_ONE_LAYER, width=16, vocabulary=16, length=4, batch=2), precision="fp16", device="cpu", clip=1.0
)
TURNS = watch.Turns(1, 1)


STEPS = 6


@pytest.fixture
def trained(monkeypatch):
    """Of a contender's first steps, each loss and the weights it was computed with, as exact numbers."""
    trainee, seen = Task.trainee, []

    def remembered(self):
        made = trainee(self)
        made[0].register_forward_hook(lambda model, given, loss: seen.append([loss.item(), *numbers(model)]))
        return made

    def numbers(model):
        return [parameter.tolist() for parameter in model.parameters()]

    def train(make):
        contender = make(NANO)
        seen.clear()
        with contender.around():
            for _ in range(STEPS):
                contender.work()
        assert seen[0] != seen[1], "it has not trained"
        return seen[:STEPS]

    monkeypatch.setattr(Task, "trainee", remembered)
    return train


class FakeWatch:
    """Knows when it is installed, and refuses to be so twice."""

    installed, count = 0, 0

    def __init__(self):
        self.failures = []

    @property
    def steps(self):
        FakeWatch.count += 1
        return FakeWatch.count

    def install(self):
        assert not FakeWatch.installed
        FakeWatch.installed += 1

    def remove(self):
        FakeWatch.installed -= 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeWatch, "installed", 0)
    monkeypatch.setattr(watch_contenders, "new_watch", FakeWatch)


# They train alike


@pytest.mark.half_by_day
@pytest.mark.parametrize("make", [watched, *watch.OTHERS], ids=lambda make: make.__name__)
def test_whoever_looks_leaves_losses_and_weights_bit_equal(make, trained):
    assert trained(make) == trained(unwatched)


def test_the_engine_watched_leaves_losses_and_weights_bit_equal(trained):
    assert trained(engine_watched) == trained(engine_alone)


def test_the_engine_trains_as_the_loop_by_hand(trained):
    (*_, (by_engine, *_)), (*_, (by_hand, *_)) = trained(engine_alone), trained(unwatched)
    assert by_engine == pytest.approx(by_hand, rel=1e-3)


def test_the_demos_model_takes_a_step():
    task = demo_task()
    small = replace(task, shape=replace(task.shape, batch=1, length=4))
    loop = Loop(small)
    before, after = loop.step().item(), loop.step().item()
    assert after < before


# They see what they are said to see


def test_the_loop_over_parameters_has_the_figures_of_a_gradient():
    layer, look = torch.nn.Linear(2, 2), ParameterLoop()
    layer.weight.grad = torch.tensor([[0.0, 3.0], [-4.0, 0.0]])
    look(layer)
    assert look.seen == {"weight": {"norm": 5.0, "min": -4.0, "max": 3.0, "mean": -0.25, "zeros": 0.5}}


def test_a_look_is_at_unscaled_gradients_before_they_are_clipped(monkeypatch):
    seen = []
    monkeypatch.setattr(watch_contenders, "MAX_NORM", 1e-3)
    Loop(NANO, lambda model: seen.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))).step()
    in_fp32, _, batch = NANO.trainee()
    in_fp32(*batch).backward()
    assert float(seen[0]) == pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in in_fp32.parameters()])), rel=0.02
    )


def test_a_histogram_counts_every_finite_value_of_a_gradient():
    layer = torch.nn.Linear(3, 2, bias=False)
    hooks = HistogramHooks(layer)
    (layer.weight * torch.tensor([[1.0, 2.0, torch.inf], [4.0, torch.nan, 4.0]])).sum().backward()
    histogram = hooks.seen["weight"]
    assert histogram.sum() == 4
    assert (histogram[0], histogram[-1]) == (1, 2)


def test_a_gradient_without_a_finite_value_has_no_histogram():
    layer = torch.nn.Linear(1, 1, bias=False)
    hooks = HistogramHooks(layer)
    (layer.weight * torch.inf).sum().backward()
    assert hooks.seen == {}


def test_debug_hooks_tell_where_it_was_not_finite():
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2))
    hooks = DebugHooks(model)
    model(torch.ones(1, 2))
    assert hooks.not_finite == set()
    with torch.no_grad():
        model[1].bias[0] = torch.nan
    model(torch.ones(1, 2))
    assert hooks.not_finite == {"1: bias", "1: output 0", ": output 0"}
    assert hooks.frames[0] == ["1.00e+00 1.00e+00 0: input 0", "1.00e+00 1.00e+00 0: output 0"]


def test_anomalies_are_looked_for_in_its_own_turns_only():
    contender = watch.anomaly_detected(NANO)
    assert not torch.is_anomaly_enabled()
    with contender.around():
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


# Watched in its own turns


def test_a_watch_sees_its_contender_made_and_its_turns_and_nothing_else(fake, monkeypatch):
    seen, step = [], Loop.step
    made = Loop.__init__

    def noted_init(self, *args):
        seen.append(("made", FakeWatch.installed))
        made(self, *args)

    def noted_step(self):
        seen.append(("step", FakeWatch.installed))
        return step(self)

    monkeypatch.setattr(Loop, "__init__", noted_init)
    monkeypatch.setattr(Loop, "step", noted_step)
    contenders = [unwatched(NANO), watched(NANO), engine_watched(NANO)]
    assert seen == [("made", 0), ("made", 1)]
    alternate(contenders, rounds=2, calls=1)
    plain, settled = [("step", 0)] * 2, [("step", 1)] * (watch_contenders.SETTLING + 2)
    assert seen[2:] == [*plain, *settled, *settled, *plain]
    assert FakeWatch.installed == 0


def test_a_watch_is_removed_after_a_turn_that_failed(fake):
    with pytest.raises(RuntimeError, match="out of luck"), watched(NANO).around():
        raise RuntimeError("out of luck")
    assert FakeWatch.installed == 0


def test_a_watch_that_failed_is_no_contender(fake):
    faulty, step = FakeWatch(), Loop(NANO).step
    faulty.failures.append("KeyError: 3")
    with pytest.raises(RuntimeError, match=r"failed in it: \['KeyError: 3'\]"), watched_turn(faulty, step):
        step()


def test_a_watch_that_saw_nothing_is_no_contender(fake, monkeypatch):
    monkeypatch.setattr(FakeWatch, "steps", 0)
    contender = watched(NANO)
    with pytest.raises(RuntimeError, match="saw 0 steps of its turn; what failed in it: nothing"), contender.around():
        contender.work()


# The tables


def test_the_engine_is_compared_with_the_engine_and_the_others_with_the_plain_loop():
    times = [Times(name=name, ms=[ms]) for name, ms in ((PLAIN, 8.0), (RUN, 10.0), (ENGINE, 4.0), (ENGINE_RUN, 6.0))]
    assert list(watch.rows_of(times, {RUN: 1.02})) == [
        [PLAIN, 8.0, 1.0, PLAIN, ""],
        [RUN, 10.0, 1.25, PLAIN, "1.02 at most"],
        [ENGINE, 4.0, 0.5, PLAIN, ""],
        [ENGINE_RUN, 6.0, 1.5, ENGINE, ""],
    ]


def test_nothing_is_published_where_ours_did_not_take_part():
    with pytest.raises(RuntimeError, match=r"^benchmarks.watch: 'ampwise run', 'ampwise run, with the engine' did not"):
        list(watch.pairs([Times(name=PLAIN, ms=[1.0]), Times(name=ENGINE, ms=[1.0])]))


@pytest.mark.nightly
def test_the_whole_is_printed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    watch.whole(TURNS, NANO).publish()
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "watch_cpu.json").read_text())
    assert written["command"] == "make bench NAME=watch"
    assert all(len(row) == len(written["columns"]) for row in written["rows"])
    assert len(written["rows"]) == len(watch.OURS) + len(watch.OTHERS) + 1, written["notes"]
    for row in written["rows"]:
        assert row[0] in printed
    assert {row[0]: row[4] for row in written["rows"] if row[4]} == {RUN: "1.10 at most", ENGINE_RUN: "1.10 at most"}


@pytest.mark.nightly
def test_rows_of_the_tiny_model_fit_their_columns(fake):
    result = watch.tiny(TURNS, NANO.shape)
    assert len(result.rows) == len(watch.OURS) + len(watch.OTHERS) + 1, result.notes
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_waits_are_counted_and_the_mode_is_put_back(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits_once_and_warns_of_something_else():
        warnings.warn(f"{watch.WAIT} (Triggered internally)", stacklevel=1)
        warnings.warn("deprecated", stacklevel=1)

    assert watch.waits_in(waits_once_and_warns_of_something_else, steps=3) == 3
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("part", watch.ONLY_ON_GPU)
def test_parts_that_need_a_gpu_say_so(part, monkeypatch, capsys):
    monkeypatch.setattr(watch, "has_gpu", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    with pytest.raises(SystemExit):
        watch.main(["--part", part])
    assert f"--part {part} needs a CUDA device" in capsys.readouterr().err
