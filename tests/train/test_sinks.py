"""An engine tells sinks of its steps: the same numbers, a little later, without a wait; and nothing without sinks."""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from ampwise import Engine, Sinks
from ampwise.errors import BadInput, MissingDependency, UnknownName
from ampwise.train import sinks as telling
from ampwise.train.scaler.step_result import AsyncScalars

from .engine_toys import OVERFLOW, PRECISIONS, net, train, training

ROOT = Path(__file__).parents[2]


def losses(rows):
    return [row.metrics["ampwise/loss"] for row in rows]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_closed_step_is_reported_once_and_as_it_was(precision):
    rows = []
    run = training(precision, callbacks=[Sinks(rows.append)], accumulate=2)
    train(run, 1, 2, 3, 4, None, 6, 7)
    run.engine.flush()
    run.engine.close()
    history = list(run.engine.history)
    assert [row.step for row in rows] == [step.number for step in history] == [1, 2, 3, 4]
    for name, fact in (("loss", "loss"), ("grad_norm", "grad_norm"), ("skipped", "skipped"), ("lr", "lr")):
        told = [row.metrics[f"ampwise/{name}"] for row in rows]
        assert repr(told) == repr([float(getattr(step, fact)) for step in history])
    assert rows[2].metrics["ampwise/skipped"] == 1.0


def test_the_scale_is_the_one_that_the_gradients_had():
    rows = []
    run = training("fp16", callbacks=[Sinks(rows.append)])
    train(run, 1, OVERFLOW, OVERFLOW, 3)
    run.engine.scaler.update(32.0)
    train(run, 4)
    state = run.engine.state_dict()
    state["scaler"]["scale"] = 8.0
    run.engine.load_state_dict(state)
    train(run, 5)
    run.engine.close()
    assert [row.metrics["ampwise/loss_scale"] for row in rows] == [256.0, 256.0, 128.0, 64.0, 32.0, 8.0]


def test_without_a_scaler_there_is_no_scale():
    rows = []
    run = training("bf16", callbacks=[Sinks(rows.append)])
    train(run, 1)
    run.engine.close()
    assert "ampwise/loss_scale" not in rows[0].metrics


def test_training_is_the_same_to_the_last_bit():
    def weights(sinks):
        run = training("fp16", callbacks=[Sinks(*sinks)])
        train(run, 1, 2, None, 3, 4)
        run.engine.close()
        return [parameter.detach().clone() for parameter in run.model.parameters()]

    for one, other in zip(weights([]), weights([lambda row: None]), strict=True):
        assert torch.equal(one, other)


class Traveller(AsyncScalars):
    """Facts that are on their way until they are let in, as from a GPU."""

    home = False

    @property
    def arrived(self):
        return Traveller.home

    def read(self):
        assert Traveller.home or Traveller.waited_for, "nobody may wait"
        return super().read()

    waited_for = False


def test_facts_on_their_way_are_not_waited_for(monkeypatch):
    from ampwise.train.scaler import grad_scaler as scaler

    monkeypatch.setattr(scaler, "AsyncScalars", Traveller)
    monkeypatch.setattr(Traveller, "home", False)
    monkeypatch.setattr(Traveller, "waited_for", False)
    rows = []
    fused = {"make": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)}
    run = training("bf16", callbacks=[Sinks(rows.append)], trace=False, **fused)  # a trace waits for the step before
    train(run, 1, 2)
    if not run.engine.callbacks[0]._awaited:
        pytest.skip("on this device the facts are there at once")
    assert not rows
    monkeypatch.setattr(Traveller, "home", True)
    train(run, 3)
    run.engine.close()
    assert [row.step for row in rows] == [1, 2, 3]


def test_what_is_on_its_way_at_the_end_is_reported_then():
    rows = []
    run = training("bf16", callbacks=[Sinks(rows.append)])
    (step,) = train(run, 1)
    run.engine.callbacks[0]._awaited.append((step.bare(), None))  # as if it had not arrived
    run.engine.close()
    assert [row.step for row in rows] == [1, 1]


def test_an_engine_that_is_gone_has_closed_its_sinks():
    rows, before = [], set(threading.enumerate())
    run = training("fp32", callbacks=[Sinks(rows.append)])
    train(run, 1, 2)
    assert [each.daemon for each in set(threading.enumerate()) - before] == [True]
    del run
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(120)
        assert not thread.is_alive()
    assert len(rows) == 2


def test_whoever_finds_an_engine_gone_does_not_wait_for_its_sinks(monkeypatch):
    monkeypatch.setenv("AMPWISE_SINK_WAIT", "3600")
    rows, taking, may_go = [], threading.Event(), threading.Event()

    def slow(row):
        taking.set()
        may_go.wait(120)
        rows.append(row)

    before = set(threading.enumerate())
    run = training("fp32", callbacks=[Sinks(slow)])
    train(run, 1, 2)
    assert taking.wait(120)
    threads = set(threading.enumerate()) - before
    del run
    gc.collect()
    assert not rows, "the sink has not gone on, and nobody waits for it"
    may_go.set()
    for thread in threads:
        thread.join(120)
    assert len(rows) == 2


def test_an_engine_that_is_found_gone_by_its_own_sink_waits_for_nobody(monkeypatch):
    monkeypatch.setenv("AMPWISE_SINK_WAIT", "3600")
    rows, held = [], threading.Event()

    def collect(row):
        rows.append(row)
        held.wait(120)
        if len(rows) == 1:
            gc.collect()

    before = set(threading.enumerate())
    run = training("fp32", callbacks=[Sinks(collect)])
    run.engine.itself = run.engine  # goes only when it is looked for
    train(run, 1, 2, 3)
    gc.disable()
    try:
        del run
        held.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(120)
            assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert len(rows) == 3


