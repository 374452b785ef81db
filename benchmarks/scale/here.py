"""What gloo ranks of this machine exchange and write, beside the laws; and how long it takes them, beside the model."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.harness import Result, note
from benchmarks.scale.check import checked, trained
from benchmarks.scale.counts import ADDRESS, checkpoint_fsyncs, operations
from benchmarks.scale.machine import Known, Machine
from benchmarks.scale.ranks import seen
from benchmarks.scale.recorders import Seen
from benchmarks.scale.simulation import Setting
from benchmarks.scale.words import time_words

__all__ = ["counted", "fitted", "heard", "ring_us", "timed"]

HERE = (2, 4, 8)
FITTED = HERE[:2]
SMALL, LARGE = 32, 2**22  # bytes of bare all-reduces: what the guard's has, and enough for a bandwidth


@cache
def here() -> dict[int, list[Seen]]:
    """What ranks have seen, by how many there were."""
    folder, found = Path(mkdtemp()), {}
    try:
        for ranks in HERE:
            note(f"{ranks} ranks")
            found[ranks] = seen(ranks, folder / str(ranks), (SMALL, LARGE))
        return found
    finally:
        shutil.rmtree(folder)


def counted() -> Result:
    result = Result(
        name="scale_counts",
        title="Scale: counts, by the law and as seen",
        claim="A small model on gloo ranks of this machine. Collectives were noted one by one, and counted by gloo "
        "itself where it does; files and fsyncs as Python asked for them. Tests hold the laws to them.",
        columns=["what", "the law, of N ranks", *(f"seen, {ranks} ranks" for ranks in HERE), "as the law says"],
    )
    found = {ranks: dict(checked(said)) for ranks, said in here().items()}
    for what in found[HERE[0]]:
        every = [found[ranks][what] for ranks in HERE]
        agree = "yes" if all(each.seen == each.by_law for each in every) else "no"
        result.rows.append([what, every[0].law, *(each.shown for each in every), agree])
    return result


def timed() -> Result:
    """Latency and bandwidth from bare all-reduces of few ranks; those of more, and ampwise's own, are predicted."""
    said = {ranks: every[0] for ranks, every in here().items()}
    bare = {ranks: {int(size): us for size, us in each["bare_us"].items()} for ranks, each in said.items()}
    latency, per_byte = fitted({ranks: bare[ranks] for ranks in FITTED})
    result = Result(
        name="scale_times",
        title="Scale: times here, predicted and seen",
        claim=f"Bare all-reduces of {' and '.join(map(str, FITTED))} gloo ranks give {latency:.0f} µs a step of the "
        f"ring and {1e-3 / per_byte:.2g} GB/s for all ranks together, which share {os.cpu_count()} cores; from these, "
        "the others. Times are reported, and decide nothing.",
        columns=["what", "bytes", "ranks", "predicted", "seen", "seen / predicted"],
    )
    for ranks in HERE:
        for what, size, us in _each(said[ranks], bare[ranks]):
            fit = ", fitted" if what.startswith("bare") and ranks in FITTED else ""
            row = [what + fit, f"{size:,}", str(ranks)]
            result.rows.append([*row, *_compared(ring_us(ranks, size, latency, per_byte), us)])
        alike = like_this(ranks, latency, 1 / per_byte, said[ranks]["fsync_us"])
        expected = Setting(model=trained(), ranks=ranks, machine=alike).checkpoint().total
        row = ["a checkpoint", f"{trained().bytes():,}", str(ranks)]
        result.rows.append([*row, *_compared(expected * 1e6, said[ranks]["guarded"]["save_s"] * 1e6)])
    result.notes.append(
        "On the first rank. Other programs ran on the machine: of 60 calls the tenth that took "
        "least, of 4 checkpoints the fastest."
    )
    result.notes.append(
        "A checkpoint: by the law of its collectives and fsyncs, with the latency that was fitted, and an fsync here; "
        "ranks share the cores and the disk."
    )
    return result


def _compared(expected: float, us: float) -> list[str | float]:
    return [time_words(expected / 1e6), time_words(us / 1e6), round(us / expected, 2)]


def like_this(ranks: int, latency: float, bytes_per_us: float, fsync_us: float) -> Machine:
    """This machine, as far as a checkpoint of a small model knows it.

    Each message waits for a process to wake; ranks share the cores, and a disk that does one fsync after the other.
    """
    in_turn = checkpoint_fsyncs(ranks) / operations(first=True)["fsync"]
    shared = max(1.0, ranks / (os.cpu_count() or 1))

    class Here(Machine):
        tcp_s = message_s = Known(latency * 1e-6, "s", "measured here", "a step between two processes")
        tcp = Known(bytes_per_us * 1e6, "bytes/s", "measured here", "through memory")
        fsync_s = Known(fsync_us * 1e-6 * in_turn, "s", "measured here", "a small file, written and synced")
        own_s = Known(Machine.own_s * shared, "s", "measured here", Machine.own_s.what)

    return Here()


def _each(said: Seen, bare: Mapping[int, float]) -> Iterator[tuple[str, int, float]]:
    yield from (("bare all-reduce", size, us) for size, us in bare.items())
    yield "the engine's all-reduce", 24, said["guarded"]["reach_us"]
    yield "the guard's exchange", 32, said["guarded"]["agree_us"]


def heard() -> dict[str, float]:
    """Lengths of what the ranks wrote and said, by the names that ``machine`` has for them."""
    first = here()[HERE[0]][0]
    words = [size for kind, size, group in first["guarded"]["save"] if (kind, group) == ("all_gather", "save")]
    return {
        "plain": first["guarded"]["files"]["plain-00000.json"],
        "word": max(words),
        "address": first["group"]["bytes"]["set"] - ADDRESS * HERE[0],
    }


def fitted(bare: Mapping[int, Mapping[int, float]]) -> tuple[float, float]:
    """Microseconds of a step of the ring, and for a byte; ``bare``: by ranks and size."""
    steps = {ranks: 2 * (ranks - 1) for ranks in bare}
    latency = statistics.mean(times[SMALL] / steps[ranks] for ranks, times in bare.items())
    slopes = ((times[LARGE] - times[SMALL]) / (LARGE - SMALL) / steps[ranks] for ranks, times in bare.items())
    return latency, statistics.mean(slopes)


def ring_us(ranks: int, size: int, latency: float, per_byte: float) -> float:
    """Twice around the ring. All ranks' bytes go through one memory: each has its share of them in every step."""
    return 2 * (ranks - 1) * (latency + size * per_byte)
