"""What the guard says: each event has a name, a level and a line with its numbers; some are findings to act on."""

import ast
import io
import json
import math
import os
import sys
import threading
import time
import typing
from dataclasses import fields

import pytest

from ampwise.finding import registry
from ampwise.finding.registry import built_in_rules, run_checks
from ampwise.finding.strict_json import dumps
from ampwise.guard import reporter
from ampwise.guard.events import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointLate,
    GuardEvent,
    LockTakenOver,
    LossSpike,
    PrecisionChanged,
    PrecisionRestored,
    Preempted,
    RankLost,
    RanksChanged,
    RolledBack,
    ScaleAtFloor,
    StepOutOfMemory,
    StepSkipped,
    TrainingStopped,
    WeightsNotFinite,
)
from ampwise.guard.reporter import EventReporter
from ampwise.rules.amp8xx_guard import rank_lost
from ampwise.runs.events import event_line, read_event

CASES = [
    (
        StepSkipped(step=400, loss=math.nan, scale=None, streak=1, scaled=False),
        "the step was skipped: its loss was NaN; the weights are unchanged",
    ),
    (
        StepSkipped(step=400, loss=2.5, scale=1024.0, streak=3, scaled=True),
        "the step was skipped: its gradients were not finite at a loss scale of 1024, with a loss of 2.5, the 3rd bad "
        "step in a row; the weights are unchanged",
    ),
    (
        StepSkipped(step=400, loss=None, scale=1.0, streak=1, scaled=False),
        "the step was skipped: its gradients were not finite; the weights are unchanged",
    ),
    (
        ScaleAtFloor(step=9, scale=1.0, streak=5),
        "5 steps in a row overflowed with the loss scale at its lower limit of 1: a lower scale will not help",
    ),
    (
        RolledBack(
            step=1510,
            to_step=1400,
            source="memory",
            milliseconds=4.2,
            streak=5,
            cause="5 steps in a row were not finite",
            passed_over=((0, 1508), (0, 1509), (1, 0)),
        ),
        "rolled back 110 steps, to step 1,400, from memory in 4.2 ms, because 5 steps in a row were not finite; the "
        "data was rewound too, and batches 1508, 1509 of epoch 0, batch 0 of epoch 1, counted from 0, will be skipped",
    ),
    (
        RolledBack(
            step=3, to_step=2, source="disk", milliseconds=2500.0, streak=1, cause="the loss jumped", rewound=False
        ),
        "rolled back 1 step, to step 2, from disk in 2.5 s, because the loss jumped; the data continues from its "
        "current position",
    ),
    (
        RolledBack(
            step=9,
            to_step=0,
            source="memory",
            milliseconds=1.0,
            streak=7,
            cause="bad",
            passed_over=tuple((2, batch) for batch in range(7)),
        ),
        "rolled back 9 steps, to step 0, from memory in 1 ms, because bad; the data was rewound too, and batches 0, "
        "1, 2, 3, 4 of epoch 2 and 2 more, counted from 0, will be skipped",
    ),
    (
        PrecisionChanged(step=7, before="fp16", after="bf16", cause="FP16 overflows at any loss scale"),
        "the precision was changed from fp16 to bf16, because FP16 overflows at any loss scale",
    ),
    (
        PrecisionChanged(step=7, before="fp16", after="fp32", modules=("head", "blocks.0", "blocks.1", "blocks.2")),
        "the precision was changed from fp16 to fp32 for `head`, `blocks.0`, `blocks.1` and 1 more only",
    ),
    (
        PrecisionRestored(step=5000, before="fp32", after="fp16", healthy_steps=2000),
        "back from fp32 to fp16, after 2,000 steps without failures",
    ),
    (
        TrainingStopped(step=60, cause="the loss is NaN", tried=("skip", "roll back"), capsule="c", checkpoint="d"),
        "training was stopped: the loss is NaN; tried without success: skip, roll back",
    ),
    (
        TrainingStopped(step=60, cause="the loss is NaN", tried=()),
        "training was stopped: the loss is NaN; nothing else is allowed",
    ),
    (
        LossSpike(step=90, loss=31.25, usual=2.5, spreads=41.4),
        "the loss jumped to 31.25 from a usual 2.5, 41 times its usual spread",
    ),
    (
        LossSpike(step=90, loss=31.25, usual=2.5, spreads=41.4, action="rollback"),
        "the loss jumped to 31.25 from a usual 2.5, 41 times its usual spread; the run rolls back to its last good "
        "state",
    ),
    (
        CheckpointFailed(step=5, directory="/data/run", error="OSError: no room", kind="full", last="/data/run/4"),
        "no checkpoint could be written to /data/run: the disk is full (OSError: no room); the last complete one is "
        "/data/run/4; training continues",
    ),
    (
        CheckpointFailed(step=5, directory="d", error="OSError: odd", kind="other", failures_in_a_row=2),
        "no checkpoint could be written to d: OSError: odd, the 2nd failure in a row; there is no complete one yet; "
        "training continues",
    ),
    (
        CheckpointLate(step=5, seconds=90.0, every=60.0),
        "a checkpoint has been in progress for 1.5 min, but one is due every 1.0 min",
    ),
    (
        CheckpointDamaged(path="run/step-5", why="`model.bin` has another checksum", instead="run/step-4"),
        "the checkpoint is damaged: `model.bin` has another checksum; run/step-4 is used instead",
    ),
    (
        CheckpointDamaged(path="run/step-5", why="no manifest"),
        "the checkpoint is damaged: no manifest; there is no other complete one",
    ),
    (
        WeightsNotFinite(step=5, names=("head.weight",), count=1, where="checkpoint"),
        "1 tensor is not finite, so the checkpoint was discarded: `head.weight`",
    ),
    (
        WeightsNotFinite(step=5, names=("a", "b"), count=40, where="snapshot"),
        "40 tensors are not finite, so the snapshot was discarded: `a`, `b` and 38 more",
    ),
    (
        StepOutOfMemory(step=5, pieces=2, error="OutOfMemoryError: 2 GiB", splits=True),
        "the step ran out of memory; training continues with each batch in 2 pieces and the same effective batch size "
        "(OutOfMemoryError: 2 GiB)",
    ),
    (
        StepOutOfMemory(step=5, pieces=1, error="OutOfMemoryError: 2 GiB", splits=False),
        "the step ran out of memory; splitting the batch is not allowed, so the step was not taken (OutOfMemoryError: "
        "2 GiB)",
    ),
    (
        Preempted(step=5, signal="SIGTERM", checkpoint="run/step-5", seconds=1.25),
        "ended by SIGTERM after this step; run/step-5 was complete 1.2 s later",
    ),
    (
        Preempted(step=5, signal="SIGTERM"),
        "ended by SIGTERM after this step; no checkpoint could be saved",
    ),
    (
        RankLost(step=5, waited=30.0, error="RuntimeError: Connection closed by peer", checkpoint="run/step-4"),
        "a rank did not answer within 30.0 s, so this one stops (RuntimeError: Connection closed by peer); the last "
        "complete checkpoint is run/step-4",
    ),
    (
        RankLost(step=5, waited=0.0, error="closed"),
        "a rank is gone, so this one stops (closed); there is no complete checkpoint yet",
    ),
    (
        RanksChanged(before=8, after=1),
        "saved with 8 ranks, resumed with 1 rank: the effective batch size is 0.125 times the previous one, unless "
        "the per-rank batch size changed too; each rank gets new random numbers and restarts the epoch's data",
    ),
    (
        LockTakenOver(pid=42, host="node7", since="2026-11-15 22:00"),
        "the folder was locked since 2026-11-15 22:00 by process 42 on node7, which no longer exists; this run now "
        "holds the lock",
    ),
]
KINDS = GuardEvent.__subclasses__()
LEVELS = {
    "step-skipped": "info",
    "scale-at-floor": "warning",
    "rolled-back": "warning",
    "precision-changed": "warning",
    "climbed-back": "info",
    "training-stopped": "error",
    "loss-spike": "warning",
    "checkpoint-failed": "error",
    "checkpoint-late": "warning",
    "checkpoint-damaged": "warning",
    "weights-not-finite": "error",
    "out-of-memory": "warning",
    "preempted": "info",
    "rank-lost": "error",
    "ranks-changed": "info",
    "lock-taken-over": "info",
}
FOUND = {  # what a user must act on
    "AMP807": "training-stopped",
    "AMP808": "checkpoint-failed",
    "AMP810": "checkpoint-damaged",
    "AMP811": "weights-not-finite",
    "AMP814": "rank-lost",
}
RULES = [rule for rule in built_in_rules() if rule.code.startswith("AMP8")]
EVENTS = [event for event, _ in CASES]


