"""``Engine``: a whole mixed-precision training step in one call."""

from __future__ import annotations

import functools
import importlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.log import log, log_once
from ampwise.finding.terminal import shortened
from ampwise.hardware.kernel_faults import faults_here
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.train.accumulator import (
    Accumulator,
    Weight,
    device_scalar,
    start_host_copy,
    total_weight,
    weighted_loss,
)
from ampwise.train.arguments import (
    checked_callbacks,
    checked_clipping,
    checked_loss,
    checked_models,
    checked_optimizers,
    checked_size,
    checked_weight,
    loss_and_extra,
    model_device,
)
from ampwise.train.batches import WindowedBatches, split_batch
from ampwise.train.buffer_snapshot import BufferSnapshot
from ampwise.train.callback import Callback, Hooks, MicroBatch
from ampwise.train.cuda_graphs import CudaGraphs
from ampwise.train.engine_state import (
    VERSION,
    accumulator_state,
    check_engine_state,
    load_accumulator_state,
    restore_rng,
    rng_state,
)
from ampwise.train.float8.layer_stats import Float8LayerStats
from ampwise.train.float8.matmul_choices import Fp8Choices
from ampwise.train.float8.recipe import Fp8
from ampwise.train.precision.contexts import NO_CONTEXT, PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import TrainPrecision, choose_precision
from ampwise.train.precision_plugin import PrecisionPlugin, make_plugin
from ampwise.train.ranks import Ranks, is_main_process, refuse_other_dtypes
from ampwise.train.scaler.grad_scaler import GradScaler
from ampwise.train.scaler.grad_stats import NO_CLIPPING, inverse_scale
from ampwise.train.scaler.gradients import clamp_, collect_gradients, to_device
from ampwise.train.scaler.step_result import AsyncScalars, StepCounts, StepResult
from ampwise.train.schedulers import SchedulerSet
from ampwise.train.step import Step, StepHistory
from ampwise.train.trained_parameters import TrainedParameters

__all__ = ["Engine"]


