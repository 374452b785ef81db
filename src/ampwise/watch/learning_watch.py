"""Observe which parameters get gradients, which an optimizer holds, and which a step changes.

Nothing syncs with a device, and only a few values of a few tensors are copied, at the first steps and then ever less
often.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.crossed_values import CrossedLosses
from ampwise.watch.cut_terms import Callers, callers_of, note_cut_term
from ampwise.watch.drawn_samples import DrawnSamples
from ampwise.watch.graph_cuts import cut_after, cut_before_loss, leads_to
from ampwise.watch.graph_lines import GraphLines, watch_for_zeros
from ampwise.watch.inspection import parameters_of, precisions_of, unwrapped
from ampwise.watch.learning import (
    CountedCalls,
    Learning,
    OptimizerUse,
    SharedMemory,
    SharedSteps,
)
from ampwise.watch.loss_means import (
    note_diluted_mean,
    note_sign,
    note_sign_of_terms,
    note_unreachable_target,
    note_wrong_normalisation,
)
from ampwise.watch.lost_gradients import LostAt, LostGradient
from ampwise.watch.made_code import assignment_of_rate
from ampwise.watch.mixed_samples import MixedSamples
from ampwise.watch.outside_watch import OutsideWatch
from ampwise.watch.sampled_values import SAMPLED_TENSORS, SampledValues, StepComparison, is_plain
from ampwise.watch.source_faults import SourceFaults
from ampwise.watch.target_graphs import note_target_graph
from ampwise.watch.term_weights import weights_of_terms
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker
from ampwise.watch.wide_clips import WideClips

__all__ = ["LearningWatch", "is_due"]

MOST_NODES = 20_000  # of an autograd graph whose leaves are looked at
EMPTY_STEPS = 12  # in a row, after which the next backward pass is looked at
MOST_FLAT_SITES = 32
MOST_POINTS = 256
MOST_RESTARTS = 8  # a script may make modules in each step
STILL = 20  # steps in a row that change nothing, each of which is looked at; some optimizers apply one of several
PENALTIES = ("penalty", "gp", "r1_", "zero_centered")  # in names of functions
LOW = 1e-6  # of the highest learning rate: next to nothing


def is_due(count: int) -> bool:
    """Whether to look closely this time: at the first ones, and then less and less often."""
    return count <= 10 or count.bit_count() == 1 or count % 256 == 0


# State by object


@dataclass(slots=True)
class _Samples:
    """What the samples of an optimizer's steps have shown for each of its parameters."""

    refs: list[weakref.ref[Tensor]]
    graded: list[bool]
    comparison: StepComparison | None = None


@dataclass(slots=True)
class _Cuts:
    """Lines that cut the graph of the last loss off from parameters, by index of the optimizer that has them."""

    number: int = 0  # of the backward pass
    site: CallSite = field(default_factory=CallSite)
    lines: dict[int, CallSite] = field(default_factory=dict)


