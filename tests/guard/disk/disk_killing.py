"""Processes that are killed while they write or prune checkpoints; prints what was left each time, as JSON.

Torch is imported once, here, and those that die are forked from it. They die at every operation on files, one after
the other, or from a signal at some moment.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ampwise.guard.disk.catalog import checkpoints, mark_good, prune, verify
from ampwise.guard.disk.writing import write_checkpoint


def save(folder, step, size=50):
    tensors = {"w": torch.full((size,), float(step)), "n": torch.tensor(step)}
    return write_checkpoint(folder, step=step, live=tensors, staged=tensors, plain=step, about={}, group=None)


def die_at(operation, folder):
    """Leave, as by SIGKILL, before the n-th of the operations on files in a folder."""
    done = 0

    def count():
        nonlocal done
        done += 1
        if done == operation:
            os._exit(9)

    def hook(event, arguments):
        if event in EVENTS and arguments and str(arguments[0]).startswith(folder):
            count()

    sync = os.fsync

    def fsync(descriptor):
        count()
        sync(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def found(folder):
    """All that is there, with what a look into the files says of it."""
    facts = []
    for each in checkpoints(folder):
        told = each.trouble
        if not told:
            verify(each)
        facts.append({"step": each.step, "trouble": told, "good": each.good})
    return facts


def left_by(folder, work):
    """What is there after a child that may die; and after the next run has cleared up."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    before = found(folder)
    prune(folder, 3)
    names = sorted(path.name for path in Path(folder).iterdir())
    return {"died": status != 0, "found": before, "then": found(folder), "names": names}


def writing_at_every_operation(folder):
    for operation in range(1, 200):
        home = f"{folder}/{operation}"
        save(home, 1)

        def work(operation=operation, home=home):
            die_at(operation, home)
            save(home, 2)

        left = left_by(home, work)
        yield left
        if not left["died"]:
            return


def pruning_at_every_operation(folder):
    for operation in range(1, 200):
        home = f"{folder}/{operation}"
        first, *_ = [save(home, step) for step in range(1, 5)]
        mark_good(first)

        def work(operation=operation, home=home):
            die_at(operation, home)
            prune(home, 1)

        left = left_by(home, work)
        yield left
        if not left["died"]:
            return


def killed_at_any_moment(folder):
    save(folder, 1, 300_000)
    chance = random.Random()
    for _ in range(6):
        hears, tells = os.pipe()

        def work(tells=tells):
            for step in range(2, 10**6):
                save(folder, step, 300_000)
                os.write(tells, b".")
                prune(folder, 3)

        child = os.fork()
        if not child:
            work()
        for _ in range(chance.randint(1, 4)):
            os.read(hears, 1)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(hears)
        os.close(tells)
        before = found(folder)
        prune(folder, 3)
        names = sorted(path.name for path in Path(folder).iterdir())
        yield {"died": True, "found": before, "then": found(folder), "names": names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    phases = (writing_at_every_operation, pruning_at_every_operation, killed_at_any_moment)
    print(json.dumps({phase.__name__: list(phase(f"{sys.argv[1]}/{phase.__name__}")) for phase in phases}), flush=True)
    os._exit(0)
