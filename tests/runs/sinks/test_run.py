"""`ampwise run --sink`: the script is as it is without, and its numbers are where they were wanted."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from ampwise.watch.script import ScriptToRun
from ampwise.watch.watched_run import RunOptions, WatchedRun

ROOT = Path(__file__).parents[3]
TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(12):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 8) * (float("inf") if step == 5 else 1.0)).float().square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print("step", step)
sys.exit(3)
"""
PRINTED = "".join(f"step {step}\n" for step in range(12))


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path / "train.py"


def ampwise(*words, folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ampwise", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "110", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def watched(warm, tmp_path):
    """`ampwise run`, where it does not matter that torch is loaded already."""

    def watched(*words, **environment):
        environment = {**os.environ, "COLUMNS": "110", **environment}
        return warm.run("-m", "ampwise", "run", *words, cwd=tmp_path, env=environment)

    return watched


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def codes(run):
    return [seen.finding.rule.code for seen in run.findings]


def test_the_numbers_of_the_record_and_a_script_that_notices_nothing(script, watched, tmp_path):
    words = ("-q", "-o", "first", "--every", "1", "--sink", "jsonl", "--sink", "jsonl:logs/m.jsonl", script)
    done = watched(*words)
    assert (done.returncode, done.stdout, done.stderr) == (3, PRINTED, "")
    rows, also = lines(tmp_path / "first.metrics.jsonl"), lines(tmp_path / "logs" / "m.jsonl")
    assert rows == also
    run = Run.read(tmp_path / "first")
    steps = [row for row in rows if "ampwise/skipped" in row]
    assert [row["step"] for row in steps] == [bucket.first for bucket in run.steps] == list(range(1, 13))
    assert [row["ampwise/skipped"] for row in steps] == [bucket.skipped for bucket in run.steps]
    for name, fact in (("loss", "loss"), ("loss_scale", "scale"), ("grad_norm", "norm"), ("lr", "lr")):
        written = [getattr(bucket, fact) for bucket in run.steps]  # to seven digits
        told = [float(row[f"ampwise/{name}"]) for row in steps]
        assert [not math.isfinite(each) for each in told] == [bool(spread.bad) for spread in written], name
        finite = [(each, spread.mean) for each, spread in zip(told, written, strict=True) if not spread.bad]
        assert all(each == pytest.approx(mean, rel=1e-6) for each, mean in finite), name
    assert math.isnan(float(steps[5]["ampwise/loss"]))
    assert steps[5]["ampwise/skipped"] == 1.0
    assert steps[-1]["ampwise/skip_rate"] == pytest.approx(1 / 12)
    assert any("ampwise/underflow_share" in row for row in rows)
    errors = sum(seen.finding.severity == "error" for seen in run.findings)
    assert errors
    assert rows[-1]["ampwise/findings/errors"] == errors
    assert run.events == []


HANGING = """
import time
from contextlib import contextmanager
@contextmanager
def open_sink(about):
    def hang(rows):
        time.sleep(600)
    yield hang

def broken(about):
    raise OSError("no room")
"""


@pytest.fixture
def plugin(tmp_path):
    """A package with a sink that hangs, as pip would install it."""
    folder = tmp_path / "plugin"
    info = folder / "hanging-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "hanging.py").write_text(HANGING)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ampwise.sinks]\nslow = hanging:open_sink\nbroken = hanging:broken\n")
    return folder


def test_sinks_that_fail_and_hang_are_events_of_the_run_and_nothing_else(script, plugin, watched, tmp_path):
    path = os.pathsep.join([str(ROOT / "src"), str(plugin)])
    sinks = ("--sink", "broken", "--sink", "slow", "--sink", "jsonl:m.jsonl")
    done = watched("-o", "first", *sinks, script, PYTHONPATH=path, AMPWISE_SINK_WAIT="2")
    assert (done.returncode, done.stdout) == (3, PRINTED)
    assert done.stderr.count("sink-failed: the sink `broken` could not be opened: OSError: no room") == 1
    assert done.stderr.count("sink-failed: the sink `slow` was still busy when the run ended") == 1
    run = Run.read(tmp_path / "first")
    assert [event.name for event in run.events] == ["sink-failed"] * 2
    assert codes(run)[:2] == ["AMP917", "AMP101"]  # errors come first, and of these the cause
    assert (run.manifest["status"], run.manifest["exit_code"]) == ("finished", 3)
    assert len([row for row in lines(tmp_path / "m.jsonl") if "ampwise/skipped" in row]) == 12


def test_who_wants_to_hear_nothing_hears_of_a_sink_that_failed(script, plugin, watched, tmp_path):
    path = os.pathsep.join([str(ROOT / "src"), str(plugin)])
    done = watched("-q", "-o", "first", "--sink", "broken", script, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (3, PRINTED)
    said = "ampwise: warning: sink-failed: the sink `broken` could not be opened: OSError: no room\n"
    assert done.stderr == said


@pytest.mark.half_by_day
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")], ids=["", "torchrun"]
)
@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ("tensorbord", "unknown sink 'tensorbord'. Did you mean tensorboard?"),
        ("jsonl:.", "is a folder, expected a file."),
        ("wandb:p", "--sink wandb: wandb is not installed. pip install 'ampwise[wandb]'"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_script_starts(sink, said, launcher, script, tmp_path):
    hidden = "import sys; sys.modules['wandb'] = None; from ampwise.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "run", "-o", "first", "--sink", sink, *launcher, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "first").exists()


@pytest.mark.nightly
def test_of_several_ranks_the_first_sends(watched, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.replace("sys.exit(3)", ""))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = watched("-q", "-o", "two", "--sink", "jsonl", *launcher, "train.py")
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "two.metrics.jsonl")
    assert len([row for row in rows if "ampwise/skipped" in row]) == 12
    assert len(Run.read(tmp_path / "two").steps) == 12
    assert not (tmp_path / "two" / "rank1.metrics.jsonl").exists()


