"""Reading a record: of a run that is over, that was killed, or that is still going on."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ampwise.census.algebra import Census
from ampwise.errors import BadInput
from ampwise.record.bucket import Bucket
from ampwise.record.files import read_json, read_lines
from ampwise.record.layout import (
    FINDINGS,
    FORMAT,
    LARGEST_MANIFEST,
    LAYERS,
    MANIFEST,
    STEPS,
    VERSION,
    rank_folders,
)
from ampwise.record.lines import BROKEN, read_bucket, read_layers
from ampwise.record.rows import LayerSample, Seen
from ampwise.record.stored import read_findings

__all__ = ["Run"]

LARGEST_FILE = 1_000_000_000  # bytes, five times what a record has as a whole
LARGEST_FINDINGS = 100_000_000

Manifest = dict[str, Any]
Read = TypeVar("Read")

# What makes a manifest of each version that can be read one of the present version.
MIGRATIONS: Mapping[int, Callable[[Manifest], Manifest]] = {1: lambda manifest: manifest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a record says. ``trouble``: what could not be read of it, in plain sentences."""

    folder: Path
    manifest: Manifest
    steps: list[Bucket] = field(default_factory=list)  # of all optimizers; a step alone is a bucket of one
    layers: list[LayerSample] = field(default_factory=list)
    findings: list[Seen] = field(default_factory=list)  # of this rank
    ranks: dict[int, Run] = field(default_factory=dict)  # the others, by rank
    trouble: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """The record in ``folder``; BadInput where there is none, or one that is too new."""
        run = cls._read_part(Path(folder))
        for rank, path in rank_folders(run.folder).items():
            try:
                if path.is_symlink():
                    raise BadInput(f"{path.name} is a link to another place, and was not followed.")
                run.ranks[rank] = cls._read_part(path)
            except BadInput as error:
                run.trouble.append(str(error))
            else:
                run.trouble.extend(f"{path.name}: {said}" for said in run.ranks[rank].trouble)
        return run

    @classmethod
    def _read_part(cls, folder: Path) -> Run:
        manifest = _read_manifest(folder)
        trouble = [str(said) for said in _listed(manifest.get("trouble"))]
        return cls(
            folder=folder,
            manifest=manifest,
            steps=_read_all(folder / STEPS, read_bucket, trouble),
            layers=_read_all(folder / LAYERS, read_layers, trouble),
            findings=_read_findings(folder / FINDINGS, trouble),
            trouble=trouble,
        )

    @property
    def status(self) -> str:
        """How it ended: finished, failed, interrupted; or "running or killed", where the record has no end."""
        status = str(self.manifest.get("status"))
        return "running or killed" if status == "running" else status

    @property
    def alive(self) -> bool | None:
        """Whether the process that writes it is still there; None where that cannot be told from here."""
        if self.manifest.get("status") != "running":
            return False
        pid, host = self.manifest.get("pid"), self.manifest.get("host")
        if type(pid) is not int or pid < 1 or not host or host != platform.node() or os.name != "posix":
            return None
        try:
            os.kill(pid, 0)  # asks, and does nothing to it
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # somebody else's, but there
            return True
        return True

    @property
    def rank(self) -> int:
        rank = self.manifest.get("rank")
        return rank if type(rank) is int else 0

    @property
    def environment(self) -> Mapping[str, Any]:
        return _mapping(self.manifest.get("environment"))

    @property
    def facts(self) -> Mapping[str, Any]:
        return _mapping(self.manifest.get("facts"))

    def rows(self, optimizer: int = 0) -> list[Bucket]:
        """The steps of one optimizer, in their order."""
        return [bucket for bucket in self.steps if bucket.optimizer == optimizer]

    def total_layers(self, optimizer: int = 0) -> dict[str, Census]:
        """What the gradients of each parameter held in all samples together."""
        parts: dict[str, list[Census]] = {}
        for sample in self.layers:
            if sample.optimizer == optimizer:
                for name, census in sample.layers.items():
                    parts.setdefault(name, []).append(census)
        return {name: _total(censuses) for name, censuses in parts.items()}

    def merged_findings(self) -> list[Seen]:
        """Those of all ranks, worst first and then the most frequent; one that several ranks have is there once."""
        merged: dict[tuple[str, Any, str], Seen] = {}
        for rank, run in self._parts().items():
            for seen in run.findings:
                here = _on_rank(seen, rank)
                key = (here.finding.rule.code, here.finding.place.but(rank=None), here.finding.message)
                merged[key] = _merged(merged[key], here) if key in merged else here
        return sorted(merged.values(), key=_weight)

    def scales_by_rank(self, optimizer: int = 0) -> dict[int, dict[int, float]]:
        """The loss scale of each rank at each step at which it is known; of merged steps, where it did not change."""
        return {rank: _scales(run.rows(optimizer)) for rank, run in self._parts().items()}

    def _parts(self) -> dict[int, Run]:
        return {self.rank: self, **self.ranks}


