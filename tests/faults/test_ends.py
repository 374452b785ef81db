"""Told to end: the step is finished, the state saved, and the exit code is the one asked for."""

import os
import signal

import pytest

from ampwise.guard.disk.catalog import checkpoints

from ..night import by_night
from .conftest import written
from .programs import train

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(autouse=True)
def _untouched():
    """A guard that was told to end expects duplicates of the signal for a while."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("code", [*by_night(0), 75])
def test_sigterm_finishes_the_step_saves_and_ends(tmp_path, code):
    outcome = train(tmp_path, fault="SIGTERM", at=(20,), guard={"exit_code": code, "every": "1h"})
    assert outcome.code == code
    assert outcome.told == ["preempted"]
    assert "ended by SIGTERM" in outcome.messages[0]
    assert [each.step for each in checkpoints(tmp_path)] == [21]
    assert len(outcome.lineage) == 21  # with the one that was being made, which was finished


@written("engine", "loop", "lightning", "trainer", *by_night("own steps"))
def test_the_run_goes_on_to_the_bit_where_it_was_reported_to_end(tmp_path):
    unbroken = train(tmp_path / "whole")
    for at in (0, 7, 25):
        train(tmp_path / "run", fault="SIGTERM", at=(at,))
    outcome = train(tmp_path / "run")
    assert outcome.began_at == 1 + 8 + 26
    assert outcome.weights == unbroken.weights
    assert outcome.told == []


def test_other_signals_if_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(train.__globals__["FAULTS"], "SIGUSR1", train.__globals__["sends"](signal.SIGUSR1))
    outcome = train(tmp_path, fault="SIGUSR1", at=(20,), guard={"signals": ["SIGUSR1"]})
    assert outcome.told == ["preempted"]
    assert checkpoints(tmp_path)[0].step == 21


@written("engine")
def test_in_the_middle_of_a_window_the_window_is_finished(tmp_path):
    outcome = train(tmp_path / "run", fault="SIGTERM", at=(9,), engine={"accumulate": 4})
    assert outcome.code == 0
    assert checkpoints(tmp_path / "run")[0].step == 3
    assert len(outcome.steps) == 12
    rest = train(tmp_path / "run", engine={"accumulate": 4})
    assert rest.weights == train(tmp_path / "whole", engine={"accumulate": 4}).weights


def test_where_nothing_can_be_saved_the_code_says_so(tmp_path, monkeypatch):
    """Whoever restarts it is not to believe that all is well."""

    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ampwise.guard.disk.writing.write_tensors", full)
    outcome = train(tmp_path, fault="SIGTERM", at=(20,), guard={"every": "1h"})
    assert outcome.code == 70
    assert outcome.told == ["checkpoint-failed", "preempted"]
    assert "no checkpoint could be saved" in outcome.why


def test_the_process_itself_ends_with_that_code(children, tmp_path):
    ended = children.train(tmp_path / "run", fault="SIGTERM", at=[20], guard={"exit_code": 85})
    assert ended.code == 85, ended.said
    assert "ended by SIGTERM" in ended.said
    assert checkpoints(tmp_path / "run")[0].step == 21


@written("engine")
@pytest.mark.nightly
@pytest.mark.parametrize("everyone", [*by_night(False), True], ids=["the agent", "every process"])
def test_a_job_under_torchrun_that_is_preempted_saves_and_goes_on_to_the_bit(children, tmp_path, everyone):
    """Where a scheduler signals every process, a rank gets it twice: torchrun's agent forwards its own."""
    unbroken = children.train(tmp_path / "whole", ranks=2, epochs=2)[0].outcome
    ended = children.preempt(tmp_path / "run", everyone=everyone, epochs=2, at=[14], guard={"every": "1h"})
    assert [each.told for each in ended] == [["preempted"], ["preempted"]]
    assert [each.code for each in ended] == [0, 0]
    assert [each.step for each in checkpoints(tmp_path / "run")] == [15]
    resumed = children.train(tmp_path / "run", ranks=2, epochs=2)
    assert [each.outcome.began_at for each in resumed] == [15, 15]
    assert [each.outcome.weights for each in resumed] == 2 * [unbroken.weights]


def test_workers_of_a_loader_that_end_with_the_signal_do_not_fail_the_step(children, tmp_path):
    """torchrun's agent signals the process group, and torch raises the end of a worker wherever the program is."""
    options = {"epochs": 1, "workers": 1, "guard": {"every": "1h"}}
    ended = children.train(tmp_path / "run", fault="SIGTERM to the group", at=[4], **options)
    assert ended.code == 0, ended.said
    assert ended.outcome.told == ["preempted"]
    assert [each.step for each in checkpoints(tmp_path / "run")] == [5]
    resumed = children.train(tmp_path / "run", **options).outcome
    assert resumed.weights == children.train(tmp_path / "whole", **options).outcome.weights
