"""What ampwise exchanges, writes and keeps, as a law of ranks and parameters. Read from the code, held to it by tests.

A law gives the collectives of one rank in their order, each with the bytes that this rank brings or gets; files and
fsyncs of one rank, or of all.
"""

from __future__ import annotations

from typing import NamedTuple

from ampwise.guard.disk.manifest import plain_file, tensors_file

__all__ = [
    "GROUPS_OF_A_GUARD",
    "Collective",
    "begin_of_guard",
    "checkpoint_files",
    "checkpoint_fsyncs",
    "checkpoint_names",
    "descriptors",
    "explained",
    "files_bytes",
    "files_read",
    "operations",
    "record_files",
    "save",
    "step",
    "store_bytes",
    "store_calls",
]

GROUPS_OF_A_GUARD = 3  # guard/rank_agreement.py, RankAgreement.__init__: to agree, to save, to read
NUMBER = 8  # bytes of a length, before an object
ADDRESS = 8  # bytes for each other rank in what a rank tells of itself to make a gloo group


class Collective(NamedTuple):
    kind: str
    bytes: int | None  # None: the length of an object, which depends on what it says
    group: str  # whose: of the model, or one of the guard's


def _all_gather_object(group: str) -> list[Collective]:
    return [Collective("all_gather", NUMBER, group), Collective("all_gather", None, group)]


def _gather_object(group: str) -> list[Collective]:
    return [Collective("all_gather", NUMBER, group), Collective("gather", None, group)]


def _scatter_object(group: str) -> list[Collective]:
    return [
        Collective("broadcast", NUMBER, group),
        Collective("scatter", None, group),
        Collective("scatter", NUMBER, group),
    ]


# --- a step --------------------------------------------------------------------------------------------------------


def step(
    *, sharded: bool = False, weighed: bool = False, fp8_layers: int = 0, guarded: bool = False, optimizers: int = 1
) -> list[Collective]:
    """Of ours: what DDP and FSDP exchange themselves is theirs. A copied model needs nothing: ranks see the same."""
    found = []
    if weighed:  # train/ranks.py, Ranks.mean: the weight of a window
        found.append(Collective("all_reduce", NUMBER, "model"))
    if sharded:  # train/scaler/grad_stats.py, RankReduction.reach: sum of squares, infinities, NaNs, in FP64
        found += [Collective("all_reduce", 3 * NUMBER, "model")] * optimizers
    if fp8_layers:  # train/float8/delayed_scaling.py: the largest magnitude and a count of 3 operands, in FP32
        found.append(Collective("all_reduce", 3 * 2 * 4 * fp8_layers, "model"))
    if guarded:  # guard/rank_agreement.py, RankAgreement.agree: the loss, due, busy, ends, in FP64
        found.append(Collective("all_reduce", 4 * NUMBER, "agree"))
    return found


def explained() -> list[Collective]:
    """A step whose loss is not finite, run again on all ranks (trace/bad_steps.py, trace/diagnosis.py).

    Asked of all: was the loss finite, is anything drawn, how many passes, which losses; does the replay work, has it
    exchanges, is it finite (two), what was found (two), where it was saved.
    """
    return _all_gather_object("model") * 11


# --- a guard -------------------------------------------------------------------------------------------------------


def begin_of_guard() -> list[Collective]:
    """guard/guard.py, Guard.begin, in a folder without checkpoints."""
    return _all_gather_object("agree") * 6


def save() -> list[Collective]:
    """guard/checkpointing.py, save_now and BackgroundSaver; guard/disk/exchange.py in the group that saves.

    Is it saved already; are weights finite; pieces to the first rank, and back what to write; what was written to the
    first rank, and back where it is. One that is due begins without the first question.
    """
    exchange = [*_gather_object("save"), *_scatter_object("save")]
    return [*_all_gather_object("agree"), *_all_gather_object("save"), *exchange * 2]


def checkpoint_files(ranks: int) -> int:
    """Two of a rank, the manifest and its seal: in one folder."""
    return 2 * ranks + 2


def checkpoint_fsyncs(ranks: int) -> int:
    """Each file's, the folder's by every rank; by the first one that of the folder again, and of the one above."""
    return checkpoint_files(ranks) + ranks + 2


def checkpoint_names(ranks: int, kept: int) -> int:
    """What all ranks ask of the file system by name, without what is written and read.

    Each file is made aside, renamed and read back, and the folder is opened to be synced; the first rank looks up all
    files of those that are kept, once to number this one, once to prune, and removes one (guard/disk/catalog.py).
    """
    made = operations(first=True)["create"] + operations(first=True)["rename"] + operations(first=True)["open"]
    others = sum(operations(first=False).values()) - operations(first=False)["fsync"]
    return made + (ranks - 1) * others + 2 * kept * 2 * ranks + checkpoint_files(ranks)


def operations(*, first: bool) -> dict[str, int]:
    """Of a rank, in the folder of a checkpoint and the one above, for the first one there."""
    if not first:
        return {"create": 2, "rename": 2, "open": 3, "fsync": 3}
    return {"create": 4, "rename": 5, "open": 7, "fsync": 7}


def files_read(ranks: int) -> int:
    """Of tensors, by a rank that goes on, at most (guard/disk/reading.py): each whole, to compare its checksum.

    Its own, and the first one's, which has the step counters and all else that is a single number.
    """
    return min(ranks, 2)


def files_bytes(sizes: dict[int, tuple[int, int]]) -> int:
    """Of the part of the manifest that names files, by rank: how long its tensors' file is, and its plain one."""
    digest = '"sha256": "' + 64 * "0" + '"}'
    entries = [
        f'"{name}": {{"bytes": {size}, {digest}'
        for rank, both in sizes.items()
        for name, size in zip((tensors_file(rank), plain_file(rank)), both, strict=True)
    ]
    return len("{}") + sum(map(len, entries)) + len(", ") * (len(entries) - 1)


# --- a gloo group --------------------------------------------------------------------------------------------------


def descriptors(ranks: int) -> int:
    """That a process holds open for a group: a connection to every other rank, and four of its own."""
    return ranks - 1 + 4


def store_calls(ranks: int) -> int:
    """Of a rank, to find the others: every rank reads what every rank has said."""
    return 1 + ranks


def store_bytes(ranks: int, alone: int) -> int:
    """That a rank says of itself; ``alone``: without the others."""
    return alone + ADDRESS * ranks


# --- a record ------------------------------------------------------------------------------------------------------


def record_files(ranks: int) -> int:
    """runs/layout.py: four of a rank, in a folder of its own but for the first."""
    return 4 * ranks
