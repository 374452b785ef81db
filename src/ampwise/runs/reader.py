"""Read the record of a run that has ended, was killed, or is still running."""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ampwise.errors import BadInput
from ampwise.numbers.census.algebra import Census
from ampwise.runs.bucket import StepBucket
from ampwise.runs.events import LoggedEvent, read_event
from ampwise.runs.files import read_json
from ampwise.runs.findings_json import read_findings
from ampwise.runs.growing_files import GrowingLines, ReadLimits, ReplacedFile
from ampwise.runs.json_lines import is_count, read_bucket, read_layers
from ampwise.runs.layout import (
    EVENTS,
    FINDINGS,
    FORMAT,
    LARGEST_MANIFEST,
    LAYERS,
    MANIFEST,
    STEPS,
    VERSION,
    rank_folders,
)
from ampwise.runs.rows import CountedFinding, LayerSample

__all__ = ["RankRecord", "Run", "with_ranks"]

# Several times the size that thinning.Limits allows.
STEP_LIMITS = ReadLimits(bytes=100_000_000, line=10_000, lines=300_000)
LAYER_LIMITS = ReadLimits(bytes=250_000_000, line=64_000_000, lines=10_000)
EVENT_LIMITS = ReadLimits(bytes=100_000_000, line=1_000_000, lines=20_000)
LARGEST_FINDINGS = 32_000_000  # bytes

RunManifest = dict[str, Any]