def name_of(each):
    return type(each).__name__


def test_names_and_levels_are_stable():
    assert {kind.name: kind.level for kind in KINDS} == LEVELS
    assert len(KINDS) == len(LEVELS)
    assert {type(event) for event in EVENTS} == set(KINDS), "each kind has a case here"


@pytest.mark.parametrize(("event", "message"), CASES, ids=name_of)
def test_an_event_its_record_and_its_finding_say_the_same(event, message):
    assert event.message == message
    assert not event.advice or event.advice.endswith(".")
    json.loads(dumps(event.as_dict()))
    known = {each.name: getattr(event, each.name) for each in fields(event) if each.name != "step"}
    assert repr(event.fields) == repr({name: value for name, value in known.items() if value not in (None, "", ())})

    read = read_event(event_line(event.logged()))
    assert (read.name, read.level, read.step) == (event.name, event.level, event.step)
    assert (read.message, read.advice) == (event.message, event.advice)
    assert read.fields.keys() == event.fields.keys()

    found = run_checks(event)
    assert [finding.rule.name for finding in found] == ([event.name] if event.name in FOUND.values() else [])
    for finding in found:
        assert (finding.message, finding.fix, finding.place.step) == (event.message, event.advice, event.step)
        assert (str(finding.severity), finding.evidence) == (event.level, event.fields)
        json.loads(dumps(finding.as_dict()))


