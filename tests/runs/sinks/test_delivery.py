"""Rows arrive, in order; and whatever a sink does, neither the training nor the other sinks notice."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ampwise.runs.rows import LayerSample, StepRow
from ampwise.runs.sinks import requested_sinks, run_sinks
from ampwise.runs.sinks.metrics import TimedEvent
from ampwise.runs.sinks.run_sinks import BATCH, MOST_SAMPLES, WaitLimits

from ...for_each import for_each
from .sink_toys import Toy, all_sinks, steps

ROOT = Path(__file__).parents[3]


def send(sinks, number):
    for step in steps([float(each) for each in range(number)]):
        sinks.send(step)


def said(found):
    (event,) = found
    assert (event.name, event.level) == ("sink-failed", "warning")
    return event.message


def test_every_row_arrives_in_order():
    toy = Toy()
    sinks, found = all_sinks(toy.opening)
    send(sinks, 3 * BATCH + 1)
    sinks.close(60)
    assert [each.step for each in toy.rows] == list(range(1, 3 * BATCH + 2))
    assert [each.metrics["ampwise/loss"] for each in toy.rows] == [float(each) for each in range(3 * BATCH + 1)]
    assert toy.calls[0] == "open"
    assert toy.calls[-1] == "close"
    assert not found


def test_a_sink_without_rows_is_never_opened():
    toy = Toy()
    sinks, found = all_sinks(toy.opening)
    sinks.close()
    assert not toy.calls
    assert not found


def test_after_the_end_nothing_is_sent():
    toy = Toy()
    sinks, _ = all_sinks(toy.opening)
    send(sinks, 2)
    sinks.close(60)
    send(sinks, 2)
    sinks.close(60)
    assert len(toy.rows) == 2
    assert toy.calls.count("close") == 1


@for_each(
    ("fails", "message"),
    [
        ("open", "the sink `bad` could not be opened: ValueError: the disk is full"),
        ("send", "the sink `bad` failed after 0 rows and was dropped: ValueError: the disk is full"),
        ("close", "the sink `bad` received 40 rows, and failed on closing: ValueError: the disk is full"),
    ],
)
def test_a_sink_that_fails_costs_one_finding_and_no_other_sink(fails, message):
    bad, good = Toy("bad", fails), Toy()
    sinks, found = all_sinks(bad.opening, good.opening)
    send(sinks, 20)
    if fails != "close":
        _until(lambda: found)
    send(sinks, 20)
    sinks.close(60)
    assert said(found) == message
    assert len(good.rows) == 40
    assert bad.calls.count(fails) == 1  # and was left alone


def test_a_sink_that_exits_ends_alone():
    toy = Toy(fails="send", error=SystemExit(7))
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    sinks.close(60)
    assert said(found) == "the sink `toy` failed after 0 rows and was dropped: SystemExit: 7"


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_error_without_words():
    toy = Toy(fails="open", error=Wordless())
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    sinks.close(60)
    assert said(found) == "the sink `toy` could not be opened: Wordless: (no message)"


def test_nobody_to_tell_is_no_trouble_either():
    toy, good = Toy(fails="open"), Toy()

    def refuse(trouble):
        raise RuntimeError("no room for findings")

    sinks, _ = all_sinks(toy.opening, good.opening)
    sinks._found = refuse
    send(sinks, 3)
    sinks.close(60)
    assert len(good.rows) == 3


def test_a_sink_that_hangs_holds_up_neither_training_nor_end_nor_other_sinks():
    hanging, good = Toy("hanging", held=True), Toy()
    sinks, found = all_sinks(hanging.opening, good.opening)
    send(sinks, 1)
    assert hanging.gate.wait(120)
    send(sinks, 100)
    _until(lambda: len(good.rows) == 101)
    sinks.close(0.1)
    assert said(found) == (
        "the sink `hanging` was still busy when the run ended and was abandoned: 0 rows sent, 101 not"
    )
    hanging.may_go.set()


def test_a_full_queue_drops_the_oldest_and_says_so_at_the_end(monkeypatch):
    monkeypatch.setattr(run_sinks, "MOST_WAITING", 10)
    toy = Toy(held=True)
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    send(sinks, 50)  # of which ten find room
    assert not found
    toy.may_go.set()
    sinks.close(60)
    assert [each.step for each in toy.rows] == [1, *range(41, 51)]
    assert said(found) == "the sink `toy` is slower than the training: 40 rows were dropped, 11 rows sent"


def test_of_several_troubles_the_first_is_reported(monkeypatch):
    monkeypatch.setattr(run_sinks, "MOST_WAITING", 10)
    toy = Toy(held=True, fails="close")
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    send(sinks, 50)
    toy.may_go.set()
    sinks.close(60)
    assert said(found).startswith("the sink `toy` received 11 rows, and failed on closing")


def test_without_threads_there_is_a_finding(monkeypatch):
    def no_thread(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    toy = Toy()
    sinks, found = all_sinks(toy.opening)
    monkeypatch.setattr(threading, "Thread", no_thread)
    send(sinks, 5)
    sinks.close()
    assert said(found) == "the sink `toy` could not be opened: RuntimeError: can't start new thread"


def test_a_second_interrupt_ends_the_waiting():
    toy = Toy(held=True)
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    sinks._threads[0]._done.wait = lambda seconds: os.kill(os.getpid(), signal.SIGINT)
    sinks.close(3600)
    assert "abandoned" in said(found)
    toy.may_go.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("sent_before", [0, 1])
def test_a_forked_process_sends_nothing(sent_before):
    toy = Toy()
    sinks, found = all_sinks(toy.opening)
    send(sinks, sent_before)
    assert not sent_before or toy.gate.wait(120)
    child = os.fork()
    if child == 0:
        before = list(toy.calls)
        send(sinks, 5)
        time.sleep(0.2)
        signal.alarm(120)  # it would wait for ever
        sinks.close(3600)
        os._exit(toy.calls != before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send(sinks, 1)
    sinks.close(60)
    assert len(toy.rows) == sent_before + 1
    assert not found


def test_threads_keep_no_interpreter_alive():
    code = """
