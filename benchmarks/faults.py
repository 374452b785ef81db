"""Effect of faults on training, in a plain torch loop and with a guard.

A run that ends early is restarted a few times, as a cluster would do. Then the benchmark counts how often each sample
of each epoch is in the weights, and compares the final loss with that of runs without faults.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ampwise.guard.disk.reading
import ampwise.guard.disk.writing
import ampwise.trace.diagnosis  # noqa: F401  (all three once, and not in every fork)
from ampwise.guard.disk.catalog import checkpoints
from benchmarks.faults_contenders import (
    BATCH,
    EPOCHS,
    LATEST,
    RESULT,
    SAMPLES,
    SOON_S,
    Fault,
    Job,
    guarded,
    join_ranks,
    plain,
)
from benchmarks.harness import Result, note

SEEDS = (0, 1, 2)
STARTS = 2  # of a training, at most
LIMIT_S = 3 * SOON_S  # then it is said to hang
IN_A_ROW = (50, 51, 52)
WITHOUT_END = tuple(range(50, 10_000))

WHAT = ("loss", "lost", "twice", "redone")

Contender = Callable[[Job], None]


def newest(directory: Path) -> Path:
    """The file with the tensors of the newest checkpoint."""
    found = [each.path / "tensors-00000.safetensors" for each in checkpoints(directory / "guard") if not each.trouble]
    return found[0] if found else directory / LATEST


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


FAULTS = [
    Fault(name="none"),
    Fault(name="a NaN batch", kind="nan", at=(50,)),
    Fault(name="an inf batch", kind="inf", at=(50,)),
    Fault(name="a huge batch", kind="huge", at=(50,)),
    Fault(name="three NaN batches in a row", kind="nan", at=IN_A_ROW),
    Fault(name="NaN without end", kind="nan", at=WITHOUT_END, every_time=True),
    Fault(name="NaN in the weights", kind="weights", at=(50,)),
    Fault(name="activations too large for FP16", model="loud", precision="fp16"),
    Fault(name="gradients too large for FP16", model="steep", precision="fp16"),
    Fault(name="a spike: wrong labels", kind="spike", at=(90,), ladder={"on_spike": "rollback"}),
    Fault(name="SIGKILL", kind="SIGKILL", at=(70,)),
    Fault(name="SIGKILL while saving", kind="SIGKILL while saving"),
    Fault(name="killed, checkpoint truncated", kind="SIGKILL", at=(70,), damage=cut),
    Fault(name="killed, a bit flipped", kind="SIGKILL", at=(70,), damage=flip),
    Fault(name="killed, a file missing", kind="SIGKILL", at=(70,), damage=Path.unlink),
    Fault(name="no room on the disk", largest_file=20_000, every_time=True),
    Fault(name="SIGTERM: preempted", kind="SIGTERM", at=(70,)),
    Fault(name="out of memory", kind="memory", at=(50,), every_time=True, guard={"split": True}),
    Fault(name="2 ranks: none", ranks=2),
    Fault(name="2 ranks: NaN on one", kind="nan", at=(50,), ranks=2, on_rank=1),
    Fault(name="2 ranks: one is killed", kind="SIGKILL", at=(70,), ranks=2, on_rank=1),
    Fault(name="2 ranks: one hangs", kind="hang", at=(70,), ranks=2, on_rank=1),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a training, with all its starts."""

    codes: list[int | None]  # exit codes, the worst of its ranks; None: it hung, and was killed
    loss: float | None  # None: it never came to its end, or was not finite
    finished: bool
    lost: int  # samples of an epoch that are not in the weights
    twice: int  # that are there again
    redone: int  # steps that were made, and undone or forgotten
    told: list[str]


# --- processes -----------------------------------------------------------------------------------------------------


