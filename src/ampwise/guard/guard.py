"""A guard over a long training: snapshots that can be trusted, and a way out of most faults."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ampwise.engine.engine import Engine
from ampwise.engine.pieces import length_of
from ampwise.engine.step import Step
from ampwise.errors import BadInput
from ampwise.evidence.faults import LockTakenOver, OutOfMemory, Preempted, RankLost
from ampwise.finding import Finding
from ampwise.guard.agreement import Agreement, LostRank
from ampwise.guard.alerts import Alert, Alerts
from ampwise.guard.averages import Averages
from ampwise.guard.changes import Changes
from ampwise.guard.checkpointing import Checkpointing
from ampwise.guard.disk.catalog import Checkpoint, checkpoints, clear_leftovers
from ampwise.guard.disk.lock import Lock
from ampwise.guard.durations import Every, seconds
from ampwise.guard.ends import STOPPED, Signals, Stopped, Watchdog
from ampwise.guard.ladder import Facts, Ladder
from ampwise.guard.position import Position
from ampwise.guard.recovery import Recovery
from ampwise.guard.resuming import Resuming
from ampwise.guard.state import Whole
from ampwise.guard.telling import Telling

__all__ = ["Guard"]

CAPSULES = "capsules"  # the folder of steps that ended a training, in the guard's directory
LOST = (
    "Connection closed by peer",
    "Connection reset",
    "NCCL",
    "Gloo",
    "gloo",
    "Broken pipe",
    "timed out",
    "Timed out",
)


class Guard:
    """Keeps a training going, and loses nothing: checkpoints, rollback, and the recovery ladder.

    every: how often a checkpoint is written: "10min", "2h", "500 steps". It is written beside the training, on all
        ranks together, and is in place when it is whole. keep: how many of them, besides the last good one.
    snapshot_every: steps between snapshots in memory, which a rollback goes to. snapshots_on: "host" or "device".
    ladder: what is done about bad steps.
    state: other objects to save, by name, with ``state_dict`` and ``load_state_dict``: ``{"ema": ema}``. An
        AveragedModel among them is not updated after a step that was skipped or undone.
    resume: go on from the newest whole checkpoint in the directory, if there is one.
    override: what the script decides where it differs from the checkpoint: "precision", "optimizer", "schedulers",
        "scaler", "state", "data", and options of the optimizer, such as "weight_decay". Of all else, the checkpoint's
        value is used, which is said, or it is refused.
    split: on running out of memory, cut batches in halves, and in halves again.
    alerts: functions that are called with each finding, in the background; ``ampwise.guard.alerts`` has some.
    signals: at which the step is finished, the state saved, and the program ended with ``exit_code``.
    signal_grace: how long further signals count as part of the first, which a scheduler and torchrun's agent both send.
        Later ones end the program at once, and so does a second SIGINT at any time.
    patience: how long other ranks are waited for, and the next step, before this one ends too; see ``alive``.

    >>> import tempfile
    >>> model = torch.nn.Linear(4, 1)
    >>> engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    >>> with Guard(engine, tempfile.mkdtemp()) as guard:
    ...     for batch in guard.batches([torch.ones(8, 4)], epochs=3):
    ...         step = guard.step(lambda x: model(x).square().mean(), batch)
    >>> guard.last_checkpoint.step
    3
    """

    def __init__(
        self,
        engine: Engine,
        directory: str | os.PathLike[str],
        *,
        every: str | float = "10min",
        keep: int = 3,
        snapshot_every: int = 100,
        snapshots_on: str = "host",
        ladder: Ladder | None = None,
        state: Mapping[str, Any] | None = None,
        resume: bool = True,
        override: Iterable[str] = (),
        split: bool = False,
        alerts: Iterable[Alert] = (),
        signals: Iterable[str] = ("SIGTERM",),
        signal_grace: str | float = "30s",
        exit_code: int = 0,
        patience: str | float = "30min",
    ) -> None:
        if not isinstance(engine, Engine):
            raise BadInput(f"Guard({type(engine).__name__}): an ampwise.Engine is expected, then the directory.")
        for name, count in (("keep", keep), ("snapshot_every", snapshot_every)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise BadInput(f"Guard({name}={count!r}): a whole number is expected, 1 or more.")
        self._engine, self.directory = engine, Path(directory)
        self._ladder = Ladder() if ladder is None else ladder
        self._resumes, self._splits, self._exit_code = resume, split, exit_code
        waits = seconds(patience, "patience")
        self._agreement = Agreement(engine.ranks, waits)
        speaks = self._agreement.rank == 0
        functions = list(alerts)
        self._telling = Telling(Alerts(functions) if functions and speaks else None, speaks=speaks)
        whole = Whole(engine, state or {})
        self._checkpointing = Checkpointing(
            self.directory,
            engine,
            whole,
            self._agreement,
            self._telling,
            every=Every.checked(every),
            keep=keep,
            snapshot_every=snapshot_every,
            snapshots_on=snapshots_on,
            besides=self._besides,
        )
        self._changes = Changes(engine, state or {}, override, self._telling.say)
        self._position = Position(
            self.directory, writes=speaks, say=self._telling.say, override=self._changes.overrides("data")
        )
        self._resuming = Resuming(self.directory, engine, whole, self._changes, self._agreement, self._telling)
        self._recovery = Recovery(
            self._ladder,
            engine,
            whole,
            self._checkpointing,
            self._resuming,
            self._position,
            self._agreement,
            self._telling,
            self.directory / CAPSULES,
        )
        self._signals = Signals(signals, seconds(signal_grace, "signal_grace"))
        self._lock = Lock(self.directory)
        self._watchdog = Watchdog(waits, self._last_words) if self._agreement.several else None
        self._lag = 0 if engine.device.type == "cpu" else 1  # how many steps later the host knows of one
        self._unjudged: deque[Step] = deque()
        self._window: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._pieces = 1  # that batches are cut into
        self._waits_for_disk = True
        self._ends = False  # a rank was told to
        self._updating = False  # weights and optimizers are being written: a step that fails now is half done
        self._number = 0  # of the last closed step
        self._averages = Averages(state or {})
        self._attends = self._begun = self._ended = False

    # Around the training

    def __enter__(self) -> Guard:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            elif self._is_lost_rank(error):
                self._rank_lost(error)
        except LostRank as lost:
            self._rank_lost(lost)
        finally:
            self.close()

    def begin(self) -> None:
        """Take the directory, and go on from what is in it. It happens by itself at the first step or batch."""
        if self._ended:
            raise BadInput("this guard is closed: make another.")
        if self._begun:
            return
        try:
            self._engine.attend(self)  # first, as it refuses a second guard
            self._attends = True
            self._agreement.each(self._take_directory)
            self._begun = True
            self._finalizer = weakref.finalize(self, _release, self._lock)
            self._start()
            self._averages.hook()
        except BaseException as error:
            try:
                if self._is_lost_rank(error):
                    self._rank_lost(error)
            finally:
                self.close()
            raise

    def _take_directory(self) -> None:
        if (self.directory / CAPSULES).is_symlink():  # a directory may come from anybody
            raise BadInput(
                f"Guard({str(self.directory)!r}): {CAPSULES} in it is a symlink, and nothing is written through one. "
                "Remove it, or name another directory."
            )
        if self._agreement.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(
                    f"Guard({str(self.directory)!r}): no such directory can be made: {error.strerror or error}."
                ) from error
            self._lock.acquire()
            clear_leftovers(self.directory)  # now, as a run that has come to its end saves nothing any more

    def _take_note(self) -> None:
        """Note what the script gave, and where its data begins."""
        self._changes.begin()
        self._position.begin()

    def _start(self) -> None:
        if self._lock.stale:
            holder = self._lock.holder_before
            self._telling.tell(LockTakenOver(pid=holder.pid, host=holder.host, since=holder.since), 0)
        self._agreement.each(self._take_note)
        self._position.passed_over = self._agreement.first_says(self._position.passed_over)
        resumed = self._resuming.newest() if self._resumes else None
        checkpoint, plain = resumed if resumed is not None else (None, {})
        if checkpoint is None and not self._resumes:
            self._agreement.each(self._refuse_used)
        self._number = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            self._position.resume(plain.get("data"))
        self._recovery.begin(self._number, plain.get("guard", {}))
        self._agreement.each(lambda: self._checkpointing.begin(self._number, checkpoint))
        if checkpoint is not None:
            self._telling.say(f"going on from {checkpoint.path}, after step {checkpoint.step:,}")
        self._engine.scaler.collapses = False
        self._signals.listen()

    def _refuse_used(self) -> None:
        if self._agreement.rank == 0 and checkpoints(self.directory):
            raise BadInput(
                f"Guard({str(self.directory)!r}, resume=False): it has a run's checkpoints. Name another directory, or "
                "go on from it: resume=True."
            )

    def _finish(self) -> None:
        """The training is over: judge what is left, and save it."""
        if self._begun and not self._ended:
            self._judge_rest()
            if any(self._agreement.all_of(self._ends or bool(self._signals.caught))):
                self._preempted()
            if self._engine.accumulating:
                self._telling.say("the training ended in the middle of a window, which is not saved")
            elif self._number:
                self._checkpointing.save_now(self._number)

    def close(self) -> None:
        """Let go of engine and directory. A checkpoint that is being written is waited for; none is begun."""
        if self._ended:
            return
        self._ended = True
        if self._watchdog is not None:
            self._watchdog.end()
        self._averages.unhook()
        if self._attends:
            self._engine.attend(None)
        if self._begun:
            self._let_go()
        self._telling.close()

    def _let_go(self) -> None:
        self._signals.stop_listening()
        self._engine.scaler.collapses = True
        self._engine.save_bad_steps(None)
        self._checkpointing.collect(wait=self._waits_for_disk)
        self._finalizer()
        self._signals.pass_on()

    # The training

    def batches(self, loader: Any, *, epochs: int | None = 1) -> Iterator[Any]:
        """The batches of a loader, so many epochs of them, from where a resumed run was.

        A rollback goes back in them, too, and passes over those that failed. A loader with ``state_dict``, such as
        torchdata's StatefulDataLoader, is asked where it is; any other is counted. None: epochs without end.
        """
        self.begin()
        placed = self._position.hand_out(loader, epochs)
        self._checkpointing.data_begins(self._position.state())
        return self._batches(placed)

    def _batches(self, placed: Iterator[Any]) -> Iterator[Any]:
        windows = iter(self._engine.batches(placed))
        while (found := self._fetched(windows)) is not None:
            place, batch = found
            self._position.taken(place)
            yield batch
            if not self._engine.accumulating:
                self._ends = self._ends or self._told_alone
                self.begins()
        if self._judge_rest() and (rest := self._position.rest()) is not None:
            yield from self._batches(rest)

    def _fetched(self, windows: Iterator[Any]) -> Any | None:
        """The next batch and its place; None after the last. The end, if a signal ended the loader's workers, too."""
        before = self._position.fetched
        try:
            return next(windows, None)
        except Exception:
            if self._told_alone and self._position.fetched == before:  # else the place is in the middle of a window
                self._preempted()
            raise

    @property
    def _told_alone(self) -> bool:
        """A signal was caught, and no other rank has to agree."""
        return bool(self._signals.caught) and not self._agreement.several

    def step(self, loss_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
        """``engine.step``, which goes on with less memory where there is not enough. Any other is guarded as well."""
        self.begin()
        self._window.append((loss_fn, args, kwargs))
        try:
            return self._run(loss_fn, args, kwargs)
        except BaseException as error:
            if self._may_run_again(error):
                return self._with_less_memory(error)
            self._forget_window()
            if self._is_lost_rank(error):
                self._rank_lost(error)
            raise

    def _forget_window(self) -> None:
        """Of a batch that failed: whoever goes on goes on without it, and without those that went with it."""
        if self._engine.accumulating:
            self._window.pop()
        else:
            self._window.clear()

    def alive(self) -> None:
        """All is well though no step is closed: for an evaluation longer than ``patience``; on every rank."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def save(self) -> Checkpoint | None:
        """Write a checkpoint now, and wait for it; None if that failed, which is a finding. All ranks together."""
        self.begin()
        if self._engine.accumulating:
            raise BadInput("guard.save() in the middle of a window: save when step.closed is true.")
        return self._checkpointing.save_now(self._number)

    # What happened

    @property
    def findings(self) -> list[Finding]:
        """What the guard has seen and done, oldest first."""
        return list(self._telling.findings)

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest that is whole, as far as this run knows."""
        self._checkpointing.collect()
        return self._checkpointing.last

    @property
    def passed_over(self) -> list[tuple[int, int]]:
        """Batches that are left out: epoch and number, from 0."""
        return list(self._position.passed_over)

    @property
    def epoch(self) -> int:
        """Of the batch that ``batches`` handed out last, from 0."""
        return self._position.epoch

    def __repr__(self) -> str:
        return f"<Guard of {self._engine!r} in {self.directory}, step {self._number:,}>"

    # As the engine's attendant

    def begins(self) -> None:
        """Whatever the user does after a step is done: end, if that was asked for, or keep the state, if it is time."""
        self._updating = False
        if self._ends:
            self._preempted()
        self._checkpointing.keep_wanted()

    def before_update(self) -> None:
        """Copies of the state that are still being made are waited for, by the device."""
        self._updating = True
        self._checkpointing.before_update()

    def closed(self, step: Step) -> None:
        """A step is over: judge the one that is known by now."""
        self._updating = False
        self._window.clear()
        self._number = step.number
        self._position.closed(step.number)
        self._unjudged.append(step.bare())
        if self._watchdog is not None:
            self._watchdog.beat()
        times_back = self._recovery.times_back
        try:
            self._judge_next(ends=bool(self._signals.caught))
        except LostRank as error:
            self._rank_lost(error)
        step.undone = self._recovery.times_back > times_back
        self._averages.last = step.bare()

    def _judge_rest(self) -> bool:
        """At the end of the data. Whether the state was changed by what is known only now."""
        return any(self._judge_next(ends=False, lag=0) for _ in range(len(self._unjudged)))

    def _judge_next(self, *, ends: bool, lag: int | None = None) -> bool:
        """Whether the state was changed, so that steps that are not judged yet are void."""
        self._checkpointing.collect()
        waits = self._lag if lag is None else lag
        judged = self._unjudged.popleft() if len(self._unjudged) > waits else None
        agreed = self._agreement.agree(
            0.0 if judged is None else judged.loss,
            due=self._checkpointing.is_due(self._number),
            busy=self._checkpointing.busy,
            ends=ends,
        )
        if judged is not None and self._recovery.judge(self._facts(judged, agreed.loss)):
            self._unjudged.clear()
            self._number = self._engine.applied_steps + self._engine.skipped_steps
            return True
        self._ends = self._ends or agreed.ends
        self._checkpointing.after(self._number, agreed)
        return False

    def _facts(self, step: Step, loss: float) -> Facts:
        scaler = self._engine.scaler
        return Facts(step.number, step.skipped, loss, step.scale, scaler.is_enabled(), scaler.min_scale)

    def _besides(self) -> dict[str, Any]:
        """What is saved besides the state of the engine."""
        guard = {**self._recovery.state(), "given": self._changes.given}
        return {"data": self._position.state(), "guard": guard}

    # Ends

    def _preempted(self) -> None:
        """Finish, save, and end; whoever asked for it may have asked another rank."""
        self._signals.heeded = True
        name = self._signals.caught or "a signal to another rank"
        began = self._signals.when or time.monotonic()
        saved = self._checkpointing.save_now(self._number)
        finding = self._telling.tell(
            Preempted(
                step=self._number,
                signal=name,
                checkpoint="" if saved is None else str(saved.path),
                seconds=time.monotonic() - began,
            ),
            self._number,
        )
        raise Stopped(STOPPED if saved is None else self._exit_code, finding.message)

    def _is_lost_rank(self, error: BaseException) -> bool:
        """What torch raises when another rank is gone has many names."""
        if not self._agreement.several or isinstance(error, Stopped):
            return False
        return isinstance(error, LostRank) or (
            isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
        )

    def _rank_lost(self, error: BaseException) -> None:
        self._waits_for_disk = False  # what is being written waits for that rank, too
        finding = self._lost(0.0, str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise Stopped(STOPPED, finding.message) from error

    def _lost(self, waited: float, error: str) -> Finding:
        last = self._checkpointing.last
        return self._telling.tell(
            RankLost(step=self._number, waited=waited, error=error, checkpoint="" if last is None else str(last.path)),
            self._number,
        )

    def _last_words(self, silent: float) -> None:
        self._lost(silent, "no step was closed")

    # Less memory

    def _run(self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        if self._pieces == 1:
            return self._engine.step(loss_fn, *args, **kwargs)
        return self._engine.step_in_pieces(min(self._pieces, length_of(args, kwargs)), loss_fn, *args, **kwargs)

    def _with_less_memory(self, error: BaseException) -> Step:
        """The window once more, from its beginning: as it was, with memory that others held let go; then in halves."""
        what, first = (str(error) or type(error).__name__).splitlines()[0], True
        if self._agreement.several:  # others may have exchanged some of its gradients
            self._halve(error, what)
        while True:
            self._engine.drop_window()
            error.__traceback__ = None  # which holds what the step had made
            _release_memory()
            if not first:
                self._halve(error, what)
            first = False
            try:
                return [self._run(*batch) for batch in list(self._window)][-1]
            except BaseException as again:
                if not self._may_run_again(again):
                    self._forget_window()
                    raise
                error = again

    def _may_run_again(self, error: BaseException) -> bool:
        """It ran out of memory before anything was written to, and not when the step was over."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError) and bool(self._window) and not self._updating

    def _halve(self, error: BaseException, what: str) -> None:
        longest = max(length_of(args, kwargs) for _, args, kwargs in self._window) if self._splits else 0
        may = self._splits and self._pieces < longest and not self._agreement.several
        pieces = min(self._pieces * 2, longest) if may else self._pieces
        self._telling.tell(OutOfMemory(step=self._number + 1, pieces=pieces, error=what, splits=may), self._number + 1)
        if not may:
            self._forget_window()
            raise error
        self._pieces = pieces


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _release(lock: Lock) -> None:
    lock.release()
