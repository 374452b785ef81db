"""A script run under the watch, from an empty folder to a finished record."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.record.rows import Seen
from ampwise.record.writer import Writer
from ampwise.sinks import Opening, openings
from ampwise.watch.forks import follow_forks
from ampwise.watch.script import Ended, Script, when_imported

if TYPE_CHECKING:
    from ampwise.watch.watch import Watch

__all__ = ["Options", "Running", "rank_here"]

# Python's kinds of them, in the order in which it ends them, each with what says that there are to be no more.
POOLS = {"process": "_global_shutdown", "thread": "_shutdown"}


@dataclass(frozen=True, slots=True)
class Options:
    """How closely to look, and who else is told."""

    every: int | None = None
    activations: bool = False
    timing: bool = True
    sinks: tuple[str, ...] = ()
    capsules: Path | None = None  # a folder to save bad steps in
    weights: bool = True  # with those of the model


class Running:
    """One process of a run. The script imports torch when it likes; only then does the watch begin."""

    def __init__(self, script: Script, folder: Path, options: Options, *, force: bool = False) -> None:
        self.script, self.options = script, options
        rank, world_size = rank_here()
        sends = rank == 0  # a rank's numbers are like another's
        wanted = openings(options.sinks, base=folder, sends=sends)  # before anything is made that would have to go
        self.record = Writer.create(
            folder,
            force=force,
            rank=rank,
            world_size=world_size,
            command=[*sys.orig_argv],
            script=script.name,
            environment=_environment(),
        )
        self._wanted = wanted if sends else []
        if self._wanted:
            self._begin_sending(self._wanted)
        self.watch: Watch | None = None
        self.trouble: str | None = None
        self.is_child = False  # a fork of the process that is watched
        self._exit_at_once = os._exit

    def _begin_sending(self, wanted: Sequence[Opening]) -> None:
        from ampwise.sinks.together import Sinks

        sinks = Sinks(wanted, lambda finding: self.record.add_finding(Seen(finding=finding)))
        self.record.listen(sinks.tell, before_end=sinks.close)

    def run(self) -> Ended:
        """Run the script to its end, whatever that is, and close the record. It returns in forked children, too."""
        when_imported("torch", self._begin)
        os._exit = self._closing_first(self._exit_at_once)  # type: ignore[assignment]
        follow_forks(self)
        ended = self.script.run()
        if not self.is_child:
            _wait_for_threads()
            os._exit = self._exit_at_once
            self._end(ended)
        return ended

    def about_to_fork(self) -> None:
        """Nothing of this object minds."""

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
            for opening in self._wanted:  # not earlier: what a script sets for packages, it sets before it imports
                opening.load()
        except Exception as error:  # an unusual torch: the script runs all the same
            self.trouble = f"{type(error).__name__}: {error}"
            if os.environ.get("AMPWISE_DEBUG"):
                raise

    def _end(self, ended: Ended) -> None:
        try:
            self._write_end(ended)
        except Exception as error:  # no file may be opened any more, say: how the script ended stays what it was
            self.record.close(ended.status, ended.exit_code, ended.error)
            if os.environ.get("AMPWISE_DEBUG"):
                raise error

    def _write_end(self, ended: Ended) -> None:
        _add_torch_facts(self.record)
        if self.watch is None:
            why = self.trouble or "the script never imported torch"
            self.record.fact("not_measured", [f"Nothing was watched: {why}."])
            self.record.close(ended.status, ended.exit_code, ended.error)
            return
        if isinstance(ended.error, Exception):
            self.watch.died(ended.error)
        self.watch.close(ended.status, ended.exit_code, ended.error)

    def _closing_first(self, exit_at_once: Callable[[int], Any]) -> Callable[[int], Any]:
        """``os._exit`` asks nobody: this is the last moment to write down what is known."""
        thread = threading.get_ident()

        def leave(code: int) -> Any:
            if not self.is_child and threading.get_ident() == thread:
                self._end(Ended("finished" if code == 0 else "failed", code))
            return exit_at_once(code)

        return leave


def _wait_for_threads() -> None:
    """As Python does before it ends: they may be the ones that train."""
    _end_pools()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _end_pools() -> None:
    """What is left for them is done, and idle workers leave, which else would wait for more for ever.

    Python does so before it waits for threads. Afterwards pools can be made again: we count gradients with them.
    """
    for kind, no_more in POOLS.items():
        module = sys.modules.get(f"concurrent.futures.{kind}")
        if module is not None and hasattr(module, "_python_exit") and hasattr(module, no_more):
            module._python_exit()
            setattr(module, no_more, False)


def rank_here(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """This process among those that torchrun, or a cluster's own launcher, has started."""
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


def _add_torch_facts(record: Writer) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "__version__"):
        return
    facts = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    if torch.cuda.is_initialized():
        facts["cuda"] = str(torch.version.cuda)
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    record.fact("torch", facts)
