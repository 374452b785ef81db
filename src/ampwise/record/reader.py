"""Reading a record: of a run that is over, that was killed, or that is still going on."""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ampwise.census.algebra import Census
from ampwise.errors import BadInput
from ampwise.record.bucket import Bucket
from ampwise.record.files import read_json
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
from ampwise.record.lines import is_count, read_bucket, read_layers
from ampwise.record.rows import LayerSample, Seen
from ampwise.record.stored import read_findings
from ampwise.record.tail import Limits, Tail, Whole

__all__ = ["Part", "Run", "with_ranks"]

# Several times what a record has: thinning.Limits.
OF_STEPS = Limits(bytes=100_000_000, line=10_000, lines=300_000)
OF_LAYERS = Limits(bytes=250_000_000, line=64_000_000, lines=10_000)
LARGEST_FINDINGS = 32_000_000  # bytes

Manifest = dict[str, Any]

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
    findings_known: bool = True  # whether all that were written could be read, of every rank

    @classmethod
    def read(cls, folder: str | Path, *, layers_of_others: bool = True) -> Run:
        """The record in ``folder``; BadInput where there is none, or one that is too new.

        layers_of_others: False leaves those of all ranks but the first unread, and what is wrong with them untold:
        they are most of a record of many ranks, and no report shows them.
        """
        return with_ranks(_read_part(Path(folder)), partial(_read_part, layers=layers_of_others))

    @property
    def status(self) -> str:
        """How it ended: finished, failed, interrupted; "running or killed", where the record has no end; or unknown."""
        status = str(self.manifest.get("status", "unknown"))
        return "running or killed" if status == "running" else status

    @property
    def alive(self) -> bool | None:
        """Whether the process that writes it is still there; None where that cannot be told from here."""
        if self.manifest.get("status") != "running":
            return False
        pid, host = self.manifest.get("pid"), self.manifest.get("host")
        if not pid or not host or host != platform.node() or os.name != "posix":
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
        rank: int = self.manifest.get("rank", 0)
        return rank

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

    def _repr_html_(self) -> str:
        from ampwise.report.notebook import run_html

        return run_html(self)

    def _parts(self) -> dict[int, Run]:
        return {self.rank: self, **self.ranks}


# --- parts ---------------------------------------------------------------------------------------------------------


class Part:
    """The record of one rank: its files, each read as far as it is another than at the last look.

    layers: False where nobody asks for them.
    """

    def __init__(self, folder: Path, *, layers: bool = True) -> None:
        self.folder = folder
        self._manifest = Whole(folder / MANIFEST, partial(_read_manifest, folder))
        self._steps = Tail(folder / STEPS, read_bucket, OF_STEPS)
        self._layers = Tail(folder / LAYERS, read_layers, OF_LAYERS)
        self._findings = Whole(folder / FINDINGS, partial(_read_findings, folder / FINDINGS))
        wanted = [self._layers] if layers else []
        self._asked: list[Tail[Any] | Whole[Any]] = [self._manifest, self._steps, *wanted, self._findings]

    def look(self) -> bool:
        """Whether it says something else now; BadInput where it is no record, or one that is too new."""
        news = [file.look() for file in self._asked]
        manifest, said = self._manifest.value
        if not manifest and not (self._steps.values or self._layers.values or self._findings.value[0]):
            raise BadInput(f"{self.folder}: {said} Nothing else is there to read. Name another record, or run again.")
        return any(news)

    @property
    def run(self) -> Run:
        """As of the last look, without the other ranks."""
        found, said = self._findings.value
        manifest, torn = self._manifest.value
        told = [*([torn] if torn else []), *manifest.get("trouble", ())]
        return Run(
            folder=self.folder,
            manifest=manifest,
            steps=self._steps.values,
            layers=self._layers.values,
            findings=list(found),
            trouble=[*told, *self._steps.trouble, *self._layers.trouble, *said],
            findings_known=not said,
        )


def with_ranks(run: Run, read: Callable[[Path], Run]) -> Run:
    """The first rank's part, with the parts of the others in it, as ``read`` finds them."""
    try:
        folders = rank_folders(run.folder)
    except OSError as error:
        run.trouble.append(f"The parts of other ranks cannot be listed: {error.strerror or error}.")
        return run
    known = run.findings_known
    for rank, path in folders.items():
        try:
            if path.is_symlink():
                raise BadInput(f"{path.name} is a link to another place, and was not followed.")
            run.ranks[rank] = read(path)
        except BadInput as error:
            run.trouble.append(str(error))
            known = False
        else:
            run.trouble.extend(f"{path.name}: {said}" for said in run.ranks[rank].trouble)
            known &= run.ranks[rank].findings_known
    return replace(run, findings_known=known)


