"""How long what ampwise does takes on a machine, for a model on so many ranks; and from how many on it does not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.guard.checkpointing import seconds
from ampwise.guard.disk.manifest import LARGEST_MANIFEST
from ampwise.runs.writer import RecordLimits
from benchmarks.scale import counts
from benchmarks.scale.machine import CLUSTER, Machine
from benchmarks.scale.models import Model

__all__ = ["MOST_RANKS", "PATIENCE_S", "Breaks", "Checkpoint", "Setting", "fewest", "limits"]

MOST_RANKS = 16_384  # that are looked at
PATIENCE_S = seconds("30min", "patience")  # the guard's, unless one says otherwise
KEPT = 3  # checkpoints, as the guard keeps them
AN_END_S = 600.0  # that one waits for, when a run is over
HOST_MEMORY = 64e9  # bytes that one gives to a report


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Seconds, by what they go to; the training goes on meanwhile."""

    exchanges: float
    first_rank: float  # plans, merges, writes the manifest and reads it again
    data: float  # written, with its checksum, and read back
    names: float  # files made, renamed, looked up; fsyncs
    own: float  # each rank's Python

    @property
    def total(self) -> float:
        return self.exchanges + self.first_rank + self.data + self.names + self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model in FSDP2 on so many ranks, in bfloat16, under a guard. shards: into how many it is cut, if not all."""

    model: Model
    ranks: int
    shards: int | None = None
    machine: Machine = CLUSTER

    @property
    def cut(self) -> int:
        return min(self.shards or self.ranks, self.ranks)

    # A step

    @property
    def step_s(self) -> float:
        return self.machine.step_s(self.model.parameters, self.ranks)

    def device_s(self, *, fp8: bool = False) -> float:
        """The engine's exchanges of a step."""
        law = counts.step(sharded=self.ranks > 1, fp8_layers=self.model.linear if fp8 else 0)
        return sum(self.machine.device_all_reduce_s(self.ranks, each.bytes or 0) for each in law)

    @property
    def agree_s(self) -> float:
        """The guard's, on hosts: it shows when it takes longer than a step, of which the host is ahead."""
        law = [each for each in counts.step(guarded=True) if each.group == "agree"]
        return sum(self.machine.exchange_s(each.kind, self.ranks, each.bytes or 0) for each in law)

    # A checkpoint

    @property
    def files(self) -> int:
        return counts.checkpoint_files(self.ranks)

    @property
    def fsyncs(self) -> int:
        return counts.checkpoint_fsyncs(self.ranks)

    @property
    def pieces(self) -> int:
        return self.model.pieces(self.cut)

    @property
    def manifest_bytes(self) -> int:
        entry = counts.files_bytes({0: (int(self.rank_bytes), int(self.machine.plain))})  # all ranks' are about as long
        return self.model.manifest_bytes(self.cut) + self.ranks * entry

    @property
    def refused(self) -> bool:
        """The manifest is longer than one may be."""
        return self.manifest_bytes > LARGEST_MANIFEST

    @property
    def rank_bytes(self) -> float:
        return self.model.bytes() / self.ranks

    def checkpoint(self) -> Checkpoint:
        machine, ranks = self.machine, self.ranks
        planned = self.model.items(self.cut, ranks)
        written = 2 * (self.rank_bytes / machine.sha256 + self._moved_s())  # and read back
        operations = counts.checkpoint_names(ranks, KEPT)
        in_turn = counts.operations(first=True)["fsync"] * machine.fsync_s  # those of others meanwhile
        return Checkpoint(
            exchanges=self._saving_s(),
            first_rank=planned * machine.piece_s,
            data=written,
            names=operations / machine.names + in_turn,
            own=machine.own_s,
        )

    def _moved_s(self) -> float:
        return max(self.rank_bytes / self.machine.rank_disk, self.model.bytes() / self.machine.disk)

    def _saving_s(self) -> float:
        """Of the objects: a word; pieces there, and back what to write; what was written, and where it is."""
        each = self.model.items(self.cut, self.ranks) / self.ranks
        machine = self.machine
        sizes = iter((machine.word, machine.planned * each, machine.shared * each, machine.told, machine.told))
        law = [found for found in counts.save() if found.group == "save"]
        total = 0.0
        for found in law:
            size = next(sizes) if found.bytes is None else found.bytes
            total += self.machine.exchange_s(found.kind, self.ranks, int(size))
        return total + 2 * self.ranks * self.machine.answer_s

    @property
    def first_rank_bytes(self) -> float:
        """Of memory, for plans and the manifest."""
        return self.model.items(self.cut, self.ranks) * self.machine.piece

    # Going on

    @property
    def read_bytes(self) -> float:
        """Of the files that a rank needs, each of which it reads whole (guard/disk/reading.py, CheckpointReader)."""
        return counts.files_read(self.ranks) * self.rank_bytes

    @property
    def read_s(self) -> float:
        """Until all ranks have them: they wait for each other until all checksums are compared."""
        moved = max(self.read_bytes / self.machine.rank_disk, self.ranks * self.read_bytes / self.machine.disk)
        return self.read_bytes / self.machine.sha256 + moved

    # At the beginning

    @property
    def descriptors(self) -> int:
        return counts.GROUPS_OF_A_GUARD * counts.descriptors(self.ranks)

    @property
    def meeting_s(self) -> float:
        """Until the guard's groups are there: all that ranks ask of one store, one after the other."""
        calls = counts.store_calls(self.ranks) * self.ranks
        moved = self.ranks * self.ranks * counts.store_bytes(self.ranks, int(self.machine.address))
        each = max(calls / self.machine.store_calls, moved / self.machine.store)
        return counts.GROUPS_OF_A_GUARD * each

    # A record

    @property
    def samples(self) -> int:
        """That a record keeps, at the most."""
        limits = RecordLimits()
        sample = len(self.model.tensors) * self.machine.census_on_disk
        return int(min(limits.samples, limits.layer_bytes / sample))

    @property
    def record_bytes(self) -> float:
        """On disk, of all ranks, of a run that is long enough."""
        machine, tensors = self.machine, len(self.model.tensors)
        layers = self.samples * tensors * machine.census_on_disk
        return self.ranks * (RecordLimits().rows * machine.row_on_disk + layers)

    @property
    def report_s(self) -> float:
        """One process reads the steps of all ranks, and the layers of the first (runs/reader.py, Run.read)."""
        layers = self.samples * len(self.model.tensors) * self.machine.census_s
        return self.ranks * RecordLimits().rows * self.machine.row_s + layers

    @property
    def report_bytes(self) -> float:
        layers = self.samples * len(self.model.tensors) * self.machine.census
        return self.ranks * RecordLimits().rows * self.machine.row + layers