# Converts a manifest of each readable version to the current version.
MIGRATIONS: Mapping[int, Callable[[RunManifest], RunManifest]] = {1: lambda manifest: manifest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Contents of a record. ``trouble``: sentences about parts that could not be read."""

    folder: Path
    manifest: RunManifest
    steps: list[StepBucket] = field(default_factory=list)  # of all optimizers; a single step is a bucket of one
    layers: list[LayerSample] = field(default_factory=list)
    findings: list[CountedFinding] = field(default_factory=list)  # of this rank
    events: list[LoggedEvent] = field(default_factory=list)  # in order; the first rank logs them for all
    ranks: dict[int, Run] = field(default_factory=dict)  # the other ranks
    trouble: list[str] = field(default_factory=list)
    findings_known: bool = True  # whether the findings of all ranks could be read completely
    _notebook_view: ClassVar[Callable[[Run], str] | None] = None  # set by ampwise.report: HTML of a run

    @classmethod
    def read(cls, folder: str | Path, *, layers_of_others: bool = True) -> Run:
        """Read the record in ``folder``; raise BadInput if there is none, or if it is too new.

        layers_of_others: False skips the layers of all ranks but the first, and errors in them: they are the largest
        part of a record of many ranks, and no report shows them.
        """
        return with_ranks(_read_part(Path(folder)), partial(_read_part, layers=layers_of_others))

    @property
    def status(self) -> str:
        """How the run ended: finished, failed, interrupted; "running or killed" if it has no end; or unknown."""
        status = str(self.manifest.get("status", "unknown"))
        return "running or killed" if status == "running" else status

    @property
    def alive(self) -> bool | None:
        """Whether the process that writes the record is running; None if that is unknown on this machine."""
        if self.manifest.get("status") != "running":
            return False
        pid, host = self.manifest.get("pid"), self.manifest.get("host")
        if not pid or not host or host != platform.node() or os.name != "posix":
            return None
        try:
            os.kill(pid, 0)  # checks only
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # another user's process
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

    def rows(self, optimizer: int = 0) -> list[StepBucket]:
        """Return the steps of one optimizer, in order."""
        return [bucket for bucket in self.steps if bucket.optimizer == optimizer]

    def total_layers(self, optimizer: int = 0) -> dict[str, Census]:
        """Return the census of each parameter's gradients, summed over all samples."""
        parts: dict[str, list[Census]] = {}
        for sample in self.layers:
            if sample.optimizer == optimizer:
                for name, census in sample.layers.items():
                    parts.setdefault(name, []).append(census)
        return {name: _total(censuses) for name, censuses in parts.items()}

    def merged_findings(self) -> list[CountedFinding]:
        """Return the findings of all ranks without duplicates, sorted by severity, then by frequency."""
        merged: dict[tuple[str, Any, str], CountedFinding] = {}
        for rank, run in self._parts().items():
            for seen in run.findings:
                here = _on_rank(seen, rank)
                key = (here.finding.rule.code, here.finding.place.but(rank=None), here.finding.message)
                merged[key] = _merged(merged[key], here) if key in merged else here
        return sorted(merged.values(), key=_weight)

    def scales_by_rank(self, optimizer: int = 0) -> dict[int, dict[int, float]]:
        """Return the loss scale of each rank by step, where it is known; for merged steps, if it did not change."""
        return {rank: _scales(run.rows(optimizer)) for rank, run in self._parts().items()}

    def _repr_html_(self) -> str | None:
        return None if Run._notebook_view is None else Run._notebook_view(self)

    def _parts(self) -> dict[int, Run]:
        return {self.rank: self, **self.ranks}


# --- parts ---------------------------------------------------------------------------------------------------------


class RankRecord:
    """The record of one rank, of which only changed files are read again.

    layers: False to skip them.
    """

    def __init__(self, folder: Path, *, layers: bool = True) -> None:
        self.folder = folder
        self._manifest = ReplacedFile(folder / MANIFEST, partial(_read_manifest, folder))
        self._steps = GrowingLines(folder / STEPS, read_bucket, STEP_LIMITS)
        self._layers = GrowingLines(folder / LAYERS, read_layers, LAYER_LIMITS)
        self._findings = ReplacedFile(folder / FINDINGS, partial(_read_findings, folder / FINDINGS))
        self._events = GrowingLines(folder / EVENTS, read_event, EVENT_LIMITS, optional=True)
        wanted = [self._layers] if layers else []
        self._files: list[GrowingLines[Any] | ReplacedFile[Any]] = [
            self._manifest,
            self._steps,
            *wanted,
            self._findings,
            self._events,
        ]

    def look(self) -> bool:
        """Read what has changed; return whether anything has. Raise BadInput if it is not a record, or too new."""
        changed = [file.look() for file in self._files]
        manifest, problem = self._manifest.value
        if not manifest and not (self._steps.values or self._layers.values or self._findings.value[0]):
            raise BadInput(f"{self.folder}: {problem} The other files are empty, too. Name another record.")
        return any(changed)

    @property
    def run(self) -> Run:
        """The run at the last look, without the other ranks."""
        found, findings_trouble = self._findings.value
        manifest, problem = self._manifest.value
        manifest_trouble = [*([problem] if problem else []), *manifest.get("trouble", ())]
        return Run(
            folder=self.folder,
            manifest=manifest,
            steps=self._steps.values,
            layers=self._layers.values,
            findings=list(found),
            events=self._events.values,
            trouble=[
                *manifest_trouble,
                *self._steps.trouble,
                *self._layers.trouble,
                *findings_trouble,
                *self._events.trouble,
            ],
            findings_known=not findings_trouble,
        )


def with_ranks(run: Run, read: Callable[[Path], Run]) -> Run:
    """Return rank 0's run with the other ranks added, each read by ``read``."""
    try:
        folders = rank_folders(run.folder)
    except OSError as error:
        run.trouble.append(f"The folders of other ranks cannot be listed: {error.strerror or error}.")
        return run
    known = run.findings_known
    for rank, path in folders.items():
        try:
            if path.is_symlink():
                raise BadInput(f"{path.name} is a link and was not followed.")
            run.ranks[rank] = read(path)
        except BadInput as error:
            run.trouble.append(str(error))
            known = False
        else:
            run.trouble.extend(f"{path.name}: {problem}" for problem in run.ranks[rank].trouble)
            known &= run.ranks[rank].findings_known
    return replace(run, findings_known=known)


def _read_part(folder: Path, *, layers: bool = True) -> Run:
    part = RankRecord(folder, layers=layers)
    part.look()
    return part.run


# --- files ---------------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> tuple[RunManifest, str]:
    """Return the manifest and an empty string; or an empty manifest and why it cannot be read."""
    if not folder.is_dir():
        raise BadInput(f"{folder} {_instead_of_a_folder(folder)}")
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a record: it has no {MANIFEST}. `ampwise run -o RUN train.py` writes one to RUN."
        ) from None
    except (OSError, ValueError) as error:
        return {}, f"{MANIFEST}, which has the command and how the run ended, cannot be read: {_why(error)}."
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{folder / MANIFEST} is not an ampwise record: expected the format {FORMAT!r}.")
    return _checked(_migrated(manifest, folder))


