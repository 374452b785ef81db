"""Run a script under the watch, from an empty folder to a finished record."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.runs.sinks import SinkRequest, requested_sinks
from ampwise.runs.writer import RecordWriter
from ampwise.watch.forks import notify_of_forks
from ampwise.watch.script import ScriptExit, ScriptToRun, when_imported

if TYPE_CHECKING:
    from ampwise.watch.watch import Watch

__all__ = ["RunOptions", "WatchedRun", "rank_here"]

# Modules of concurrent.futures, in the order in which Python shuts them down, each with its shutdown flag.
SHUTDOWN_FLAGS = {"process": "_global_shutdown", "thread": "_shutdown"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a watched run."""

    every: int | None = None  # count gradients in full at each n-th step
    activations: bool = False
    timing: bool = True
    sinks: tuple[str, ...] = ()  # trackers to send numbers to
    capsules: Path | None = None  # a folder to save bad steps in
    weights: bool = True  # save the model's weights with them


class WatchedRun:
    """One process of a run. The watch begins when the script imports torch."""

    def __init__(self, script: ScriptToRun, folder: Path, options: RunOptions, *, force: bool = False) -> None:
        self.script, self.options = script, options
        rank, world_size = rank_here()
        sends = rank == 0  # numbers of one rank are enough
        sinks = requested_sinks(
            options.sinks, base=folder, sends=sends
        )  # first, as a bad sink must not create a record
        self.record = RecordWriter.create(
            folder,
            force=force,
            rank=rank,
            world_size=world_size,
            command=[*sys.orig_argv],
            script=script.name,
            environment=_environment(),
        )
        self._sinks = sinks if sends else []
        if self._sinks:
            self._begin_sending(self._sinks)
        self.watch: Watch | None = None
        self.install_error: str | None = None
        self.is_child = False  # a fork of the watched process
        self._exit_at_once = os._exit

    def _begin_sending(self, sinks: Sequence[SinkRequest]) -> None:
        from ampwise.runs.sinks.run_sinks import Sinks

        together = Sinks(sinks, self.record.event)
        self.record.listen(together.send, before_end=together.close)

    def run(self) -> ScriptExit:
        """Run the script to its end and close the record. Returns in forked children, too."""
        when_imported("torch", self._begin)
        os._exit = self._close_before_exit(self._exit_at_once)  # type: ignore[assignment]
        notify_of_forks(self)
        ended = self.script.run()
        if not self.is_child:
            _wait_for_threads()
            os._exit = self._exit_at_once
            self._end(ended)
        return ended

    def about_to_fork(self) -> None:
        """Do nothing: only the child matters."""

    def forked(self) -> None:
        self.is_child = True
        os._exit = self._exit_at_once

    def _begin(self) -> None:
        if self.is_child:
            return
        try:
            from ampwise.watch.watch import Watch

            options = self.options
            self.watch = Watch(
                self.record,
                every=options.every,
                activations=options.activations,
                timing=options.timing,
                capsules=options.capsules,
                weights=options.weights,
            ).install()
            for opening in self._sinks:  # not earlier: a script sets environment variables before its imports
                opening.load()
        except Exception as error:  # an unusual torch: the script must run anyway
            self.install_error = f"{type(error).__name__}: {error}"
            if os.environ.get("AMPWISE_DEBUG"):
                raise

    def _end(self, ended: ScriptExit) -> None:
        try:
            self._write_end(ended)
        except Exception as error:  # e.g. no more file descriptors: the script's exit status must not change
            self.record.close(ended.status, ended.exit_code, ended.error)
            if os.environ.get("AMPWISE_DEBUG"):
                raise error

    def _write_end(self, ended: ScriptExit) -> None:
        _add_torch_facts(self.record)
        if self.watch is None:
            why = self.install_error or "the script never imported torch"
            self.record.fact("not_measured", [f"Nothing was watched: {why}."])
            self.record.close(ended.status, ended.exit_code, ended.error)
            return
        if isinstance(ended.error, Exception):
            self.watch.died(ended.error)
        self.watch.close(ended.status, ended.exit_code, ended.error)

    def _close_before_exit(self, exit_at_once: Callable[[int], Any]) -> Callable[[int], Any]:
        """Wrap ``os._exit``, which runs no cleanup: close the record first."""
        thread = threading.get_ident()

        def close_and_exit(code: int) -> Any:
            if not self.is_child and threading.get_ident() == thread:
                self._end(ScriptExit("finished" if code == 0 else "failed", code))
            return exit_at_once(code)

        return close_and_exit


def _wait_for_threads() -> None:
    """Wait for non-daemon threads, as Python does at exit: they may be training."""
    _shut_down_pools()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _shut_down_pools() -> None:
    """Finish the work of executor pools and end their idle workers, which would otherwise wait forever.

    Python does the same before it waits for threads. Pools can be created afterwards: gradients are counted with them.
    """
    for kind, flag in SHUTDOWN_FLAGS.items():
        module = sys.modules.get(f"concurrent.futures.{kind}")
        if module is not None and hasattr(module, "_python_exit") and hasattr(module, flag):
            module._python_exit()
            setattr(module, flag, False)


def rank_here(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and world size as set by torchrun or a cluster's launcher."""
    try:
        return int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    except ValueError:
        return 0, 1


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "folder": str(Path.cwd()),
    }


def _add_torch_facts(record: RecordWriter) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "__version__"):
        return
    facts = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    if torch.cuda.is_initialized():
        facts["cuda"] = str(torch.version.cuda)
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    record.fact("torch", facts)