# What a user must act on is a finding


def test_an_error_is_always_a_finding():
    assert {rule.code: rule.name for rule in RULES} == FOUND
    assert {name for name, level in LEVELS.items() if level == "error"} <= set(FOUND.values())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_examples_are_python_or_commands(rule):
    for example in (rule.bad, rule.good):
        if not example.startswith("$ "):
            ast.parse(example)
    assert rule.bad != rule.good


# The ways out


def test_a_stop_says_how_to_look_and_how_to_go_on():
    stopped = TrainingStopped(step=6, cause="NaN", tried=("skip",), capsule="my run/c", checkpoint="run/step-5")
    assert stopped.fields["exit_code"] == 70
    assert stopped.advice == (
        "Replay the bad step: `ampwise replay 'my run/c' train.py:make`, replacing train.py:make with your "
        "function that builds the model. Fix the cause, then start the same command again: it continues from "
        "run/step-5."
    )
    known = TrainingStopped(step=6, cause="NaN", tried=("skip",), capsule="c", build="my net.py:make")
    assert "step: `ampwise replay c 'my net.py:make'`. Fix" in known.advice
    assert TrainingStopped(step=6, cause="NaN", tried=()).advice == (
        "Fix the cause, then start the same command again: it starts over, because there is no good checkpoint."
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (CheckpointFailed(step=1, directory="d", error="e", kind="full"), "Free space"),
        (CheckpointFailed(step=1, directory="d", error="e", kind="read-only"), "Remount it"),
        (CheckpointFailed(step=1, directory="d", error="e", kind="permission"), "write permission"),
        (CheckpointFailed(step=1, directory="d", error="e", kind="other"), "Fix the reported"),
        (Preempted(step=1, signal="SIGTERM"), "newest complete checkpoint, which is older"),
        (Preempted(step=1, signal="SIGTERM", checkpoint="c"), "it continues from there"),
        (LossSpike(step=1, loss=9.0, usual=1.0, spreads=12.0, action="rollback"), "now skipped"),
    ],
    ids=name_of,
)
def test_each_has_its_way_out(event, words):
    assert words in event.advice


# Texts from elsewhere


def hostile(kind):
    """An event all of whose texts are someone else's."""
    bad = "a\n\x1b[2Jb" + "x" * 5000
    texts = {"str": bad, "tuple[str, ...]": (bad, bad)}
    plain = {
        "int": 3,
        "int | None": 3,
        "float": 3.0,
        "float | None": 3.0,
        "bool": True,
        "tuple[tuple[int, int], ...]": ((1, 2),),
    }
    values = {each.name: (texts | plain).get(each.type) for each in fields(kind)}
    literals = {each.name: typing.get_args(typing.get_type_hints(kind)[each.name]) for each in fields(kind)}
    return kind(**{name: literals[name][0] if value is None else value for name, value in values.items()})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_the_texts_hold_the_message_is_one_short_line_and_prints_harmlessly(kind, capsys):
    event = hostile(kind)
    assert "\n" not in event.message
    assert len(event.message) < 2000
    EventReporter(None, prints=True).report(event)
    assert "\x1b" not in capsys.readouterr().err


# Who hears of them


SKIPPED = StepSkipped(step=400, loss=math.nan, scale=None, streak=1, scaled=False)
LATE = CheckpointLate(step=5, seconds=90.0, every=60.0)
STOPPED = TrainingStopped(step=60, cause="the loss is NaN", tried=())


def test_one_line_each_and_the_advice_once(capsys):
    told = EventReporter(None, prints=True)
    for _ in range(9):
        told.report(LATE)
    line = "ampwise: step 5: a checkpoint has been in progress for 1.5 min, but one is due every 1.0 min"
    advised = f"{line}. Write to a faster disk, or save checkpoints less often."
    assert capsys.readouterr().err.splitlines() == [advised, line, line, line]  # the 1st, 2nd, 4th, 8th
    assert told.events == [LATE] * 9
    assert told.findings == []