class Engine:
    """Mixed-precision training step: autocast, loss scaling, accumulation, clipping, schedulers, several ranks.

    A step whose gradients are not finite changes nothing, in any precision: neither weights nor the state of
    optimizer, scheduler and BatchNorm, nor any other buffer. With a fused optimizer nothing syncs with the GPU.

    Args:
        model: a model, or several that train together.
        optimizer: an optimizer, or several that step together. ``make_optimizer`` makes one by name.
        precision: "fp32", "tf32", "fp16", "bf16"; "auto", which chooses what the device runs fast and logs why;
            "fp8" for linear layers where the device supports it, or an ``Fp8``, which also says how they are scaled;
            "bf16-pure" for weights in BF16 too, without losing small updates ("bf16-pure,kahan",
            "bf16-pure,bf16-states"); "emulate:mxfp8" (or another format) for matmuls on values rounded to that
            format, on any device; or a ``Policy``, which sets exceptions by module.
        clip_norm: clip unscaled gradients by the norm of all of them.
        clip_value: clip each unscaled gradient to this value.
        accumulate: how many micro-batches make a step. Their losses are averaged.
        weight: weigh micro-batches in that mean: a function of the loss function's arguments, such as
            ``lambda x, y: (y != padding).sum()``.
        scheduler: one or several learning-rate schedulers, stepped once per step and not when a step is skipped.
        scaling: options of the engine's ``GradScaler``: ``{"init_scale": 2.0**12}``; ``{"process_group": group}``
            where plain gradients are sharded over ranks (not needed with DDP and FSDP2).
        graph: capture forward and backward passes in CUDA graphs, for small models. Works with ``step`` only; the
            loss function must be the same object each time and must not sync with the GPU, and batches must be on the
            GPU and have few different shapes.
        trace: rerun a bad step (its loss or gradients are not finite) and report which operation it came from and why,
            in ``engine.findings``. The only cost on good steps: the host runs at most one step ahead of the device.
        callbacks: called around each step: ``Sinks("tensorboard:logs")`` sends each step's numbers somewhere,
            ``Capsules("capsules")`` saves bad steps for ``ampwise replay``; or a ``Callback`` of your own.

    Raises:
        BadInput: an argument does not fit; the model is unchanged.
        PrecisionUnavailable: the device cannot run the precision.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    >>> engine = Engine(model, optimizer, precision="bf16", clip_norm=1.0)
    >>> step = engine.step(lambda x: model(x).square().mean(), torch.ones(8, 4))
    >>> step.skipped, step.precision, step.lr
    (False, 'bf16', 0.1)
    """

    def __init__(
        self,
        model: Module | Sequence[Module],
        optimizer: Optimizer | Iterable[Optimizer],
        precision: str | Policy | Fp8 = "auto",
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        weight: Callable[..., Weight] | None = None,
        scheduler: Any = None,
        scaling: Mapping[str, Any] | None = None,
        graph: bool = False,
        trace: bool = True,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._models = checked_models(model)
        # The module whose parameter and module names are used in reports.
        self._model = self._models[0] if len(self._models) == 1 else ModuleList(self._models)
        self._trained = TrainedParameters(checked_optimizers(optimizer, self._models), self._models)
        self._schedules = SchedulerSet(scheduler, self._trained.optimizers)
        self._clip_norm, self._clip_value = checked_clipping(clip_norm, clip_value)
        self._accumulator = Accumulator(checked_size(accumulate))
        self._weigh = checked_weight(weight)
        self.device = model_device(self._models)
        self._graphs = CudaGraphs(self.device) if graph else None
        asked = checked_callbacks(callbacks)
        self.policy, chosen, self.why = self._choose(precision)
        self._fp8 = self.policy.fp8
        self._plugin = self._plugin_for(chosen, self.policy)
        self._contexts = self._contexts_of(chosen)
        self.scaler = _scaler(self.device, chosen.scaled, scaling)
        self._scaling = dict(scaling or {})
        self._process_group = self._scaling.get("process_group")
        self._ranks = Ranks(self._models, self._process_group)
        if graph and self._ranks.several:
            raise BadInput(
                "Engine(graph=True) does not work with DDP or FSDP, which exchange gradients in the backward pass."
            )
        if self.policy.base == "auto":
            self._ranks.require_same_precision(self.precision)
            if is_main_process():
                log("warning" if self.precision == "fp32" else "info", "{}", self.why)
        self._ranks.warn_if_not_synced(self._trained.parameters)
        _name_kernel_faults(self._models, self.device)
        self._statistics = BufferSnapshot(self._models)
        self._statistics_within = BufferSnapshot(
            self._models, self._statistics
        )  # at the start of the current micro-batch
        self._counts = StepCounts()
        self.history = StepHistory()
        self._inside = False  # inside a call of step()
        self._window_open = False  # an accumulation window is open, and its buffers are backed up
        self._closed_steps = 0  # accumulation windows that are complete
        self._in_optimizer_step = False  # the engine itself is calling optimizer.step()
        self._backoffs: list[StepResult] = []  # scale backoffs to undo at the end of the window
        self._hooks = Hooks()
        self.traces = trace
        self._explainer: Any = None
        if trace:  # by name, as its package builds on this one
            self._explainer = importlib.import_module("ampwise.trace.bad_steps").BadStepExplainer()
        for callback in (*asked, *([self._explainer] if trace else [])):
            self.add_callback(callback)
        # Last, so that a rejected argument leaves the model unchanged.
        self.policy.apply(self._model)
        self._plugin.install()
        schedules, alive = weakref.ref(self._schedules), weakref.ref(self)  # the hooks must not keep the engine alive

        def settle_schedules(*_: Any) -> None:
            if (found := schedules()) is not None:
                found.settle()

        def refuse_others_step(*_: Any) -> None:
            """Raise if the user steps an optimizer in an open window: its gradients are scaled or incomplete."""
            engine = alive()
            if engine is not None and engine._accumulator.has_gradients and not engine._in_optimizer_step:
                raise BadInput(
                    "optimizer.step() was called between the micro-batches of a step: the engine calls it. Use "
                    "engine.apply() or engine.step()."
                )

        self._trained.hook("register_state_dict_pre_hook", settle_schedules)
        self._trained.hook("register_step_pre_hook", refuse_others_step)

    def _choose(self, precision: str | Policy | Fp8) -> tuple[Policy, TrainPrecision, str]:
        """Return what is asked for as a policy, the precision that it means on this device, and why."""
        if isinstance(precision, Fp8):
            precision = Policy("fp8", fp8=precision)
        base = precision.base if isinstance(precision, Policy) else precision
        chosen, why, slow = choose_precision(base, self.device)
        for model in self._models:
            refuse_other_dtypes(model, chosen)
        if slow and is_main_process():
            log_once("warning", slow)
        return precision if isinstance(precision, Policy) else Policy(precision), chosen, why

    def _plugin_for(self, chosen: TrainPrecision, policy: Policy) -> PrecisionPlugin:
        graphed, fp8 = self._graphs is not None, policy.fp8 or self._fp8
        return make_plugin(chosen, policy, self._models, self._trained.optimizers, self.device, fp8, graphed=graphed)

    def _contexts_of(self, chosen: TrainPrecision) -> PrecisionContexts:
        bare = type(self._plugin).pass_context is PrecisionPlugin.pass_context
        around = None if bare else self._plugin.pass_context
        return PrecisionContexts(chosen, self.device.type, cached=self._graphs is None, around=around)

    @property
    def precision(self) -> str:
        """Name of the precision that the engine trains in."""
        return self._contexts.precision.name

    # A step in one call

    def step(self, loss_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
        """Run ``loss_fn(*args, **kwargs)``, which returns the loss, and train on it.

        It may return ``(loss, extra)``; ``extra`` is then in ``step.extra``. With ``accumulate``, the optimizer steps
        on the last micro-batch of the accumulation window: ``step.closed``.

        Args:
            loss_fn: returns the loss.
            *args: the batch, passed to it.
            **kwargs: likewise, by name.

        Returns:
            the step, whose numbers arrive a little later.

        Raises:
            BadInput: the loss function does not return a loss, or something else changed the gradients.
            ScaleCollapsed: the loss scale is at its floor, and gradients still overflow.
        """
        self._begin_step(loss_fn, "step")
        self._inside = True
        try:
            weight = None if self._weigh is None else self._weigh(*args, **kwargs)
            share, extra = self._pass(loss_fn, args, kwargs, self._accumulator.factor(weight, self._mean_weight))
            self._accumulator.add(share)
            is_last = self._accumulator.end_micro_batch()
            step = self._take_step(extra) if is_last else self._open_step(extra)
        finally:
            self._inside = False
        return self._after_step(step)

    def step_in_pieces(self, count: int, loss_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
        """Run ``step`` on a batch split into ``count`` pieces, one after the other: for a batch too large for memory.

        Tensors are split along their first dimension, in arguments and in lists, tuples and dicts of them. The gradient
        is that of the whole batch if the loss is a mean over it; BatchNorm sees each piece separately. ``step.extra``
        is a list with one item per piece.

        Args:
            count: number of pieces.
            loss_fn: returns the loss of a piece.
            *args: the batch.
            **kwargs: likewise, by name.

        Returns:
            the step.

        Raises:
            BadInput: as ``step``; or the batch cannot be split so.
        """
        self._begin_step(loss_fn, "step_in_pieces")
        window, pieces = self._accumulator, split_batch(count, args, kwargs)
        self._inside = True
        try:
            weights = [None if self._weigh is None else self._weigh(*piece.args, **piece.kwargs) for piece in pieces]
            total = total_weight(weights)
            factor = window.factor(total, self._mean_weight)
            extras = []
            for place, (piece, weight) in enumerate(zip(pieces, weights, strict=True), start=1):
                weighed = piece.weighed(weight, total)
                window.pieces_left = len(pieces) - place
                its_factor = weighed.share * (1 / window.divisor if factor is None else factor)
                share, extra = self._pass(loss_fn, piece.args, piece.kwargs, its_factor)
                window.add(weighed.counted(share))
                self._trained.record_gradients()
                extras.append(extra)
            step = self._take_step(extras) if window.end_micro_batch() else self._open_step(extras)
        except BaseException:
            self._drop_window()  # it may hold gradients of some pieces
            raise
        finally:
            self._inside = False
        return self._after_step(step)

    def _begin_step(self, loss_fn: Any, name: str) -> None:
        """Check that a step can begin here, and call the hooks if it opens an accumulation window."""
        self._refuse_inside(name)
        if not callable(loss_fn):
            first = "" if name == "step" else "the number of pieces, "
            raise BadInput(
                f"{name}() takes {first}the loss function and its arguments: engine.step(loss_fn, x, y). For a loss "
                "that is already computed: engine.backward(loss), then engine.apply()."
            )
        self._before_window()

    def _pass(
        self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], factor: Weight | None
    ) -> tuple[Tensor, Any]:
        """Run forward and backward; return the loss's contribution to the window's mean, and ``extra``."""
        first = not self._accumulator.has_gradients
        if first:
            self._begin()
        else:
            self._refuse_changes()
            self._statistics.remember_new()
            self._statistics_within.remember()
        batch = MicroBatch(loss_fn, args, kwargs, factor, self._accumulator.divisor)
        for hook in self._hooks.on_pass_begin:
            hook(batch)
        with NO_CONTEXT if self._accumulator.size == 1 else self._plugin.micro_batch_context(first=first):
            if self._graphs is None or self._plugin.bypass_graphs:
                share, extra = self._forward_and_backward(loss_fn, args, kwargs, factor)
            else:
                if factor is not None:  # a Python number would become a constant of the graph
                    factor = device_scalar(factor, self.device)
                share, extra = self._graphs.run(
                    lambda given: self._forward_and_backward(loss_fn, *given),
                    loss_fn,
                    graph_version=self._plugin.graph_version,
                    fixed=self._accumulator.divisor,
                    args=(args, kwargs, factor),
                    parameters=self._trained.all_parameters,
                )
        for hook in self._hooks.on_pass_end:
            hook(batch, share)
        return share, extra

    def _forward_and_backward(
        self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], factor: Weight | None
    ) -> tuple[Tensor, Any]:
        window = self._accumulator
        with self._contexts.pass_context():
            try:
                syncing = self._ranks.gradient_sync(window) if self._ranks.distributed else NO_CONTEXT
                with syncing, self._contexts.forward():
                    returned = loss_fn(*args, **kwargs)
                several = self._ranks.distributed and self._ranks.several  # DDP may move gradients in a forward pass
                if self._graphs is None and not several and self._trained.gradients_changed():
                    self._drop_window()
                    raise BadInput("the loss function must not call backward() itself; it must return the loss.")
                loss, extra = loss_and_extra(returned)
            except BaseException:
                if window.has_gradients:
                    self._statistics_within.restore()
                else:
                    self._drop_window()
                raise
            if factor is not None or window.divisor != 1:
                loss = weighted_loss(loss, factor, window.divisor)
            return self._backward(loss, {}), extra

    def rerun(self, batch: MicroBatch, *, scale: float, goes_back: Callable[[Tensor], bool]) -> Tensor:
        """Run a micro-batch of a past step again, for a callback; return its contribution to the step's loss.

        Gradients are added to those that exist.

        Args:
            batch: what to run.
            scale: multiplies the loss before the backward pass.
            goes_back: decides by the loss whether there is a backward pass.

        Returns:
            the loss.
        """
        with self._contexts.pass_context():
            with self._contexts.forward():
                loss, _ = loss_and_extra(batch.function(*batch.args, **batch.kwargs))
            share = weighted_loss(loss, batch.weight, batch.divisor)
            if goes_back(share):
                with self._contexts.backward():
                    (share * scale).backward()
        return share

    def _refuse_changes(self) -> None:
        """Raise if someone else changed the gradients of an open accumulation window."""
        if self._graphs is None and self._trained.gradients_changed():
            self._drop_window()
            raise BadInput(
                "gradients were changed between the micro-batches of a step: by zero_grad() or clipping, which the "
                "engine does itself (clip_norm=...), or by another backward pass through these parameters."
            )

    # A step in separate calls

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context for a forward pass in the engine's precision, in training and in evaluation.

        For training, gradients must be enabled, as they are by default.

        Returns:
            a context manager.
        """
        if not torch.is_grad_enabled():
            with self._contexts.pass_context(), self._contexts.forward():
                yield
            return
        if self._accumulator.has_gradients:
            self._statistics.remember_new()
        elif not self._window_open and (self._statistics.moves or any(model.training for model in self._models)):
            self._before_window()
            self._begin()  # not for an evaluation
        with (
            self._contexts.pass_context(),
            self._ranks.gradient_sync(self._accumulator),
            self._contexts.forward(),
        ):
            yield

    def backward(self, loss: Tensor, *, weight: Weight | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss, scaled and divided by the number of micro-batches.

        A micro-batch may have several losses: call this once for each.

        Args:
            loss: a scalar.
            weight: of this micro-batch in the mean, for an engine with ``weight``.
            **kwargs: passed to ``Tensor.backward``.

        Raises:
            BadInput: not a loss, or something else changed the gradients.
        """
        self._refuse_inside("backward")
        checked_loss(loss, "backward() was given")
        if weight is None and self._weigh is not None and not self._accumulator.passes:
            raise BadInput("backward(loss): this engine weights micro-batches. Call backward(loss, weight=...).")
        if self._accumulator.has_gradients:
            self._refuse_changes()
        elif self._window_open:
            self._drop_gradients()  # left by backward passes outside the engine since the forward pass
        else:  # the forward pass ran without engine.autocast(), so no buffers are backed up
            self._before_window()
            self._begin(remember=False)
        factor = self._accumulator.factor(weight, self._mean_weight)
        share = weighted_loss(loss, factor, self._accumulator.divisor)
        with self._contexts.pass_context():
            self._accumulator.add(self._backward(share, kwargs))
        self._trained.record_gradients()

    def apply(self) -> Step:
        """End a micro-batch. If it is the last of the accumulation window, the optimizer steps.

        Returns:
            the step; ``step.closed`` says whether the optimizer stepped.

        Raises:
            BadInput: there are no gradients.
        """
        self._refuse_inside("apply")
        if not self._accumulator.passes:
            raise BadInput("apply(): there are no gradients. Call engine.backward(loss) first, for each micro-batch.")
        self._refuse_changes()
        return self._after_step(self._take_step(None) if self._accumulator.end_micro_batch() else self._open_step(None))

    def flush(self) -> Step | None:
        """Step the optimizer although the accumulation window is not complete, for instance at the end of the data.

        The mean is over the micro-batches seen so far. Returns None if there are none. ``batches`` calls this itself.

        Returns:
            the step, or None.
        """
        self._refuse_inside("flush")
        window = self._accumulator
        if window.passes:
            window.end_micro_batch()
        if not window.count:
            return None
        self._refuse_changes()
        if window.count < window.length:
            self._ranks.sync_now()
        return self._after_step(self._take_step(None))

    def drop_window(self) -> None:
        """Discard the micro-batches of an open accumulation window, for instance after an error that is handled."""
        self._refuse_inside("drop_window")
        self._drop_window()

    def batches(self, loader: Iterable[Any]) -> WindowedBatches:
        """Iterate over a loader; the last accumulation window may be shorter, and is averaged correctly.

        Batches are fetched one accumulation window at a time, so that the end of the data is known in advance.

        Args:
            loader: any iterable of batches.

        Returns:
            an iterable of the same batches.
        """
        return WindowedBatches(loader, self._accumulator, self.flush)

    def grad(self, outputs: Tensor, inputs: Any, *, create_graph: bool = True, **kwargs: Any) -> tuple[Any, ...]:
        """Return unscaled gradients like ``torch.autograd.grad``, for a gradient penalty; scaled inside, for FP16.

        Args:
            outputs: as in ``torch.autograd.grad``, like the others.
            inputs: likewise.
            create_graph: likewise.
            **kwargs: likewise.

        Returns:
            the gradients.
        """
        with self._contexts.pass_context(), self._contexts.backward():
            scaled = self.scaler.scale(outputs)
            gradients: tuple[Any, ...] = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **kwargs)
            scale = self.scaler.scale_tensor
            if scale is None:
                return gradients
            inverse = inverse_scale(scale)
            return tuple(None if each is None else each * to_device(inverse, each.device) for each in gradients)

    def close(self) -> None:
        """Explain the last step if it was bad; send the remaining rows to the sinks and close them.

        Training may continue afterwards, without sinks. Syncs with the last step and with the sinks: seconds, or up to
        a minute while they make progress. Called automatically when the program ends. The sinks of an engine that was
        garbage-collected are closed too, without waiting for them.
        """
        self._settle_bad_steps()
        for callback in self.callbacks:
            callback.on_close()

    def _settle_bad_steps(self) -> None:
        if self._explainer is not None:
            self._explainer.settle()

    def change_precision(self, precision: str | Policy | Fp8) -> None:
        """Switch to another precision or policy from the next step on. Between accumulation windows only.

        Weights and optimizer state stay as they are; after "bf16-pure" they become FP32. If the new precision needs a
        loss scale, it starts from its initial value. If the device cannot run the precision, raises and changes
        nothing.

        Args:
            precision: as for ``Engine``.

        Raises:
            BadInput: in an open window, or where the precision is fixed.
            PrecisionUnavailable: the device cannot run it.
        """
        self._refuse_inside("change_precision")
        if self._accumulator.has_gradients:
            raise BadInput("change_precision() between the micro-batches of a step: call it when step.closed is true.")
        if self.precision_locked_because:
            raise BadInput(f"change_precision(): {self.precision_locked_because}")
        policy, chosen, why = self._choose(precision)
        policy.modules(self._model)  # raises for a pattern that matches nothing
        plugin = self._plugin_for(chosen, policy)
        self._settle_bad_steps()
        self._plugin.uninstall()
        self.policy.apply(self._model).remove()
        policy.apply(self._model)
        plugin.install()
        self.policy, self.why, self._plugin, self._fp8 = policy, why, plugin, policy.fp8 or self._fp8
        self._contexts = self._contexts_of(chosen)
        if chosen.scaled != self.scaler.is_enabled():
            self._schedules.settle()
            self._counts.settle()
            collapses = self.scaler.collapses
            self.scaler = _scaler(self.device, chosen.scaled, self._scaling)
            self.scaler.collapses = collapses
        for hook in self._hooks.on_reset:
            hook()

    # Callbacks

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The callbacks, in the order in which they are called."""
        return self._hooks.callbacks

    def add_callback(self, callback: Callback) -> None:
        """Call the hooks of this callback around each step, after those that were added before.

        Args:
            callback: what to call.
        """
        callback.on_attach(self)
        self._hooks = Hooks((*self._hooks.callbacks, callback))

    def remove_callback(self, callback: Callback) -> None:
        """Stop calling the hooks of this callback.

        Args:
            callback: one of ``engine.callbacks``.
        """
        self._hooks = Hooks(each for each in self._hooks.callbacks if each is not callback)

    # What happened

    @property
    def models(self) -> Sequence[Module]:
        """The models, as passed to the engine."""
        return self._models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, as passed to the engine."""
        return self._trained.optimizers

    @property
    def precision_locked_because(self) -> str:
        """Why the precision cannot be changed any more; empty if it can."""
        in_graphs = "not with graph=True: the captured graphs contain the precision."
        return self._plugin.locked_because if self._graphs is None else in_graphs

    @property
    def ranks(self) -> Ranks:
        """Ranks that train this model together."""
        return self._ranks

    @property
    def lr(self) -> float:
        """Learning rate of the next step. Syncs with the last step, which holds the scheduler if it was skipped."""
        self._schedules.settle()
        lrs = (group["lr"] for each in self._trained.optimizers for group in each.param_groups if "lr" in group)
        return next((float(lr) for lr in lrs), math.nan)

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights. Syncs with the last step."""
        return self._counts.settle().applied

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped. Syncs with the last step."""
        return self._counts.settle().skipped

    @property
    def accumulating(self) -> bool:
        """Whether an accumulation window is open: some of its micro-batches are done."""
        return self._accumulator.has_gradients

    @property
    def findings(self) -> list[Finding]:
        """Causes of the bad steps so far. Syncs with the last step.

        A gradient overflow that a lower loss scale fixes is not a finding. In FP8, also what layers lose.
        """
        self._settle_bad_steps()
        explained = [] if self._explainer is None else self._explainer.findings
        return [*explained, *self._plugin.findings()]

    def sample_fp8(self) -> None:
        """Count the operands of FP8 layers in the next step: ``fp8_report`` and ``findings`` then show what is lost.

        That step runs without torch.compile, and syncs with the device.

        Raises:
            BadInput: another precision than FP8.
        """
        self._in_fp8("sample_fp8").sample()

    def fp8_report(self) -> Float8LayerStats:
        """Report the scale, past magnitudes, saturation and underflow of each FP8 layer's input, weight and gradient.

        What delayed scaling counts is available after every step; underflow only after ``sample_fp8`` and a step. Syncs
        with the last step.

        Returns:
            the numbers of each operand; ``print`` shows a table.

        Raises:
            BadInput: another precision than FP8.
        """
        report: Float8LayerStats = self._in_fp8("fp8_report").report()
        return report

    def fp8_choices(self) -> Fp8Choices:
        """Return which matmuls of each layer ``Fp8("auto")`` runs in FP8, with the gain and the errors behind it.

        Returns:
            the choice for each layer; ``print`` shows a line for each group of layers.

        Raises:
            BadInput: another precision or recipe.
        """
        choices: Fp8Choices = self._in_fp8("fp8_choices").choices()
        return choices

    @property
    def fp8_layers(self) -> list[str]:
        """Names of the layers that run in FP8; empty in other precisions."""
        return getattr(self._plugin, "layers", [])

    def _in_fp8(self, name: str) -> Any:
        if self.precision != "fp8":
            raise BadInput(f"engine.{name}() needs precision='fp8'; this engine trains in {self.precision}.")
        return self._plugin

    @property
    def explained(self) -> list[Finding]:
        """Findings about the bad step explained last, since the state was loaded. Syncs with the last step.

        With several ranks, only the first has them.
        """
        self._settle_bad_steps()
        return [] if self._explainer is None else list(self._explainer.last)

    @property
    def buffer_snapshot(self) -> BufferSnapshot:
        """The buffers as they were when the current step began, for callbacks that run a step again."""
        return self._statistics

    def save_bad_steps(self, capsules: Any, *, streak: int = 1) -> None:
        """Save bad steps in these ``Capsules``, from the ``streak``-th in a row on; None: nowhere.

        ``Capsules`` among the callbacks save every bad step, and win.

        Args:
            capsules: ``Capsules``, or None.
            streak: save from this many bad steps in a row on.
        """
        if self._explainer is not None:
            self._explainer.save_to(capsules, streak=streak)

    def census(self) -> DeviceCensus:
        """Census of the last step's gradients by parameter, unscaled and before clipping.

        Returns:
            a mapping from names of parameters.
        """
        return self.scaler.census(self._model)

    def __repr__(self) -> str:
        window = "" if self._accumulator.size == 1 else f", accumulate {self._accumulator.size}"
        kinds = Counter(type(each).__name__ for each in self._trained.optimizers)
        names = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in kinds.items())
        kept = f", {len(self.policy.rules)} exceptions" if self.policy.rules else ""
        clips = "" if self._clip_norm is None else f", clip_norm {self._clip_norm:g}"
        clips += "" if self._clip_value is None else f", clip_value {self._clip_value:g}"
        return shortened(f"<Engine in {self.precision}{kept} on {self.device}, {names}{window}{clips}>")

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state. Save the model's and the optimizer's next to it. Syncs with the last step.

        Plain data and tensors: ``torch.load(..., weights_only=True)`` reads it. Between the micro-batches of a step it
        also holds the gradients, so that a resumed run continues exactly.

        Returns:
            plain data and tensors.

        Raises:
            BadInput: between ``backward`` and ``apply``.
        """
        self._refuse_inside("state_dict")
        if self._accumulator.passes:
            raise BadInput("state_dict() between backward() and apply(): save after engine.apply().")
        if self._accumulator.has_gradients:
            self._ranks.require_closed_window()
        return self._state()

    def _state(self) -> dict[str, Any]:
        counts = self._counts.settle()
        return {
            "version": VERSION,
            "precision": self.precision,
            "policy": self.policy.as_dict(),
            "scaler": self.scaler.state_dict(),
            "schedulers": self._schedules.state(),
            "applied_steps": counts.applied,
            "skipped_steps": counts.skipped,
            "window": accumulator_state(self._accumulator, self._trained.parameters, self._statistics.state()),
            "rng": rng_state(self.device),
            "fitting": self._plugin.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_precision: bool = False) -> None:
        """Resume from ``state_dict``. Load the model and the optimizer separately, before or after.

        Args:
            state: what ``state_dict`` returned.
            other_precision: accept a state saved in another precision or policy, and keep this engine's.

        Raises:
            BadInput: the state does not fit; nothing has changed.
        """
        self._refuse_inside("load_state_dict")
        if self._accumulator.passes:
            raise BadInput("load_state_dict() between backward() and apply(): load after engine.apply().")
        for hook in self._hooks.on_reset:
            hook()
        before = self._state()
        try:
            self._load(state, other_precision)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._load(before, True)
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"load_state_dict(): the state is damaged ({type(error).__name__}: {error}).") from error
        self.history.clear()

    def _load(self, state: Mapping[str, Any], other_precision: bool) -> None:
        check_engine_state(
            state,
            precision=self.precision,
            policy=self.policy.as_dict(),
            schedulers=len(self._schedules),
            other=other_precision,
        )
        self._plugin.load(state.get("fitting", {}) if state["precision"] == self.precision else {})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._drop_gradients()
        self._ranks.drop_unsynced()
        load_accumulator_state(self._accumulator, state["window"], self._trained.parameters)
        self._window_open = self._accumulator.has_gradients
        self._trained.record_gradients()
        if self._window_open:
            self._statistics.load(state["window"]["statistics"])
        self._schedules.load(state["schedulers"])
        self._counts = StepCounts(state["applied_steps"], state["skipped_steps"])
        self._closed_steps = state["applied_steps"] + state["skipped_steps"]
        restore_rng(state["rng"], self.device)

    # Internals

    def _refuse_inside(self, name: str) -> None:
        if self._inside:
            raise BadInput(f"engine.{name}() inside engine.step(): the loss function must only compute the loss.")

    def _begin(self, *, remember: bool = True) -> None:
        """Open an accumulation window."""
        self._drop_gradients()  # left by other backward passes, such as another engine's through this model
        if remember:
            self._statistics.remember()
        else:
            self._statistics.forget()
        self._window_open = True

    def _backward(self, share: Tensor, kwargs: dict[str, Any]) -> Tensor:
        syncing = self._ranks.gradient_sync(self._accumulator) if self._ranks.distributed else NO_CONTEXT
        try:
            with syncing, self._contexts.backward():
                self.scaler.scale(share).backward(**kwargs)  # noqa: AMP205 (the share is the loss over their number)
        except BaseException as error:
            self._drop_window()
            if "backward through the graph a second time" in str(error):
                error.add_note("ampwise: the loss function must not call backward() itself: return the loss.")
            raise
        loss: Any = share.detach()
        return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).reshape(())  # type: ignore[no-any-return]

    def _before_window(self) -> None:
        if not self._window_open:
            for hook in self._hooks.on_step_begin:
                hook()

    def _after_step(self, step: Step) -> Step:
        """Call the guard last: it may take the engine back to an earlier step, or end the training."""
        if step.closed:
            for hook in self._hooks.after_step:
                hook(step)
        return step

    def _mean_weight(self, weight: Weight) -> float:
        """Return the mean weight of a micro-batch over all ranks, so that all ranks divide by the same number."""
        mean = float(self._ranks.mean(weight, self.device))
        return mean if 0 < mean < math.inf else 1.0

    def _open_step(self, extra: Any) -> Step:
        """Return what is known of a step before its last micro-batch."""
        window = self._accumulator
        self._trained.record_gradients()
        assert window.loss is not None
        return Step(self._closed_steps + 1, self.precision, window.loss, loss_divisor=window.correction(), extra=extra)

    def _take_step(self, extra: Any) -> Step:
        """Step the optimizers and close the accumulation window."""
        # With a process group a rank may hold no shard of a gradient, and still steps.
        sharded = self._process_group is not None
        stepping = self._trained.optimizers if sharded else self._trained.optimizers_with_gradients
        if not stepping:
            self._drop_window()
            raise BadInput(
                "the backward pass reached none of the optimizer's parameters. Does the loss depend on the model, and "
                "do its parameters require gradients?"
            )
        result, lrs, divisor = None, [], None
        try:
            if self._schedules.schedulers:
                self._schedules.settle()  # sets the learning rate of this step
            lrs = self._trained.lrs()
            for hook in self._hooks.before_update:
                hook(self._closed_steps + 1, self._accumulator.loss)
            divisor = self._accumulator.correction()
            # On several ranks the losses differ, and all ranks must decide alike.
            alone = not self._ranks.distributed or self._ranks.alone
            self._check_and_clip(stepping, divisor, skip_bad_loss=alone)
            self._in_optimizer_step = True
            plain = type(self._plugin) is PrecisionPlugin  # autocast is all that the precision needs
            for optimizer in stepping:
                with NO_CONTEXT if plain else self._plugin.step_context(optimizer):
                    self.scaler.step(optimizer)  # noqa: AMP110 (each optimizer once)
                result = result or self.scaler.result_of(optimizer)  # either all skip or none
            # On several ranks the explainer undoes the backoff later.
            self.scaler.update(loss=self._accumulator.loss if alone else None)
            if self._backoffs:
                self._undo_backoffs()
        except BaseException:
            self.scaler.abandon()
            if result is None:
                self._drop_window()
            else:  # the error came after the step was taken
                self._finish(result, stepping, lrs, divisor, extra)
            raise
        finally:
            self._in_optimizer_step = False
        assert result is not None
        return self._finish(result, stepping, lrs, divisor, extra)

    def _check_and_clip(self, stepping: Sequence[Optimizer], divisor: Weight | None, *, skip_bad_loss: bool) -> None:
        """Check all gradients together, as they are applied together or not at all; then clip them.

        On a CPU this calls ``clip_grad_norm_``, so that a plain PyTorch loop gives bit-identical weights. On other
        devices the optimizer's kernel clips, which saves two passes over the gradients.
        """
        on_device = None
        if divisor is not None:
            if self._accumulator.total is not None:
                self._accumulator.agreed = divisor = self._ranks.mean(divisor, self.device)
            on_device = device_scalar(divisor, self.device)
        loss = self._accumulator.loss
        check = functools.partial(
            self.scaler.check, stepping, divisor=on_device, loss=loss, skip_bad_loss=skip_bad_loss
        )
        if self._clip_norm is not None and self._trained.on_cpu():
            parameters = self._trained.in_model_order()  # the order affects the last bit
            check(unscale=True)
            clip_grad_norm_(parameters, self._clip_norm)  # noqa: AMP101 (check() has unscaled the gradients)
        elif self._clip_value is not None:
            check(unscale=True)
            for optimizer in stepping:
                clamp_(collect_gradients(optimizer).values, self._clip_value)
        else:
            limit = NO_CLIPPING if self._clip_norm is None else self._clip_norm
            check(max_norm=limit)

    def undo_backoff(self, result: StepResult) -> None:
        """Undo the scale backoff of a step that no loss scale would have fixed; in an open window, at its end.

        Args:
            result: of the step.
        """
        self._backoffs.append(result)
        if not self._window_open:
            self._undo_backoffs()

    def _undo_backoffs(self) -> None:
        while self._backoffs:
            self.scaler.undo_backoff(self._backoffs.pop())

    def _finish(
        self,
        result: StepResult,
        stepping: Sequence[Optimizer],
        lrs: Sequence[float | AsyncScalars],
        divisor: Weight | None,
        extra: Any,
    ) -> Step:
        """Undo what a skipped step changed, record the step, and reset for the next window."""
        if result.skipped_on_host is None and result.numbers is not None:
            self._statistics.end_window(result.numbers[1])
        else:
            self._statistics.end_window(result.skipped)
        result.release()
        self._counts.add(result)
        self._closed_steps += 1
        if self._ranks.distributed:
            self._ranks.step_closed()
        step = Step(
            self._closed_steps,
            self._contexts.precision.name,
            self._accumulator.loss if result.posted is None else None,
            loss_divisor=None if divisor is None else start_host_copy(divisor),
            result=result,
            lrs=lrs,
            extra=extra,
        )
        self.history.append(step)
        self._accumulator.close()
        self._window_open = False
        if self._graphs is None:
            self._trained.drop_gradients()  # the next forward pass can use their memory
        try:  # the window is closed even if one of these raises
            if type(self._plugin) is not PrecisionPlugin:
                self._plugin.step_ended()
        finally:
            for hook in self._hooks.on_step_end:
                hook(step, result)
            if self._schedules.schedulers:
                self._schedules.after(result, stepping)
        return step

    def _drop_window(self) -> None:
        """Discard the window's gradients, and restore the buffers its forward passes changed."""
        for hook in self._hooks.on_step_dropped:
            hook()
        if self._window_open:  # else the backup belongs to a past window
            self._statistics.restore()
        self._drop_gradients()
        self._ranks.drop_unsynced()
        self._accumulator.reset()
        self._window_open = False

    def _drop_gradients(self) -> None:
        if self._graphs is not None:
            self._graphs.clear_gradients(self._trained.all_parameters)
        else:
            self._trained.drop_gradients()


def _name_kernel_faults(models: Sequence[Module], device: torch.device) -> None:
    """Log the known bugs of attention kernels on this GPU, if a model has attention. Few shapes run into them."""
    names = {type(module).__name__.lower() for model in models for module in model.modules()}
    if device.type == "cuda" and any("attention" in name for name in names):
        for fault in faults_here():
            log_once("info", f"On this GPU, {fault.what}. {fault.avoid} avoids it ({fault.link}).")


def _scaler(device: torch.device, scaled: bool, options: Mapping[str, Any] | None) -> GradScaler:
    if not isinstance(options, Mapping | None):
        raise BadInput(
            f'Engine(scaling={options!r}): expected a dict of GradScaler options, such as {{"init_scale": 2.0**12}}.'
        )
    try:
        return GradScaler(device, enabled=scaled, **(options or {}))
    except TypeError as error:
        raise BadInput(f"Engine(scaling=...): {error}. The options are those of ampwise.GradScaler.") from None
