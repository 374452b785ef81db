"""Trainings in processes of their own."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .programs import Outcome, cheap

PROGRAM = Path(__file__).with_name("programs.py")
LIMIT_S = 60
LOADED = [
    *("ampwise.guard.guard", "ampwise.guard.disk.reading", "ampwise.guard.disk.writing", "ampwise.trace.explaining"),
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
            plan = {"directory": str(directory), "result": str(result), "store": store, **options}
            plan.update((by_rank or {}).get(rank, {}))
            ended[rank] = self._run(plan, result, rank, ranks)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(ended), "a child did not come to an end"
        return ended[0] if ranks == 1 else ended

    def _run(self, plan, result, rank, ranks):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        words = [str(PROGRAM), json.dumps(plan)]
        done = self._warm.run(*words, cwd=self._folder, env=environment, timeout=LIMIT_S, loaded=LOADED)
        outcome = Outcome(**json.loads(result.read_text())) if result.exists() else None
        return SimpleNamespace(code=done.returncode, said=done.stdout + done.stderr, outcome=outcome)


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


@pytest.fixture
def logged():
    """The steps that a program wrote down."""

    def read(path):
        lines = Path(path).read_text().splitlines() if Path(path).exists() else []
        return [json.loads(line) for line in lines]

    return read
