"""One run to a directory."""

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from ampwise.errors import BadInput
from ampwise.guard.disk import lock
from ampwise.guard.disk.lock import DirectoryLock

HOLDER = """
import os, sys, time
from ampwise.guard.disk.lock import DirectoryLock
held = DirectoryLock(sys.argv[1])
held.acquire()
if "fork" not in sys.argv or not os.fork():  # the worker says so, once it is a process of its own
    print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    processes = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture
def no_flock(monkeypatch):
    monkeypatch.setattr(lock, "_flock", lambda descriptor: None)
    monkeypatch.setattr(lock, "SETTLED_AFTER_S", 0.01)


def test_a_second_run_is_refused_and_reported_by_whom(tmp_path, holder):
    process = holder()
    with pytest.raises(BadInput, match=f"is in use by process {process.pid} on .* since 20.*stop that run first"):
        DirectoryLock(tmp_path).acquire()


@pytest.mark.parametrize("words", [(), ("fork",)], ids=["alone", "with a worker that outlives it"])
def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, holder, words):
    process = holder(*words)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    taken = DirectoryLock(tmp_path)
    taken.acquire()
    assert taken.stale
    with pytest.raises(BadInput, match=f"process {os.getpid()} "):
        DirectoryLock(tmp_path).acquire()
    taken.release()


def test_a_lock_that_was_let_go_is_not_stale(tmp_path):
    for _ in range(2):
        one = DirectoryLock(tmp_path / "made")
        one.acquire()
        assert (one.held, one.stale) == (True, False)
        with pytest.raises(BadInput, match="already locked by this run"):
            one.acquire()
        one.release()
        one.release()
        assert not one.held


def test_a_directory_that_cannot_be_locked(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot be locked: File exists\. Name a writable folder\."):
        DirectoryLock(tmp_path / "file").acquire()
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(BadInput, match="cannot be locked: lock is a link"):
        DirectoryLock(tmp_path).acquire()
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": "\\u001b[2J", "host": "\\n", "since": 1e999}', "x" * 20_000])
def test_nonsense_in_the_file(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    one = DirectoryLock(tmp_path)
    one.acquire()
    assert one.stale == bool(text)
    with pytest.raises(BadInput) as raised:
        DirectoryLock(tmp_path).acquire()
    assert str(raised.value).isprintable()
    one.release()


def test_a_refusal_is_printable(tmp_path):
    text = lock._refusal(tmp_path, {"pid": "\x1b[2J", "host": "\n", "since": float("inf")})
    assert text.isprintable()


# --- where there is no flock ---------------------------------------------------------------------------------------


def test_without_flock_a_living_process_keeps_it(tmp_path, holder, no_flock):
    process = holder()  # which did use it: its file says the same
    with pytest.raises(BadInput, match=f"process {process.pid}"):
        DirectoryLock(tmp_path).acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    taken = DirectoryLock(tmp_path)
    taken.acquire()
    assert taken.stale
    taken.release()
    assert not (tmp_path / "lock").exists()


def test_without_flock_a_number_that_another_process_has_now_is_dead(tmp_path, no_flock):
    first = DirectoryLock(tmp_path)
    first.acquire()
    facts = json.loads((tmp_path / "lock").read_text())
    with pytest.raises(BadInput, match="in use"):
        DirectoryLock(tmp_path).acquire()
    (tmp_path / "lock").write_text(json.dumps({**facts, "born": "1"}))
    second = DirectoryLock(tmp_path)
    second.acquire()
    assert second.stale
    second.release()
    first.release()


@pytest.mark.parametrize(("age", "lives"), [(0, True), (60, True), (600, False)])
def test_without_flock_another_host_lives_by_its_signs(tmp_path, no_flock, age, lives):
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "another", "since": time.time()}))
    moment = time.time() - age
    os.utime(tmp_path / "lock", (moment, moment))
    one = DirectoryLock(tmp_path)
    if lives:
        with pytest.raises(BadInput, match="process 1 on another"):
            one.acquire()
    else:
        one.acquire()
        assert one.stale
        one.release()
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def test_without_flock_signs_of_life_are_given(tmp_path, no_flock, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    one = DirectoryLock(tmp_path)
    one.acquire()
    os.utime(tmp_path / "lock", (0, 0))
    until = time.monotonic() + 120
    while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < until:
        time.sleep(0.02)
    assert (tmp_path / "lock").stat().st_mtime > 0
    one.release()


def race(folder, pipe):
    lock._flock = lambda descriptor: None
    one = DirectoryLock(folder)
    pipe.recv()
    try:
        one.acquire()
        pipe.send(True)
    except BadInput:
        pipe.send(False)
    pipe.recv()


def test_without_flock_two_that_take_over_at_once_are_not_both_holders(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"pid": 2**22 + 1, "host": lock.socket.gethostname(), "born": "1"}))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=race, args=(tmp_path, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.send("go")
    held = [ours.recv() for ours, _ in pipes]
    assert held.count(True) == 1
    for (ours, _), process in zip(pipes, processes, strict=True):
        ours.send("end")
        process.join(120)


@pytest.mark.parametrize(("number", "found"), [(errno.ENOLCK, None), (errno.EOPNOTSUPP, None), (errno.EAGAIN, False)])
def test_what_the_system_says(monkeypatch, number, found):
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor, how):
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock._flock(0) is found
