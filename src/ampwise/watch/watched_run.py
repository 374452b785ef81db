"""Run a script under the watch, from an empty folder to a finished record."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ampwise.finding import Severity, terminal
from ampwise.report.formatting import lower_first
from ampwise.report.text_layout import path_from_here
from ampwise.runs.rows import CountedFinding
from ampwise.runs.sinks import requested_sinks
from ampwise.runs.writer import RecordWriter
from ampwise.watch.script import ScriptExit, ScriptToRun, when_imported

if TYPE_CHECKING:
    from ampwise.watch.watch import Watch

__all__ = ["RunOptions", "WatchedRun", "rank_here", "say_on_stderr", "write_to_stderr"]

MOST_ANNOUNCED = 20  # lines; the summary has the others
LONGEST_ANNOUNCED = 160  # characters of a text
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
    quiet: bool = False  # print nothing while the script runs


class WatchedRun:
    """One process of a run. The watch begins when the script imports torch."""

    def __init__(self, script: ScriptToRun, folder: Path, options: RunOptions, *, force: bool = False) -> None:
        self.script, self.options = script, options
        self._pid = os.getpid()
        rank, world_size = rank_here()
        sends = rank == 0  # numbers of one rank are enough
        sinks = requested_sinks(options.sinks, base=folder, sends=sends)  # first: a bad sink must create no record
        self.record = RecordWriter.create(
            folder,
            force=force,
            rank=rank,
            world_size=world_size,
            command=[*sys.orig_argv],
            script=script.name,
            environment={
                "python": platform.python_version(),
                "platform": platform.platform(),
                "processors": os.cpu_count(),
                "folder": str(Path.cwd()),
            },
        )
        self._sinks = sinks if sends else []
        if self._sinks:
            from ampwise.runs.sinks.run_sinks import SinkThreads

            together = SinkThreads(self._sinks, self.record.event)
            self.record.listen(together.send, before_end=together.close)
        self._announced: dict[tuple[object, ...], CountedFinding] = {}
        self.watch: Watch | None = None
        self.install_error: str | None = None

    @property
    def is_child(self) -> bool:
        """Whether this process is a fork of the watched one."""
        return os.getpid() != self._pid

    def run(self) -> ScriptExit:
        """Run the script to its end and close the record. Returns in forked children, too."""
        when_imported("torch", self._begin)
        exit_at_once, thread = os._exit, threading.get_ident()

        def close_and_exit(code: int) -> Any:
            """Close the record first: ``os._exit`` runs no cleanup."""
            if not self.is_child and threading.get_ident() == thread:
                self._end(ScriptExit("finished" if code == 0 else "failed", code))
            return exit_at_once(code)

        os._exit = close_and_exit  # type: ignore[assignment]
        ended = self.script.run()
        if not self.is_child:
            _wait_for_threads()
            os._exit = exit_at_once
            self._end(ended)
        return ended

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
                quiet=options.quiet,
            ).install()
            if rank_here()[0] == 0 and not options.quiet:
                self.watch.findings.on_new = self._announce
            for opening in self._sinks:  # not earlier: a script sets environment variables before its imports
                opening.load()
        except Exception as error:  # an unusual torch: the script must run anyway
            self.install_error = f"{type(error).__name__}: {error}"
            if os.environ.get("AMPWISE_DEBUG"):
                raise

    def _announce(self, seen: CountedFinding) -> None:
        """Print an error or a warning on stderr when it first occurs: a line for each rule and place."""
        finding, place = seen.finding, seen.finding.place
        key = (finding.rule.code, place.file, place.line)
        is_known = key in self._announced or any(each.explains(seen) for each in [*self._announced.values()])
        if finding.severity is Severity.INFO or is_known or len(self._announced) >= MOST_ANNOUNCED:
            return
        self._announced[key] = seen
        step = "" if seen.first_step is None else f"step {seen.first_step}: "
        where = "" if place.file is None else f"{path_from_here(place.file)}:{place.line}, "
        is_short = 0 < len(finding.message) <= LONGEST_ANNOUNCED  # else the rule's words, which are of all its cases
        text = finding.message if is_short else lower_first(finding.rule.summary)
        line = f"{step}{text} ({where}{finding.rule.code})"
        stream, bars = _open_stderr(), getattr(sys.modules.get("tqdm"), "tqdm", None)
        if stream is None:
            return
        with contextlib.suppress(Exception):  # the training goes on, whatever the script did with its streams
            if bars is not None and getattr(bars, "_instances", None):
                with bars.external_write_mode(file=stream):  # removes the bars, and draws them again below the line
                    terminal.say("ampwise: {}", line, stream=stream)
            else:
                if sys.stderr is sys.__stderr__:  # a replacement, such as rich's, knows where its lines begin
                    terminal.start_line(stream)
                terminal.say("ampwise: {}", line, stream=stream)
            stream.flush()

    def _end(self, ended: ScriptExit) -> None:
        if self.watch is not None:
            self.watch.findings.on_new = lambda seen: None  # the summary follows
        try:
            torch = sys.modules.get("torch")
            if torch is not None and hasattr(torch, "__version__"):
                facts = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
                if torch.cuda.is_initialized():
                    facts["cuda"] = str(torch.version.cuda)
                    facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
                self.record.fact("torch", facts)
            if self.watch is None:
                why = self.install_error or "the script never imported torch"
                self.record.fact("not_measured", [f"Nothing was watched: {why}."])
                self.record.close(ended.status, ended.exit_code, ended.error)
                return
            if isinstance(ended.error, Exception):
                self.watch.died(ended.error)
            self.watch.close(ended.status, ended.exit_code, ended.error)
        except Exception:  # e.g. no more file descriptors: the script's exit status must not change
            self.record.close(ended.status, ended.exit_code, ended.error)
            if os.environ.get("AMPWISE_DEBUG"):
                raise


def _wait_for_threads() -> None:
    """Wait for non-daemon threads, as Python does at exit: they may be training.

    Before, finish the work of executor pools and end their idle workers, which would otherwise wait forever. Python
    does the same. Pools can be created afterwards: gradients are counted with them.
    """
    for kind, flag in SHUTDOWN_FLAGS.items():
        module = sys.modules.get(f"concurrent.futures.{kind}")
        if module is not None and hasattr(module, "_python_exit") and hasattr(module, flag):
            module._python_exit()
            setattr(module, flag, False)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def rank_here() -> tuple[int, int]:
    """Return rank and world size as set by torchrun or a cluster's launcher."""
    try:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        return 0, 1


def say_on_stderr(template: str, *fields: object) -> None:
    """Call ``terminal.say`` on stderr, if it can be written to."""
    write_to_stderr(lambda stream: terminal.say(template, *fields, stream=stream))


def write_to_stderr(show: Callable[[TextIO], None]) -> None:
    """Call ``show`` with stderr. If stderr cannot be written to, nothing is shown.

    A script may have closed or replaced its streams. A failure must not cause a traceback or change the exit code.
    """
    stream = _open_stderr()
    if stream is None:
        return
    try:
        stream.flush()  # the script's own output
    except Exception:
        return
    try:
        show(stream)
        stream.flush()
    except Exception:
        # Flushing the stream's buffer would fail again at Python's exit, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_stderr() -> TextIO | None:
    """Return stderr, or that of the process if the script has replaced it by something that is not a file."""

    def is_open(stream: Any) -> bool:
        try:
            os.fstat(stream.fileno())
            return not stream.closed and stream.isatty() in (True, False)
        except Exception:  # a replacement by the script may raise anything
            return False

    return next((each for each in (getattr(sys, "stderr", None), sys.__stderr__) if is_open(each)), None)
