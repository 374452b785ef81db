"""The Guard class: checkpoints, snapshots, rollback and recovery for a long training run."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.terminal import shortened
from ampwise.guard.checkpointing import Checkpointing, GuardedRun, Interval, seconds
from ampwise.guard.data_position import DataPosition
from ampwise.guard.disk.catalog import SavedCheckpoint, checkpoints, clear_leftovers
from ampwise.guard.disk.lock import DirectoryLock
from ampwise.guard.events import GuardEvent, LockTakenOver, Preempted, RankLost
from ampwise.guard.ladder import Ladder, LadderFacts
from ampwise.guard.memory_retry import MemoryRetry
from ampwise.guard.rank_agreement import LostRank, RankAgreement
from ampwise.guard.recovery import CAPSULES, Recovery
from ampwise.guard.reporter import EventReporter, OnEvent
from ampwise.guard.resuming import CheckpointLoader
from ampwise.guard.script_changes import ScriptChanges
from ampwise.guard.script_loop import ScriptLoop
from ampwise.guard.state import AveragedModels, TrainingState
from ampwise.guard.stopping import STOPPED_EXIT_CODE, Signals, Stopped, Watchdog
from ampwise.guard.training import GuardedTraining
from ampwise.train.callback import Callback
from ampwise.train.engine import Engine
from ampwise.train.ranks import rank
from ampwise.train.step import Step

LOST_RANK = re.compile("Connection closed by peer|Connection reset|NCCL|[Gg]loo|Broken pipe|[Tt]imed out")


class Guard(Callback):
    """Keep a training run going: checkpoints, rollback, and the recovery ladder.

    Args:
        engine: the engine that trains, if there is one.
        directory: where checkpoints are written; one run each. For a loop without an engine, this comes first.
        model: a model, or several, that your own loop trains; likewise ``optimizer``, ``scheduler`` and ``scaler``.
        optimizer: see ``model``.
        scheduler: one or several. ``guard.step`` steps them once per step, and not when a step is skipped.
        scaler: torch's GradScaler or ampwise's, if the loop has one.
        clip_norm: for ``guard.step(loss)``: clip unscaled gradients by their norm.
        accumulate: for ``guard.step(loss)``: how many micro-batches make a step. Their losses are averaged.
        every: how often to write a checkpoint: "10min", "2h", "500 steps". All ranks write it together, in the
            background; it appears in the directory only when it is complete.
        keep: how many to keep, besides the last good one.
        snapshot_every: steps between in-memory snapshots, which a rollback restores.
        snapshots_on: where they are kept, "host" or "device".
        ladder: what to do about bad steps.
        state: other objects to save, by name, with ``state_dict`` and ``load_state_dict``: ``{"ema": ema}``. An
            AveragedModel among them is not updated after a step that was skipped or undone.
        resume: continue from the newest complete checkpoint in the directory, if there is one.
        override: settings to take from the script where it differs from the checkpoint: "precision", "optimizer",
            "schedulers", "scaler", "state", "data", and optimizer options such as "weight_decay". For all others the
            guard uses the checkpoint's value and logs that, or refuses to resume.
        split: when memory runs out, split batches in half, and in half again.
        on_event: a function to call with each event of the guard, on rank 0: to send a message, for example. It is
            called in the background; training does not wait for it, and does not stop if it fails.
        signals: signals at which the guard finishes the step, saves the state, and exits with ``exit_code``.
        signal_grace: how long further signals count as duplicates of the first: a scheduler and torchrun's agent both
            send one. Later signals, and a second SIGINT at any time, end the program at once.
        patience: how long to wait for other ranks, and for the next step, before this rank exits too; see ``alive``.

    Raises:
        BadInput: an argument does not fit, or the checkpoint does not fit the script.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    >>> with Guard(engine, tempfile.mkdtemp()) as guard:
    ...     for batch in guard.batches([torch.ones(8, 4)], epochs=3):
    ...         step = guard.step(lambda x: model(x).square().mean(), batch)
    >>> guard.last_checkpoint.step
    3

    A loop without an engine:

    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with Guard(tempfile.mkdtemp(), model=model, optimizer=optimizer) as guard:
    ...     for batch in guard.batches([torch.ones(8, 4)], epochs=3):
    ...         step = guard.step(model(batch).square().mean())
    >>> step.number, step.applied
    (3, True)
    """

    def __init__(
        self,
        engine: Engine | str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        *,
        model: Module | Sequence[Module] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        every: str | float = "10min",
        keep: int = 3,
        snapshot_every: int = 100,
        snapshots_on: str = "host",
        ladder: Ladder | None = None,
        state: Mapping[str, Any] | None = None,
        resume: bool = True,
        override: Iterable[str] = (),
        split: bool = False,
        on_event: OnEvent | None = None,
        signals: Iterable[str] = ("SIGTERM",),
        signal_grace: str | float = "30s",
        exit_code: int = 0,
        patience: str | float = "30min",
    ) -> None:
        loop = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "clip_norm": clip_norm,
        }
        if isinstance(engine, str | os.PathLike) and directory is None:
            engine, directory = None, engine
        if directory is None or (engine is None and (model is None or optimizer is None)):
            raise BadInput(
                "Guard(): expected an engine and a directory, Guard(engine, 'checkpoints'), or the parts of a loop, "
                "Guard('checkpoints', model=model, optimizer=optimizer)."
            )
        if engine is not None and not isinstance(engine, Engine):
            raise BadInput(f"Guard({type(engine).__name__}): expected an ampwise.Engine, then the directory.")
        if engine is not None and (given := [name for name, each in loop.items() if each is not None]):
            raise BadInput(
                f"Guard(engine, {given[0]}=...): the engine has its own. Leave it out, or leave out the engine."
            )
        for name, count in (("keep", keep), ("snapshot_every", snapshot_every)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise BadInput(f"Guard({name}={count!r}): expected a whole number, 1 or more.")
        self.loop = ScriptLoop(**loop, accumulate=accumulate) if engine is None else None
        training = self._engine = engine or cast(GuardedTraining, self.loop)
        self.directory = Path(directory)
        self._ladder = Ladder() if ladder is None else ladder
        self._resumes, self._exit_code = resume, exit_code
        patience_s = seconds(patience, "patience")
        self._agreement = RankAgreement(training.ranks, patience_s)
        prints = self._agreement.rank == 0
        self._reporter = EventReporter(on_event, prints=prints)
        run = GuardedRun(
            self.directory, training, TrainingState(training, state or {}), self._agreement, self._reporter
        )
        self._checkpointing = Checkpointing(
            run,
            every=Interval.checked(every),
            keep=keep,
            snapshot_every=snapshot_every,
            snapshots_on=snapshots_on,
            extra_state=self._extra_state,
        )
        self._changes = ScriptChanges(training, state or {}, override)
        self._position = DataPosition(
            self.directory, writes=prints, log=self._reporter.log, override=self._changes.overrides("data")
        )
        self._resuming = CheckpointLoader(run, self._changes)
        self._recovery = Recovery(run, self._ladder, self._checkpointing, self._resuming, self._position)
        self._signals = Signals(signals, seconds(signal_grace, "signal_grace"))
        self._lock = DirectoryLock(self.directory)
        self._watchdog = None
        if self._agreement.distributed:
            self._watchdog = Watchdog(patience_s, self._report_silence)
            if self.loop is not None:
                self.loop.worst_of_ranks = self._worst_of_ranks
        # Steps until the host has a step's results; the optimizer of a loop has waited for them.
        self._lag = 0 if engine is None or engine.device.type == "cpu" else 1
        self._retry = MemoryRetry(engine, self._reporter, splits=split, distributed=self._agreement.distributed)
        self._unjudged: deque[Step] = deque()
        self._wait_for_disk = True
        self._stop_requested = False  # some rank received a signal
        self._number = 0  # the last completed step
        self._averages = AveragedModels(state or {})
        self._attached = self._started = self._closed = False

    # Start and end

    def __enter__(self) -> Guard:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._started and not self._closed:
                self._judge_remaining()
                if any(self._agreement.gather(self._stop_requested or bool(self._signals.caught))):
                    self._preempted()
                if self._engine.accumulating:
                    self._reporter.log("the training ended in the middle of gradient accumulation, which is not saved")
                elif self._number:
                    self._checkpointing.save_now(self._number)
            elif error is not None and self._is_lost_rank(error):
                self._stop_for_lost_rank(error)
        except LostRank as lost:
            self._stop_for_lost_rank(lost)
        finally:
            self.close()

    def begin(self) -> None:
        """Lock the directory and resume from it. The first step or batch does this if nothing else has."""
        if self._closed:
            raise BadInput("this guard is closed: create a new one.")
        if self._started:
            return
        try:
            if any(isinstance(each, Guard) for each in self._engine.callbacks):
                raise BadInput("this engine already has a guard. Use one guard per engine.")
            self._engine.add_callback(self)
            self._attached = True
            self._agreement.run_on_all(self._take_directory)
            self._started = True
            self._finalizer = weakref.finalize(self, self._lock.release)
            self._start()
            self._averages.hook()
        except BaseException as error:
            try:
                if self._is_lost_rank(error):
                    self._stop_for_lost_rank(error)
            finally:
                self.close()
            raise

    def _take_directory(self) -> None:
        if rank() and not self._agreement.distributed:
            raise BadInput(
                f"Guard({str(self.directory)!r}): this is rank {rank()}, and the model is neither wrapped in "
                "DistributedDataParallel nor sharded by fully_shard: the guards of all ranks would not act together. "
                "Wrap or shard the model; if only rank 0 trains, use a guard only there."
            )
        if (self.directory / CAPSULES).is_symlink():  # the directory is untrusted
            raise BadInput(
                f"Guard({str(self.directory)!r}): {CAPSULES} in it is a symlink, and the guard does not write through "
                "symlinks. Remove it, or name another directory."
            )
        if self._agreement.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(
                    f"Guard({str(self.directory)!r}): cannot create this directory: {error.strerror or error}."
                ) from error
            self._lock.acquire()
            clear_leftovers(self.directory)  # now, because a run that is already complete saves nothing later

    def _start(self) -> None:
        if self._lock.stale:
            holder = self._lock.holder_before
            self._reporter.report(LockTakenOver(pid=holder.pid, host=holder.host, since=holder.since))

        def begin() -> None:
            self._changes.begin()
            self._position.begin()
            if not self._resumes and self._agreement.rank == 0 and checkpoints(self.directory):
                raise BadInput(
                    f"Guard({str(self.directory)!r}, resume=False): the directory has checkpoints. Name another "
                    "directory, or resume from it: resume=True."
                )

        self._agreement.run_on_all(begin)
        self._position.passed_over = self._agreement.broadcast(self._position.passed_over)
        resumed = self._resuming.newest() if self._resumes else None
        checkpoint, plain = resumed if resumed is not None else (None, {})
        self._number = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            self._position.resume(plain.get("data"))
        self._recovery.begin(self._number, plain.get("guard", {}))
        self._agreement.run_on_all(lambda: self._checkpointing.begin(self._number, checkpoint))
        if checkpoint is not None:
            self._reporter.log(f"resuming from {checkpoint.path}, after step {checkpoint.step:,}")
        self._engine.scaler.collapses = False
        self._signals.listen()

    def close(self) -> None:
        """Release the engine and the directory, after waiting for a checkpoint that is being written."""
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.end()
        self._averages.unhook()
        if self._attached:
            self._engine.remove_callback(self)
        if self._started:
            self._signals.stop_listening()
            self._engine.scaler.collapses = True
            self._engine.save_bad_steps(None)
            self._checkpointing.collect(wait=self._wait_for_disk)
            self._finalizer()
        self._reporter.close()
        if self._started:
            self._signals.resend()  # may end the process

    # Training

    def batches(self, loader: Any, *, epochs: int | None = 1) -> Iterator[Any]:
        """Iterate over a loader's batches for ``epochs`` epochs, starting where a resumed run stopped.

        A rollback rewinds them, too, and leaves out the batches that failed. A loader with ``state_dict``, such as
        torchdata's StatefulDataLoader, restores its own position; for any other, batches are counted.

        Args:
            loader: any iterable of batches.
            epochs: how many; None: no end.

        Returns:
            an iterator over the batches.
        """
        self.begin()
        placed = self._position.hand_out(loader, epochs)
        self._checkpointing.data_begins(self._position.state())
        return self._batches(placed)

    def _batches(self, placed: Iterator[Any]) -> Iterator[Any]:
        windows = iter(self._engine.batches(placed))
        while True:
            before = self._position.fetched
            try:
                found = next(windows, None)
            except Exception:
                # The signal may have ended loader workers, too: stop, unless a window is half read.
                if self._signalled_alone and self._position.fetched == before:
                    self._preempted()
                raise
            if found is None:
                break
            place, batch = found
            self._position.taken(place)
            yield batch
            if not self._engine.accumulating:
                self._stop_requested = self._stop_requested or self._signalled_alone
                self.on_step_begin()
        if self._judge_remaining() and (remaining := self._position.remaining()) is not None:
            yield from self._batches(remaining)

    @property
    def _signalled_alone(self) -> bool:
        """Whether a signal was caught and there are no other ranks to agree with."""
        return bool(self._signals.caught) and not self._agreement.distributed

    def step(self, loss: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Step:
        """Take a step: backward pass, unscaling, clipping, update, schedulers. A bad one changes nothing.

        Of an Engine: ``guard.step(loss_fn, x, y)`` runs ``engine.step``, and retries with less memory if it runs out.
        Plain ``engine.step`` is guarded as well. Of a model and an optimizer: ``guard.step(loss)``.

        Args:
            loss: of a plain loop, the loss of this batch; with an engine, the function that returns it.
            *args: the batch, passed to that function.
            **kwargs: likewise, by name.

        Returns:
            the step.

        Raises:
            Stopped: no rung of the ladder helped.
        """
        if self.loop is not None:
            return self._end_loop_step(self._begun_loop("step").train_on, loss)
        self.begin()
        try:
            return self._retry.step(loss, args, kwargs, number=self._number + 1)
        except BaseException as error:
            if self._is_lost_rank(error):
                self._stop_for_lost_rank(error)
            raise

    def end_step(self, loss: Tensor | float) -> Step:
        """End a step of a loop that runs ``loss.backward()``, ``optimizer.step()`` and the like itself.

        Call it once for each step, after ``scaler.update()``. If a gradient was not finite, ``optimizer.step()`` has
        changed nothing; step the scheduler only ``if step.applied``.

        Args:
            loss: of the step.

        Returns:
            the step.

        Raises:
            Stopped: no rung of the ladder helped.
        """
        return self._end_loop_step(self._begun_loop("end_step").end_step, loss)

    def _begun_loop(self, name: str) -> ScriptLoop:
        if self.loop is None:
            raise BadInput(
                f"guard.{name}(loss) is for Guard(model=..., optimizer=...): an engine ends its steps itself."
            )
        if not self._started or self._closed:
            raise BadInput(
                f"guard.{name}(loss) before the guard has begun, or after it: write the loop inside `with guard:`, or "
                "take its batches from guard.batches(loader)."
            )
        return self.loop

    def _end_loop_step(self, end: Callable[[Any], Step], loss: Any) -> Step:
        step = end(loss)
        if step.closed:
            self.after_step(step)
            if not self._position.is_used:
                self.on_step_begin()
        return step

    def _worst_of_ranks(self, found: int) -> int:
        try:
            return self._agreement.worst(found)
        except LostRank as error:
            self._stop_for_lost_rank(error)

    def alive(self) -> None:
        """Reset the watchdog. Call it on every rank during an evaluation that takes longer than ``patience``."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def save(self) -> SavedCheckpoint | None:
        """Write a checkpoint now and wait for it; None, and an event, if that failed. Call it on all ranks.

        Returns:
            the checkpoint, or None.
        """
        self.begin()
        if self._engine.accumulating:
            raise BadInput("guard.save() in the middle of gradient accumulation: save when step.closed is true.")
        return self._checkpointing.save_now(self._number)

    # What happened

    @property
    def events(self) -> list[GuardEvent]:
        """What happened and what the guard did, oldest first: each has a name, a level, a step and a message."""
        return list(self._reporter.events)

    @property
    def findings(self) -> list[Finding]:
        """Findings for those events that you must act on, oldest first."""
        return list(self._reporter.findings)

    @property
    def last_checkpoint(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint that this run has written or resumed from."""
        self._checkpointing.collect()
        return self._checkpointing.last

    @property
    def passed_over(self) -> list[tuple[int, int]]:
        """Batches that the run leaves out, as (epoch, index), both from 0."""
        return list(self._position.passed_over)

    @property
    def epoch(self) -> int:
        """Epoch of the batch that ``batches`` yielded last, from 0."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """Index in its epoch of the batch that ``batches`` yielded last, from 0; -1 before the first."""
        return self._position.index

    @property
    def number(self) -> int:
        """Number of the last completed step; a rollback lowers it."""
        return self._number

    def __repr__(self) -> str:
        return shortened(f"<Guard of {self._engine!r} in {self.directory}, step {self._number:,}>", 400)

    # Callbacks that the engine calls

    def on_step_begin(self) -> None:
        """Before the next step: stop if a signal asked for it, and save the state if it is due."""
        self._retry.updating = False
        if self._stop_requested:
            self._preempted()
        self._checkpointing.keep_wanted()

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Make the device wait for snapshot copies that are still running."""
        self._retry.updating = True
        self._checkpointing.snapshots.before_update()

    def after_step(self, step: Step) -> None:
        """After a step: judge the latest step whose results the host has."""
        self._retry.step_ended()
        self._number = step.number
        self._position.closed(step.number)
        self._unjudged.append(step.bare())
        if self._watchdog is not None:
            self._watchdog.beat()
        restores = self._recovery.restores
        try:
            self._judge_next(ends=bool(self._signals.caught))
        except LostRank as error:
            self._stop_for_lost_rank(error)
        step.undone = self._recovery.restores > restores
        self._averages.last = step.bare()

    def _judge_remaining(self) -> bool:
        """Judge all remaining steps at the end of the data; return whether that changed the state."""
        return any(self._judge_next(ends=False, lag=0) for _ in range(len(self._unjudged)))

    def _judge_next(self, *, ends: bool, lag: int | None = None) -> bool:
        """Judge one step; return whether that changed the state, so that steps not judged yet no longer count."""
        self._checkpointing.collect()
        behind = self._lag if lag is None else lag
        judged = self._unjudged.popleft() if len(self._unjudged) > behind else None
        agreed = self._agreement.agree(
            0.0 if judged is None else judged.loss,
            due=self._checkpointing.is_due(self._number),
            busy=self._checkpointing.saver.busy,
            ends=ends,
        )
        scaler = self._engine.scaler
        if judged is not None and self._recovery.judge(
            LadderFacts(judged.number, judged.skipped, agreed.loss, judged.scale, scaler.is_enabled(), scaler.min_scale)
        ):
            self._unjudged.clear()
            self._number = self._engine.applied_steps + self._engine.skipped_steps
            return True
        self._stop_requested = self._stop_requested or agreed.ends
        self._checkpointing.after(self._number, agreed)
        return False

    def _extra_state(self) -> dict[str, Any]:
        """State that is saved besides the engine's."""
        guard = {**self._recovery.state(), "given": self._changes.given}
        return {"data": self._position.state(), "guard": guard}

    # Stopping

    def _preempted(self) -> None:
        """Save and exit, because this rank or another received a signal."""
        self._signals.handled = True
        name = self._signals.caught or "a signal to another rank"
        began = self._signals.when or time.monotonic()
        saved = self._checkpointing.save_now(self._number)
        preempted = self._reporter.report(
            Preempted(
                step=self._number,
                signal=name,
                checkpoint="" if saved is None else str(saved.path),
                seconds=time.monotonic() - began,
            )
        )
        raise Stopped(STOPPED_EXIT_CODE if saved is None else self._exit_code, preempted.message)

    def _is_lost_rank(self, error: BaseException) -> bool:
        """Whether the error means that another rank is gone; torch raises several kinds for that."""
        if not self._agreement.distributed or isinstance(error, Stopped):
            return False
        return isinstance(error, LostRank) or (
            isinstance(error, RuntimeError) and LOST_RANK.search(str(error)) is not None
        )

    def _stop_for_lost_rank(self, error: BaseException) -> NoReturn:
        self._wait_for_disk = False  # the checkpoint being written waits for that rank, too
        lost = self._report_lost_rank(0.0, str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise Stopped(STOPPED_EXIT_CODE, lost.message) from error

    def _report_lost_rank(self, waited: float, error: str) -> RankLost:
        last = self._checkpointing.last
        return self._reporter.report(
            RankLost(step=self._number, waited=waited, error=error, checkpoint="" if last is None else str(last.path))
        )

    def _report_silence(self, silent: float) -> None:
        self._report_lost_rank(silent, "no step was completed")
        self._reporter.close()  # the process ends at once: let on_event take this event first
