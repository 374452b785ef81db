"""Read the record of a run that has ended, was killed, or is still running; and again, only what is new.

Files are not kept open between two looks, and not locked, so the writer is not disturbed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, NamedTuple, TypeVar

from ampwise.errors import BadInput
from ampwise.finding.terminal import shortened
from ampwise.numbers.census.algebra import Census
from ampwise.runs.events import LoggedEvent, read_event
from ampwise.runs.files import open_regular, read_json
from ampwise.runs.findings_json import read_findings
from ampwise.runs.json_lines import LINE_ERRORS, is_count, read_bucket, read_layers
from ampwise.runs.layout import (
    EVENTS,
    FILES,
    FINDINGS,
    FORMAT,
    LARGEST_MANIFEST,
    LAYERS,
    MANIFEST,
    STEPS,
    VERSION,
    rank_folders,
)
from ampwise.runs.rows import CountedFinding, LayerSample, StepBucket, fold_consequences


class ReadLimits(NamedTuple):
    """Limits on how much of a file is read: in memory, a line takes many times its length."""

    bytes: int
    line: int  # bytes of one line
    lines: int


# Several times the size that RecordLimits allows.
STEP_LIMITS = ReadLimits(bytes=100_000_000, line=10_000, lines=300_000)
LAYER_LIMITS = ReadLimits(bytes=250_000_000, line=64_000_000, lines=10_000)
EVENT_LIMITS = ReadLimits(bytes=100_000_000, line=1_000_000, lines=20_000)
LARGEST_FINDINGS = 32_000_000  # bytes

RunManifest = dict[str, Any]
Value = TypeVar("Value")


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

    def __repr__(self) -> str:
        steps = sum(bucket.count for bucket in self.steps)
        return shortened(f"<Run {self.folder}: {self.status}, {steps:,} steps, {len(self.findings):,} findings>")

    @classmethod
    def read(cls, folder: str | Path, *, layers_of_others: bool = True) -> Run:
        """Read the record in ``folder``; raise BadInput if there is none, or if it is too new.

        Args:
            folder: of the run.
            layers_of_others: False skips the layers of all ranks but the first, and errors in them: they are the
                largest part of a record of many ranks, and no report shows them.

        Returns:
            the run.

        Raises:
            BadInput: there is no record, or it is too new.
        """
        run = RecordFollower(folder, layers_of_others=layers_of_others).look()
        assert run is not None  # the first look always returns a run
        return run

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
        return self._mapping("environment")

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._mapping("facts")

    def _mapping(self, name: str) -> Mapping[str, Any]:
        value = self.manifest.get(name)
        return value if isinstance(value, dict) else {}

    def rows(self, optimizer: int = 0) -> list[StepBucket]:
        """Return the steps of one optimizer, in order."""
        return [bucket for bucket in self.steps if bucket.optimizer == optimizer]

    def total_layers(self, optimizer: int = 0) -> dict[str, Census]:
        """Return the census of each parameter's gradients, summed over all samples.

        Args:
            optimizer: its number, from 0.

        Returns:
            censuses by parameter.
        """
        parts: dict[str, list[Census]] = {}
        for sample in self.layers:
            if sample.optimizer == optimizer:
                for name, census in sample.layers.items():
                    parts.setdefault(name, []).append(census)
        return {name: _total(censuses) for name, censuses in parts.items()}

    def merged_findings(self) -> list[CountedFinding]:
        """Return the findings of all ranks, sorted by severity, then by frequency.

        Equal findings of several ranks are one, and a fault is one finding: what it caused is in its ``consequences``.
        """
        merged: dict[tuple[str, Any, str], CountedFinding] = {}
        for rank, run in {self.rank: self, **self.ranks}.items():
            for seen in run.findings:
                here = replace(seen, ranks=seen.ranks or [rank])
                key = (here.finding.rule.code, here.finding.place.but(rank=None), here.finding.message)
                merged[key] = _merged(merged[key], here) if key in merged else here

        def weight(seen: CountedFinding) -> tuple[object, ...]:
            rule, place = seen.finding.rule, seen.finding.place
            return (
                seen.finding.severity.rank,
                not seen.names_the_cause,
                -seen.count,
                rule.code,
                str(place),
                seen.finding.message,
            )

        return fold_consequences(sorted(merged.values(), key=weight))

    def scales_by_rank(self, optimizer: int = 0) -> dict[int, dict[int, float]]:
        """Return the loss scale of each rank by step, where it is known; for merged steps, if it did not change.

        Args:
            optimizer: its number, from 0.

        Returns:
            scales by rank and step.
        """
        return {
            rank: {
                step: bucket.scale.low
                for bucket in run.rows(optimizer)
                if bucket.scale.low is not None and bucket.scale.low == bucket.scale.high and not bucket.scale.bad
                for step in (bucket.first, bucket.last)
            }
            for rank, run in {self.rank: self, **self.ranks}.items()
        }

    def _repr_html_(self) -> str | None:
        return None if Run._notebook_view is None else Run._notebook_view(self)


def _total(parts: list[Census]) -> Census:
    """Add up censuses in one go, without an intermediate Census for each: there are tens of thousands."""
    binades: dict[int, int] = {}
    for part in parts:
        for exponent, count in part.binades.items():
            binades[exponent] = binades.get(exponent, 0) + count
    return Census(
        binades=binades,
        zeros=sum(part.zeros for part in parts),
        infs=sum(part.infs for part in parts),
        nans=sum(part.nans for part in parts),
        amax=max(part.amax for part in parts),
        amin=min((part.amin for part in parts if part.amin), default=0.0),  # 0.0 means none
        sum_squares=sum(part.sum_squares for part in parts),
    )


def _merged(one: CountedFinding, other: CountedFinding) -> CountedFinding:
    """Merge a finding of two ranks."""
    firsts = [step for step in (one.first_step, other.first_step) if step is not None]
    lasts = [step for step in (one.last_step, other.last_step) if step is not None]
    return replace(
        one,
        finding=one.finding.but(place=one.finding.place.but(rank=None)),
        count=one.count + other.count,
        first_step=min(firsts, default=None),
        last_step=max(lasts, default=None),
        ranks=sorted({*one.ranks, *other.ranks}),
        excerpt=one.excerpt or other.excerpt,
        diff=one.diff or other.diff,
    )


# --- a record that grows -------------------------------------------------------------------------------------------


class RecordFollower:
    """Reads a record, again and again while it grows, without disturbing the process that writes it.

    layers_of_others: whether to read the layers of other ranks than the first. No live view shows them, and they grow
    the fastest.
    """

    def __init__(self, folder: str | Path, *, layers_of_others: bool = False) -> None:
        self.folder = Path(folder)
        self._layers_of_others = layers_of_others
        self._ranks: dict[Path, _RankReader] = {}  # by folder: ranks appear over time
        self._has_news = False
        self._last_seen: tuple[object, ...] = ()  # ranks and trouble at the last look

    def look(self) -> Run | None:
        """Return the whole run, or None if nothing is new; raise BadInput if there is no record, or it is too new."""
        run = self._read(self.folder)
        try:
            folders = rank_folders(self.folder)
        except OSError as error:
            folders = {}
            run.trouble.append(f"The folders of other ranks cannot be listed: {error.strerror or error}.")
        known = run.findings_known
        for rank, path in folders.items():
            try:
                if path.is_symlink():
                    raise BadInput(f"{path.name} is a link and was not followed.")
                run.ranks[rank] = self._read(path)
            except BadInput as error:
                run.trouble.append(str(error))
                known = False
            else:
                run.trouble.extend(f"{path.name}: {problem}" for problem in run.ranks[rank].trouble)
                known &= run.ranks[rank].findings_known
        seen = (list(run.ranks), run.trouble)
        if not self._has_news and seen == self._last_seen:
            return None
        self._has_news, self._last_seen = False, seen
        return replace(run, findings_known=known)

    @property
    def written(self) -> float | None:
        """When rank 0 last wrote something, in seconds since 1970; None if there are no files."""
        times = []
        for name in FILES:
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=None)

    def _read(self, folder: Path) -> Run:
        layers = self._layers_of_others or folder == self.folder
        reader = self._ranks.setdefault(folder, _RankReader(folder, layers=layers))
        changed, run = reader.look()
        # Set until a run is returned: later ranks may raise, and what was read is not read again.
        self._has_news |= changed
        return run


class _RankReader:
    """The record of one rank, of whose growing files only new lines are read. layers: False to skip them."""

    def __init__(self, folder: Path, *, layers: bool) -> None:
        self.folder = folder
        self._steps = _Lines(folder / STEPS, read_bucket, STEP_LIMITS)
        self._layers = _Lines(folder / LAYERS, read_layers, LAYER_LIMITS)
        self._events = _Lines(folder / EVENTS, read_event, EVENT_LIMITS, optional=True)
        self._growing: list[_Lines[Any]] = [self._steps, *([self._layers] if layers else []), self._events]
        self._documents: tuple[object, ...] = ()

    def look(self) -> tuple[bool, Run]:
        """Return whether anything has changed, and the run without the other ranks. Raise BadInput if it is not a
        record, or too new."""
        manifest, manifest_trouble = _read_manifest(self.folder / MANIFEST)
        found, findings_trouble = _read_findings(self.folder / FINDINGS)
        before, self._documents = self._documents, (manifest, manifest_trouble, found, findings_trouble)
        changed = [before != self._documents, *[file.look() for file in self._growing]]
        run = Run(
            folder=self.folder,
            manifest=manifest,
            steps=self._steps.values,
            layers=self._layers.values,
            findings=found,
            events=self._events.values,
            trouble=[
                *manifest_trouble,
                *manifest.get("trouble", ()),
                *self._steps.trouble,
                *self._layers.trouble,
                *findings_trouble,
                *self._events.trouble,
            ],
            findings_known=not findings_trouble,
        )
        if not manifest and not (run.steps or run.layers or found):
            raise BadInput(f"{self.folder}: {manifest_trouble[0]} The other files are empty, too. Name another record.")
        return any(changed), run


class _Lines(Generic[Value]):
    """Values read from the lines of a file that grows, and is sometimes replaced by a shorter one.

    optional: without the file there are no values, which is no problem.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], Value], limits: ReadLimits, *, optional: bool = False
    ) -> None:
        self._path, self._parse, self._limits, self._optional = path, parse, limits, optional
        self._problem = ""  # why not everything can be read
        self._restarts = 0  # how often reading started from the beginning
        self._start_over()

    def _start_over(self) -> None:
        self._values: list[Value] = []
        self._torn: bytes = b""  # a last line without its newline; it is read again at the next look
        self._torn_value: list[Value] = []  # its value, if it is valid
        self._identity = (0, 0)
        self._offset = 0  # end of the last complete line
        self._last_line = b""
        self._number = self._broken = self._first_broken = 0  # of lines
        self._restarts += 1

    def look(self) -> bool:
        """Read what was added; return whether the values have changed."""
        before = self._state()
        self._problem = ""
        try:
            with open_regular(self._path, os.O_RDONLY, "rb") as file:
                self._read_more(file)
        except FileNotFoundError:
            self._lose("" if self._optional else f"{self._path.name} is missing.")
        except (OSError, ValueError) as error:
            self._lose(f"{self._path.name} cannot be read: {error}.")
        return before != self._state()

    @property
    def values(self) -> list[Value]:
        """Values of all valid lines, including a last line without a newline."""
        return [*self._values, *self._torn_value]

    @property
    def trouble(self) -> list[str]:
        """Messages about invalid lines; an unfinished line at the end is not reported."""
        trouble = [self._problem] if self._problem else []
        if self._broken:
            trouble.append(
                f"{self._path.name}: {self._broken} of {self._number + bool(self._torn)} lines cannot be read and "
                f"were ignored; the first is line {self._first_broken}."
            )
        return trouble

    def _lose(self, problem: str) -> None:
        if self._identity != (0, 0):
            self._start_over()
        self._problem = problem

    def _state(self) -> tuple[object, ...]:
        return self._restarts, self._offset, self._torn, self._problem

    def _read_more(self, file: IO[bytes]) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_size > self._limits.bytes:
            raise ValueError(f"it has more than {self._limits.bytes:,} bytes")
        # A replaced file has another inode, but inodes are reused: the last line must also be where it was.
        if self._identity == (stat.st_dev, stat.st_ino):
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._start_over()
        elif self._identity != (0, 0):
            self._start_over()
        self._identity, self._torn, self._torn_value = (stat.st_dev, stat.st_ino), b"", []
        file.seek(self._offset)
        while line := file.readline(self._limits.line):
            if self._number == self._limits.lines:
                too_many = f"it has more than {self._number:,} lines, and the rest was ignored"
                self._problem = f"{self._path.name} cannot be read: {too_many}."
                return
            is_torn = not line.endswith(b"\n") and len(line) < self._limits.line
            try:
                value = [self._parse(line)]
            except LINE_ERRORS:
                value = []
            if is_torn:
                self._torn, self._torn_value = line, value
                return
            self._values += value
            self._number += 1
            self._offset += len(line)
            self._last_line = line
            if not value and line.endswith(b"\n"):
                self._broken += 1
                self._first_broken = self._first_broken or self._number