def _read_part(folder: Path, *, layers: bool = True) -> Run:
    part = Part(folder, layers=layers)
    part.look()
    return part.run


# --- files ---------------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest; or none, and what is to be said of one that is there and cannot be read."""
    if not folder.is_dir():
        raise BadInput(f"{folder} {_instead_of_a_folder(folder)}")
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} holds no record: it has no {MANIFEST}. `ampwise run -o RUN train.py` makes one in RUN."
        ) from None
    except (OSError, ValueError) as error:
        return {}, f"{MANIFEST}, which says what ran and how it ended, cannot be read: {_why(error)}."
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{folder / MANIFEST} is of another program: a record of ampwise has the format {FORMAT!r}.")
    return _checked(_migrated(manifest, folder))


# What of a manifest is more than shown. All of it may come from anybody.
KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("ampwise", "created", "host", "status"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("script", "finished"), lambda value: value is None or isinstance(value, str)),
    **dict.fromkeys(("rank", "world_size", "pid"), is_count),
    "exit_code": lambda value: value is None or (type(value) is int and abs(value) < 2**63),
    "command": lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
    "trouble": lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
    "error": lambda value: value is None or isinstance(value, dict),
    **dict.fromkeys(("environment", "facts"), lambda value: isinstance(value, dict)),
}


def _checked(manifest: Manifest) -> tuple[Manifest, str]:
    """The manifest without what is of another kind than a run writes, and what is to be said of that."""
    wrong = [name for name, is_one in KINDS.items() if name in manifest and not is_one(manifest[name])]
    said = f"{MANIFEST}: {', '.join(wrong)} make no sense and were left out." if wrong else ""
    return {name: value for name, value in manifest.items() if name not in wrong}, said


def _instead_of_a_folder(path: Path) -> str:
    if path.exists():
        return "is a file, and a record is a folder."
    if path.is_symlink():
        return "is a link that leads nowhere."
    return f"does not exist. `ampwise run -o {path} train.py` makes a record."


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return "it is cut off, or damaged"
    return getattr(error, "strerror", None) or str(error)


def _migrated(manifest: Manifest, folder: Path) -> Manifest:
    version = manifest.get("version")
    if type(version) is int and version in MIGRATIONS:
        return MIGRATIONS[version](manifest)
    if type(version) is int and version > VERSION:
        import ampwise
        from ampwise.printers.terminal import printable

        wrote = printable(str(manifest.get("ampwise", "unknown")))
        raise BadInput(
            f"{folder} is a record of version {version}, written by ampwise {wrote}; this is ampwise "
            f"{ampwise.__version__}, which reads up to version {VERSION}. Read it with ampwise {wrote} or later."
        )
    readable = ", ".join(map(str, sorted(MIGRATIONS)))
    raise BadInput(f"{folder} is a record of version {version!r}, which there never was; those that are: {readable}.")


def _read_findings(path: Path) -> tuple[list[Seen], list[str]]:
    """The findings of a file, and what is to be said of those that cannot be read."""
    try:
        return read_findings(read_json(path, LARGEST_FINDINGS))
    except FileNotFoundError:
        return [], [f"{path.name} is missing."]
    except (OSError, ValueError) as error:
        return [], [f"{path.name} cannot be read: {_why(error)}."]


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
    return replace(seen, ranks=seen.ranks or [rank])


def _merged(one: Seen, other: Seen) -> Seen:
    return replace(
        one,
        finding=one.finding.but(place=one.finding.place.but(rank=None)),
        count=one.count + other.count,
        first_step=min(_known(one.first_step, other.first_step), default=None),
        last_step=max(_known(one.last_step, other.last_step), default=None),
        ranks=sorted({*one.ranks, *other.ranks}),
        excerpt=one.excerpt or other.excerpt,
        diff=one.diff or other.diff,
    )


def _known(*steps: int | None) -> list[int]:
    return [step for step in steps if step is not None]


def _weight(seen: Seen) -> tuple[int, bool, int, str, str, str]:
    finding = seen.finding
    causes_last = not finding.rule.names_the_cause
    return finding.severity.rank, causes_last, -seen.count, finding.rule.code, str(finding.place), finding.message


def _scales(buckets: list[Bucket]) -> dict[int, float]:
    return {
        step: bucket.scale.low
        for bucket in buckets
        if bucket.scale.low is not None and bucket.scale.low == bucket.scale.high and not bucket.scale.bad
        for step in (bucket.first, bucket.last)
    }
