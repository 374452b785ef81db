"""The whole training step in one call."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from ampwise.census.device import DeviceCensus
from ampwise.engine.arguments import (
    checked_length,
    checked_loss,
    checked_models,
    checked_optimizers,
    checked_size,
    checked_weight,
    loss_and_extra,
    where,
)
from ampwise.engine.attendant import Attendant
from ampwise.engine.bad_steps import BadSteps
from ampwise.engine.batches import Batches
from ampwise.engine.capsules import Capsules, checked_capsules
from ampwise.engine.clipping import Clipping
from ampwise.engine.fitting import Fitting
from ampwise.engine.fittings import fitting_for
from ampwise.engine.graph import Graphs
from ampwise.engine.numbers import on_device, posted, total_of
from ampwise.engine.passes import Pass
from ampwise.engine.pieces import Piece, split
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import Precision, choose
from ampwise.engine.ranks import Ranks, speaks
from ampwise.engine.rng import restore_rng, rng_state
from ampwise.engine.saved import VERSION, checked_saved, load_window, saved_window
from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.gradients import there
from ampwise.engine.scaling.outcome import Counts, Outcome
from ampwise.engine.scaling.reading import inverse_of
from ampwise.engine.scaling.scaler import GradScaler
from ampwise.engine.schedule import Schedules
from ampwise.engine.statistics import Statistics
from ampwise.engine.step import History, Step
from ampwise.engine.telling import telling
from ampwise.engine.trained import Trained
from ampwise.engine.window import Weight, Window, shared
from ampwise.errors import BadInput
from ampwise.evidence.narrow import NarrowLayers
from ampwise.finding import Finding
from ampwise.float8.recipe import Fp8, fp8_from
from ampwise.printers.terminal import say
from ampwise.sinks.metrics import Row
from ampwise.trace.replay import Settings

__all__ = ["Engine"]


class Engine:
    """The training step, done right: autocast, loss scaling, accumulation, clipping, schedulers, ranks.

    optimizer: one, or several that step together; or one by name, as ``make_optimizer`` takes it, with
        ``optimizer_options``: ``Engine(model, "adamw8bit", optimizer_options={"lr": 3e-4})``.
    precision: "fp32", "tf32", "fp16", "bf16", or "auto", which goes by what the device runs fast and says why; "fp8"
        for linear layers where the device has it; "bf16-pure" for weights in BF16, too, with updates that are not
        lost in them ("bf16-pure,kahan", "bf16-pure,bf16-states"); "emulate:mxfp8" and the like for products on values
        rounded to any format, anywhere; or a Policy, which has exceptions by module. What the device cannot do is
        refused.
    clip_norm, clip_value: clip gradients, in true units, by the norm of all of them or by the value of each.
    accumulate: how many micro-batches make a step. Their losses are averaged, or weighed by ``weight``: a function of
        what the loss function is given, such as ``lambda x, y: (y != padding).sum()``.
    scheduler: one or several that move once a step; they stand still when a step is skipped.
    scaling: options for the GradScaler, where the precision needs one: ``{"init_scale": 2.0**12}``.
    process_group: the ranks among which plain gradients are divided. DDP and FSDP2 need none.
    graph: capture forward and backward passes in CUDA graphs, for small models: ``step`` only, with a loss function
        that is the same object each time, batches of few shapes on the GPU, and nothing in it that waits for it.
    history: how many steps ``engine.history`` keeps.
    sinks: where the numbers of each step go: names, ``["tensorboard:logs", "wandb"]``, and functions that take a row.
        They are told a little later, and never waited for.
    trace: run a step once more whose loss or gradients are not finite, and say which operation it came from, and why:
        ``engine.findings``. Until then it costs nothing but that the host is no more than a step ahead of the device.
    capsules: a folder in which such steps are saved, for ``ampwise replay``; or ``Capsules``, which say how to build
        the model there.
    fp8: with precision "fp8", how its layers are scaled: a recipe by name, "current", "delayed", "tensorwise",
        "rowwise", "rowwise+hp-weight-grad"; "measured", which takes for each layer what is fastest; or ``Fp8(...)``.

    A step whose gradients are not finite changes nothing, in any precision: neither weights nor the state of
    optimizer, scheduler and BatchNorm, nor any other buffer. With a fused optimizer nothing waits for the GPU.

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
        optimizer: Optimizer | Iterable[Optimizer] | str,
        precision: str | Policy = "auto",
        *,
        optimizer_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        weight: Callable[..., Weight] | None = None,
        scheduler: Any = None,
        scaling: Mapping[str, Any] | None = None,
        process_group: Any | None = None,
        set_to_none: bool = True,
        graph: bool = False,
        history: int = 1000,
        sinks: Iterable[str | Callable[[Row], None]] | None = None,
        trace: bool = True,
        capsules: Capsules | str | os.PathLike[str] | None = None,
        fp8: str | Fp8 | None = None,
    ) -> None:
        self._models = checked_models(model)
        # The one by whose names parameters and modules are known.
        self._model = self._models[0] if len(self._models) == 1 else ModuleList(self._models)
        self._trained = Trained(checked_optimizers(optimizer, self._models, optimizer_options), self._models)
        self._schedules = Schedules(scheduler, self._trained.optimizers)
        self._clipping = Clipping.checked(clip_norm, clip_value)
        self._window = Window(checked_size(accumulate))
        self._weigh = checked_weight(weight)
        self._set_to_none = set_to_none
        self.device = where(self._models)
        self._graphs = Graphs(self.device) if graph else None
        fp8_from(fp8)  # before the device is asked: a typo needs no GPU to be found
        chosen, self.why = choose(precision.base if isinstance(precision, Policy) else precision, self.device)
        self.policy = precision if isinstance(precision, Policy) else Policy(precision)
        self._fp8 = fp8
        self._fitting = self._fitting_for(chosen, self.policy, fp8)
        self._arithmetic = self._arithmetic_of(chosen)
        self._ranks = Ranks(self._models, process_group)
        if graph and self._ranks.several:
            raise BadInput("Engine(graph=True): not with DDP or FSDP, which exchange gradients in the backward pass.")
        self._announce()
        self._ranks.warn_if_apart(self._trained.parameters)
        self._divided = process_group is not None  # a rank may have no share of a gradient, and steps along
        self._scaling = scaling
        self.scaler = _scaler(self.device, chosen.scaled, scaling, process_group)
        self._statistics = Statistics(self._models)
        self._statistics_within = Statistics(self._models, self._statistics)  # a window, as of the micro-batch at hand
        self._counts = Counts()
        self.history = History(checked_length(history))
        self._inside = False  # of a step
        self._begun = False  # the window: what it must not change is remembered
        self._closed = 0  # windows
        self._stepping = False  # optimizers, by the engine itself
        self._stock: Any = None  # of gradients, where they must not change
        self._backoffs: list[Outcome] = []  # to be undone at the end of the window
        self._attendant: Attendant | None = None
        self._own_capsules = checked_capsules(capsules)
        self._bad_steps = self._watched_steps(self._own_capsules) if trace else None
        self._telling = telling(sinks)
        if self._telling is not None:
            weakref.finalize(self, self._telling.end).atexit = False  # of which it knows by itself
        # Last, as nothing that is refused may leave a trace.
        self.policy.apply(self._model)
        self._fitting.put_on()
        self._trained.before_saving(self._schedules.settle)
        self._trained.before_stepping(self._refuse_others_step)

    def _watched_steps(self, capsules: Capsules | None) -> BadSteps:
        return BadSteps(
            self._rerun,
            self._undo_backoff,
            self._models,
            self._trained.optimizers,
            self._ranks,
            self._statistics,
            self.device,
            self.policy.as_dict(),
            capsules,
        )

    def _fitting_for(self, chosen: Precision, policy: Policy, fp8: str | Fp8 | None) -> Fitting:
        graphed = self._graphs is not None
        return fitting_for(chosen, policy, self._models, self._trained.optimizers, self.device, fp8, graphed=graphed)

    def _arithmetic_of(self, chosen: Precision) -> Arithmetic:
        bare = type(self._fitting).products is Fitting.products
        around = None if bare else self._fitting.products
        return Arithmetic(chosen, self.device.type, cached=self._graphs is None, around=around)

    def _announce(self) -> None:
        """Say what "auto" came to, and why."""
        if self.policy.base == "auto":
            self._ranks.refuse_different(self.precision)
            if speaks():
                say("ampwise: {}", self.why)

    @property
    def precision(self) -> str:
        """The name of the precision that is trained in."""
        return self._arithmetic.precision.name

    # The step in one call

    def step(self, loss_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
        """Run ``loss_fn(*args, **kwargs)``, which returns the loss, and train on it.

        It may return ``(loss, extra)``: the rest is in ``step.extra``. With ``accumulate``, the optimizer has its turn
        when the window is complete: ``step.closed``.
        """
        self._refuse_step(loss_fn, "step")
        self._announce_window()
        self._inside = True
        try:
            factor = self._window.factor(self._weight_of(args, kwargs), self._typical)
            share, extra = self._pass(loss_fn, args, kwargs, factor)
            self._window.add(share)
            if not self._window.at_its_last:
                self._take_stock()
            step = self._next(extra)
        finally:
            self._inside = False
        return self._attended(step)

    def step_in_pieces(self, count: int, loss_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
        """``step`` on a batch that is cut into so many pieces, one after the other, for a batch that has no room whole.

        Tensors are cut along their first dimension, in arguments and in lists, tuples and dicts of them. The gradient
        is that of the whole batch if the loss is a mean over it; BatchNorm sees each piece by itself. ``step.extra`` is
        a list of what was returned for each.
        """
        self._refuse_step(loss_fn, "step_in_pieces")
        self._announce_window()
        pieces = split(count, args, kwargs)
        self._inside = True
        try:
            weights = [self._weight_of(piece.args, piece.kwargs) for piece in pieces]
            total = total_of(weights)
            factor = self._window.factor(total, self._typical)
            extras = [
                self._one_piece(loss_fn, piece.weighed(weight, total), factor, len(pieces) - place)
                for place, (piece, weight) in enumerate(zip(pieces, weights, strict=True), start=1)
            ]
            if not self._window.at_its_last:
                self._take_stock()
            step = self._next(extras)
        except BaseException:
            self._drop_window()  # some of its pieces may be in it
            raise
        finally:
            self._inside = False
        return self._attended(step)

    def _one_piece(self, loss_fn: Callable[..., Any], piece: Piece, factor: Weight | None, to_come: int) -> Any:
        self._window.pieces_to_come = to_come
        its_factor = piece.share * (1 / self._window.divisor if factor is None else factor)
        share, extra = self._pass(loss_fn, piece.args, piece.kwargs, its_factor)
        self._window.add(piece.counted(share))
        self._take_stock()
        return extra

    def _refuse_step(self, loss_fn: Any, name: str) -> None:
        self._refuse_inside(name)
        if not callable(loss_fn):
            first = "" if name == "step" else "how many pieces, "
            raise BadInput(
                f"{name}() takes {first}the loss function, and what it is to be given: engine.step(loss_fn, x, y). For "
                "a loss that is there already: engine.backward(loss), then engine.apply()."
            )

    def _weight_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Weight | None:
        return None if self._weigh is None else self._weigh(*args, **kwargs)

    def _pass(
        self, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], factor: Weight | None
    ) -> tuple[Tensor, Any]:
        """Forward and backward: the loss's share in the window, and what else was returned."""
        if self._window.touched:
            self._refuse_changes()
            self._statistics.remember_new()
            self._statistics_within.remember()
        else:
            self._begin()
        kept = None
        if self._bad_steps is not None:
            kept = self._bad_steps.pass_begins(loss_fn, args, kwargs, factor, self._window.divisor)

        def one_pass(given: Any) -> tuple[Tensor, Any]:
            args, kwargs, factor = given
            with self._arithmetic.products():
                loss, extra = self._run(loss_fn, args, kwargs)
                return self._backward(self._window.share(loss, factor), {}), extra

        if self._graphs is None or self._fitting.plain:
            share, extra = one_pass((args, kwargs, factor))
        else:
            if factor is not None:  # a number would become a constant of the graph
                factor = on_device(factor, self.device)
            share, extra = self._graphs.run(
                one_pass,
                loss_fn,
                phase=self._fitting.phase,
                fixed=self._window.divisor,
                args=(args, kwargs, factor),
                parameters=self._trained.all_parameters,
            )
        if kept is not None and self._bad_steps is not None:
            self._bad_steps.pass_ended(kept, share)
        return share, extra

    def _rerun(self, kept: Pass, settings: Settings) -> Tensor:
        """A micro-batch of a step that is over, once more."""
        with self._arithmetic.products():
            with self._arithmetic.forward():
                loss, _ = loss_and_extra(kept.function(*kept.args, **kept.kwargs))
            share = shared(loss, kept.factor, kept.divisor)
            if settings.goes_back_from(share):
                with self._arithmetic.backward():
                    (share * settings.scale).backward()
        return share

    def _run(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Tensor, Any]:
        try:
            with self._ranks.exchanging(self._window.at_its_last), self._arithmetic.forward():
                returned = loss_fn(*args, **kwargs)
            self._refuse_gradients()
            return loss_and_extra(returned)
        except BaseException:
            if self._window.touched:
                self._statistics_within.restore()
            else:
                self._drop_window()
            raise

    def _refuse_gradients(self) -> None:
        """A loss function that has called backward() itself would be counted twice."""
        if self._graphs is not None or self._ranks.several:  # DDP may move gradients to its buckets in a forward pass
            return
        if self._trained.has_gradients if self._stock is None else self._stock != self._trained.stock():
            self._drop_window()
            raise BadInput("the loss function must not call backward() itself: it returns the loss.")

    def _refuse_changes(self) -> None:
        """An open window has gradients, which are nobody else's."""
        if self._stock is not None and self._stock != self._trained.stock():
            self._drop_window()
            raise BadInput(
                "gradients of an open window were changed by someone else: by zero_grad() or clipping, which are the "
                "engine's to do (clip_norm=...), or by another backward pass through these parameters."
            )

    def _take_stock(self) -> None:
        """Of gradients that must not change, where there are any."""
        bare = self._graphs is not None or (self._set_to_none and not self._window.touched)
        self._stock = None if bare else self._trained.stock()

    # The step in pieces

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision, for a forward pass: in training, and to evaluate in what was trained in.

        Gradients need to be enabled for training, as they are unless one turns them off.
        """
        if not torch.is_grad_enabled():
            with self._arithmetic.products(), self._arithmetic.forward():
                yield
            return
        if self._window.touched:
            self._statistics.remember_new()
        elif not self._begun and (self._statistics.moves or any(model.training for model in self._models)):
            self._announce_window()
            self._begin()  # unless it is an evaluation
        with (
            self._arithmetic.products(),
            self._ranks.exchanging(self._window.at_its_last),
            self._arithmetic.forward(),
        ):
            yield

    def backward(self, loss: Tensor, *, weight: Weight | None = None, **kwargs: Any) -> None:
        """The backward pass of a loss, scaled, and divided by the number of micro-batches.

        A micro-batch may have several losses, one call each. ``kwargs`` are those of ``Tensor.backward``.
        """
        self._refuse_inside("backward")
        checked_loss(loss, "backward() was given")
        if weight is None and self._weigh is not None and not self._window.passes:
            raise BadInput("backward(loss): this engine weighs micro-batches. Give backward(loss, weight=...).")
        if self._window.touched:
            self._refuse_changes()
        elif self._begun:
            self._drop_gradients()  # of others' backward passes since the forward pass
        else:  # without our autocast, there are no statistics to go back to
            self._announce_window()
            self._begin(remember=False)
        share = self._window.share(loss, self._window.factor(weight, self._typical))
        with self._arithmetic.products():
            self._window.add(self._backward(share, kwargs))
        self._take_stock()

    def apply(self) -> Step:
        """The end of a micro-batch. If it completes the window, the optimizer has its turn."""
        self._refuse_inside("apply")
        if not self._window.passes:
            raise BadInput("apply(): nothing to apply. Call engine.backward(loss) before, once or more a micro-batch.")
        self._refuse_changes()
        return self._attended(self._next(None))

    def flush(self) -> Step | None:
        """Let the optimizer have its turn though the window is not complete, at the end of the data, say.

        The mean is over the micro-batches there are. None if there are none. ``batches`` does it by itself.
        """
        self._refuse_inside("flush")
        if self._window.passes:
            self._window.next()
        if not self._window.count:
            return None
        self._refuse_changes()
        if not self._window.complete:
            self._ranks.exchange_late()
        return self._attended(self._close(None))

    def drop_window(self) -> None:
        """Forget the micro-batches of an open window, as if they had not been: after an error that one goes on from."""
        self._refuse_inside("drop_window")
        self._drop_window()

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The batches of a loader, with its end known beforehand: the last window may be shorter.

        As many batches as make a window are fetched at a time.
        """
        return Batches(loader, self._window, self.flush)

    def grad(self, outputs: Tensor, inputs: Any, *, create_graph: bool = True, **kwargs: Any) -> tuple[Any, ...]:
        """``torch.autograd.grad`` in true units, for a penalty on gradients; scaled on the way, so that FP16 holds."""
        with self._arithmetic.products(), self._arithmetic.backward():
            scaled = self.scaler.scale(outputs)
            gradients: tuple[Any, ...] = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **kwargs)
            if not self.scaler.is_enabled():
                return gradients
            assert self.scaler._scale is not None
            inverse = inverse_of(self.scaler._scale)
            return tuple(None if each is None else each * there(inverse, each.device) for each in gradients)

    def close(self) -> None:
        """Explain the last step, if it was bad; send the sinks what they have not got yet, and close them.

        Training may go on without.

        Waits for the last step, and for sinks: seconds, or up to a minute while they get on. It happens by itself when
        the program ends. The sinks of an engine that is gone are closed, too, and nobody waits for them.
        """
        self._settle_bad_steps()
        if self._telling is not None:
            self._telling.close()
            self._telling = None

    def _settle_bad_steps(self) -> None:
        if self._bad_steps is not None:
            self._bad_steps.settle()

    def change_precision(self, precision: str | Policy) -> None:
        """Go on in another precision, or with another policy, from the next step on. Between windows only.

        Weights and the state of optimizers stay as they are; after "bf16-pure" they are FP32. Where the loss needs a
        scale from now on, it is found anew. What the device cannot do is refused, and nothing has changed.
        """
        self._refuse_inside("change_precision")
        if self._window.touched:
            raise BadInput("change_precision() in the middle of a window: change it when step.closed is true.")
        if self.precision_stays:
            raise BadInput(f"change_precision(): {self.precision_stays}")
        policy = precision if isinstance(precision, Policy) else Policy(precision)
        chosen, why = choose(policy.base, self.device)
        policy.modules(self._model)  # which refuses what matches nothing
        fitting = self._fitting_for(chosen, policy, self._fp8 if chosen.name == "fp8" else None)
        self._settle_bad_steps()
        self._fitting.take_off()
        self.policy.apply(self._model).remove()
        policy.apply(self._model)
        fitting.put_on()
        self.policy, self.why, self._fitting = policy, why, fitting
        self._arithmetic = self._arithmetic_of(chosen)
        if chosen.scaled != self.scaler.is_enabled():
            self._schedules.settle()
            self._counts.settle()
            collapses = self.scaler.collapses
            self.scaler = _scaler(self.device, chosen.scaled, self._scaling, self.scaler._process_group)
            self.scaler.collapses = collapses
        if self._bad_steps is not None:
            self._bad_steps.policy_changed(policy.as_dict())

    def attend(self, attendant: Attendant | None) -> None:
        """Have someone told of each step, before the update and when it is closed: a guard. None: nobody any more."""
        if attendant is not None and self._attendant is not None and attendant is not self._attendant:
            raise BadInput("this engine has a guard already: one is enough.")
        self._attendant = attendant

    # What happened

    @property
    def models(self) -> Sequence[Module]:
        """As they were given."""
        return self._models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """As they were given."""
        return self._trained.optimizers

    @property
    def precision_stays(self) -> str:
        """Why the precision cannot be changed any more; empty where it can."""
        in_graphs = "not with graph=True, whose graphs have the precision in them."
        return self._fitting.stays if self._graphs is None else in_graphs

    @property
    def ranks(self) -> Ranks:
        """The processes that train this model together."""
        return self._ranks

    @property
    def lr(self) -> float:
        """The learning rate of the next step; waits for the last, whose skip would hold the scheduler."""
        self._schedules.settle()
        return next((float(lr) for lr in self._trained.lrs), math.nan)

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights; waits for the last."""
        return self._counts.settle().applied

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the last."""
        return self._counts.settle().skipped

    @property
    def accumulating(self) -> bool:
        """A window is open: some of its micro-batches are done."""
        return self._window.touched

    @property
    def findings(self) -> list[Finding]:
        """What steps with a bad loss or bad gradients came from; waits for the last step.

        An overflow of gradients that goes away with a lower loss scale is none. In FP8, also what layers lose.
        """
        self._settle_bad_steps()
        explained = [] if self._bad_steps is None else self._bad_steps.findings
        return [*explained, *self._fitting.findings()]

    def sample_fp8(self) -> None:
        """Count, in the next step, what FP8 layers are given: ``fp8_report`` and ``findings`` then say what is lost.

        That step runs without torch.compile, and waits for the device.
        """
        self._in_fp8("sample_fp8").sample()

    def fp8_report(self) -> NarrowLayers:
        """Of each FP8 layer's input, weight and gradient: the scale, past magnitudes, what was cut off, what vanishes.

        What delayed scaling counts is there after every step, what vanishes after one that was sampled. Waits for the
        last step.
        """
        report: NarrowLayers = self._in_fp8("fp8_report").report()
        return report

    @property
    def fp8_layers(self) -> list[str]:
        """The names of the layers that run in FP8; none in other precisions."""
        return getattr(self._fitting, "layers", [])

    def _in_fp8(self, name: str) -> Any:
        if self.precision != "fp8":
            raise BadInput(f"engine.{name}(): this engine trains in {self.precision}. It is for precision='fp8'.")
        return self._fitting

    @property
    def explained(self) -> list[Finding]:
        """What was found of the bad step that was explained last, since the state was loaded; waits for the last step.

        Of several ranks, the first has it.
        """
        self._settle_bad_steps()
        return [] if self._bad_steps is None else list(self._bad_steps.last)

    def save_bad_steps(self, capsules: Capsules | None) -> None:
        """In this folder from now on, for ``ampwise replay``; None: nowhere. One that was given to the engine stays."""
        if self._bad_steps is not None and (self._bad_steps.capsules is None or capsules is None):
            self._bad_steps.capsules = capsules or self._own_capsules

    def census(self) -> DeviceCensus:
        """What the gradients of the last step held, by parameter, in true units and before clipping."""
        return self.scaler.census(self._model)

    def __repr__(self) -> str:
        window = "" if self._window.size == 1 else f", accumulate {self._window.size}"
        names = ", ".join(type(each).__name__ for each in self._trained.optimizers)
        kept = f", {len(self.policy.rules)} exceptions" if self.policy.rules else ""
        return f"<Engine in {self.precision}{kept} on {self.device}, {names}{window}{self._clipping}>"

    # State

    def state_dict(self) -> dict[str, Any]:
        """All but the states of model and optimizer, which are saved beside it. Waits for the last step.

        Plain data and tensors: ``torch.load(..., weights_only=True)`` reads it. In the middle of a window it has the
        gradients too, so that a run goes on from there as if it had not been broken.
        """
        self._refuse_inside("state_dict")
        if self._window.passes:
            raise BadInput("state_dict() between backward() and apply(): save after engine.apply().")
        if self._window.touched:
            self._ranks.refuse_open_window()
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
            "window": saved_window(self._window, self._trained.parameters, self._statistics.state()),
            "rng": rng_state(self.device),
            "fitting": self._fitting.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_precision: bool = False) -> None:
        """Go on where ``state_dict`` was called; model and optimizer are loaded by themselves, in whatever order.

        other_precision: go on in this engine's precision and policy though the state was saved in another.
        A state that cannot be gone on with is refused, and nothing has changed.
        """
        self._refuse_inside("load_state_dict")
        if self._window.passes:
            raise BadInput("load_state_dict() between backward() and apply(): load after engine.apply().")
        if self._bad_steps is not None:
            self._bad_steps.forget()
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
        checked_saved(
            state,
            precision=self.precision,
            policy=self.policy.as_dict(),
            schedulers=len(self._schedules),
            other=other_precision,
        )
        self._fitting.load(state.get("fitting", {}) if state["precision"] == self.precision else {})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._drop_gradients()
        self._ranks.drop_unexchanged()
        load_window(self._window, state["window"], self._trained.parameters)
        self._begun = self._window.touched
        self._take_stock()
        if self._begun:
            self._statistics.load(state["window"]["statistics"])
        self._schedules.load(state["schedulers"])
        self._counts = Counts(state["applied_steps"], state["skipped_steps"])
        self._closed = state["applied_steps"] + state["skipped_steps"]
        restore_rng(state["rng"], self.device)

    # Inside

    def _refuse_inside(self, name: str) -> None:
        if self._inside:
            raise BadInput(f"engine.{name}() inside of engine.step(): the loss function only computes the loss.")

    def _begin(self, *, remember: bool = True) -> None:
        """Begin a window."""
        self._drop_gradients()  # of others' backward passes, such as of another engine through this model
        if remember:
            self._statistics.remember()
        else:
            self._statistics.forget()
        self._begun = True
        self._take_stock()

    def _backward(self, share: Tensor, kwargs: dict[str, Any]) -> Tensor:
        try:
            with self._ranks.exchanging(self._window.at_its_last), self._arithmetic.backward():
                self.scaler.scale(share).backward(**kwargs)
        except BaseException as error:
            self._drop_window()
            if "backward through the graph a second time" in str(error):
                error.add_note("ampwise: the loss function must not call backward() itself: return the loss.")
            raise
        loss: Any = share.detach()
        return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).reshape(())  # type: ignore[no-any-return]

    def _announce_window(self) -> None:
        if self._attendant is not None and not (self._begun or self._window.touched):
            self._attendant.begins()

    def _attended(self, step: Step) -> Step:
        """Last of all, as it may take the engine back to an earlier step, or end the training."""
        if step.closed and self._attendant is not None:
            self._attendant.closed(step)
        return step

    def _typical(self, weight: Weight) -> float:
        """The weight of a typical micro-batch, agreed upon once: ranks divide by the same."""
        mean = float(self._ranks.mean(weight, self.device))
        return mean if 0 < mean < math.inf else 1.0

    def _next(self, extra: Any) -> Step:
        window = self._window
        window.next()
        if window.complete:
            return self._close(extra)
        assert window.loss is not None
        return Step(self._closed + 1, self.precision, window.loss, loss_divisor=window.correction(), extra=extra)

    def _close(self, extra: Any) -> Step:
        """The optimizer's turn."""
        stepping = self._trained.optimizers if self._divided else self._trained.with_gradients
        if not stepping:
            self._drop_window()
            raise BadInput(
                "the backward pass reached none of the optimizer's parameters. Does the loss depend on the model, and "
                "do its parameters require gradients?"
            )
        outcome, lrs = None, []
        try:
            self._schedules.settle()  # which decides on the learning rate of this step
            lrs = [posted(lr) for lr in self._trained.lrs]
            if self._telling is not None:
                self._telling.step_begins(self.scaler._scale if self.scaler.is_enabled() else None)
            if self._bad_steps is not None:
                scale = self.scaler.get_scale() if self.device.type == "cpu" else None
                self._bad_steps.before_update(self._closed + 1, self.precision, self._window.loss, scale)
            if self._attendant is not None:
                self._attendant.before_update()
            self._judge(stepping)
            self._stepping = True
            for optimizer in stepping:
                with self._fitting.stepping(optimizer):
                    self.scaler.step(optimizer)  # noqa: AMP110 (each optimizer once)
                outcome = outcome or self.scaler._outcome_of(optimizer)  # all skip, or none
            # Ranks that have each their own loss would move the scale apart: it is put right when all know of it.
            self.scaler.update(loss=self._window.loss if self._ranks.alone else None)
            self._undo_backoffs()
        except BaseException:
            self.scaler._abandon()
            if outcome is None:
                self._drop_window()
            else:  # it went wrong after the step
                self._finish(outcome, stepping, lrs, extra)
            raise
        finally:
            self._stepping = False
        assert outcome is not None
        return self._finish(outcome, stepping, lrs, extra)

    def _undo_backoff(self, outcome: Outcome) -> None:
        """Of a step that no loss scale would have helped. In an open window, whose gradients are scaled, at its end."""
        self._backoffs.append(outcome)
        if not (self._begun or self._window.touched):
            self._undo_backoffs()

    def _undo_backoffs(self) -> None:
        while self._backoffs:
            self.scaler._undo_backoff(self._backoffs.pop())

    def _refuse_others_step(self) -> None:
        """An optimizer that is stepped by someone else, in an open window, would take scaled or partial gradients."""
        if self._window.touched and not self._stepping:
            raise BadInput(
                "optimizer.step() in an open window: the engine calls it. Use engine.apply() or engine.step()."
            )

    def _judge(self, stepping: Sequence[Optimizer]) -> None:
        """Whether the step is to be taken, and by how much gradients are to be divided."""
        divisor = self._window.correction()
        if divisor is not None:
            if self._window.total is not None:
                self._window.agreed = divisor = self._ranks.mean(divisor, self.device)
            self.scaler._besides = on_device(divisor, self.device)
        self.scaler._aside = self._window.loss
        self._clipping.clip_(self.scaler, stepping, self._trained.in_model_order)

    def _finish(
        self, outcome: Outcome, stepping: Sequence[Optimizer], lrs: Sequence[float | Posted], extra: Any
    ) -> Step:
        """Nothing of a skipped step is to stay, and nothing of this window in the next."""
        self._statistics.learn()
        if outcome.known_to_skip is None and outcome.numbers is not None:
            self._statistics.restore_if(outcome.numbers[1])
        elif outcome.skipped:
            self._statistics.restore()
        outcome.let_go()
        self._closed += 1
        self._ranks.window_closed()
        step = self._step_of(outcome, lrs, extra)
        self.history.append(step)
        if self._telling is not None:
            self._telling.step_ended(step)
        self._counts.add(outcome)
        self._window.learn()
        self._window.begin()
        self._begun = False
        if self._set_to_none and self._graphs is None:
            self._trained.drop_gradients()  # whose memory the next forward pass can use
        try:  # the window is over whatever these say, which may refuse to go on
            self._fitting.step_ended()
        finally:
            if self._bad_steps is not None:
                self._bad_steps.closed(step, outcome)
            self._schedules.after(outcome, stepping)
        return step

    def _step_of(self, outcome: Outcome, lrs: Sequence[float | Posted], extra: Any) -> Step:
        return Step(
            self._closed,
            self.precision,
            self._window.loss if outcome.posted is None else None,
            loss_divisor=posted(self._window.correction()),
            outcome=outcome,
            lrs=lrs,
            extra=extra,
        )

    def _drop_window(self) -> None:
        """As if its micro-batches had not been."""
        if self._bad_steps is not None:
            self._bad_steps.drop()
        if self._begun:  # else what is remembered is of a window that is over
            self._statistics.restore()
        self._drop_gradients()
        self._ranks.drop_unexchanged()
        self._window.begin()
        self._begun = False

    def _drop_gradients(self) -> None:
        if self._graphs is not None:
            self._graphs.clear_gradients(self._trained.all_parameters)
        elif self._set_to_none:
            self._trained.drop_gradients()
        else:
            self._trained.clear_gradients()


def _scaler(device: torch.device, scaled: bool, options: Mapping[str, Any] | None, process_group: Any) -> GradScaler:
    if not isinstance(options, Mapping | None):
        raise BadInput(f'Engine(scaling={options!r}): options of GradScaler by name: {{"init_scale": 2.0**12}}.')
    try:
        return GradScaler(device, enabled=scaled, process_group=process_group, **(options or {}))
    except TypeError as error:
        raise BadInput(f"Engine(scaling=...): {error}. The options are those of ampwise.GradScaler.") from None