def test_an_error_is_printed_in_full_each_time(capsys):
    told = EventReporter(None, prints=True)
    for _ in range(3):
        told.report(STOPPED)
    assert capsys.readouterr().err.count("AMP807") == 3
    assert told.events == [STOPPED] * 3
    assert [finding.rule.code for finding in told.findings] == ["AMP807"] * 3


def test_other_ranks_keep_and_are_silent(capsys):
    got = []
    told = EventReporter(got.append, prints=False)
    told.report(STOPPED)
    told.log("a line")
    told.close()
    assert (told.events, len(told.findings), got) == ([STOPPED], 1, [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [OSError("no\nluck\x1b[2J"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_function_that_fails_is_said_once_and_called_again(capsys, error):
    tried = []

    def broken(event):
        tried.append(event)
        raise error

    told = EventReporter(broken, prints=True)
    told.report(SKIPPED)
    told.report(LATE)
    told.close()
    assert tried == [SKIPPED, LATE]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "on_event" in line]
    said = "ampwise: on_event failed; it will be called with the next event all the same: "
    assert line.startswith(said + type(error).__name__)
    assert "\x1b" not in line


def test_a_slow_function_gets_all_events_in_one_thread(capsys):
    release, begun, got = threading.Event(), threading.Event(), []

    def slow(event):
        begun.set()
        assert release.wait(120)
        got.append((event.step, threading.current_thread().name))

    told = EventReporter(slow, prints=True)
    for step in range(2000):
        told.report(RanksChanged(step=step, before=2, after=1))
    assert begun.wait(120)
    release.set()
    told.close()
    assert got == [(step, "ampwise-on-event") for step in range(2000)]
    capsys.readouterr()


def test_events_that_do_not_reach_it_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(reporter, "CLOSING_S", 0.1)
    release, begun, threads = threading.Event(), threading.Event(), set()

    def slow(event):
        threads.add(threading.current_thread())
        begun.set()
        release.wait(120)
        raise OSError("no luck")

    told = EventReporter(slow, prints=True)
    for _ in range(3):
        told.report(LATE)
    assert begun.wait(120)
    told.close()
    assert "it was not waited for; 2 further events did not reach it" in capsys.readouterr().err
    told.report(SKIPPED)  # starts no second thread
    assert (
        "on_event was not called with 'step-skipped', which came after the guard was closed" in capsys.readouterr().err
    )
    release.set()
    for thread in list(threads):
        thread.join(120)
    assert len(threads) == 1
    capsys.readouterr()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_sends_nothing_of_its_parents(tmp_path, capsys):
    def leave_a_file(event):
        (tmp_path / f"{os.getpid()}-{event.step}").touch()

    told = EventReporter(leave_a_file, prints=True)
    told.report(LATE)
    child = os.fork()
    if not child:
        told.report(SKIPPED)
        told.close()
        time.sleep(0.2)  # enough for a thread that should not be there
        os._exit(0)
    os.waitpid(child, 0)
    told.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}-5"]
    capsys.readouterr()


class Unwritable(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Unwritable(), None])
@pytest.mark.parametrize("event", [RanksChanged(before=2, after=1), CASES[0][0]], ids=name_of)
def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch, capsys, stream, event):
    got = []
    monkeypatch.setattr(sys, "stderr", stream)
    told = EventReporter(got.append, prints=True)
    told.report(event)
    told.log("a line")
    told.close()
    assert got == [event]
    assert capsys.readouterr().out == ""


def test_a_rank_that_is_left_says_that_another_is_lost(capsys):
    lost = RankLost(step=7, waited=3.0, error="gone", checkpoint="run/step-5")
    EventReporter(None, prints=False).report(lost)
    assert "run/step-5" in capsys.readouterr().err
    EventReporter(None, prints=False).report(RanksChanged(before=2, after=1))
    assert capsys.readouterr().err == ""


def test_a_rule_that_fails_stops_nothing(monkeypatch, capsys):
    def fail(event):
        raise TypeError("of a plugin")

    fail.__module__ = rank_lost.__name__
    monkeypatch.setattr(registry, "checks_for", lambda kind: (fail, rank_lost.check_guard))
    told = EventReporter(None, prints=True)
    told.report(RankLost(step=7, waited=3.0, error="gone", checkpoint="run/step-5"))
    assert len(told.events) == 1
    assert [finding.rule.code for finding in told.findings] == ["AMP814"], "the other rules are still checked"
    assert "ampwise: AMP814 failed to check a RankLost: TypeError('of a plugin')" in capsys.readouterr().err


def test_fields_that_are_nested_deeply_are_refused():
    deep = []
    for _ in range(900):
        deep = [deep]
    line = json.dumps(CASES[0][0].logged().as_dict() | {"fields": {"x": deep}})
    with pytest.raises(ValueError, match="invalid fields"):
        read_event(line)