# --- where it ends -------------------------------------------------------------------------------------------------


class Breaks(NamedTuple):
    """Something that does not do any more from some number of ranks on."""

    what: str
    where: str  # in the code
    breaks: Callable[[Setting], bool]
    by_pieces: bool = False  # it goes by how tensors are cut


def limits(machine: Machine = CLUSTER) -> list[Breaks]:
    """In the order of the page."""
    return [
        Breaks(
            f"the manifest is over {LARGEST_MANIFEST / 1e6:.0f} MB, and the checkpoint is refused",
            "guard/disk/writing.py, finish",
            lambda each: each.refused,
            by_pieces=True,
        ),
        Breaks(
            f"the guard's {counts.GROUPS_OF_A_GUARD} gloo groups need more than {machine.descriptors:,.0f} open files",
            "guard/rank_agreement.py, RankAgreement",
            lambda each: each.descriptors > machine.descriptors,
        ),
        Breaks(
            "the record takes over 64 GB of memory to read",
            "runs/reader.py, Run.read",
            lambda each: each.report_bytes > HOST_MEMORY,
        ),
        Breaks(
            "the record takes over 10 minutes to read",
            "runs/reader.py, Run.read",
            lambda each: each.report_s > AN_END_S,
        ),
        Breaks(
            "the first rank plans and merges a checkpoint for over a minute",
            "guard/disk/writing.py, _CheckpointWriter",
            lambda each: each.checkpoint().first_rank > 60,
        ),
        Breaks(
            "the first rank plans and merges for longer than the others' patience",
            "guard/disk/writing.py, _CheckpointWriter",
            lambda each: each.checkpoint().first_rank > PATIENCE_S,
            by_pieces=True,
        ),
        Breaks(
            "the guard's exchange takes longer than a step",
            "guard/rank_agreement.py, agree",
            lambda each: each.agree_s > each.step_s,
        ),
        Breaks(
            "ranks take over 10 minutes to make the guard's groups",
            "guard/rank_agreement.py, _new_group",
            lambda each: each.meeting_s > AN_END_S,
        ),
        Breaks(
            "the engine's exchange takes over 1 % of a step",
            "train/scaler/grad_stats.py, reach",
            lambda each: each.device_s() > 0.01 * each.step_s,
        ),
    ]


def fewest(setting: Callable[[int], Setting], breaks: Callable[[Setting], bool], least: int = 1) -> int | None:
    """Ranks at which it does, from ``least`` on; None if it does not up to the most that are looked at.

    What does not do with some does not do with more.
    """
    if breaks(setting(least)):
        return least
    low, high = least, MOST_RANKS
    if not breaks(setting(high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if breaks(setting(middle)) else (middle, high)
    return high
