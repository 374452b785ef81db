"""Trainings in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ..night import by_night
from . import programs
from .programs import Outcome, cheap

PROGRAM = Path(__file__).with_name("programs.py")
LIMIT_S = 120
LOADED = [
    *("ampwise.guard.guard", "ampwise.guard.disk.reading", "ampwise.guard.disk.writing", "ampwise.trace.diagnosis"),
    *("torch.distributed.fsdp", "torch.nn.parallel", "torch.utils.data"),
]


class Children:
    """Programs run to their end, each in a folder of its own beside the directory that they share."""

    def __init__(self, warm, folder):
        self._warm, self._folder, self._count = warm, folder, 0

    def train(self, directory, *, ranks=1, by_rank=None, **options):
        """Of one process, or of each rank: ``code``, ``said``, and ``outcome`` if it lived to tell."""
        self._count += 1
        store = str(self._folder / f"store-{self._count}") if ranks > 1 else ""
        ended = [None] * ranks

        def run(rank):
            result = self._folder / f"result-{self._count}-{rank}.json"
            plan = {"directory": str(directory), "result": str(result), "store": store, "way": programs.WAY, **options}
            plan.update((by_rank or {}).get(rank, {}))
            ended[rank] = self._run(plan, result, rank, ranks)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(ended), "a child did not come to an end"
        return ended[0] if ranks == 1 else ended

    def preempt(self, directory, *, everyone, **options):
        """Two ranks under torchrun, which come to a batch and are told to end: by their agent, or all of them."""
        self._count += 1
        result = self._folder / f"result-{self._count}-RANK.json"
        store = self._folder / f"store-{self._count}"
        plan = {"directory": str(directory), "result": str(result), "store": str(store), "signals": 1 + everyone}
        plan.update(fault="waits for signals", **options)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "PYTHON_EXEC": str(getattr(self._warm, "rank", sys.executable))}
        words = [sys.executable, *launcher, str(PROGRAM), json.dumps(plan)]
        with (self._folder / f"said-{self._count}").open("w+") as said:
            with subprocess.Popen(words, env=environment, cwd=self._folder, stdout=said, stderr=said) as agent:
                workers = [self._waits(directory, rank, 0, agent) for rank in range(2)]
                if everyone:
                    for rank, worker in enumerate(workers):
                        os.kill(worker, signal.SIGTERM)
                        self._waits(directory, rank, 1, agent)
                agent.send_signal(signal.SIGTERM)
                agent.wait(LIMIT_S)
            said.seek(0)
            words = said.read()
        results = [Path(str(result).replace("RANK", str(rank))) for rank in range(2)]
        assert all(each.exists() for each in results), words
        return [Outcome(**json.loads(each.read_text())) for each in results]

    def _waits(self, directory, rank, count, agent):
        """The process that waits for a signal, after so many."""
        says, until = Path(f"{directory}.waits-{rank}-{count}"), time.monotonic() + LIMIT_S
        while not (says.exists() and says.read_text()):
            assert agent.poll() is None, f"torchrun ended before rank {rank} came to the batch"
            assert time.monotonic() < until, f"rank {rank} does not come to the batch"
            time.sleep(0.01)
        return int(says.read_text())

    def _run(self, plan, result, rank, ranks):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        words = [str(PROGRAM), json.dumps(plan)]
        done = self._warm.run(*words, cwd=self._folder, env=environment, timeout=LIMIT_S, loaded=LOADED)
        outcome = Outcome(**json.loads(result.read_text())) if result.exists() else None
        return SimpleNamespace(code=done.returncode, said=done.stdout + done.stderr, outcome=outcome)


@pytest.fixture(scope="module", params=["engine", *by_night("loop", "own steps", "lightning", "trainer")])
def way(request):
    """How the trainings of a test are written: with an engine, by night in all other ways, too."""
    if request.param in ("lightning", "trainer"):
        pytest.importorskip("pytorch_lightning" if request.param == "lightning" else "transformers")
    programs.WAY = request.param
    yield request.param
    programs.WAY = "engine"


def written(*ways):
    """A mark: the test is run for trainings that are written in these ways."""
    return pytest.mark.parametrize("way", ways, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def _small_operations_are_cheap():
    """As they are in the children: what is compared is to have the same bits."""
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    cheap()
    yield
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(onednn)


@pytest.fixture
def children(warm, tmp_path_factory):
    return Children(warm, tmp_path_factory.mktemp("children"))
