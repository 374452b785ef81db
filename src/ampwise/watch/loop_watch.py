"""Observe the training loop around the steps: modes of models, schedulers, data loaders, and calls without effect."""

from __future__ import annotations

import ast
import linecache
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SequentialSampler

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, own_files, says
from ampwise.trace.names_in_code import call_name, free_names, nodes_of, tree_of
from ampwise.trace.python_state import random_position
from ampwise.watch.always_dropped import functional_dropout
from ampwise.watch.inspection import HALVES, inner_model, parameters_of, tensors_in, unwrapped
from ampwise.watch.learning import CountedCalls, Learning, LoaderUse, ModelModes, ScheduleUse
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker

__all__ = ["LoopWatch"]

LOOKED_AT = 3  # passes in evaluation mode in which random numbers are looked for
IN_A_ROW = 3  # passes without gradients, on different inputs: an evaluation
MOST_FACTORS = 8
MOVES_LOOKED_AT = 6
TOTALS = ("total_steps", "T_max", "total_iters")
RANDOM_PARTS = ("Dropout", "DropPath", "StochasticDepth", "DropConnect", "DropBlock")


@dataclass(slots=True)
class _Modes:
    """A model's modes since the last step of its optimizers."""

    ref: weakref.ref[nn.Module]
    facts: ModelModes
    trains: list[TrackedOptimizer]
    since_step: set[bool] = field(default_factory=set)
    in_a_row: int = 0  # passes without gradients in training mode
    inputs: set[tuple[float, ...]] = field(default_factory=set)  # values of the inputs of these
    parts: list[str] = field(default_factory=list)  # classes of modules that acted as in training in these


@dataclass(slots=True)
class _Schedule:
    facts: ScheduleUse
    ref: weakref.ref[Any]
    unmoved: Any  # the scheduler, until it moves for the first time: a script may delete it before the end
    other_steps: int = 0  # of another optimizer of the same parameters


@dataclass(slots=True)
class _Region:
    """The outermost autocast region that was entered last."""

    site: CallSite
    device: str
    steps: Counter[int] = field(default_factory=Counter)  # in it, by optimizer


@dataclass(slots=True)
class _Loader:
    facts: LoaderUse
    drawn: int = 0  # of the current pass
    joins: int = 0  # samples that a function of the script puts together, as long as each has a row in all tensors