import sys, time
from pathlib import Path
from ampwise.runs.sinks import requested_sinks
from ampwise.runs.sinks.run_sinks import SinkThreads
from ampwise.runs.rows import StepRow

def hang(row):
    time.sleep(600)

sinks = SinkThreads(requested_sinks([hang], base=Path("run")), print)
sinks.send(StepRow(step=1))
time.sleep(0.2)
sys.exit(5)  # and nobody has closed them
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")


def test_handing_over_waits_for_nobody():
    toy = Toy(held=True)
    sinks, found = all_sinks(toy.opening)
    sinks.send(*steps([1.0]))
    assert toy.gate.wait(120)
    (one,) = sinks._threads
    for each in steps([1.0] * 500):
        one.put(TimedEvent(1e9, each))
    assert (one.sent, one._facts.qsize()) == (0, 500), "all that while the sink had the first in hand"
    toy.may_go.set()
    sinks.close(60)
    assert (len(toy.rows), found) == (501, [])


def _until(holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


# What is counted, and what waits


def test_a_function_that_fails_has_got_what_it_got():
    rows, gate = [], threading.Event()

    def eight(row):
        gate.wait(120)
        if row.step == 8:
            raise OSError("full")
        rows.append(row)

    sinks, found = all_sinks(*requested_sinks([eight], base=Path("run")))
    send(sinks, 20)
    gate.set()
    sinks.close(60)
    assert len(rows) == 7
    assert "failed after 7 rows and was dropped: OSError: full" in said(found)
    assert (found[0].fields["sent"], found[0].fields["lost"]) == (7, 13)


def test_of_rows_in_hand_nobody_knows():
    toy = Toy(held=True)
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    toy.fails = "send"
    send(sinks, 20)
    toy.may_go.set()
    sinks.close(60)
    assert said(found).startswith("the sink `toy` failed after at least 1 row and was dropped")
    assert (found[0].fields["sent"], found[0].fields["lost"]) == (1, 20)


def sample(step):
    return LayerSample(first=step, last=step, scale=256.0, layers={})


def test_few_samples_wait_and_the_steps_stay():
    toy = Toy(held=True)
    sinks, found = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    for step in range(2, 102):
        sinks.send(StepRow(step=step, loss=1.0))
        sinks.send(sample(step))
    (delivery_,) = sinks._threads
    assert len(delivery_._samples) == MOST_SAMPLES
    assert delivery_._facts.qsize() == 100 + MOST_SAMPLES
    toy.may_go.set()
    sinks.close(60)
    assert not delivery_._samples
    assert [each.step for each in toy.rows] == list(range(1, 102))
    assert said(found) == "the sink `toy` is slower than the training: 84 rows were dropped, 101 rows sent"


def test_samples_that_are_dropped_with_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(run_sinks, "MOST_WAITING", 4)
    toy = Toy(held=True)
    sinks, _ = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    for step in range(2, 102):
        sinks.send(sample(step))
    assert len(sinks._threads[0]._samples) == 4
    toy.may_go.set()
    sinks.close(60)


def test_the_rate_of_skips_counts_what_was_left_out(monkeypatch):
    monkeypatch.setattr(run_sinks, "MOST_WAITING", 10)
    toy = Toy(held=True)
    sinks, _ = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    for step in range(2, 301):
        sinks.send(StepRow(step=step, skipped=step <= 250))
    toy.may_go.set()
    sinks.close(60)
    assert toy.rows[-1].metrics["ampwise/skip_rate"] == 0.5  # 201 to 250 of 201 to 300
    assert toy.rows[1].metrics["ampwise/skip_rate"] == 0.59


# Patience


def slowly(number, seconds):
    """A sink that takes so many seconds for each of so many rows, which are there."""
    rows = []

    def take(row):
        time.sleep(seconds)
        rows.append(row)

    sinks, found = all_sinks(*requested_sinks([take], base=Path("run")))
    send(sinks, number)
    return sinks, found, rows


def test_a_sink_that_gets_on_is_waited_for():
    sinks, found, rows = slowly(10, 0.02)
    sinks._limits = WaitLimits(still=60.0, in_all=120.0)
    sinks.close()
    assert len(rows) == 10
    assert not found


def test_but_not_for_ever():
    sinks, found, rows = slowly(300, 0.1)
    sinks._limits = WaitLimits(still=20.0, in_all=0.3)
    sinks.close()
    assert len(rows) < 300
    assert "was still busy when the run ended" in said(found)


def test_the_user_may_have_more_patience_or_less(monkeypatch):
    monkeypatch.setenv("AMPWISE_SINK_WAIT", "0.3")
    sinks, found, rows = slowly(300, 0.1)
    sinks.close()
    assert len(rows) < 300
    assert "was still busy" in said(found)


def test_what_was_given_up_is_closed_when_it_can_be():
    toy = Toy(held=True)
    sinks, _ = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    sinks.close(0.0)
    toy.may_go.set()
    _until(lambda: toy.calls[-1] == "close")


# Forks

FORKING = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkRequest
from ampwise.runs.sinks.sink_context import SinkContext
from ampwise.runs.sinks.run_sinks import SinkThreads

sys.path.insert(0, ".")

@contextmanager
def open_sink(about):
    import takes_long
    yield lambda rows: None

sinks = SinkThreads([SinkRequest("late", open_sink, SinkContext(base=Path("run").absolute()))], print)
sinks.send(StepRow(step=1))
time.sleep(0.2)  # it is at it
child = os.fork()
if child == 0:
    import takes_long
    os._exit(0)
for _ in range(600):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
sinks.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_while_a_sink_imports_can_import_too(tmp_path):
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(0.7)\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_wait_for_a_hanging_sink_once(monkeypatch):
    monkeypatch.setattr(run_sinks, "LONGEST_BEFORE_FORKS", 0.5)
    toy = Toy(held=True)
    sinks, _ = all_sinks(toy.opening)
    send(sinks, 1)
    assert toy.gate.wait(120)
    (one,) = sinks._threads
    waits, wait = [], one._settled.wait
    one._settled.wait = lambda seconds: waits.append(seconds) or wait(seconds)
    for _ in range(10):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert 1 <= len(waits) <= 2
    assert sum(waits) < 1.0  # and not half a second for each fork
    sinks.close(0.0)
    toy.may_go.set()
