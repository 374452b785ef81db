"""Run a step again when it runs out of memory: first unchanged, after freeing cached memory; then split in halves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from ampwise.guard.events import StepOutOfMemory
from ampwise.guard.reporter import EventReporter
from ampwise.train.batches import batch_length
from ampwise.train.engine import Engine
from ampwise.train.step import Step


class MemoryRetry:
    """Steps of an engine, with the micro-batches since the last one, so that they can be run again."""

    def __init__(self, engine: Engine | None, reporter: EventReporter, *, splits: bool, distributed: bool) -> None:
        self._engine, self._reporter, self._splits = engine, reporter, splits
        self._distributed = (
            distributed  # other ranks may have exchanged some of a step's gradients: it is not run again
        )
        self._microbatches: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._pieces = 1  # pieces each batch is split into
        self.updating = False  # weights and optimizer state are being written: a step that fails now is half done

    def step(self, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int) -> Step:
        """Run ``engine.step``, again if it runs out of memory before weights or optimizer state were written."""
        self._microbatches.append((loss_fn, args, kwargs))
        try:
            return self._run(loss_fn, args, kwargs)
        except BaseException as error:
            if self._may_run_again(error):
                return self._with_less_memory(error, number)
            self._forget()
            raise

    def step_ended(self) -> None:
        self.updating = False
        self._microbatches.clear()

    def _forget(self) -> None:
        """Drop a batch that failed, and the micro-batches accumulated with it."""
        if self._engine is not None and self._engine.accumulating:
            self._microbatches.pop()
        else:
            self._microbatches.clear()

    def _run(self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        assert self._engine is not None
        if self._pieces == 1:
            return self._engine.step(loss_fn, *args, **kwargs)
        return self._engine.step_in_pieces(min(self._pieces, batch_length(args, kwargs)), loss_fn, *args, **kwargs)

    def _with_less_memory(self, error: BaseException, number: int) -> Step:
        assert self._engine is not None
        what, first = (str(error) or type(error).__name__).splitlines()[0], True
        if self._distributed:
            self._halve(error, what, number)
        while True:
            self._engine.drop_window()
            error.__traceback__ = None  # it keeps the step's tensors alive
            gc.collect()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            if not first:
                self._halve(error, what, number)
            first = False
            try:
                return [self._run(*batch) for batch in list(self._microbatches)][-1]
            except BaseException as again:
                if not self._may_run_again(again):
                    self._forget()
                    raise
                error = again

    def _may_run_again(self, error: BaseException) -> bool:
        return (
            isinstance(error, torch.OutOfMemoryError | MemoryError) and bool(self._microbatches) and not self.updating
        )

    def _halve(self, error: BaseException, what: str, number: int) -> None:
        longest = max(batch_length(args, kwargs) for _, args, kwargs in self._microbatches) if self._splits else 0
        may = self._splits and self._pieces < longest and not self._distributed
        pieces = min(self._pieces * 2, longest) if may else self._pieces
        self._reporter.report(StepOutOfMemory(step=number, pieces=pieces, error=what, splits=may))
        if not may:
            self._forget()
            raise error
        self._pieces = pieces
