"""``ampwise.watch()``: what ``ampwise run`` does for a script, around any part of a program."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampwise.finding import Finding
from ampwise.integrations.training_watch import TrainingWatch
from ampwise.runs.reader import Run
from ampwise.runs.rows import NumberStats, StepBucket
from ampwise.trace.call_site import code_owner
from ampwise.watch.watch import Watch
from ampwise.watch.watched_run import rank_here

__all__ = ["WatchedLoop", "watch"]

MOST_LOOKED_AT = 20_000  # objects among which models, optimizers and scalers are searched for
SEARCH_DEPTH = 4  # of attributes and containers: self.trainer.optimizers[0]


def watch(
    output: str | Path | None = None,
    *,
    force: bool = False,
    every: int | None = None,
    activations: bool = False,
    timing: bool = True,
    sinks: Sequence[str | Callable[[Any], None]] = (),
    quiet: bool = False,
) -> WatchedLoop:
    """Watch the training inside a ``with`` block as ``ampwise run`` watches a script.

    Models, optimizers and scalers made inside the block are found by themselves, and so are those that the variables
    of the calling code lead to. Results stay the same, bit for bit. At the end the summary is printed to stderr.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    >>> with watch(quiet=True) as run:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    ...         norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ...         scaler.step(optimizer)
    ...         scaler.update()
    >>> [finding.rule.name for finding in run.findings]
    ['clip-scaled-grads']
    >>> [(row["step"], row["loss_scale"], row["skipped"]) for row in run.history]
    [(1, 4.0, 0), (2, 4.0, 0), (3, 4.0, 0)]

    Args:
        output: a folder to keep the record in, for ``ampwise report``; None keeps none.
        force: overwrite a record there.
        every: count gradients in full at each n-th step; None: as often as 1 % of the time allows.
        activations: measure the outputs of modules, too.
        timing: measure where the time goes.
        sinks: trackers to send numbers to, such as "tensorboard:logs", or functions.
        quiet: print no summary.

    Returns:
        a context manager with ``findings`` and ``history``, inside the block and after it. Under ``ampwise run`` it
        shows those of that run, and its own arguments are ignored.

    Raises:
        BadInput: an argument is wrong, or there is a record in ``output`` already.
    """
    return WatchedLoop(
        output, force=force, every=every, activations=activations, timing=timing, sinks=sinks, quiet=quiet
    )


class WatchedLoop(TrainingWatch):
    """A part of a program that is watched: ``with ampwise.watch() as run``."""

    _name = "ampwise.watch"
    _part = "block"
    _rebound: Sequence[tuple[dict[str, Any], str, Any, Any]] = ()
    _outer: Watch | None = None

    def __repr__(self) -> str:
        return f"<ampwise.watch: {len(self.findings):,} findings>"

    def __enter__(self) -> WatchedLoop:
        self._run, self._outer = None, Watch.installed
        if self._outer is not None:  # `ampwise run`, or a block around this one: it sees this training already
            return self
        rank, world_size = rank_here()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self._begin(self, rank=rank, world_size=world_size):
            assert self._watch is not None
            self._rebound = rebind_imported_functions(self._watch)
            self._adopt(*trained_objects(sys._getframe(1)))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for names, name, original, replacement in self._rebound:
            if names.get(name) is replacement:
                names[name] = original
        self._rebound = []
        self._end(error)

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, worst first."""
        watching = self._watch or (self._outer if self._run is None else None)
        if watching is not None:
            return [each.finding for each in watching.findings]
        return [] if self._run is None else [each.finding for each in self._run.findings]

    @property
    def history(self) -> list[dict[str, float | None]]:
        """Rows of the steps so far, with the names of the metrics that sinks get; None: unknown.

        A row is one step or, in a long run, the last of several (``steps``), whose numbers are means.
        """
        run = self.run
        return [] if run is None else [_row(bucket) for bucket in run.steps]

    @property
    def run(self) -> Run | None:
        """Contents of the record so far."""
        if self._run is not None:
            return self._run
        watching = self._watch or self._outer
        folder = None if watching is None else watching.flushed_folder()
        return None if folder is None else Run.read(folder)

    def _repr_html_(self) -> str | None:
        from ampwise.report.notebook import run_html

        run = self.run
        return None if run is None else run_html(run)


def _row(bucket: StepBucket) -> dict[str, float | None]:
    return {
        "optimizer": bucket.optimizer,
        "step": bucket.last,
        "steps": bucket.count,
        "loss": _mean(bucket.loss),
        "grad_norm": _mean(bucket.norm),
        "loss_scale": _mean(bucket.scale),
        "lr": _mean(bucket.lr),
        "skipped": bucket.skipped,
    }


def _mean(stats: NumberStats) -> float | None:
    if stats.nans:
        return math.nan
    if stats.infs or stats.negative_infs:
        return math.inf if stats.infs else -math.inf
    return stats.mean


def rebind_imported_functions(watching: Watch) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Replace functions that modules of the program have imported from torch by the wrappers of the watch.

    Returns:
        namespace, name, original and replacement of each.
    """
    replaced = {id(original): (original, new) for original, new in watching.replaced()}
    rebound = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        file = getattr(module, "__file__", None)
        is_own = module is sys.modules.get("__main__") or (isinstance(file, str) and code_owner(file) == "own")
        if not is_own or not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in replaced:
                original, new = replaced[id(value)]
                names[name] = new
                rebound.append((names, name, original, new))
    return rebound


def trained_objects(frame: FrameType | None) -> list[Any]:
    """Return models, optimizers, scalers and compiled functions that variables of the program's own code lead to."""
    kinds = (nn.Module, Optimizer, GradScaler, FunctionType)
    return [thing for thing in _reachable(frame) if issubclass(type(thing), kinds)]


def _reachable(frame: FrameType | None) -> Iterator[Any]:
    """Yield the values of variables, their attributes and what containers hold, breadth first, each once."""
    level: list[Any] = []
    while frame is not None:
        if code_owner(frame.f_code.co_filename) == "own" or frame.f_globals.get("__name__") == "__main__":
            level += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen: set[int] = set()
    for _ in range(SEARCH_DEPTH):
        inner: list[Any] = []
        for thing in level:
            if id(thing) in seen or len(seen) > MOST_LOOKED_AT:
                continue
            seen.add(id(thing))
            yield thing
            if type(thing) in (list, tuple, set):
                inner += list(thing)[:MOST_LOOKED_AT]
            elif type(thing) is dict:
                inner += list(thing.values())[:MOST_LOOKED_AT]
            elif not issubclass(type(thing), nn.Module | Optimizer | torch.Tensor) and _is_own_class(type(thing)):
                inner += list(getattr(thing, "__dict__", {}).values())
        level = inner


def _is_own_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (isinstance(file, str) and code_owner(file) == "own")
