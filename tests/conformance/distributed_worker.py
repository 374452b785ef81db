"""Gloo processes on this machine, two or four of which run the cases they are told: one JSON line in, one out.

Torch is imported once, here, and the ranks are forked from it. Every case has a process group of its own, so ranks
that fell out of step in one case meet again in the next; if one hangs, all are replaced.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import distributed_cases
import distributed_engine
import distributed_fsdp2
import torch
import torch.distributed as dist

MOST = 4
COLLECTIVE_TIMEOUT_S = 90
CASE_TIMEOUT_S = 120
LOST = f"no answer in {CASE_TIMEOUT_S} s: the rank hangs or died"


def run(cases, rank, world, store, name, arguments):
    """What a case found out on this rank, or the error it ended with."""
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    try:
        facts = cases[name](**arguments)
        dist.barrier()
    except Exception as error:  # an answer too: some contenders raise
        traceback.print_exc()
        facts = {"error": f"{type(error).__name__}: {error}"}
    finally:
        dist.destroy_process_group()  # a rank still waiting for this one gets an error at once
    return facts


def serve(cases, rank, pipe):
    torch.set_num_threads(1)
    while task := pipe.recv():
        pipe.send(run(cases, rank, task["ranks"], task["store"], task["case"], task["arguments"]))


class Ranks:
    def __init__(self, cases):
        self.cases = cases
        self.fork()

    def fork(self):
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(MOST)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(self.cases, rank, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def answer(self, task):
        pipes = self.pipes[: task["ranks"]]
        for pipe in pipes:
            pipe.send(task)
        return [pipe.recv() if pipe.poll(CASE_TIMEOUT_S) else {"error": LOST} for pipe in pipes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()


def main():
    ranks = Ranks(distributed_cases.CASES | distributed_engine.CASES | distributed_fsdp2.CASES)
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(sys.stdin):
            answers = ranks.answer({**json.loads(line), "store": str(Path(folder) / str(number))})
            print(json.dumps(answers), flush=True)
            if {"error": LOST} in answers:
                ranks.kill()
                ranks.fork()
    ranks.kill()
    os._exit(0)  # nothing is left to save, and torch takes seconds to leave


if __name__ == "__main__":
    main()
