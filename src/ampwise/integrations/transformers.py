"""Hugging Face integration: ``AmpwiseCallback()`` watches as ``ampwise run`` does; ``GuardCallback()`` is the guard."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.guard.guard import Guard
from ampwise.guard.script_loop import ScriptLoop
from ampwise.integrations.deferred_scaler import inner_optimizer
from ampwise.integrations.training_watch import TrainingWatch
from ampwise.integrations.versions import TRANSFORMERS, require
from ampwise.watch.patches import Patches

require(TRANSFORMERS, "transformers")

from accelerate.utils import DistributedType, send_to_device  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402

__all__ = ["AmpwiseCallback", "GuardCallback"]

EVALUATION_SUFFIX = "_runtime"  # the prefix is the user's choice
TRAINING_RUNTIME = "train_runtime"


class AmpwiseCallback(TrainingWatch, TrainerCallback):
    """Callback for ``Trainer(..., callbacks=[AmpwiseCallback()])``: loss scale, skips, gradient health, and findings.

    Gradients are measured unscaled, before they are clipped; ``on_pre_optimizer_step`` would see them after clipping.
    The metrics of docs/sinks.md go into the Trainer's own logs, each once, and from there to the loggers in
    ``report_to`` and to ``state.log_history``; the Trainer logs loss, learning rate and norm itself. Findings are
    printed to stderr when the training ends.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: overwrite a record there.
    every: full gradient histograms at every n-th step; None: as often as 1% of the time allows. activations: watch the
    outputs of modules. timing: measure where time goes. sinks: as for ``Engine``. quiet: no summary at the end. After
    the training, ``run`` has the findings.
    """

    _name = "ampwise.integrations.transformers.AmpwiseCallback"
    _logged_already = frozenset({"ampwise/loss", "ampwise/lr", "ampwise/grad_norm"})  # under other names

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start watching: model and optimizer exist, and no batch has been processed."""
        if not self._begin(state, rank=args.process_index, world_size=args.world_size):
            return
        optimizer = given.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        self._adopt(given.get("model"), inner, getattr(optimizer, "scaler", None))
        # Callbacks get the logs after the loggers in `report_to`, so metrics must be added before.
        self._patches.replace(Trainer, "log", self._logging)

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            of_evaluation = any(name.endswith(EVALUATION_SUFFIX) and name != TRAINING_RUNTIME for name in logs)
            if self in trainer.callback_handler.callbacks and not of_evaluation:
                logs.update(self._take())
            return original(trainer, logs, *args, **kwargs)

        return log

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the record when the training ends or stops early."""
        self._end()


class GuardCallback(TrainerCallback):
    """Callback for ``Trainer(..., callbacks=[GuardCallback("checkpoints")])``: what a Guard does for an Engine.

    It takes the data over from the Trainer: an epoch of the Trainer has its usual number of batches, also after a
    rollback, so that it ends earlier in the data. A guarded run resumes by itself when the same command is started
    again: leave out ``resume_from_checkpoint``. One process only.

    directory: where checkpoints are written. options: as for ``Guard``, such as ``every="500 steps"``. ``guard`` is the
    Guard of the last training, with ``events``, ``findings`` and ``passed_over``.
    """

    _epochs_are_open = Patches()  # of the Trainer, for good: it decides on the number of epochs before any callback

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory, self._options = directory, options
        self.guard: Guard | None = None
        self._trainer: Any = None
        self._losses: list[Tensor] = []  # of the current step's micro-batches
        if not self._epochs_are_open.pairs():
            self._epochs_are_open.wrap(Trainer, "set_initial_training_values", _with_open_end)

    def begins(self, trainer: Any, loader: Any) -> None:
        """Refuse what cannot be guarded, before the training begins."""
        args, name = trainer.args, "ampwise.integrations.transformers.GuardCallback"
        if args.world_size > 1 or trainer.accelerator.distributed_type != DistributedType.NO:
            raise BadInput(f"{name}: it guards a training in one process. For several ranks, use an ampwise.Engine.")
        size = args.gradient_accumulation_steps
        if size > 1 and len(loader) % size:
            raise BadInput(
                f"{name}: an epoch of {len(loader):,} batches is not a multiple of gradient_accumulation_steps={size}, "
                "so steps would have other batches after a rollback. Change the batch size, or the number of samples."
            )
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Resume, if there is a checkpoint; the model and the optimizer exist, and no batch was processed."""
        trainer, loader = self._trainer, given["train_dataloader"]
        if trainer is None or state.global_step:
            raise BadInput(
                "ampwise.integrations.transformers.GuardCallback: the Trainer has resumed from its own checkpoint. "
                "Leave out resume_from_checkpoint: the guard resumes from its directory by itself."
            )
        self._end(None)
        optimizer = given["optimizer"]
        self.guard = guard = Guard(
            self._directory,
            model=given["model"],
            optimizer=inner_optimizer(optimizer),
            scheduler=given.get("lr_scheduler"),
            scaler=getattr(optimizer, "scaler", None),
            **self._options,
        )
        epochs = None if args.max_steps > 0 else math.ceil(args.num_train_epochs)
        state.num_train_epochs = epochs or math.ceil(state.max_steps / max(1, len(loader)))
        with self._ends_with_errors():
            guard.begin()
            stream = guard.batches(getattr(loader, "base_dataloader", loader), epochs=epochs)
        self._count(state)
        batches = self._batches(stream, getattr(loader, "device", None))

        def get_batch_samples(_: Any, *args: Any) -> Any:
            return type(trainer).get_batch_samples(trainer, batches, *args)

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = type(trainer).training_step(trainer, *args, **kwargs)
            self._losses.append(loss.detach())
            return loss

        trainer.training_step, trainer.get_batch_samples = training_step, get_batch_samples

    def _batches(self, stream: Iterator[Any], device: Any) -> Iterator[Any]:
        """Yield the guard's batches, epoch after epoch, in place of the Trainer's."""
        assert self.guard is not None
        while self.guard.number < self._trainer.state.max_steps:
            with self._ends_with_errors():
                batch = next(stream, None)
            if batch is None:
                self._trainer.control.should_training_stop = True
                return
            yield batch if device is None else send_to_device(batch, device)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep the scheduler from advancing on a skipped step, as a scaler does."""
        loop, optimizer = self._loop, given["optimizer"]
        if getattr(optimizer, "scaler", None) is None:
            optimizer._is_overflow = loop.skips

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Judge the step; if the guard goes back, so do the Trainer's counters."""
        assert self.guard is not None
        was_last = state.global_step >= state.max_steps
        with self._ends_with_errors():
            step = self.guard.end_step(sum(float(each) for each in self._losses))
        self._losses.clear()
        self._count(state)
        if step.undone:
            self._trainer._tr_loss.zero_()
            control.should_training_stop = control.should_training_stop and not was_last

    def _count(self, state: Any) -> None:
        """Set the Trainer's counters to the guard's."""
        assert self.guard is not None
        trainer, loader = self._trainer, self._trainer.callback_handler.train_dataloader
        state.global_step = self.guard.number
        state.epoch = self.guard.epoch + (self.guard.batch + 1) / len(loader)
        trainer._globalstep_last_logged = min(trainer._globalstep_last_logged, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save the last state."""
        self._end(None)

    @property
    def _loop(self) -> ScriptLoop:
        assert self.guard is not None
        assert self.guard.loop is not None
        return self.guard.loop

    @contextmanager
    def _ends_with_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        if self.guard is not None:
            self._losses.clear()
            for name in ("training_step", "get_batch_samples"):
                self._trainer.__dict__.pop(name, None)
            self.guard.__exit__(None if error is None else type(error), error, None)


def _with_open_end(original: Callable[..., Any], trainer: Any, args: Any, loader: Any) -> Any:
    """Let the Trainer go on for as many epochs as the guard has batches for; it stops at its number of steps."""
    epochs, *others = original(trainer, args, loader)
    guards = [each for each in trainer.callback_handler.callbacks if isinstance(each, GuardCallback)]
    for guard in guards:
        guard.begins(trainer, loader)
    return sys.maxsize if guards else epochs, *others
