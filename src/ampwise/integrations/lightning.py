"""Lightning: ``Watch()`` and ``GuardCallback()`` for the Trainer; ``Precision("fp16")``, a plugin for it and Fabric."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.errors import BadInput, PrecisionUnavailable
from ampwise.guard.guard import Guard
from ampwise.guard.script_loop import ScriptLoop
from ampwise.integrations.deferred_scaler import DeferredScaler
from ampwise.integrations.training_watch import TrainingWatch
from ampwise.integrations.versions import LIGHTNING, lightning_name, require
from ampwise.train.precision.precision import PRECISIONS, precisions_of

require(LIGHTNING, lightning_name())
if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.loops.fetchers import _DataFetcher as DataFetcher
    from pytorch_lightning.plugins.precision import Precision as PrecisionPlugin
else:
    pl = importlib.import_module(lightning_name())
    DataFetcher = importlib.import_module(f"{lightning_name()}.loops.fetchers")._DataFetcher
    PrecisionPlugin = importlib.import_module(f"{lightning_name()}.plugins.precision").Precision

from lightning_utilities.core.apply_func import apply_to_collection  # noqa: E402

__all__ = ["GuardCallback", "Precision", "Watch"]

NAMES = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}  # ours to Lightning's
HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")  # user hooks that may read gradients
THEIR_KEY = "MixedPrecision"  # Lightning's own plugin in checkpoints


class Precision(PrecisionPlugin):
    """FP16, BF16 or FP32 for ``Trainer(plugins=[Precision("fp16")])`` and ``Fabric(plugins=[Precision("fp16")])``.

    It replaces ``precision="16-mixed"``: clipping works with fused optimizers, a step with a gradient that is not
    finite is skipped in every precision, and the Trainer's schedulers of interval "step" do not advance on skipped
    steps. ``skipped`` is whether the last step was skipped; ``scaler`` is ampwise's GradScaler, with its norm and
    census.

    device: "cuda" or "cpu", where the model runs; by default the Trainer's, and with Fabric the GPU if there is one.
    scaling: settings of the GradScaler, such as ``{"init_scale": 1024.0}``.

    >>> plugin = Precision("fp16", device="cpu")
    >>> plugin.precision, plugin.scaler.is_enabled()
    ('16-mixed', True)
    """

    def __init__(
        self, precision: str = "fp16", *, device: str | None = None, scaling: Mapping[str, Any] | None = None
    ) -> None:
        if precision not in NAMES:
            theirs = {lightning: ours for ours, lightning in NAMES.items()}
            hint = f" Use {theirs[precision]!r}." if precision in theirs else ""
            raise BadInput(
                f"ampwise.integrations.lightning.Precision({precision!r}): expected one of {', '.join(NAMES)}.{hint}"
            )
        self.precision = NAMES[precision]
        self._asked, self._scaling = PRECISIONS[precision], dict(scaling or {})
        self._device_given = device is not None
        self._held: pl.LightningModule | None = None  # whose schedulers are held back on skipped steps
        self._has_trainer = False
        self._set_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _set_device(self, device: str) -> None:
        try:
            self._device = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise BadInput(
                f"ampwise.integrations.lightning.Precision(device={device!r}): expected 'cuda' or 'cpu'."
            ) from error
        self.scaler = DeferredScaler(self._device, enabled=self._asked.scaled, **self._scaling)

    @property
    def skipped(self) -> bool:
        """Whether the last step left the weights unchanged. Syncs with the device."""
        return self.scaler.skipped

    # Forward and backward

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged: weights stay FP32. Here the Trainer's device is known for the first time."""
        trainer = _trainer_of(module)
        self._has_trainer = trainer is not None
        kind = None if trainer is None else trainer.strategy.root_device.type
        if kind is not None and kind != self._device and not self._device_given:
            self._set_device(kind)
        facts = precisions_of(torch.device(self._device))
        if self._asked.name in facts.lacks:
            raise PrecisionUnavailable(
                f"ampwise.integrations.lightning.Precision({self._asked.name!r}): {facts.lacks[self._asked.name]} "
                f"It runs {', '.join(name for name in facts.runs if name in NAMES)}."
            )
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast, without its cache: that fails if a forward without gradients comes before one with."""
        if self._asked.dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._asked.dtype, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        """Cast FP64 inputs to FP32 for Fabric, as its own plugins do; autocast would leave them FP64.

        The Trainer's plugins do not touch batches.
        """
        if self._has_trainer or self._asked.dtype is None:
            return data
        return apply_to_collection(data, Tensor, lambda each: each.float() if each.dtype == torch.float64 else each)

    def convert_output(self, data: Any) -> Any:
        """Cast outputs to FP32: Fabric computes losses outside of autocast."""
        narrow = (torch.float16, torch.bfloat16)
        return apply_to_collection(data, Tensor, lambda each: each.float() if each.dtype in narrow else each)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss for the Trainer, which uses the returned value; Fabric ignores it."""
        if tensor.device.type != self._device and self._asked.dtype is not None:
            raise BadInput(
                f"ampwise.integrations.lightning.Precision({self._asked.name!r}) is for {self._device}, but the loss "
                f"is on {tensor.device.type}, where autocast was off. Use Precision({self._asked.name!r}, "
                f"device={tensor.device.type!r})."
            )
        if _trainer_of(module) is None:
            return None
        return super().pre_backward(self.scaler.scale(tensor), module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss; for the Trainer, ``pre_backward`` has scaled it.

        Autocast is switched off: the Trainer calls ``manual_backward`` inside it, which would compute the gradients of
        FP32 modules in 16 bits.
        """
        with torch.autocast(self._device, enabled=False):
            if _trainer_of(model) is not None:
                super().backward(tensor, model, *args, **kwargs)
            else:
                self.scaler.scale(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return None if _trainer_of(module) is None else super().post_backward(tensor, module)

    # Steps

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step the optimizer. The Trainer's closure computes the gradients; with Fabric they already exist."""
        trainer = _trainer_of(model)
        if isinstance(optimizer, LBFGS):
            if self.scaler.is_enabled():
                raise BadInput(
                    "LBFGS computes gradients several times per step and cannot be used with fp16: use bf16."
                )
            given = kwargs if closure is None else {"closure": closure, **kwargs}
            return optimizer.step(**given) if trainer is None else super().optimizer_step(optimizer, model, **given)
        if trainer is None or closure is None:
            return self._step(optimizer, kwargs if closure is None else {"closure": closure, **kwargs})
        self._hold_schedulers(model)
        result = closure()
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        # training_step returned None to skip this batch; a module's own optimizer_step may have called the closure.
        if result is None and model.automatic_optimization and all(each is None for each in gradients):
            self._after_closure(model, optimizer)
            return result
        if _user_reads_gradients(model, trainer) or not getattr(optimizer, "_step_supports_amp_scaling", False):
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        with _closure_given(optimizer, lambda: result):
            returned = self._step(optimizer, kwargs)
        return result if returned is None else returned

    def _step(self, optimizer: Any, given: dict[str, Any]) -> Any:
        result = self.scaler.step(optimizer, **given)
        self.scaler.update_later()
        return result

    # Clipping: of unscaled gradients, whatever the optimizer

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, unless that was done already, so that user code can read them."""
        if not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by norm; gradients of a fused optimizer are clipped within its step, at no cost."""
        self.scaler.clip_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.unscale_gradients(optimizer)
        super().clip_grad_by_value(optimizer, clip_val)

    # Schedulers

    def _hold_schedulers(self, model: pl.LightningModule) -> None:
        """Keep the module's schedulers from advancing on skipped steps, until the training ends.

        The Trainer calls the module's hook for every scheduler step, so the hook is replaced. An attribute set on a
        scheduler itself would end up in its state_dict.
        """
        if self._held is not model:
            self.teardown()
            model.lr_scheduler_step = _SchedulerHook(self.scaler.skipped_for, model)  # type: ignore[method-assign]
            self._held = model

    def teardown(self) -> None:
        """Restore the module's hook when the training ends."""
        if self._held is not None:
            self._held.__dict__.pop("lr_scheduler_step", None)
            self._held = None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state. The Trainer saves it; Fabric: ``fabric.save(path, {"precision": plugin})``."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.scaler.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scaler's state also from a checkpoint written with ``precision="16-mixed"``."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint.get(THEIR_KEY) or {})