def test_a_sink_may_close_its_own_engine(monkeypatch):
    monkeypatch.setenv("AMPWISE_SINK_WAIT", "3600")
    before = set(threading.enumerate())
    run = training("fp32", callbacks=[Sinks(lambda row: run.engine.close())])
    train(run, 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(120)
        assert not thread.is_alive(), "it waits for itself"


def test_engines_made_in_the_same_second_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(telling.time, "strftime", lambda form: "20260101-000000")
    (tmp_path / f"ampwise-20260101-000000-{os.getpid()}.tensorboard").mkdir()  # as of a process before this one
    runs = [training("fp32", callbacks=[Sinks("jsonl")]) for _ in range(3)]
    for number, run in enumerate(runs, 1):
        train(run, *range(1, number + 1))
        run.engine.close()
    files = sorted(tmp_path.glob("*.metrics.jsonl"))
    assert [path.name.partition(".")[0].rpartition("-")[2] for path in files] == ["2", "3", "4"]
    assert [len(path.read_text().splitlines()) for path in files] == [1, 2, 3]


def test_training_goes_on_after_the_end_of_sinks():
    rows = []
    run = training("fp32", callbacks=[Sinks(rows.append)])
    train(run, 1)
    run.engine.close()
    run.engine.close()
    train(run, 2)
    assert len(rows) == 1
    assert len(run.engine.history) == 2


def test_a_sink_that_fails_costs_a_line_on_stderr(capfd):
    def refuse(row):
        raise OSError("no\x1b[31m room")

    run = training("fp32", callbacks=[Sinks(refuse)])
    train(run, 1, 2, 3)
    run.engine.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("ampwise: sink-failed: the sink `") == 1
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert len(run.engine.history) == 3


def test_names_of_sinks_are_checked_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownName, match=r"unknown sink 'jsonll'\. Did you mean jsonl\?"):
        training("fp32", callbacks=[Sinks("jsonll")])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"Sinks\('wandb'\): wandb is not installed\. pip install"):
        training("fp32", callbacks=[Sinks("wandb:x")])
    with pytest.raises(BadInput, match=r"Sinks\(\['jsonl'\]\): expected the name of a sink, or a function"):
        Sinks(["jsonl"])
    assert not list(tmp_path.iterdir())


def test_a_refused_engine_leaves_no_trace():
    model = net()
    before = [list(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(UnknownName):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", callbacks=[Sinks("nowhere")])
    assert [list(module._forward_pre_hooks) for module in model.modules()] == before


def test_files_are_named_after_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = training("fp32", callbacks=[Sinks("jsonl", "jsonl:mine.jsonl")])
    train(run, 1)
    run.engine.close()
    (own,) = tmp_path.glob("ampwise-*.metrics.jsonl")
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == len(own.read_text().splitlines()) == 1


AT_EXIT = """
import atexit, json, sys
import torch
from contextlib import contextmanager
from pathlib import Path
from ampwise import Engine, Sinks
from ampwise.runs.sinks import kinds

log = open("log", "a")

def say(*words):
    print(*words, file=log, flush=True)

class Package:  # one that ends by itself when the program does, as those of trackers do
    ended = False
    def end(self):
        self.ended = True
        say("package ended")

class Sink:
    package = None
    def __call__(self, row):
        if self.package is None:
            self.package = Package()
            atexit.register(self.package.end)
        say("row", row.step, self.package.ended)

model = torch.nn.Linear(4, 1)
engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", callbacks=[Sinks(Sink())])
for _ in range(3):
    step = engine.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
sinks = engine.callbacks[0]
sinks._awaited.append((step, None))  # facts that arrive last of all
while not sinks._threads._threads[0].sent:  # until then nobody knows what the package does at the end
    pass
sys.exit(6)
"""


def test_the_end_of_the_program_is_the_end_of_sinks(warm, tmp_path):
    done = warm.run("-c", AT_EXIT, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (6, "", "")
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["row 1 False", "row 2 False", "row 3 False", "row 3 False", "package ended"]


def test_a_hanging_sink_delays_the_end_by_seconds_only(warm, tmp_path):
    code = AT_EXIT.replace('say("row", row.step, self.package.ended)', "import time; time.sleep(600)")
    code = "\n".join(line for line in code.splitlines() if "while not" not in line and line != "    pass")
    done = warm.run("-c", code, cwd=tmp_path, env={**os.environ, "AMPWISE_SINK_WAIT": "1"})
    assert done.returncode == 6
    assert "was still busy when the run ended" in done.stderr
    assert json.dumps(done.stdout) == '""'


def test_a_rejected_argument_opens_no_sink(tmp_path):
    model, sinks = torch.nn.Linear(2, 1), Sinks(f"jsonl:{tmp_path}/rows.jsonl")
    with pytest.raises(BadInput, match="clip_norm=0"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", callbacks=[sinks], clip_norm=0)
    assert (sinks._threads, list(tmp_path.iterdir())) == (None, [])


def test_sinks_are_of_one_engine():
    sinks = Sinks(print)
    run = training("fp32", callbacks=[sinks])
    with pytest.raises(BadInput, match="already in use by another engine"):
        training("fp32", callbacks=[sinks])
    run.engine.close()
    training("fp32", callbacks=[sinks]).engine.close()
