"""Write a record from inside the training process, cheaply and without ever failing the training."""

from __future__ import annotations

import functools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import to_json_types
from ampwise.finding.version import installed_version
from ampwise.runs.events import LoggedEvent, event_line
from ampwise.runs.files import AppendOnlyFile, write_atomically
from ampwise.runs.findings_json import findings_data
from ampwise.runs.json_lines import layers_line, step_line, thin_layers, thin_steps
from ampwise.runs.layout import EVENTS, FINDINGS, FORMAT, LAYERS, MANIFEST, STEPS, VERSION, prepare_folder
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow

STATUSES = ("running", "finished", "failed", "interrupted")
FEWEST_SAMPLES = 16  # kept however large they are
MANIFEST_REST_S = 1.0  # between two writes of the manifest
LONGEST_MESSAGE = 10_000  # characters of an exception's message
MOST_EVENTS = 10_000  # further ones are left out

RunEvent = StepRow | LayerSample | LoggedEvent | Sequence[CountedFinding]  # something that happened in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Size limits of a record. With these, the record of 300 tensors stays under 200 MB however long the run is."""

    rows: int = 50_000  # lines of steps.jsonl at which older ones are merged
    samples: int = 512  # lines of layers.jsonl at which neighbours are merged
    layer_bytes: int = 96_000_000  # bytes of layers.jsonl at which they are merged, if there are at least 16
    buffer_bytes: int = 256_000  # buffered in memory

    @property
    def recent_rows(self) -> int:
        """Number of newest steps that are not merged."""
        return self.rows // 4

    def bucket_size(self, old_steps: int) -> int:
        """Return how many steps to merge into one line, so that older steps take a quarter of the lines.

        It is a power of two, so that buckets double in size, and all older steps have the same density.
        """
        needed = -(-old_steps // max(1, self.rows // 4))
        return 1 << (needed - 1).bit_length() if needed > 1 else 1


def _recording(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a method that writes to the file ``name``: its errors are added to ``trouble``, and what is recorded is
    also passed to the listener, even if it could not be written."""

    def decorate(write: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(write)
        def record(self: RecordWriter, event: RunEvent) -> None:
            self._try(name, write, self, event)
            if self._listener is not None:
                self._try("the listener", self._listener, event, lock=False)

        return record

    return decorate


class RecordWriter:
    """Writes a record. Only ``create`` raises; later errors are added to ``trouble``.

    Forked processes write nothing.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], limits: RecordLimits) -> None:
        self.folder = folder
        self.trouble: list[str] = []  # sentences about errors, each once
        self._limits = limits
        self._manifest = manifest
        self._manifest_at, self._manifest_is_outdated = -MANIFEST_REST_S, True
        self._steps = AppendOnlyFile(folder / STEPS, buffer_bytes=limits.buffer_bytes)
        self._layers = AppendOnlyFile(folder / LAYERS, buffer_bytes=limits.buffer_bytes)
        self._events: AppendOnlyFile | None = None
        self._step_count = 0
        self._thin_steps_at, self._thin_layers_at = limits.rows, limits.samples
        self._every = 1
        self._listener: Callable[[RunEvent], None] | None = None
        self._before_end: Callable[[], None] | None = None
        self._lock = threading.RLock()  # a signal handler may interrupt a write on the same thread
        self._pid, self._closed = os.getpid(), False

    @classmethod
    def create(
        cls,
        folder: str | Path,
        *,
        force: bool = False,
        rank: int = 0,
        world_size: int = 1,
        command: Sequence[str] = (),
        script: str | None = None,
        environment: Mapping[str, Any] | None = None,
        limits: RecordLimits | None = None,
    ) -> RecordWriter:
        """Create a record. ``force`` overwrites an older record; other folders are never overwritten."""
        top = Path(folder)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "ampwise": installed_version() or "unknown",
            "created": _now(),
            "command": [str(part) for part in command],
            "script": script,
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": platform.node(),
            "status": "running",
            "exit_code": None,
            "error": None,
            "finished": None,
            "environment": to_json_types(environment or {}),
            "facts": {},
            "trouble": [],
        }
        try:
            own = prepare_folder(top, rank=rank, world_size=world_size, force=force)
            write_atomically(own / MANIFEST, [_json(manifest)])
            write_atomically(own / FINDINGS, [_json(findings_data([]))])
            return cls(own, manifest, limits or RecordLimits())
        except OSError as error:
            reason = error.strerror or str(error)
            raise BadInput(f"cannot write a record to {top}: {reason}. -o names another folder.") from error

    def listen(self, listener: Callable[[RunEvent], None], before_end: Callable[[], None]) -> None:
        """Pass everything that is recorded to ``listener``, too. ``before_end`` is called when the run ends, while
        events can still be added. Errors that the two raise are added to ``trouble``."""
        self._listener, self._before_end = listener, before_end

    @_recording(STEPS)
    def step(self, row: StepRow) -> None:
        """Record a step. It runs at every step and takes a few microseconds."""
        line = step_line(row)
        self._step_count += 1
        if not self._steps.add(line):
            return
        if self._steps.lines >= self._thin_steps_at:
            recent = self._limits.recent_rows
            size = self._limits.bucket_size(self._step_count - recent)
            self._steps.rewrite(partial(thin_steps, old=self._steps.lines - recent, size=size))
            # With very many optimizers, each with its own bucket, more lines may remain than planned.
            self._thin_steps_at = max(self._limits.rows, self._steps.lines + self._limits.rows // 4)
        self._write_manifest(rest=MANIFEST_REST_S)

    @_recording(LAYERS)
    def layers(self, sample: LayerSample) -> None:
        """Record a sample of the gradients of all parameters."""
        self._layers.add(layers_line(sample))
        self._layers.flush()  # samples are rare and large
        fill = self._layers.lines / self._thin_layers_at
        if self._layers.lines >= FEWEST_SAMPLES:
            fill = max(fill, self._layers.bytes / self._limits.layer_bytes)
        if self._layers.dead:
            return
        if fill >= 1:
            self._layers.rewrite(thin_layers)
            self._every *= 2
            self._thin_layers_at = max(self._limits.samples, self._layers.lines * 2)
        elif fill > 0.5:  # merging all samples at once would take seconds: with each new one, merge two older ones
            self._layers.rewrite_some(thin_layers)

    def findings(self, found: Iterable[CountedFinding]) -> None:
        """Record all findings so far, replacing those of earlier calls."""
        self._set_findings(list(found))

    @_recording(FINDINGS)
    def _set_findings(self, found: Sequence[CountedFinding]) -> None:
        worst_first = sorted(found, key=lambda seen: seen.finding.severity.rank)
        write_atomically(self.folder / FINDINGS, [_json(findings_data(worst_first))])

    @_recording(EVENTS)
    def event(self, event: LoggedEvent) -> None:
        """Record an event; from any thread."""
        if self._events is None:
            self._events = AppendOnlyFile(self.folder / EVENTS, buffer_bytes=self._limits.buffer_bytes)
        if self._events.lines >= MOST_EVENTS:
            raise ValueError(f"more than {MOST_EVENTS:,} events")
        self._events.add(event_line(event))
        self._events.flush()  # the event may be the last thing that the process does

    def fact(self, name: str, value: Any) -> None:
        """Set a fact about the whole run in the manifest."""
        self._try(MANIFEST, self._set_fact, name, value)

    def _set_fact(self, name: str, value: Any) -> None:
        facts, plain = self._manifest["facts"], to_json_types(value)
        if name not in facts or facts[name] != plain:
            facts[name] = plain
            self._manifest_is_outdated = True
            self._write_manifest(rest=MANIFEST_REST_S)

    def sample_every(self, step: int = 0) -> int:
        """Return N, where every N-th layer sample should be recorded: 1 at first, more as the run gets long."""
        return self._every

    def flush(self) -> None:
        """Write everything that is buffered."""
        for file in self._files():
            self._try(file.path.name, file.flush)
        self._try(MANIFEST, self._write_manifest)

    def close(self, status: str, exit_code: int | None, error: BaseException | Mapping[str, str] | None = None) -> None:
        """Record the end of the run; later calls are ignored."""
        if status not in STATUSES:
            raise BadInput(f"close({status!r}): expected one of {', '.join(STATUSES)}.")
        if self._closed or os.getpid() != self._pid:
            return
        before_end, self._listener, self._before_end = self._before_end, None, None
        if before_end is not None:
            self._try("the listener", before_end, lock=False)
        for file in self._files():
            self._try(file.path.name, file.close)
        self._manifest |= {
            "status": status,
            "exit_code": exit_code,
            "error": None if error is None else exception_data(error),
            "finished": _now(),
        }
        self._manifest_is_outdated = True
        self._try(MANIFEST, self._write_manifest)
        self._closed = True

    def _files(self) -> list[AppendOnlyFile]:
        return [file for file in (self._steps, self._layers, self._events) if file is not None]

    def _try(self, name: str, write: Callable[..., None], *arguments: Any, lock: bool = True) -> None:
        """Call ``write`` unless the record is closed or this is a forked process; add its error to ``trouble``.

        lock: not for the listener, which may wait for threads that record events.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            with self._lock if lock else nullcontext():
                write(*arguments)
        except Exception as error:  # an error in the record must not stop the training
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                problem = f"{name} could not be written: {reason}. Later data is missing from the record."
            else:
                problem = f"{name}: some data could not be written and was left out: {error!r}."
            if not any(before.startswith(name) for before in self.trouble):
                self.trouble.append(problem)
                self._manifest_is_outdated = True

    def _write_manifest(self, rest: float = 0.0) -> None:
        now = time.monotonic()
        if self._manifest_is_outdated and now - self._manifest_at >= rest:
            self._manifest_at, self._manifest_is_outdated = now, False
            write_atomically(self.folder / MANIFEST, [_json(self._manifest | {"trouble": self.trouble})])


def exception_data(error: BaseException | Mapping[str, str]) -> dict[str, str]:
    """Return the type and message of an exception."""
    if isinstance(error, Mapping):
        return {"type": str(error.get("type", "")), "message": str(error.get("message", ""))[:LONGEST_MESSAGE]}
    message = "(no message: str() failed)"
    with suppress(Exception):  # the __str__ of a user's exception may do anything
        message = str(error)
    return {"type": type(error).__name__, "message": message[:LONGEST_MESSAGE]}


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