class LearningWatch:
    """Observe the optimizers' steps and the backward passes."""

    def __init__(self, facts: Learning, tracker: CallTracker, lines: GraphLines) -> None:
        self._facts, self._tracker, self.lines = facts, tracker, lines
        self._zeros_wanted: Callable[[CallSite], None] | None = None
        self._lost_from: weakref.ref[Tensor] | None = None  # the parameter whose gradients are zero
        self._lost_wanted: Callable[[LostAt], object] | None = None
        self._lost: LostGradient | None = None  # in the running pass
        self._wide_clips = WideClips(tracker)
        self._uses: dict[int, OptimizerUse] = {}
        self._samples: dict[int, _Samples] = {}
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._outside = OutsideWatch(tracker, self.is_held)
        self._looks = False  # at the running pass or, after a step without gradients, at the next one
        self._unused: dict[int, list[SampledValues]] = {}  # by optimizer that has not made a step
        self._empty: dict[int, set[int]] = {}  # ids of the parameters of optimizers whose steps found no gradients
        self._cuts = _Cuts()
        self._mixed = MixedSamples(facts, lines)
        self._source = SourceFaults(facts, lines)
        self._crossed = CrossedLosses(facts, lines)
        self.drawn = DrawnSamples(facts)
        self._flat_sites: dict[CallSite, Callers] = {}  # calls of ``autograd.grad`` without a graph
        # What they are gradients of, with versions, since the last backward pass.
        self._points: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._default_rates: dict[int, Any] = {}  # by index of the optimizer
        self._by_hand: set[int] = set()  # optimizers whose parameters the script updates itself
        self._backwards = self._clips = 0
        self._restarts, self._looked_from = 0, 0  # of the schedule of looks, and the pass at which it began
        self._pending: list[tuple[AsyncScalars, Callable[[list[float]], None]]] = []
        self._shared: dict[tuple[int, int], list[str]] = {}  # names of parameters that two optimizers have
        self._last: tuple[weakref.ref[Any], TrackedOptimizer, int] | None = None  # the last step

    # Calls

    def state_loaded(self, model: nn.Module, result: Any) -> None:
        """Note a state of which no entry has the name of one of the model's. result: of ``load_state_dict``."""
        missing, unexpected = getattr(result, "missing_keys", ()), getattr(result, "unexpected_keys", ())
        if missing and unexpected and len(missing) >= len(model.state_dict()):
            what = f"`{unexpected[0]}` is no name in {type(model).__name__}, which has `{missing[0]}`"
            calls = self._facts.unloaded.setdefault(calling_site(), CountedCalls(step=self._tracker.steps + 1))
            calls.what, calls.times = what, calls.times + 1

    def differentiated(self, outputs: Any, inputs: Any, *, with_graph: bool) -> None:
        """Note gradients that ``autograd.grad`` computes without a graph, in a function that is to penalise them."""
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        self._outside.differentiated(given)
        if with_graph:
            return
        first = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
        site = calling_site()
        if not torch.is_grad_enabled():
            return
        if not any(word in (site.function or "").lower() for word in PENALTIES):
            if len(self._flat_sites) < MOST_FLAT_SITES:
                self._flat_sites.setdefault(site, {}).update(callers_of(sys._getframe(1)))
            if len(self._points) < MOST_POINTS:
                self._points.update({id(each): (weakref.ref(each), each._version) for each in given})
            return
        known = self._facts.flat_penalties.get(site)
        if known is None and first is not None and not isinstance(given[0], nn.Parameter):
            if leads_to(first.grad_fn, self.is_held):
                self._facts.flat_penalties[site] = CountedCalls(step=self._tracker.steps + 1, times=1)
        elif known is not None:
            known.times += 1

    # Optimizers

    def use_of(self, state: TrackedOptimizer) -> OptimizerUse:
        if state.index not in self._uses:
            use = OptimizerUse(index=state.index, name=state.name, made_at=state.made_at)
            self._uses[state.index] = use
            self._facts.optimizers.append(use)
        return self._uses[state.index]

    def holds(self, parameters: Iterable[Any]) -> None:
        """Note parameters that an optimizer has."""
        for each in parameters:
            if isinstance(each, Tensor):
                self._held[id(each)] = weakref.ref(each)
                self._outside.held(each)

    def loaded(self, model: nn.Module) -> None:
        """Note that the parameters of a model come from elsewhere, perhaps trained."""
        self._outside.loaded(model)

    def training_changed(self) -> bool:
        """Note a new parameter or optimizer. Return whether to look at the next passes, as training has begun."""
        if not self._backwards or self._restarts >= MOST_RESTARTS:
            return False
        if self._backwards > self._looked_from:  # else another one of the same module, or its optimizer
            self._restarts, self._looked_from = self._restarts + 1, self._backwards
        return True

    def step_begins(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Look at the gradients before a step. Those that a closure computes are not known yet."""
        use, optimizer = self.use_of(state), unwrapped(optimizer)
        if state.index in self._tracker.stepping:
            use.closures += 1
            return
        use.followed += 1
        if use.followed <= 2:
            use.step_site = calling_site()
        parameters = parameters_of(optimizer)
        _note_rate(use, optimizer, state.steps + 1)
        is_dropped = not state.pending and state.dropped_at is not None
        if is_dropped or not any(each.grad is not None for each in parameters):  # mostly decided by the first
            use.empty, use.empty_at_last = use.empty + 1, use.empty_at_last + 1
            self._looks = use.empty_at_last <= EMPTY_STEPS
            cuts = self._cuts if self._cuts.number == self._backwards else _Cuts()
            if state.index in cuts.lines and cuts.site != state.dropped_pass:  # gradients of another pass were dropped
                use.cut_at = cuts.lines[state.index]
            elif is_dropped:
                use.emptied[state.dropped_at] += 1  # type: ignore[index]
            if use.empty == use.followed <= EMPTY_STEPS:
                self._empty[state.index] = {id(each) for each in parameters}
            else:
                self._empty.pop(state.index, None)
        else:
            use.empty_at_last = 0
            self._empty.pop(state.index, None)
            if state.pending:
                use.backward_site = state.pending[-1].event.site
        with torch.no_grad():
            self._note_shared_step(optimizer, state, parameters)
            if self._pending:
                self.settle()
            if is_due(use.followed) or 0 < use.still < STILL:
                use.precisions = precisions_of(optimizer)
                if state.plain and use.lr_set_in is None:
                    self._note_unread_rate(use, optimizer)
                self._sample(use, parameters, state)

    def _note_unread_rate(self, use: OptimizerUse, optimizer: Any) -> None:
        """Note a learning rate that the script has assigned to the optimizer itself, or to its defaults."""
        given = self._default_rates.setdefault(use.index, optimizer.defaults.get("lr"))
        in_use = [group.get("lr") for group in optimizer.param_groups]
        for name, value in (("lr", vars(optimizer).get("lr", given)), ("defaults", optimizer.defaults.get("lr"))):
            if isinstance(value, int | float) and value != given and value not in in_use:
                use.lr_set_in = "lr" if name == "lr" else 'defaults["lr"]'
                use.lr_set_at = assignment_of_rate(name) or use.made_at

    def _sample(self, use: OptimizerUse, parameters: list[Any], state: TrackedOptimizer) -> None:
        samples = self._samples.get(state.index)
        is_same = samples is not None and len(samples.refs) == len(parameters)
        if samples is None or not is_same or any(a() is not b for a, b in zip(samples.refs, parameters, strict=True)):
            refs = [weakref.ref(each) for each in parameters]
            self._samples[state.index] = samples = _Samples(refs, [False] * len(parameters))
            use.sampled = 0
            self.holds(parameters)
            self._note_same_memory(use, parameters, state)
        use.sampled += 1
        samples.graded = [
            before or each.grad is not None for before, each in zip(samples.graded, parameters, strict=True)
        ]
        use.parameters, use.shapes = len(parameters), [tuple(each.shape) for each in parameters if each.requires_grad]
        names = state.names if len(state.names) == len(parameters) else [str(at) for at in range(len(parameters))]
        left = [
            (name, each)
            for name, each, graded in zip(names, parameters, samples.graded, strict=True)
            if each.requires_grad and not graded
        ]
        use.ungraded = [name for name, _ in left]
        if left and self._outside and use.followed in (4, 8, 16):
            owners = self._outside.search_owners()
            use.replaced = sum(id(each) not in owners for _, each in left)
        plain = [each for each in parameters if is_plain(each) and is_plain(each.grad)]
        plain = [each for each in plain if each.device == plain[0].device == each.grad.device]
        samples.comparison = StepComparison(plain, use.lr or 0.0) if plain else None

    def step_over(self, state: TrackedOptimizer, *, ran: bool) -> None:
        samples = self._samples.get(state.index)
        if samples is not None and samples.comparison is not None:
            compared, samples.comparison = samples.comparison, None
            if ran:
                with torch.no_grad():
                    take = partial(_add_comparison, self.use_of(state), state.steps + 1)
                    self._pending.append((compared.after_step(), take))

    def _note_same_memory(self, use: OptimizerUse, parameters: list[Any], state: TrackedOptimizer) -> None:
        """Look for two parameters in the same memory: each gets its own update."""
        seen: dict[tuple[Any, ...], int] = {}
        for position, each in enumerate(parameters):
            if not is_plain(each) or not each.data_ptr():
                continue
            key = (each.data_ptr(), each.numel(), each.device)
            other = seen.setdefault(key, position)
            if other != position and parameters[other] is not each and len(state.names) == len(parameters):
                first, second = state.names[other], state.names[position]
                self._facts.same_memory.append(
                    SharedMemory(first=first, second=second, optimizer=use.name, made_at=use.made_at)
                )

    def _note_shared_step(self, optimizer: Any, state: TrackedOptimizer, parameters: list[Any]) -> None:
        """Note a step with gradients that the step of another optimizer has just used."""
        last, self._last = self._last, (weakref.ref(optimizer), state, self._backwards)
        if last is None or last[1] is state or last[2] != self._backwards or state.pending:
            return
        other, pair = last[0](), (last[1].index, state.index)
        if other is None:
            return
        if pair not in self._shared:
            ids = {id(each) for each in parameters_of(other) if each.requires_grad}
            names = state.names if len(state.names) == len(parameters) else [""] * len(parameters)
            self._shared[pair] = [name for name, each in zip(names, parameters, strict=True) if id(each) in ids]
        names = self._shared[pair]
        if not names or not any(each.grad is not None for each in parameters):
            return
        known = next((each for each in self._facts.shared if each.pair == pair), None)
        if known is None:
            known = SharedSteps(
                pair=pair,
                first=last[1].name,
                second=state.name,
                first_site=self.use_of(last[1]).step_site,
                site=calling_site(),
                parameters=names,
            )
            self._facts.shared.append(known)
        known.times += 1

    def clipped(self, parameters: list[Any], owners: list[tuple[Any, TrackedOptimizer]], limit: float | None) -> None:
        """Look for gradients that a clip counts in its norm, and that no optimizer uses."""
        self._clips += 1
        self._wide_clips.clipped(parameters, owners, limit, look=is_due(self._clips))

    def checkpoint_cuts(self, frame: FrameType | None, *, training: bool) -> None:
        """Note a checkpoint that cuts the graph, if what it runs has parameters of an optimizer."""
        while frame is not None and "run_function" not in frame.f_locals:
            frame = frame.f_back
        function = None if frame is None else frame.f_locals["run_function"]
        function = getattr(function, "func", function)  # of a partial
        module = getattr(function, "__self__", function)
        if training and isinstance(module, nn.Module):
            held = [each for each in nn.Module.parameters(module) if each.requires_grad and self.is_held(each)]
            if held:
                known = self._facts.cut_checkpoints.setdefault(
                    calling_site(), CountedCalls(step=self._tracker.steps + 1, what=type(module).__name__)
                )
                known.times += 1

    # Backward passes

    def backward_begins(self, roots: Any, *, partly: bool) -> None:
        """Look at what a pass will reach. partly: it computes the gradients of some tensors only."""
        self._outside.pass_begins()
        self._wide_clips.backward_begins()
        given = [roots] if isinstance(roots, Tensor) else [each for each in roots if isinstance(each, Tensor)]
        if len(given) == 1 and given[0].grad_fn is None:
            loss = given[0]
            if loss.requires_grad and not isinstance(loss, nn.Parameter) and not self.is_held(loss):
                site = calling_site()
                calls = self._facts.leaf_losses.setdefault(site, CountedCalls(step=self._tracker.steps + 1))
                calls.times += 1
            return
        self._backwards += 1
        if self._empty:
            cuts = {
                index: cut_before_loss(sys._getframe(1), partial(_is_in, ids)) for index, ids in self._empty.items()
            }
            lines = {index: site for index, site in cuts.items() if site is not None}
            self._cuts = _Cuts(self._backwards, calling_site(), lines)
        self._looks = not partly and (self._looks or self.lines.on or is_due(self._backwards - self._looked_from))
        if not self._looks:
            self.drawn.forget()
            self._points.clear()
            return
        self.drawn.look(given[0], self._tracker.steps + 1)
        flat = self._flat_sites if self._flat_sites and leads_to(given[0].grad_fn, self.is_held) else {}
        note_cut_term(sys._getframe(1), self._facts, self._tracker.steps + 1, flat, self._is_trained_by)
        self._points.clear()
        note_diluted_mean(given[0], self._facts, self._tracker.steps + 1)
        self._crossed.look(given[0], self._tracker.steps + 1, sys._getframe(1))
        note_target_graph(given[0], self._facts, self._tracker.steps + 1, self.lines)
        note_unreachable_target(given[0], self._facts, self._tracker.steps + 1, self.lines)
        note_wrong_normalisation(given[0], self._facts, self._tracker.steps + 1, self.lines)
        note_sign_of_terms(given[0], self._facts, self._tracker.steps + 1, self.lines)
        if not self._outside.any_loaded:  # else it may be to forget something
            note_sign(given[0], self._facts, self._tracker.steps + 1)
        self._mixed.look(given[0], self._tracker.steps + 1, {each.batch_size for each in self._facts.loaders})
        self._source.look(given[0])
        self._note_term_weights(given[0])
        if self._zeros_wanted is not None and self.lines.on and not partly:
            watch_for_zeros(given[0], self._zeros_wanted)
        parameter = None if self._lost_from is None or not self.lines.on or partly else self._lost_from()
        self._lost = None if parameter is None else LostGradient(given[0], parameter)
        users: dict[Any, Any] = {}  # by node of the graph: the one that it was found from
        pending: list[tuple[Any, Any]] = [(each.grad_fn, None) for each in given]
        while pending:
            node, user = pending.pop()
            if node is None or node in users:
                continue
            users[node] = user
            if len(users) > MOST_NODES:
                return
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self._outside.reached(leaf, user)
            pending += [(before, node) for before, _ in node.next_functions]

    def _note_term_weights(self, loss: Tensor) -> None:
        """Note the sizes of the parameters of an optimizer that are nothing but weights of terms of the loss."""
        if len(self._facts.optimizers) < 2:  # another one has the model
            return
        weights = weights_of_terms(loss)
        for optimizer, state in self._tracker.optimizers.pairs() if weights else ():
            own = [each for each in parameters_of(optimizer) if each.requires_grad]
            if not own or not all(id(each) in weights and is_plain(each) for each in own):
                continue
            if not any(group.get("maximize") for group in optimizer.param_groups):
                with torch.no_grad():
                    sizes = AsyncScalars(torch.stack([each.detach().abs().mean().float() for each in own]))
                self._pending.append((sizes, partial(_add_size, self.use_of(state))))

    def find_zeros(self, found: Callable[[CallSite], None]) -> None:
        """Look in the next passes for the operation that makes gradients zero."""
        if self._zeros_wanted is None and self.lines.request():
            self._zeros_wanted = found

    def find_lost(self, parameter: Tensor, found: Callable[[LostAt], object]) -> None:
        """Look in the next passes for the line at which the gradient of a parameter is lost."""
        if self.lines.request():
            self._lost_from, self._lost_wanted = weakref.ref(parameter), found

    def backward_ended(self) -> None:
        self.lines.pass_ended()
        if self._lost and self._lost_wanted is not None and (loss := self._lost.end()) is not None:
            self._lost_wanted(loss)
            self._lost_from = self._lost_wanted = None
        self._lost = None
        if not self._looks:
            return
        self._looks = False
        with torch.no_grad():
            self._outside.pass_ended(self._tracker.steps + 1, self._backwards, self._pending)
            self._compare_unused()
        self.settle()

    def _compare_unused(self) -> None:
        """See whether the script itself changes parameters of optimizers that make no steps."""
        for optimizer, state in self._tracker.optimizers.pairs():
            if state.steps or state.index in self._by_hand:
                continue
            if state.index not in self._unused:
                plain = [each for each in parameters_of(optimizer) if is_plain(each)]
                self._unused[state.index] = [SampledValues(each) for each in plain[:SAMPLED_TENSORS]]
            for values in self._unused[state.index]:
                self._pending.append((values.changed(), partial(self._note_by_hand, state.index)))

    def _note_by_hand(self, index: int, numbers: list[float]) -> None:
        if numbers[0]:
            self._by_hand.add(index)

    def _is_trained_by(self, term: Tensor) -> bool:
        """Whether a term of a loss has gradients for more than the inputs of which ``autograd.grad`` took gradients."""

        def is_trained(leaf: Tensor) -> bool:
            point, version = self._points.get(id(leaf), (None, 0))
            # The script updates by hand what it changes in between.
            is_point = point is not None and point() is leaf and leaf._version == version
            return isinstance(leaf, nn.Parameter) or self.is_held(leaf) or not is_point

        return leads_to(term.grad_fn, is_trained)

    def is_held(self, parameter: Tensor) -> bool:
        """Whether an optimizer has, or had, the parameter."""
        known = self._held.get(id(parameter))
        return known is not None and known() is parameter

    # Results

    def settle(self, *, wait: bool = False) -> None:
        """Take the numbers that have arrived."""
        self._wide_clips.settle(wait=wait)
        left = []
        for numbers, take in self._pending:
            if wait or numbers.arrived:
                take(numbers.read())
            else:
                left.append((numbers, take))
        self._pending = left

    def update(self, modules_of: Callable[[int], dict[str, bool]]) -> None:
        """Bring the facts up to date. modules_of: see ``DtypeFlow``."""
        for state in self._tracker.optimizers.states():
            use = self.use_of(state)
            use.steps, use.backwards, use.zeroed = state.steps, state.passes, state.zeroed
            use.cleared = state.cleared
            use.kept = sum(each.arrived and each.read()[0] > 0 for each in state.kept)
            use.by_hand = state.index in self._by_hand
            use.cut_off = _cut_off(use, modules_of(state.index))
            use.cut_at = cut_after(use.cut_off[-1]) if use.cut_off and use.cut_at is None else use.cut_at
        self._facts.outside = list(self._outside.groups(self._wide_clips.over))


def _is_in(ids: set[int], leaf: Tensor) -> bool:
    return id(leaf) in ids


def _note_rate(use: OptimizerUse, optimizer: Any, step: int) -> None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    known = [float(lr) for lr in rates if isinstance(lr, int | float) or (isinstance(lr, Tensor) and lr.is_cpu)]
    if not known or len(known) < len(rates):
        return
    use.lr = max(known)
    use.peak_lr = max(use.peak_lr, use.lr)
    if use.lr > LOW * use.peak_lr:
        use.low_since = None
    elif use.low_since is None:
        use.low_since = step


def _cut_off(use: OptimizerUse, modules: dict[str, bool]) -> tuple[str, ...]:
    """Return the modules, from the first that ran on, none of whose parameters has got a gradient.

    modules: those with parameters of their own, in the order in which they ran, and whether gradients were enabled. A
    module that got none in the middle or at the end may have an output that is not used.
    """
    found: list[str] = []
    for name, graded in modules.items():
        own = [each for each in use.ungraded if each.rpartition(".")[0] == name]
        if not graded or not own:
            break
        found.append(name)
    return tuple(found) if len(found) < len(modules) else ()


def _add_size(use: OptimizerUse, numbers: list[float]) -> None:
    use.term_weights.append(sum(numbers) / len(numbers))


def _add_comparison(use: OptimizerUse, step: int, numbers: list[float]) -> None:
    tried, moved, change, size, due = numbers
    if tried:
        use.compared += 1
        use.tried = int(tried)
        use.unchanged += moved == 0
        if moved or not due:
            use.still = 0
        else:
            use.still, use.still_from = use.still + 1, use.still_from if use.still else step
        if size:
            use.largest_change = max(use.largest_change, (change / size) ** 0.5)