def run(contender: Contender, fault: Fault, seed: int) -> Run:
    folder = Path(tempfile.mkdtemp(prefix="ampwise-faults-"))
    codes: list[int | None] = []
    try:
        while len(codes) < STARTS and not (folder / RESULT).exists():
            codes.append(_start(contender, fault, seed, folder, len(codes)))
            if len(codes) == 1 and fault.damage is not None and newest(folder).exists():
                fault.damage(newest(folder))
        return _seen(folder, fault, codes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(contender: Contender, fault: Fault, seed: int, folder: Path, attempt: int) -> int | None:
    """Forks, which have torch loaded already."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=_child,
            args=(contender, Job(fault=fault, seed=seed, directory=folder, attempt=attempt, rank=rank)),
        )
        for rank in range(fault.ranks)
    ]
    for each in ranks:
        each.start()
    until, hung = time.monotonic() + LIMIT_S, False
    for each in ranks:
        each.join(max(0.0, until - time.monotonic()))
    first = next((each.exitcode for each in ranks if each.exitcode is not None and each.exitcode != 0), 0)
    for each in ranks:
        if each.is_alive():
            hung = hung or fault.on_rank is None or each is not ranks[fault.on_rank]
            each.kill()
        each.join()
    return None if hung else first


def _child(contender: Contender, job: Job) -> None:
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    code = 0
    try:
        join_ranks(job)
        contender(job)
    except SystemExit as ends:
        code = ends.code if isinstance(ends.code, int) else 1
    except Exception:
        code = 1
    os._exit(code)


# --- what is in the weights ----------------------------------------------------------------------------------------


def _seen(folder: Path, fault: Fault, codes: list[int | None]) -> Run:
    trained: Counter[tuple[int, int]] = Counter()
    made = 0
    told: list[str] = []
    for rank in range(fault.ranks):
        lines = [json.loads(line) for line in (folder / f"log-{rank}").read_text().splitlines()]
        trained.update(_trained(lines))
        made += sum("samples" in line for line in lines) - sum("skipped" in line for line in lines)
        told += [name for line in lines for name in line.get("told", ())] if rank == 0 else []
    result = json.loads((folder / RESULT).read_text()) if (folder / RESULT).exists() else None
    return Run(
        codes=codes,
        loss=None if result is None else result["loss"],
        finished=result is not None,
        lost=EPOCHS * SAMPLES - len(trained),
        twice=sum(trained.values()) - len(trained),
        redone=made // fault.ranks - sum(trained.values()) // BATCH,
        told=told,
    )


def _trained(lines: Sequence[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """Whoever goes back to an earlier step undoes those after it."""
    kept: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        if "samples" in line:
            kept = {number: its for number, its in kept.items() if number < line["number"]}
            kept[line["number"]] = [(line["epoch"], sample) for sample in line["samples"]]
        elif "skipped" in line:
            kept.pop(line["skipped"], None)
    return Counter(place for its in kept.values() for place in its)


# --- the table -----------------------------------------------------------------------------------------------------


def table() -> Result:
    result = Result(
        name="faults",
        title="What faults do to a training, by hand and with a guard",
        claim=f"A small model, {EPOCHS} epochs of {SAMPLES // BATCH} batches, {len(SEEDS)} seeds; on two ranks one. "
        "Codes: how its processes ended, in their order, with the first seed. Loss: the median at the end. Lost, "
        "twice: batches of data that are not in the weights, or again; redone: steps that were made in vain; a seed.",
        columns=["fault", "by hand", *WHAT, "guard", *WHAT, "what it did"],
    )
    for fault in FAULTS:
        note(fault.name)
        seeds = SEEDS[:1] if fault.ranks > 1 else SEEDS
        by_hand = [run(plain, fault, seed) for seed in seeds]
        with_guard = [run(guarded, fault, seed) for seed in seeds]
        result.rows.append([fault.name, *_cells(by_hand), *_cells(with_guard), _did(with_guard[0])])
        if fault.name == "none":
            result.notes.append(f"Unbroken runs end at {_noise(by_hand)} by hand, {_noise(with_guard)} with a guard.")
    result.notes += _expected()
    result.notes.append(
        "Of a rank that hangs the watchdog of the other tells on stderr, and ends it at once: that is not in the last "
        "column."
    )
    return result


def _expected() -> list[str]:
    """What FP16 runs would be without the fault: BF16."""
    found = []
    for model in ("loud", "steep"):
        runs = [run(plain, Fault(name=model, model=model), seed) for seed in SEEDS]
        found.append(f"The {model} model ends at {_noise(runs)} in BF16, by hand.")
    return found


def _noise(runs: Sequence[Run]) -> str:
    losses = sorted(each.loss for each in runs if each.loss is not None)
    return f"{min(losses):.4f} to {max(losses):.4f}"


def _cells(runs: Sequence[Run]) -> list[str | float]:
    losses = [math.nan if each.loss is None else each.loss for each in runs]
    if not all(each.finished for each in runs):
        loss = "never ends"
    else:
        loss = "NaN" if any(map(math.isnan, losses)) else f"{statistics.median(losses):.4f}"
    codes = ", ".join("hangs" if code is None else str(code) for code in runs[0].codes)
    means = [statistics.mean(numbers) for numbers in zip(*((run.lost, run.twice) for run in runs), strict=True)]
    return [codes, loss, *(mean / BATCH for mean in means), statistics.mean(run.redone for run in runs)]


def _did(each: Run) -> str:
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in Counter(each.told).items())


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("benchmarks.faults: needs forks, signals and limits as Linux has them")
    torch.set_num_threads(1)
    table().publish()