class _SchedulerHook:
    """Replacement of a module's ``lr_scheduler_step`` during training; copies and pickles get the original hook."""

    def __init__(self, skipped_for: Callable[[Any], bool], model: pl.LightningModule) -> None:
        self._skipped_for, self._model, self._original = skipped_for, model, model.lr_scheduler_step

    def __call__(self, scheduler: Any, metric: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and not isinstance(scheduler, ReduceLROnPlateau):
            configs = [each for each in self._model.trainer.lr_scheduler_configs if each.scheduler is scheduler]
            if any(each.interval == "step" for each in configs) and self._skipped_for(optimizer):
                return
        self._original(scheduler, metric)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._original,)


@contextmanager
def _closure_given(optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[None]:
    """Within the context, give a closure to a ``step(self, closure)`` that asks for one: it has run already."""
    kind: Any = type(optimizer)
    if not _requires_closure(kind):
        yield
        return
    attributes = vars(optimizer)
    own = attributes.get("step")  # a scheduler's wrapper
    attributes["step"] = partial(optimizer.step, closure)
    try:
        yield
    finally:
        attributes.pop("step")
        if own is not None:
            attributes["step"] = own


@lru_cache(maxsize=64)
def _requires_closure(kind: type[Optimizer]) -> bool:
    return any(
        each.name == "closure" and each.default is each.empty for each in signature(kind.step).parameters.values()
    )


def _trainer_of(module: Any) -> pl.Trainer | None:
    """Return the module's Trainer; None with Fabric, and for modules that no Trainer runs."""
    trainer = getattr(module, "_trainer", None) if isinstance(module, pl.LightningModule) else None
    return trainer if isinstance(trainer, pl.Trainer) else None


def _user_reads_gradients(model: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Whether user code runs between backward and step; it must see unscaled gradients."""
    watchers = [(model, pl.LightningModule), *((each, pl.Callback) for each in trainer.callbacks)]  # type: ignore[attr-defined]
    return any(
        getattr(type(each), hook, None) is not getattr(kind, hook, None) for each, kind in watchers for hook in HOOKS
    )


class Watch(TrainingWatch, pl.Callback):
    """Callback for ``Trainer(callbacks=[Watch()])``: loss scale, skips, norms, gradient health, and findings.

    The metrics of docs/sinks.md go to the Trainer's loggers, through ``log`` and its ``log_every_n_steps``; findings
    are printed to stderr when the fit ends. Gradients are measured unscaled, before they are clipped.

    output: a folder to keep the record in, for ``ampwise report``; None keeps none. force: overwrite a record there.
    every: full gradient histograms at every n-th step; None: as often as 1% of the time allows. activations: watch the
    outputs of modules. timing: measure where time goes. sinks: as for ``Engine``. quiet: no summary at the end. After
    the fit, ``run`` has the findings: ``[seen.finding for seen in watch.run.findings]``.
    """

    _name = "ampwise.integrations.lightning.Watch"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start watching, before optimizers are made."""
        if stage == "fit":
            self._begin(trainer, rank=trainer.global_rank, world_size=trainer.world_size)
            self._adopt(pl_module, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log new metrics; on a GPU these are of the previous step."""
        for name, value in self._take().items():
            pl_module.log(name, value, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the record of a fit that raised."""
        self._end(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the record when the fit ends."""
        if stage == "fit":
            self._end()


class GuardCallback(pl.Callback):
    """Callback for ``Trainer(callbacks=[GuardCallback("checkpoints")])``: what a Guard does for an Engine.

    The Trainer gets its batches from the guard, and goes back with it: batch, step and epoch counters too. A guarded
    run resumes by itself when the same command is started again: leave out ``fit(ckpt_path=...)``. For automatic
    optimization in one process, with one training DataLoader.

    directory: where checkpoints are written. options: as for ``Guard``, such as ``every="500 steps"``. ``guard`` is the
    Guard of the last fit, with ``events``, ``findings`` and ``passed_over``.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory, self._options = directory, options
        self.guard: Guard | None = None
        self._losses: list[float] = []  # of the current step's micro-batches
        self._steps = False  # the current batch is the last of its step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume, if there is a checkpoint; optimizers and loaders exist, and no batch was fetched."""
        combined = trainer.fit_loop._combined_loader
        loader: Any = None if combined is None else combined.iterables
        count = trainer.num_training_batches
        reasons = {
            "several processes": trainer.world_size > 1,
            "automatic_optimization = False": not pl_module.automatic_optimization,
            "fit(ckpt_path=...), as the guard resumes from its directory by itself": bool(trainer.global_step),
            "reload_dataloaders_every_n_epochs": vars(trainer)["reload_dataloaders_every_n_epochs"] > 0,
            "several training loaders, or one without a length": combined is None
            or combined.flattened != [loader]
            or not hasattr(loader, "__len__"),
        }
        reasons["limit_train_batches"] = not any(reasons.values()) and count != len(loader)
        if refused := [each for each, is_given in reasons.items() if is_given]:
            raise BadInput(f"ampwise.integrations.lightning.GuardCallback does not work with {refused[0]}.")
        self.guard = Guard(
            self._directory,
            model=pl_module,
            optimizer=trainer.optimizers,
            scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        assert self.guard.loop is not None
        self._loop: ScriptLoop = self.guard.loop
        self._loop.closures = True  # ``on_before_optimizer_step`` is called in them
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
        fetcher = _GuardedFetcher(self.guard, self.guard.batches(loader, epochs=epochs), trainer, int(count))
        trainer.fit_loop._data_fetcher = fetcher
        fetcher.count_epochs()
        self._count_steps(trainer)
        pl_module.lr_scheduler_step = _SchedulerHook(  # type: ignore[method-assign]
            lambda _: self._loop.skips, pl_module
        )

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Check the gradients before they are clipped; with a scaler, that is done when the optimizer steps."""
        self._steps = True
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            self._loop.check(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the step; if the guard goes back, so do the Trainer's counters."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(float(loss))
        if self._steps and self.guard is not None:
            mean = sum(self._losses) / max(1, len(self._losses))
            self._losses, self._steps = [], False
            step = self.guard.end_step(mean)
            self._count_steps(trainer)
            if step.undone:  # the epoch goes on, even if this was its last batch; the next batch sets the counters
                counters: Any = trainer.fit_loop.epoch_loop.batch_progress
                counters.is_last_batch, first = False, min(1, int(trainer.num_training_batches) - 1)
                counters.current.ready = counters.current.started = counters.current.processed = first

    def _count_steps(self, trainer: pl.Trainer) -> None:
        assert self.guard is not None
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = self.guard.number

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last state."""
        self._end(pl_module, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Release the directory after a fit that raised."""
        self._end(pl_module, exception)

    def _end(self, pl_module: pl.LightningModule, error: BaseException | None) -> None:
        pl_module.__dict__.pop("lr_scheduler_step", None)
        if self.guard is not None:
            self.guard.__exit__(None if error is None else type(error), error, None)


class _GuardedFetcher(DataFetcher):
    """Source of the Trainer's batches: the guard's, whose place in the data the Trainer's counters follow."""

    def __init__(self, guard: Guard, stream: Iterator[Any], trainer: pl.Trainer, length: int) -> None:
        super().__init__()
        self._guard, self._stream, self._trainer = guard, stream, trainer
        self._length = self.length = length  # batches in an epoch

    def __iter__(self) -> _GuardedFetcher:
        self.fetched, self.done = 0, False
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._stream)
        except StopIteration:
            self.done = self._trainer.should_stop = True
            raise
        index, passed_over = self._guard.batch, {*self._guard.passed_over}
        if self._guard.epoch != self._trainer.current_epoch:  # the guard went back, or has passed over the rest of one
            self.count_epochs()
        self.fetched = index + 1
        while (self._guard.epoch, self.fetched) in passed_over:
            self.fetched += 1
        self.done = self.fetched >= self._length
        index = (
            self._length - 1 if self.done else index
        )  # so that what follows the last batch does, if that is left out
        counters: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        for counter, batches in ((counters.current, index), (counters.total, self._guard.epoch * self._length + index)):
            counter.ready = counter.started = counter.processed = counter.completed = batches
        return batch, index, 0

    def count_epochs(self) -> None:
        """Set the Trainer's epoch to the guard's."""
        epoch = self._guard.epoch
        counters: Any = self._trainer.fit_loop.epoch_progress
        has_begun = int(counters.current.ready > counters.current.processed)
        for counter in (counters.current, counters.total):
            counter.ready = counter.started = epoch + has_begun
            counter.processed = counter.completed = epoch