# --- files ---------------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        what = "is a file, and a record is a folder" if folder.exists() else "does not exist"
        raise BadInput(f"{folder} {what}. `ampwise run -o {folder} train.py` makes a record.")
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} holds no record: it has no {MANIFEST}. `ampwise run -o RUN train.py` makes one in RUN."
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder / MANIFEST} cannot be read: {error}. Name another record, or run again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{folder / MANIFEST} is of another program: a record of ampwise has the format {FORMAT!r}.")
    return _migrated(manifest, folder)


def _migrated(manifest: Manifest, folder: Path) -> Manifest:
    version = manifest.get("version")
    if type(version) is int and version in MIGRATIONS:
        return MIGRATIONS[version](manifest)
    if type(version) is int and version > VERSION:
        import ampwise

        wrote = manifest.get("ampwise", "unknown")
        raise BadInput(
            f"{folder} is a record of version {version}, written by ampwise {wrote}; this is ampwise "
            f"{ampwise.__version__}, which reads up to version {VERSION}. Read it with ampwise {wrote} or later."
        )
    readable = ", ".join(map(str, sorted(MIGRATIONS)))
    raise BadInput(f"{folder} is a record of version {version!r}, which there never was; those that are: {readable}.")


def _read_all(path: Path, read: Callable[[bytes], Read], trouble: list[str]) -> list[Read]:
    """What the lines of a file say. A line at the end that was never finished is dropped and not worth a word."""
    found: list[Read] = []
    broken: list[int] = []
    number = 0
    try:
        for number, line in enumerate(read_lines(path, LARGEST_FILE), 1):
            try:
                found.append(read(line))
            except BROKEN:
                if line.endswith(b"\n"):
                    broken.append(number)
    except FileNotFoundError:
        trouble.append(f"{path.name} is missing.")
    except (OSError, ValueError) as error:
        trouble.append(f"{path.name} cannot be read: {error}.")
    if broken:
        trouble.append(
            f"{path.name}: {len(broken)} of {number} lines cannot be read and were left out, the first of them line "
            f"{broken[0]}."
        )
    return found


def _read_findings(path: Path, trouble: list[str]) -> list[Seen]:
    try:
        found, said = read_findings(read_json(path, LARGEST_FINDINGS))
    except FileNotFoundError:
        trouble.append(f"{path.name} is missing.")
        return []
    except (OSError, ValueError) as error:
        trouble.append(f"{path.name} cannot be read: {error}.")
        return []
    trouble.extend(said)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# --- layers --------------------------------------------------------------------------------------------------------


def _total(parts: list[Census]) -> Census:
    """What adding them up one by one gives, without a Census for every sum on the way: there are tens of thousands."""
    binades: defaultdict[int, int] = defaultdict(int)
    for part in parts:
        for exponent, count in part.binades.items():
            binades[exponent] += count
    return Census(
        binades=dict(binades),
        zeros=sum(part.zeros for part in parts),
        infs=sum(part.infs for part in parts),
        nans=sum(part.nans for part in parts),
        amax=max(part.amax for part in parts),
        amin=min((part.amin for part in parts if part.amin), default=0.0),  # 0.0 stands for "none"
        sum_squares=sum(part.sum_squares for part in parts),
    )


# --- ranks ---------------------------------------------------------------------------------------------------------


def _on_rank(seen: Seen, rank: int) -> Seen:
    return Seen(
        finding=seen.finding,
        count=seen.count,
        first_step=seen.first_step,
        last_step=seen.last_step,
        ranks=seen.ranks or [rank],
        excerpt=seen.excerpt,
    )


def _merged(one: Seen, other: Seen) -> Seen:
    return Seen(
        finding=one.finding.but(place=one.finding.place.but(rank=None)),
        count=one.count + other.count,
        first_step=min(_known(one.first_step, other.first_step), default=None),
        last_step=max(_known(one.last_step, other.last_step), default=None),
        ranks=sorted({*one.ranks, *other.ranks}),
        excerpt=one.excerpt or other.excerpt,
    )


def _known(*steps: int | None) -> list[int]:
    return [step for step in steps if step is not None]


def _weight(seen: Seen) -> tuple[int, int, str, str, str]:
    finding = seen.finding
    return finding.severity.rank, -seen.count, finding.rule.code, str(finding.place), finding.message


def _scales(buckets: list[Bucket]) -> dict[int, float]:
    return {
        step: bucket.scale.low
        for bucket in buckets
        if bucket.scale.low is not None and bucket.scale.low == bucket.scale.high and not bucket.scale.bad
        for step in (bucket.first, bucket.last)
    }
