"""Cost of a guard: snapshots in memory, checkpoints in the background, and restoring.

Plain and guarded engines take turns in one process, so many steps each. A guarded turn has its snapshots, and every
fourth has a checkpoint at its beginning, which makes one in a minute of training GPT-2 on a fast GPU. On a CPU a small
model is used.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import ampwise
from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.state import TrainingState
from benchmarks.contenders import Task
from benchmarks.gpt import GPT2_124M, GPT_4M
from benchmarks.harness import Result, note, publish_parts
from benchmarks.step import device, has_gpu, suffix

ROUNDS, SAVED_EVERY = 8, 4
STEPS = 250 if has_gpu() else 40  # in a turn
SNAPSHOT_EVERY = 100 if has_gpu() else 20
WANTED_RUN, WANTED_DURING = 1.01, 1.05
RESTORES = 5


class Turn(NamedTuple):
    """So many steps of one engine."""

    seconds: float
    busy: list[float]  # milliseconds of steps while a checkpoint was being written
    others: list[float]


class Trainee(NamedTuple):
    """A model that is trained."""

    engine: ampwise.Engine
    step: Callable[[], object]


def trainee(task: Task) -> Trainee:
    model, optimizer, batch = task.trainee()
    engine = ampwise.Engine(model, optimizer, task.precision, clip_norm=task.clip)
    return Trainee(engine, lambda: engine.step(model, *batch))


def turn(step: Callable[[], object], is_busy: Callable[[], bool]) -> Turn:
    _wait()
    busy: list[float] = []
    others: list[float] = []
    began = last = time.perf_counter()
    for _ in range(STEPS):
        was_busy = is_busy()
        step()
        now = time.perf_counter()
        (busy if was_busy else others).append((now - last) * 1e3)
        last = now
    _wait()
    return Turn(time.perf_counter() - began, busy, others)


def _wait() -> None:
    if has_gpu():
        torch.cuda.synchronize()


class Guarded:
    """An engine with a guard that saves when it is told to."""

    def __init__(self, task: Task, directory: Path, snapshots_on: str) -> None:
        self.engine, self.step = trainee(task)
        self.guard = ampwise.Guard(
            self.engine, directory, every="1000000 steps", snapshot_every=SNAPSHOT_EVERY, snapshots_on=snapshots_on
        )
        self.guard.begin()
        self.keeping = self.guard._checkpointing

    def save(self) -> None:
        self.keeping._save(self.guard._number)

    @property
    def is_busy(self) -> bool:
        return bool(self.keeping.saver.busy)


def whole_run(snapshots_on: str) -> Result:
    task = Task(shape=GPT2_124M if has_gpu() else GPT_4M, precision="bf16" if has_gpu() else "fp32", device=device())
    result = Result(
        name=f"guard_{snapshots_on}_{suffix()}",
        title=f"What a guard costs on a {suffix().upper()}, with snapshots on the {snapshots_on}",
        claim=f"{task.shape.name}, {task.shape.batch}×{task.shape.length} tokens, {task.precision}, fused AdamW: a "
        f"snapshot in memory every {SNAPSHOT_EVERY} steps, a checkpoint every {STEPS * SAVED_EVERY}. Plain and guarded "
        "engines take turns in one run.",
        columns=["what", "value", "wanted", "beside"],
    )
    directory = Path(tempfile.mkdtemp(prefix="ampwise-guard-"))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            plain, guarded = trainee(task), Guarded(task, directory, snapshots_on)
            _measure(result, plain, guarded, directory)
            guarded.guard.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return result


def _measure(result: Result, plain: Trainee, guarded: Guarded, directory: Path) -> None:
    for each in (plain.step, guarded.step):
        for _ in range(SNAPSHOT_EVERY + 5):  # with the first snapshot, whose memory is made
            each()
    guarded.guard.save()
    turns: list[tuple[Turn, Turn]] = []
    for number in range(ROUNDS):
        without = turn(plain.step, lambda: False)
        if number % SAVED_EVERY == 0:
            guarded.save()
        turns.append((without, turn(guarded.step, lambda: guarded.is_busy)))
        guarded.keeping.collect(wait=True)
        note(f"round {number + 1} of {ROUNDS}: {turns[-1][1].seconds / without.seconds:.4f}")
    _tell_run(result, turns)
    _tell_state(result, guarded, directory)


def _tell_run(result: Result, turns: list[tuple[Turn, Turn]]) -> None:
    without, with_guard = (sum(pair[which].seconds for pair in turns) for which in (0, 1))
    quiet = [guarded.seconds / plain.seconds for plain, guarded in turns if not guarded.busy]
    step = statistics.median(each for plain, _ in turns for each in plain.others)
    busy = [each for _, guarded in turns for each in guarded.busy]
    rows: list[list[str | float]] = [
        ["whole run, over plain", with_guard / without, f"{WANTED_RUN} at most", f"{step:.1f} ms a plain step"],
        ["turns without a checkpoint, over plain", statistics.median(quiet), "", "median"],
    ]
    if busy:
        during = [f"{len(busy)} steps, the slowest {max(busy) / step:.2f}"]
        rows.append(
            [
                "a step while one is written, over plain",
                statistics.median(busy) / step,
                f"{WANTED_DURING} at most",
                *during,
            ]
        )
    result.rows.extend(rows)


def _tell_state(result: Result, guarded: Guarded, directory: Path) -> None:
    guarded.guard.save()
    newest = checkpoints(directory)[0]
    whole = TrainingState(guarded.engine, {})
    state = sum(tensor.nbytes for tensor in whole.live().tensors.values())
    result.rows.append(["bytes written, over the state's", newest.bytes / state, "", f"{state / 1e6:,.0f} MB of state"])
    good = guarded.keeping.snapshots.good
    assert good is not None
    times = [_timed(lambda: whole.restore(good.values, good.plain, other_precision=True)) for _ in range(RESTORES)]
    result.rows.append(["back to a snapshot, ms", statistics.median(times), "", "median"])
    times = [_timed(lambda: guarded.guard._resuming.read(newest, resumes=False)) for _ in range(3)]
    result.rows.append(["back to a checkpoint, ms", statistics.median(times), "", "median; the file is in memory"])
    guarded.step()
    seconds = _timed(guarded.guard.save)
    result.rows.append(["a checkpoint that is waited for, ms", seconds, "", "written, proven, put in place"])


def _timed(work: Callable[[], object]) -> float:
    _wait()
    began = time.perf_counter()
    work()
    _wait()
    return (time.perf_counter() - began) * 1e3


PARTS: dict[str, Callable[[], Result]] = {
    "host": lambda: whole_run("host"),
    "device": lambda: whole_run("device"),
}

if __name__ == "__main__":
    publish_parts("guard", "What a guard costs.", PARTS, ())