# Valid values of manifest fields that are used, not only shown. The whole file is untrusted.
VALID_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("ampwise", "created", "host", "status"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("script", "finished"), lambda value: value is None or isinstance(value, str)),
    **dict.fromkeys(("rank", "world_size", "pid"), is_count),
    "exit_code": lambda value: value is None or (type(value) is int and abs(value) < 2**63),
    "command": lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
    "trouble": lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
    "error": lambda value: value is None or isinstance(value, dict),
    **dict.fromkeys(("environment", "facts"), lambda value: isinstance(value, dict)),
}


def _checked(manifest: RunManifest) -> tuple[RunManifest, str]:
    """Return the manifest without invalid fields, and a message about those."""
    wrong = [name for name, is_valid in VALID_FIELDS.items() if name in manifest and not is_valid(manifest[name])]
    problem = f"{MANIFEST}: invalid values were ignored: {', '.join(wrong)}." if wrong else ""
    return {name: value for name, value in manifest.items() if name not in wrong}, problem


def _instead_of_a_folder(path: Path) -> str:
    if path.exists():
        return "is a file, and a record is a folder."
    if path.is_symlink():
        return "is a broken link."
    return f"does not exist. `ampwise run -o {path} train.py` writes a record."


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return "it is truncated or damaged"
    return getattr(error, "strerror", None) or str(error)


def _migrated(manifest: RunManifest, folder: Path) -> RunManifest:
    version = manifest.get("version")
    if type(version) is int and version in MIGRATIONS:
        return MIGRATIONS[version](manifest)
    if type(version) is int and version > VERSION:
        from ampwise.finding.terminal import printable
        from ampwise.finding.version import installed_version

        wrote = printable(str(manifest.get("ampwise", "unknown")))
        raise BadInput(
            f"{folder} is a record of version {version}, written by ampwise {wrote}; this is ampwise "
            f"{installed_version() or 'unknown'}, which reads up to version {VERSION}. Read it with "
            f"ampwise {wrote} or later."
        )
    readable = ", ".join(map(str, sorted(MIGRATIONS)))
    raise BadInput(f"{folder} is a record of unknown version {version!r}; known versions: {readable}.")


def _read_findings(path: Path) -> tuple[list[CountedFinding], list[str]]:
    """Return the findings in a file, and messages about what cannot be read."""
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
    """Add up censuses in one go, without an intermediate Census for each: there are tens of thousands."""
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
        amin=min((part.amin for part in parts if part.amin), default=0.0),  # 0.0 means none
        sum_squares=sum(part.sum_squares for part in parts),
    )


# --- ranks ---------------------------------------------------------------------------------------------------------


def _on_rank(seen: CountedFinding, rank: int) -> CountedFinding:
    return replace(seen, ranks=seen.ranks or [rank])


def _merged(one: CountedFinding, other: CountedFinding) -> CountedFinding:
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


def _weight(seen: CountedFinding) -> tuple[int, bool, int, str, str, str]:
    finding = seen.finding
    causes_last = not finding.rule.names_the_cause
    return finding.severity.rank, causes_last, -seen.count, finding.rule.code, str(finding.place), finding.message


def _scales(buckets: list[StepBucket]) -> dict[int, float]:
    return {
        step: bucket.scale.low
        for bucket in buckets
        if bucket.scale.low is not None and bucket.scale.low == bucket.scale.high and not bucket.scale.bad
        for step in (bucket.first, bucket.last)
    }