def test_os_exit_asks_nobody_and_the_rows_are_there(watched, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.replace("sys.exit(3)", "sys.stdout.flush()\nimport os\nos._exit(4)"))
    done = watched("-q", "-o", "first", "--sink", "jsonl", "train.py")
    assert done.returncode == 4
    assert len([row for row in lines(tmp_path / "first.metrics.jsonl") if "ampwise/skipped" in row]) == 12


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_script_with_wandb_of_its_own_under_the_watch(watched, tmp_path):
    """Nothing on stdout but the script's, one traceback, and no run but its own."""
    (tmp_path / "train.py").write_text(
        "import wandb\nwandb.init(project='theirs', settings=wandb.Settings(silent=True))\n"
        + TRAINING.replace("sys.exit(3)", "raise ValueError('the end')").replace(
            '    print("step", step)', '    print("step", step)\n    wandb.log({"loss": loss.item()}, step=step)'
        )
    )
    home = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    done = watched("-q", "-o", "first", "--sink", "wandb", "train.py", **home)
    assert done.returncode == 1
    assert done.stdout == PRINTED
    assert done.stderr.count("ValueError: the end") == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    run = Run.read(tmp_path / "first")
    assert (run.manifest["status"], run.events) == ("failed", [])


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_a_package_is_loaded_once_the_script_has_begun_and_draws_nothing(tmp_path):
    """Not before: what a script sets in its environment for such packages must count. Nor in a thread of its own."""
    (tmp_path / "train.py").write_text(
        "import os, random, sys\nrandom.seed(3)\nprint('trackio' in sys.modules)\n"
        "os.environ['HF_HOME'] = 'mine'\n"
        + TRAINING.replace("torch.manual_seed(0)", "print('trackio' in sys.modules)\ntorch.manual_seed(0)").replace(
            "sys.exit(3)",
            "from huggingface_hub import constants\nprint(constants.HF_HOME)\nimport time\ntime.sleep(1)\n"
            "print(random.random() == random.Random(3).random())",
        )
    )
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = ampwise("run", "-q", "-o", "first", "--sink", "trackio", "train.py", folder=tmp_path, **places)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"False\nTrue\n{PRINTED}mine\nTrue\n"


# The record's side of it


def a_record(tmp_path):
    return RecordWriter.create(tmp_path / "run")


def finding(code):
    return CountedFinding(finding=find_rule(code).at(Place(), f"an example of {code}"))


def test_who_listens_is_reported_all_of_it_and_asked_last(tmp_path):
    record, told = a_record(tmp_path), []
    record.listen(told.append, before_end=lambda: told.append("end"))
    step, sample = StepRow(step=1), LayerSample(first=1, last=1, layers={})
    record.step(step)
    record.layers(sample)
    record.findings(each for each in [finding("AMP101")])  # an iterator has one life
    record.close("finished", 0)
    record.step(StepRow(step=2))
    record.close("finished", 0)
    assert told[:2] == [step, sample]
    assert [seen.finding.rule.code for seen in told[2]] == ["AMP101"]
    assert told[3:] == ["end"]


def test_a_listener_that_raises_troubles_the_record_with_one_sentence(tmp_path):
    record = a_record(tmp_path)

    def refuse(*told):
        raise RuntimeError("not today")

    record.listen(refuse, before_end=refuse)
    for number in range(3):
        record.step(StepRow(step=number + 1))
    record.close("finished", 0)
    run = Run.read(tmp_path / "run")
    assert len(run.steps) == 3
    assert run.manifest["trouble"] == [
        "the listener: some data could not be written and was left out: RuntimeError('not today')."
    ]


def test_events_are_kept_in_order_and_may_come_at_the_very_end(tmp_path):
    record, told = a_record(tmp_path), []
    first, last = (LoggedEvent(name=name, level="warning", message=name) for name in ("rolled-back", "sink-failed"))
    record.listen(told.append, before_end=lambda: record.event(last))
    record.event(first)
    assert Run.read(tmp_path / "run").events == told == [first]
    record.close("finished", 0)
    run = Run.read(tmp_path / "run")
    assert (run.events, run.trouble) == ([first, last], [])


def test_only_the_first_rank_sends(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    running = WatchedRun(ScriptToRun("train.py"), tmp_path / "run", RunOptions(sinks=("jsonl",)))
    running.record.step(StepRow(step=1))
    running.record.close("finished", 0)
    assert not list(tmp_path.glob("**/*.metrics.jsonl"))


def test_the_help_names_every_kind(tmp_path):
    from ampwise.runs.sinks import built_in_kinds

    done = ampwise("run", "--help", folder=tmp_path)
    assert all(kind in done.stdout for kind in built_in_kinds())
    assert textwrap.shorten(done.stdout, 10_000).count("--sink") >= 1