class LoopWatch:
    """Observe modes, schedulers and loaders."""

    def __init__(self, facts: Learning, tracker: CallTracker) -> None:
        self._facts, self._tracker = facts, tracker
        self._modes: dict[int, _Modes] = {}  # by id of the model
        self._evals: dict[int, tuple[weakref.ref[nn.Module], CallSite]] = {}
        self._random: tuple[nn.Module, Any] | None = None  # at the start of a pass in evaluation mode
        self._region: _Region | None = None
        self._schedules: dict[int, _Schedule] = {}  # by id
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()

    # Modes

    def switched_to_eval(self, model: nn.Module) -> None:
        self._evals[id(model)] = (weakref.ref(model), calling_site())

    def model_begins(self, model: nn.Module, args: Any, trains: list[TrackedOptimizer]) -> None:
        """Note the mode of an outermost pass. trains: the optimizers of the model."""
        if not trains:
            return
        known = self._modes.get(id(model))
        if known is None or known.ref() is not model:
            facts = ModelModes(model=type(inner_model(model)).__name__)
            known = self._modes[id(model)] = _Modes(weakref.ref(model), facts, trains)
            self._facts.models.append(facts)
        known.trains = trains
        if torch.is_grad_enabled():
            known.since_step.add(model.training)
            known.in_a_row, known.inputs = 0, set()
        elif not model.training:
            known.facts.evaluated += 1
            if known.facts.evaluated <= LOOKED_AT:
                self._random = (model, random_position())
        elif any(state.steps for state in trains):
            known.in_a_row += 1
            known.inputs.add(tuple([value for each in tensors_in(args) for value in _first_values(each)]))
            if known.in_a_row == IN_A_ROW:  # of the model, the mode may be set alone, and its parts keep theirs
                known.parts = parts_with_modes(model, training=True)
            if known.in_a_row >= IN_A_ROW and len(known.inputs) >= IN_A_ROW and known.parts:
                facts = known.facts
                if not facts.mistaken:
                    facts.parts = known.parts
                    facts.mistaken_site, facts.mistaken_step = calling_site(), self._tracker.steps
                facts.mistaken += 1

    def model_ends(self, model: nn.Module) -> None:
        before, self._random = self._random, None
        if before is not None and before[0] is model and random_position() != before[1]:
            for site, name in functional_dropout(model):
                self._facts.always_dropped.setdefault(
                    site, CountedCalls(step=self._tracker.steps, what=name)
                ).times += 1

    def step_over(self, state: TrackedOptimizer) -> None:
        self._note_region(state)
        for known in self._modes.values():
            if not known.since_step or state not in known.trains:
                continue
            facts, known.in_a_row = known.facts, 0
            if True in known.since_step:
                facts.trained, facts.in_eval = facts.trained + 1, 0
            else:
                model = known.ref()
                if not facts.in_eval:
                    facts.first_in_eval = state.steps + 1
                    facts.eval_site = None if model is None else self._eval_site(model)
                    facts.parts = [] if model is None else parts_with_modes(model, training=False)
                facts.in_eval += 1
            known.since_step = set()

    def _eval_site(self, model: nn.Module) -> CallSite | None:
        """Return the last call of ``eval()`` of the model or of one that contains it."""
        found = None
        for ref, site in self._evals.values():
            switched = ref()
            if switched is model or (switched is not None and any(each is model for each in switched.modules())):
                found = site
        return found

    # Autocast

    def autocast_entered(self, device: str) -> None:
        """Note that an outermost autocast region was entered: torch keeps casts of the weights until it ends."""
        self._region = _Region(calling_site(), device)

    def forget_region(self) -> None:
        """Forget the region, as others are entered unnoticed from now on."""
        self._region = None

    def _note_region(self, state: TrackedOptimizer) -> None:
        region = self._region
        if region is None or not torch.is_autocast_enabled(region.device) or not torch.is_autocast_cache_enabled():
            return
        region.steps[state.index] += 1
        if region.steps[state.index] > 1 and any(
            each in HALVES for each in state.precisions
        ):  # the passes between the two used the casts
            self._facts.stale_casts.setdefault(region.site, CountedCalls(step=state.steps + 1)).times += 1

    # Schedulers

    def scheduler_made(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        state = None if optimizer is None else self._tracker.optimizers.get(unwrapped(optimizer))
        facts = ScheduleUse(
            name=type(scheduler).__name__,
            made_at=calling_site(),
            optimizer=-1 if state is None else state.index,
            began=0 if state is None else state.steps,
            period=getattr(scheduler, "T_max", None),
        )
        facts.counts_epochs = _counts_epochs(facts.made_at)
        if state is not None:
            state.scheduled_at = facts.made_at
        facts.total = next(
            (each for name in TOTALS if isinstance(each := getattr(scheduler, name, None), int) and each > 1), None
        )
        _note_factor(facts, scheduler)
        self._schedules[id(scheduler)] = _Schedule(facts, weakref.ref(scheduler), scheduler)
        self._facts.schedules.append(facts)
        for inner in getattr(scheduler, "_schedulers", ()):
            if id(inner) in self._schedules:
                self._schedules[id(inner)].facts.inner = True

    def scheduler_moved(self, scheduler: Any) -> None:
        known, position = self._schedules.get(id(scheduler)), scheduler.last_epoch
        if known is not None and known.ref() is scheduler:
            known.unmoved = None
            facts = known.facts
            if not facts.moves:
                facts.step_site = calling_site()
            facts.moves += 1
            facts.position = position
            _note_factor(facts, scheduler)
            if facts.moves <= MOVES_LOOKED_AT:
                self._note_idle_move(known, scheduler)

    def _note_idle_move(self, known: _Schedule, scheduler: Any) -> None:
        """Note a move whose optimizer has made no step, while another one with the same parameters has made some."""
        own = unwrapped(scheduler.optimizer)
        state = self._tracker.optimizers.get(own)
        held = {id(each) for each in parameters_of(own)}
        others = [
            other
            for optimizer, other in self._tracker.optimizers.pairs()
            if optimizer is not own and held.issuperset(id(each) for each in parameters_of(optimizer))
        ]
        steps = sum(other.steps for other in others)
        if (state is None or state.steps == known.facts.began) and known.other_steps and steps > known.other_steps:
            known.facts.idle_moves += 1
            known.facts.other = others[-1].made_at
        known.other_steps = steps

    # Data

    def loader_starts(self, loader: Any, iterator: Any) -> None:
        """Note a pass over a loader. Those of evaluation, without gradients, do not count."""
        if not torch.is_grad_enabled():
            return
        known = self._loaders.get(loader)
        if known is None:
            try:
                batches = len(loader)
            except TypeError:  # of an iterable dataset
                batches = 0
            # A batch sampler that is given replaces the sampler.
            sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
            facts = LoaderUse(
                site=calling_site(),
                batches=batches,
                in_order=isinstance(sampler, SequentialSampler),
                distributed=isinstance(sampler, DistributedSampler) and sampler.shuffle and sampler.num_replicas > 1,
            )
            facts.made_at = _loader_in_order(facts.site) if facts.in_order else None
            known = self._loaders[loader] = _Loader(facts)
            known.joins = getattr(loader.batch_sampler, "batch_size", None) or 0
            if loader.collate_fn is default_collate:
                facts.batch_size, known.joins = known.joins, 0
            self._facts.loaders.append(facts)
        elif known.drawn == 1:
            known.facts.first_only += 1
        facts, known.drawn = known.facts, 0
        facts.passes += 1
        if facts.distributed:
            facts.epochs.add(loader.sampler.epoch)
        self._iterators[iterator] = known

    def batch_drawn(self, iterator: Any, batch: Any) -> None:
        known = self._iterators.get(iterator)
        if known is None:
            return
        known.drawn += 1
        known.facts.drawn += 1
        if known.joins and known.drawn == 1:  # the last one may be smaller
            parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
            rows = {each.shape[0] for each in parts if isinstance(each, Tensor) and each.dim()}
            known.joins = known.joins if rows == {known.joins} else 0
            known.facts.batch_size = known.joins

    # Calls without effect

    def clipped(self, parameters: list[Any], owners: list[tuple[Any, TrackedOptimizer]], limit: float | None) -> None:
        """Note a clip, and whether there was nothing to clip: no parameters, or gradients that a step has used."""
        site, why = calling_site(), ""
        if not parameters:
            why = "no parameters"
        elif not any(each.grad is not None for each in parameters):
            why = "no gradients"
        elif owners and all(not state.pending and state.used_up for _, state in owners):
            why = "used gradients"
        if why:
            calls = self._facts.idle_clips.setdefault(site, CountedCalls(step=self._tracker.steps + 1, what=why))
            calls.times += 1
        else:
            self._facts.useful_clips[site] += 1
            for _, state in owners:
                self._facts.clip_limits[state.index] = (site, limit)

    def update(self) -> None:
        """Bring the facts up to date."""
        for known in self._schedules.values():
            scheduler, facts = known.unmoved or known.ref(), known.facts
            if scheduler is not None:
                facts.moves = max(facts.moves, getattr(scheduler, "_step_count", 1) - 1)
                facts.position = getattr(scheduler, "last_epoch", facts.position)
            state = next((each for each in self._tracker.optimizers.states() if each.index == facts.optimizer), None)
            facts.steps = 0 if state is None else state.steps - facts.began


def _note_factor(facts: ScheduleUse, scheduler: Any) -> None:
    """Note what the function of a LambdaLR has returned."""
    first: Any = next(iter(getattr(scheduler, "base_lrs", None) or ()), None)
    now: Any = next(iter(getattr(scheduler, "_last_lr", None) or ()), None)
    if isinstance(scheduler, LambdaLR) and isinstance(first, int | float) and isinstance(now, int | float) and first:
        facts.base_lr, factor = float(first), now / first
        if len(facts.factors) < MOST_FACTORS:
            facts.factors.add(factor)
        elif factor > max(facts.factors):
            facts.factors.remove(min(facts.factors))
            facts.factors.add(factor)


@lru_cache(maxsize=64)
def _loader_in_order(loop: CallSite) -> CallSite | None:
    """Return the only line that makes a loader without shuffling, or the only such one whose name the loop has."""
    here = loop.file or ""
    for files in ([here], own_files("DataLoader")):
        made = {
            CallSite(file=file, line=node.value.lineno): {call_name(each) for each in node.targets}
            for file in files
            for node in (nodes_of(file) if says(file, "DataLoader") else ())
            if isinstance(node, ast.Assign) and _is_in_order(node.value)
        }
        text = linecache.getline(here, loop.line or 0)
        named = [site for site, names in made.items() if any(name and name in text for name in names)]
        for found in ([*made], named):
            if len(found) == 1:
                return found[0]
    return None


def _is_in_order(value: ast.expr) -> bool:
    """Whether an expression makes a loader that does not shuffle."""
    if not isinstance(value, ast.Call) or call_name(value) != "DataLoader" or len(value.args) > 2:
        return False
    given = {each.arg: each.value for each in value.keywords}
    is_other = bool(given.keys() & {None, "sampler", "batch_sampler"})
    return not is_other and ast.unparse(given.get("shuffle", ast.Constant(False))) == "False"


def _counts_epochs(made_at: CallSite) -> bool:
    """Whether the statement that makes a schedule names epochs: ``T_max=epochs``, ``lambda epoch: 0.5**epoch``."""
    tree = None if made_at.file is None else tree_of(made_at.file)
    names: set[str] = set()
    for statement in ast.walk(tree) if tree is not None else ():
        if isinstance(statement, ast.Assign) and statement.lineno <= (made_at.line or 0) <= (statement.end_lineno or 0):
            arguments = [each.arg for each in ast.walk(statement.value) if isinstance(each, ast.arg)]
            names |= {*free_names(statement.value), *arguments, *map(_attribute, ast.walk(statement.value))}
    return any("epoch" in each.lower() for each in names) and not any("step" in each.lower() for each in names)


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else ""


def _first_values(tensor: Tensor) -> list[float]:
    """Return what tells inputs apart: some values on the CPU; elsewhere reading them would sync."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        return [tensor.data_ptr(), tensor._version] if tensor.is_cuda and not tensor.is_inference() else []
    values: list[float] = tensor.detach().reshape(-1)[:8].tolist()
    return values


def parts_with_modes(model: nn.Module, *, training: bool) -> list[str]:
    """Return the classes of a model's modules that act otherwise in the other mode. training: the mode they are in."""
    found: dict[str, None] = {}
    for module in (each for each in model.modules() if each.training == training):
        name, rate = type(module).__name__, None
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            rate = module.dropout
        elif name.startswith(RANDOM_PARTS):
            rate = getattr(module, "p", getattr(module, "drop_prob", None))
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        if is_norm or (isinstance(rate, int | float) and rate > 0):
            found[name] = None
    return list(found)
