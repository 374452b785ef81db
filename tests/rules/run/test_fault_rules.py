"""What findings say of a guarded run: one rule for each kind of event, a sentence with its numbers, and the way out."""

import ast
import json
import math
import typing
from dataclasses import fields

import pytest

from ampwise.finding import Severity
from ampwise.finding.strict_json import dumps
from ampwise.rules import built_in, rules_in
from ampwise.rules.dispatch import checks_for, run_checks
from ampwise.rules.evidence import guard_events as faults
from ampwise.rules.evidence.guard_events import (
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
KINDS = typing.get_args(GuardEvent)
ORDER = {  # from AMP802 up
    "step-skipped": Severity.INFO,
    "scale-at-floor": Severity.WARNING,
    "rolled-back": Severity.WARNING,
    "precision-changed": Severity.WARNING,
    "climbed-back": Severity.INFO,
    "training-stopped": Severity.ERROR,
    "checkpoint-failed": Severity.ERROR,
    "checkpoint-late": Severity.WARNING,
    "checkpoint-damaged": Severity.WARNING,
    "weights-not-finite": Severity.ERROR,
    "out-of-memory": Severity.WARNING,
    "preempted": Severity.INFO,
    "rank-lost": Severity.ERROR,
    "ranks-changed": Severity.INFO,
    "lock-taken-over": Severity.INFO,
}
OURS = [entry.rule for entry in built_in() if entry.category == "run" and entry.rule.code != "AMP801"]


def finding_of(fault):
    (finding,) = run_checks(fault, "run")
    return finding


def test_codes_and_severities_are_in_their_order():
    assert [(rule.code, rule.name) for rule in OURS] == [(f"AMP{n}", name) for n, name in enumerate(ORDER, 802)]
    assert {rule.name: rule.severity for rule in OURS} == ORDER


def test_each_kind_of_event_is_told_by_one_rule():
    assert {getattr(faults, name) for name in faults.__all__} - {GuardEvent} == set(KINDS)
    assert all(len(checks_for("run")[kind]) == 1 for kind in KINDS)
    assert {type(fault) for fault, _ in CASES} == set(KINDS), "each kind has a case here"


@pytest.mark.parametrize(("fault", "message"), CASES, ids=lambda each: type(each).__name__)
def test_what_it_says(fault, message):
    finding = finding_of(fault)
    assert finding.message == message
    assert finding.place.step == getattr(fault, "step", None)
    assert finding.fix
    json.loads(dumps(finding.as_dict()))


@pytest.mark.parametrize("fault", [fault for fault, _ in CASES], ids=lambda fault: type(fault).__name__)
def test_all_that_is_known_is_in_the_evidence(fault):
    known = {each.name: getattr(fault, each.name) for each in fields(fault) if each.name != "step"}
    evidence = finding_of(fault).evidence
    for name, value in known.items():
        assert (
            (name not in evidence) if value in (None, "", ()) else (evidence[name] is value or evidence[name] == value)
        )


@pytest.mark.parametrize("rule", OURS, ids=lambda rule: rule.name)
def test_examples_are_python_or_commands(rule):
    for example in (rule.bad, rule.good):
        if not example.startswith("$ "):
            ast.parse(example)
    assert rule.bad != rule.good


def test_a_spike_is_the_rule_that_the_watch_has():
    rule = finding_of(LossSpike(step=1, loss=9.0, usual=1.0, spreads=12.0)).rule
    assert rule.code == "AMP610"
    assert any(module.RULE is rule for module in rules_in("gradient"))
    assert next(entry.category for entry in built_in() if entry.rule is rule) == "gradient"


# The ways out


def test_a_stop_says_how_to_look_and_how_to_go_on():
    stopped = TrainingStopped(step=6, cause="NaN", tried=("skip",), capsule="my run/c", checkpoint="run/step-5")
    finding = finding_of(stopped)
    assert finding.evidence["exit_code"] == 70
    assert finding.fix == (
        "Replay the bad step: `ampwise replay 'my run/c' --build train.py:make`, replacing train.py:make with your "
        "function that builds the model. Fix the cause, then start the same command again: it continues from "
        "run/step-5."
    )
    known = TrainingStopped(step=6, cause="NaN", tried=("skip",), capsule="c", build="my net.py:make")
    assert "step: `ampwise replay c --build 'my net.py:make'`. Fix" in finding_of(known).fix
    assert finding_of(TrainingStopped(step=6, cause="NaN", tried=())).fix == (
        "Fix the cause, then start the same command again: it starts over, because there is no good checkpoint."
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("full", "Free space"),
        ("read-only", "Remount it"),
        ("permission", "write permission"),
        ("other", "Fix the reported"),
    ],
)
def test_each_failure_to_write_has_its_way_out(kind, words):
    assert words in finding_of(CheckpointFailed(step=1, directory="d", error="e", kind=kind)).fix


def test_after_a_preemption_without_a_checkpoint_an_older_one_is_used():
    assert "which is older" in finding_of(Preempted(step=1, signal="SIGTERM")).fix
    assert "which is older" not in finding_of(Preempted(step=1, signal="SIGTERM", checkpoint="c")).fix


def test_a_spike_that_leads_back_names_the_batches():
    spike = LossSpike(step=1, loss=9.0, usual=1.0, spreads=12.0, action="rollback")
    assert "now skipped" in finding_of(spike).fix


# Texts from elsewhere


def hostile(kind):
    """An event all of whose texts are someone else's."""
    bad = "a\n\x1b[2Jb" + "x" * 5000
    texts = {"str": bad, "tuple[str, ...]": (bad, bad)}
    plain = {"int": 3, "float": 3.0, "float | None": 3.0, "bool": True, "tuple[tuple[int, int], ...]": ((1, 2),)}
    values = {each.name: (texts | plain).get(each.type) for each in fields(kind)}
    literals = {each.name: typing.get_args(typing.get_type_hints(kind)[each.name]) for each in fields(kind)}
    return kind(**{name: literals[name][0] if value is None else value for name, value in values.items()})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_the_texts_hold_the_message_is_one_short_line_and_prints_harmlessly(kind):
    finding = finding_of(hostile(kind))
    assert "\n" not in finding.message
    assert len(finding.message) < 2000
    assert "\x1b" not in str(finding)
