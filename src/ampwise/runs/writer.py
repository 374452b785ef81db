"""Write a record from inside the training process, cheaply and without ever failing the training."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from ampwise.runs.json_lines import layers_line, step_line
from ampwise.runs.layout import EVENTS, FINDINGS, FORMAT, LAYERS, MANIFEST, STEPS, VERSION, prepare_folder
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.thinning import RecordLimits, bucket_size, thin_layers, thin_steps

__all__ = ["STATUSES", "RecordWriter", "exception_data"]

STATUSES = ("running", "finished", "failed", "interrupted")
FEWEST_SAMPLES = 16  # kept however large they are
MANIFEST_REST_S = 1.0  # between two writes of the manifest
LONGEST_MESSAGE = 10_000  # characters of an exception's message
MOST_EVENTS = 10_000  # further ones are left out

RunEvent = StepRow | LayerSample | LoggedEvent | Sequence[CountedFinding]


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
        self._found: list[CountedFinding] = []
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
        manifest = _first_manifest(rank, world_size, command, script, environment)
        try:
            own = prepare_folder(top, rank=rank, world_size=world_size, force=force)
            write_atomically(own / MANIFEST, [_json(manifest)])
            write_atomically(own / FINDINGS, [_json(findings_data([]))])
            return cls(own, manifest, limits or RecordLimits())
        except OSError as error:
            raise BadInput(f"cannot write a record to {top}: {_reason(error)}. -o names another folder.") from error

    def listen(self, listener: Callable[[RunEvent], None], before_end: Callable[[], None]) -> None:
        """Pass everything that is recorded to ``listener``, too. ``before_end`` is called when the run ends, while
        events can still be added. Errors that the two raise are added to ``trouble``."""
        self._listener, self._before_end = listener, before_end

    # --- recording -------------------------------------------------------------------------------------------------

    def step(self, row: StepRow) -> None:
        """Record a step. It runs at every step and takes a few microseconds."""
        self._safely(STEPS, self._add_step, row)
        self._notify(row)

    def layers(self, sample: LayerSample) -> None:
        """Record a sample of the gradients of all parameters."""
        self._safely(LAYERS, self._add_layers, sample)
        self._notify(sample)

    def findings(self, found: Iterable[CountedFinding]) -> None:
        """Record all findings so far, replacing those of earlier calls."""
        self._safely(FINDINGS, self._set_findings, found)
        self._notify(self._found)

    def event(self, event: LoggedEvent) -> None:
        """Record an event; from any thread."""
        self._safely(EVENTS, self._add_event, event)
        self._notify(event)

    def fact(self, name: str, value: Any) -> None:
        """Set a fact about the whole run in the manifest."""
        self._safely(MANIFEST, self._set_fact, name, value)

    def flush(self) -> None:
        """Write everything that is buffered."""
        self._safely(STEPS, self._steps.flush)
        self._safely(LAYERS, self._layers.flush)
        if self._events is not None:
            self._safely(EVENTS, self._events.flush)
        self._safely(MANIFEST, self._write_manifest)

    def close(self, status: str, exit_code: int | None, error: BaseException | Mapping[str, str] | None = None) -> None:
        """Record the end of the run; later calls are ignored."""
        if status not in STATUSES:
            raise BadInput(f"close({status!r}): expected one of {', '.join(STATUSES)}.")
        if self._closed or os.getpid() != self._pid:
            return
        self._end_listening()
        self._safely(STEPS, self._steps.close)
        self._safely(LAYERS, self._layers.close)
        if self._events is not None:
            self._safely(EVENTS, self._events.close)
        self._manifest |= {
            "status": status,
            "exit_code": exit_code,
            "error": None if error is None else exception_data(error),
            "finished": _now(),
        }
        self._manifest_is_outdated = True
        self._safely(MANIFEST, self._write_manifest)
        self._closed = True

    def sample_every(self, step: int = 0) -> int:
        """Return N, where every N-th layer sample should be recorded: 1 at first, more as the run gets long."""
        return self._every

    # --- the listener ----------------------------------------------------------------------------------------------

    def _notify(self, event: RunEvent) -> None:
        if self._listener is None or self._closed or os.getpid() != self._pid:
            return
        try:
            self._listener(event)
        except Exception as error:
            self._note("the listener", error)

    def _end_listening(self) -> None:
        before_end, self._listener, self._before_end = self._before_end, None, None
        if before_end is not None:
            try:
                before_end()
            except Exception as error:
                self._note("the listener", error)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _safely(self, name: str, write: Callable[..., None], *arguments: Any) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            with self._lock:
                write(*arguments)
        except Exception as error:  # an error in the record must not stop the training
            self._note(name, error)

    def _note(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError):
            problem = f"{name} could not be written: {_reason(error)}. Later data is missing from the record."
        else:
            problem = f"{name}: some data could not be written and was left out: {error!r}."
        if not any(before.startswith(name) for before in self.trouble):
            self.trouble.append(problem)
            self._manifest_is_outdated = True

    def _add_step(self, row: StepRow) -> None:
        line = step_line(row)
        self._step_count += 1
        if self._steps.add(line):
            if self._steps.lines >= self._thin_steps_at:
                self._thin_steps()
            if self._manifest_is_outdated:
                self._write_manifest(rest=MANIFEST_REST_S)

    def _thin_steps(self) -> None:
        recent = self._limits.recent_rows
        size = bucket_size(self._step_count - recent, self._limits)
        self._steps.rewrite(partial(thin_steps, old=self._steps.lines - recent, size=size))
        # With very many optimizers, each with its own bucket, more lines may remain than planned.
        self._thin_steps_at = max(self._limits.rows, self._steps.lines + self._limits.rows // 4)

    def _add_layers(self, sample: LayerSample) -> None:
        self._layers.add(layers_line(sample))
        self._layers.flush()  # samples are rare and large
        enough = self._layers.lines >= self._thin_layers_at
        large = self._layers.bytes >= self._limits.layer_bytes and self._layers.lines >= FEWEST_SAMPLES
        if (enough or large) and not self._layers.dead:
            self._layers.rewrite(thin_layers)
            self._every *= 2
            self._thin_layers_at = max(self._limits.samples, self._layers.lines * 2)

    def _set_findings(self, found: Iterable[CountedFinding]) -> None:
        self._found = sorted(found, key=lambda seen: seen.finding.severity.rank)
        write_atomically(self.folder / FINDINGS, [_json(findings_data(self._found))])

    def _add_event(self, event: LoggedEvent) -> None:
        if self._events is None:
            self._events = AppendOnlyFile(self.folder / EVENTS, buffer_bytes=self._limits.buffer_bytes)
        if self._events.lines >= MOST_EVENTS:
            raise ValueError(f"more than {MOST_EVENTS:,} events")
        self._events.add(event_line(event))
        self._events.flush()  # the event may be the last thing that the process does

    def _set_fact(self, name: str, value: Any) -> None:
        facts = self._manifest["facts"]
        if name not in facts or facts[name] != to_json_types(value):
            facts[name] = to_json_types(value)
            self._manifest_is_outdated = True
            self._write_manifest(rest=MANIFEST_REST_S)

    def _write_manifest(self, rest: float = 0.0) -> None:
        now = time.monotonic()
        if not self._manifest_is_outdated or now - self._manifest_at < rest:
            return
        self._manifest_at, self._manifest_is_outdated = now, False
        write_atomically(self.folder / MANIFEST, [_json(self._manifest | {"trouble": self.trouble})])


def _first_manifest(
    rank: int, world_size: int, command: Sequence[str], script: str | None, environment: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
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


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def exception_data(error: BaseException | Mapping[str, str]) -> dict[str, str]:
    """Return the type and message of an exception."""
    if isinstance(error, Mapping):
        return {"type": str(error.get("type", "")), "message": str(error.get("message", ""))[:LONGEST_MESSAGE]}
    message = "(no message: str() failed)"
    with suppress(Exception):  # the __str__ of a user's exception may do anything
        message = str(error)
    return {"type": type(error).__name__, "message": message[:LONGEST_MESSAGE]}
