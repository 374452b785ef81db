"""Writing a record, from inside the training process: cheap, and never in the way of the training."""

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
from ampwise.record.files import GrowingFile, write_aside
from ampwise.record.layout import FINDINGS, FORMAT, LAYERS, MANIFEST, STEPS, VERSION, make_room
from ampwise.record.lines import layers_line, step_line
from ampwise.record.rows import LayerSample, Seen, StepRow
from ampwise.record.stored import findings_data
from ampwise.record.thinning import Limits, bucket_size, thinned_layers, thinned_steps
from ampwise.strict_json import plain

__all__ = ["STATUSES", "Writer", "described"]

STATUSES = ("running", "finished", "failed", "interrupted")
FEWEST_SAMPLES = 16  # are kept, however large they are
MANIFEST_REST_S = 1.0  # between two writes of a manifest whose facts change
LONGEST_MESSAGE = 10_000  # characters of an exception's

Told = StepRow | LayerSample | Sequence[Seen]


class Writer:
    """A record as it grows. Only making one raises; later on, what goes wrong is noted in ``trouble``.

    A forked process has the writer too, and writes nothing with it.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], limits: Limits) -> None:
        self.folder = folder
        self.trouble: list[str] = []  # plain sentences, each once
        self._limits = limits
        self._manifest = manifest
        self._manifest_at, self._manifest_is_old = -MANIFEST_REST_S, True
        self._steps = GrowingFile(folder / STEPS, buffer_bytes=limits.buffer_bytes)
        self._layers = GrowingFile(folder / LAYERS, buffer_bytes=limits.buffer_bytes)
        self._step_count = 0
        self._thin_steps_at, self._thin_layers_at = limits.rows, limits.samples
        self._every = 1
        self._found: list[Seen] = []  # as told last
        self._found_besides: list[Seen] = []
        self._listener: Callable[[Told], None] | None = None
        self._before_end: Callable[[], None] | None = None
        self._lock = threading.RLock()  # a signal's handler may come in the middle of a write, on the same thread
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
        limits: Limits | None = None,
    ) -> Writer:
        """A new record. An older one gives way to it only with ``force``, and what is no record never does."""
        top = Path(folder)
        manifest = _first_manifest(rank, world_size, command, script, environment)
        try:
            own = make_room(top, rank=rank, world_size=world_size, force=force)
            write_aside(own / MANIFEST, [_json(manifest)])
            write_aside(own / FINDINGS, [_json(findings_data([]))])
            return cls(own, manifest, limits or Limits())
        except OSError as error:
            raise BadInput(f"no record can be written to {top}: {_reason(error)}. -o names another folder.") from error

    def listen(self, listener: Callable[[Told], None], before_end: Callable[[], None]) -> None:
        """Tell ``listener`` all that comes in, too. ``before_end`` is called when the run is over, while a finding may
        still be added. Whatever the two raise is noted, and troubles nobody."""
        self._listener, self._before_end = listener, before_end

    # --- what comes in while it runs -------------------------------------------------------------------------------

    def step(self, row: StepRow) -> None:
        """A step. Called at every one, so it costs a few microseconds."""
        self._safely(STEPS, self._add_step, row)
        self._tell(row)

    def layers(self, sample: LayerSample) -> None:
        """A sample of the gradients of all parameters."""
        self._safely(LAYERS, self._add_layers, sample)
        self._tell(sample)

    def findings(self, found: Iterable[Seen]) -> None:
        """All that was found so far; takes the place of what was told before."""
        self._safely(FINDINGS, self._set_findings, found)
        self._tell(self._found)

    def add_finding(self, seen: Seen) -> None:
        """One that whoever tells the others does not know of; from any thread."""
        self._safely(FINDINGS, self._add_finding, seen)

    def fact(self, name: str, value: Any) -> None:
        """Something about the run as a whole, for the manifest."""
        self._safely(MANIFEST, self._set_fact, name, value)

    def flush(self) -> None:
        """Hand over to the system all that waits."""
        self._safely(STEPS, self._steps.flush)
        self._safely(LAYERS, self._layers.flush)
        self._safely(MANIFEST, self._write_manifest)

    def close(self, status: str, exit_code: int | None, error: BaseException | Mapping[str, str] | None = None) -> None:
        """The end of the run; the first one told holds."""
        if status not in STATUSES:
            raise BadInput(f"close({status!r}): a run is one of {', '.join(STATUSES)}.")
        if self._closed or os.getpid() != self._pid:
            return
        self._end_listening()
        self._safely(STEPS, self._steps.close)
        self._safely(LAYERS, self._layers.close)
        self._manifest |= {
            "status": status,
            "exit_code": exit_code,
            "error": None if error is None else described(error),
            "finished": _now(),
        }
        self._manifest_is_old = True
        self._safely(MANIFEST, self._write_manifest)
        self._closed = True

    def sample_every(self, step: int = 0) -> int:
        """Of how many samples the record wants one, at ``step``: one of each at first, of fewer as the run gets long.

        It follows from what was written so far, which the step stands for.
        """
        return self._every

    # --- who else is told ------------------------------------------------------------------------------------------

    def _tell(self, told: Told) -> None:
        if self._listener is None or self._closed or os.getpid() != self._pid:
            return
        try:
            self._listener(told)
        except Exception as error:
            self._note("what listens", error)

    def _end_listening(self) -> None:
        before_end, self._listener, self._before_end = self._before_end, None, None
        if before_end is not None:
            try:
                before_end()
            except Exception as error:
                self._note("what listens", error)

    # --- how it gets to the disk -----------------------------------------------------------------------------------

    def _safely(self, name: str, write: Callable[..., None], *arguments: Any) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            with self._lock:
                write(*arguments)
        except Exception as error:  # whatever becomes of the record, the training goes on
            self._note(name, error)

    def _note(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError):
            said = f"{name} could not be written: {_reason(error)}. The record is without what came later."
        else:
            said = f"{name}: something could not be written, and was left out: {error!r}."
        if not any(before.startswith(name) for before in self.trouble):
            self.trouble.append(said)
            self._manifest_is_old = True

    def _add_step(self, row: StepRow) -> None:
        line = step_line(row)
        self._step_count += 1
        if self._steps.add(line):
            if self._steps.lines >= self._thin_steps_at:
                self._thin_steps()
            if self._manifest_is_old:
                self._write_manifest(rest=MANIFEST_REST_S)

    def _thin_steps(self) -> None:
        recent = self._limits.recent_rows
        size = bucket_size(self._step_count - recent, self._limits)
        self._steps.rewrite(partial(thinned_steps, old=self._steps.lines - recent, size=size))
        # Very many optimizers, each with a bucket of its own, may leave more than was wanted.
        self._thin_steps_at = max(self._limits.rows, self._steps.lines + self._limits.rows // 4)

    def _add_layers(self, sample: LayerSample) -> None:
        self._layers.add(layers_line(sample))
        self._layers.flush()  # samples are rare, and large
        enough = self._layers.lines >= self._thin_layers_at
        large = self._layers.bytes >= self._limits.layer_bytes and self._layers.lines >= FEWEST_SAMPLES
        if (enough or large) and not self._layers.dead:
            self._layers.rewrite(thinned_layers)
            self._every *= 2
            self._thin_layers_at = max(self._limits.samples, self._layers.lines * 2)

    def _set_findings(self, found: Iterable[Seen]) -> None:
        self._found = list(found)
        self._write_findings()

    def _add_finding(self, seen: Seen) -> None:
        self._found_besides.append(seen)
        self._write_findings()

    def _write_findings(self) -> None:
        every = sorted([*self._found, *self._found_besides], key=lambda seen: seen.finding.severity.rank)
        write_aside(self.folder / FINDINGS, [_json(findings_data(every))])

    def _set_fact(self, name: str, value: Any) -> None:
        facts = self._manifest["facts"]
        if name not in facts or facts[name] != plain(value):
            facts[name] = plain(value)
            self._manifest_is_old = True
            self._write_manifest(rest=MANIFEST_REST_S)

    def _write_manifest(self, rest: float = 0.0) -> None:
        now = time.monotonic()
        if not self._manifest_is_old or now - self._manifest_at < rest:
            return
        self._manifest_at, self._manifest_is_old = now, False
        write_aside(self.folder / MANIFEST, [_json(self._manifest | {"trouble": self.trouble})])


def _first_manifest(
    rank: int, world_size: int, command: Sequence[str], script: str | None, environment: Mapping[str, Any] | None
) -> dict[str, Any]:
    import ampwise

    return {
        "format": FORMAT,
        "version": VERSION,
        "ampwise": ampwise.__version__,
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
        "environment": plain(environment or {}),
        "facts": {},
        "trouble": [],
    }


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def described(error: BaseException | Mapping[str, str]) -> dict[str, str]:
    """The type and message of an exception."""
    if isinstance(error, Mapping):
        return {"type": str(error.get("type", "")), "message": str(error.get("message", ""))[:LONGEST_MESSAGE]}
    message = "(its text cannot be had)"
    with suppress(Exception):  # an exception of the user's, whose __str__ may do anything
        message = str(error)
    return {"type": type(error).__name__, "message": message[:LONGEST_MESSAGE]}