# --- documents -----------------------------------------------------------------------------------------------------


# Valid values of manifest fields that are used, not only shown. The whole file is untrusted.
VALID_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("ampwise", "created", "host", "status"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("script", "finished"), lambda value: value is None or isinstance(value, str)),
    **dict.fromkeys(("rank", "world_size", "pid"), is_count),
    "exit_code": lambda value: value is None or (type(value) is int and abs(value) < 2**63),
    **dict.fromkeys(
        ("command", "trouble"), lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value)
    ),
    "error": lambda value: value is None or isinstance(value, dict),
    **dict.fromkeys(("environment", "facts"), lambda value: isinstance(value, dict)),
}


def _read_manifest(path: Path) -> tuple[RunManifest, list[str]]:
    """Return the manifest without invalid fields, empty if it cannot be read, and messages about that."""
    folder = path.parent
    if not folder.is_dir():
        if folder.exists():
            raise BadInput(f"{folder} is a file, and a record is a folder.")
        if folder.is_symlink():
            raise BadInput(f"{folder} is a broken link.")
        raise BadInput(f"{folder} does not exist. `ampwise run -o {folder} train.py` writes a record.")
    try:
        manifest = read_json(path, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a record: it has no {MANIFEST}. `ampwise run -o RUN train.py` writes one to RUN."
        ) from None
    except (OSError, ValueError) as error:
        return {}, [f"{MANIFEST}, which has the command and how the run ended, cannot be read: {_why(error)}."]
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{path} is not an ampwise record: expected the format {FORMAT!r}.")
    version = manifest.get("version")
    if type(version) is int and version > VERSION:
        from ampwise.finding.terminal import printable
        from ampwise.finding.version import installed_version

        wrote = printable(str(manifest.get("ampwise", "unknown")))
        raise BadInput(
            f"{folder} is a record of version {version}, written by ampwise {wrote}; this is ampwise "
            f"{installed_version() or 'unknown'}, which reads up to version {VERSION}. Read it with "
            f"ampwise {wrote} or later."
        )
    if type(version) is not int or version != VERSION:
        raise BadInput(f"{folder} is a record of unknown version {version!r}; known versions: {VERSION}.")
    wrong = [name for name, is_valid in VALID_FIELDS.items() if name in manifest and not is_valid(manifest[name])]
    trouble = [f"{MANIFEST}: invalid values were ignored: {', '.join(wrong)}."] if wrong else []
    return {name: value for name, value in manifest.items() if name not in wrong}, trouble


def _read_findings(path: Path) -> tuple[list[CountedFinding], list[str]]:
    """Return the findings in a file, and messages about what cannot be read."""
    try:
        return read_findings(read_json(path, LARGEST_FINDINGS))
    except FileNotFoundError:
        return [], [f"{path.name} is missing."]
    except (OSError, ValueError) as error:
        return [], [f"{path.name} cannot be read: {_why(error)}."]


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return "it is truncated or damaged"
    return getattr(error, "strerror", None) or str(error)
