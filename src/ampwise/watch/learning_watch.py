"""Observe which parameters get gradients, which an optimizer holds, and which a step changes.

Nothing syncs with a device, and only a few values of a few tensors are copied, at the first steps and then ever less
often.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.cut_terms import note_cut_term
from ampwise.watch.graph_lines import GraphLines, watch_for_zeros
from ampwise.watch.inspection import parameters_of, precisions_of, unwrapped
from ampwise.watch.learning import (
    CountedCalls,
    Learning,
    OptimizerUse,
    OutsideParameters,
    SharedMemory,
    SharedSteps,
    WideClip,
)
from ampwise.watch.loss_means import note_crossed_loss, note_diluted_mean, note_wrong_normalisation
from ampwise.watch.made_code import converted_at
from ampwise.watch.models import name_without_wrappers
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker
from ampwise.watch.wide_clips import WideClips

__all__ = ["LearningWatch", "SampledValues", "is_due", "is_plain"]

MOST_NODES = 20_000  # of an autograd graph whose leaves are looked at
EMPTY_STEPS = 12  # in a row, after which the next backward pass is looked at
TRACED_BACK = 16  # parameters outside of optimizers
MOST_SEARCHES = 4  # for the modules that own a parameter
MOST_RESTARTS = 8  # a script may make modules in each step
CONVERSIONS = 4  # between a parameter and the attribute of a module
SAMPLED_TENSORS = 32
SAMPLED_VALUES = 32  # of each
STILL = 20  # steps in a row that change nothing, each of which is looked at; some optimizers apply one of several
LOW = 1e-6  # of the highest learning rate: next to nothing


def is_due(count: int) -> bool:
    """Whether to look closely this time: at the first ones, and then less and less often."""
    return count <= 10 or count.bit_count() == 1 or count % 256 == 0


# Values


def _some_values(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES]


def is_plain(tensor: Tensor | None) -> bool:
    """Whether some values can be viewed: a dense, contiguous floating-point tensor that is not sharded."""
    return (
        tensor is not None
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.dtype.is_floating_point
        and not hasattr(tensor, "placements")
        and not tensor.is_meta
    )


class SampledValues:
    """A few values of a tensor, to be compared with later ones on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self._view = _some_values(tensor)
        self._before = self._view.clone()
        self.count = self._view.numel()

    def changed(self) -> AsyncScalars:
        """Return the number of values that have changed since."""
        return AsyncScalars((self._view != self._before).sum().float())


class _StepComparison:
    """Some weights with a gradient before and after a step."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        chosen = parameters[:: max(len(parameters) // SAMPLED_TENSORS, 1)][:SAMPLED_TENSORS]
        self._views = [_some_values(each) for each in chosen]
        self._before = [each.clone() for each in self._views]
        gradients = torch.cat([_some_values(each.grad).float() for each in chosen])  # type: ignore[arg-type]
        self._tried = (gradients != 0) & gradients.isfinite()
        noticed = torch.cat([each.abs() * torch.finfo(each.dtype).eps for each in self._views])
        self._due = self._tried & ((lr * gradients).abs() > noticed)

    def after_step(self) -> AsyncScalars:
        """Return how many values had a gradient and how many have changed, and the squares of change and values.

        The last number says how many would have changed, had the gradient times the learning rate been subtracted.
        """
        pairs = list(zip(self._views, self._before, strict=True))
        moved = torch.cat([now != then for now, then in pairs]) & self._tried
        change = torch.cat([(now - then).float() for now, then in pairs])[self._tried]
        size = torch.cat([then.float() for _, then in pairs])[self._tried]
        return AsyncScalars(
            torch.stack(
                [
                    self._tried.sum().float(),
                    moved.sum().float(),
                    change.square().sum(),
                    size.square().sum(),
                    self._due.sum().float(),
                ]
            )
        )


# State by object


@dataclass(slots=True)
class _Samples:
    """What the samples of an optimizer's steps have shown for each of its parameters."""

    refs: list[weakref.ref[Tensor]]
    graded: list[bool]
    comparison: _StepComparison | None = None


@dataclass(slots=True)
class _Outside:
    """A parameter that got gradients while no optimizer had it."""

    ref: weakref.ref[Tensor]
    shape: tuple[int, ...]
    values: SampledValues | None
    first_step: int
    first_pass: int  # passes count on where a new optimizer begins with step 1
    last_step: int = 0
    last_pass: int = 0
    samples: int = 0
    changed: bool = False  # the script updates it itself
    after_trained: bool = False  # it is used on something that was computed from parameters of an optimizer
    owner: _Owner | None = None


@dataclass(slots=True)
class _Owner:
    """The module that has a parameter, as far as messages need it."""

    model: str = ""  # class of the outermost module
    key: int = 0  # its id
    name: str = ""  # of the parameter
    position: int = 0  # among the parameters of the outermost module
    held: int = 0  # parameters of the outermost module that an optimizer has
    trained: bool = True  # the module itself is in training mode
    converted_at: CallSite | None = None  # the line that made an attribute of the module from it


class LearningWatch:
    """Observe the optimizers' steps and the backward passes."""

    def __init__(self, facts: Learning, tracker: CallTracker, lines: GraphLines) -> None:
        self._facts, self._tracker, self.lines = facts, tracker, lines
        self._zeros_wanted: Callable[[CallSite], None] | None = None
        self._wide_clips = WideClips(tracker)
        self._uses: dict[int, OptimizerUse] = {}
        self._samples: dict[int, _Samples] = {}
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._loaded: dict[int, weakref.ref[Tensor]] = {}
        self._outside: dict[int, _Outside] = {}
        # Parameters outside of optimizers that the running backward pass reaches, and the nodes that use them.
        self._reached: list[tuple[Tensor, Any]] = []
        self._looks = False  # at the running pass or, after a step without gradients, at the next one
        self._unused: dict[int, list[SampledValues]] = {}  # by optimizer that has not made a step
        self._by_hand: set[int] = set()  # optimizers whose parameters the script updates itself
        self._searches = self._backwards = self._clips = 0
        self._restarts, self._looked_from = 0, 0  # of the schedule of looks, and the pass at which it began
        self._pending: list[tuple[AsyncScalars, Callable[[list[float]], None]]] = []
        self._shared: dict[tuple[int, int], list[str]] = {}  # names of parameters that two optimizers have
        self._last: tuple[weakref.ref[Any], TrackedOptimizer, int] | None = None  # the last step

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
                self._outside.pop(id(each), None)

    def loaded(self, model: nn.Module) -> None:
        """Note that the parameters of a model come from elsewhere, perhaps trained."""
        for each in nn.Module.parameters(model):
            self._loaded[id(each)] = weakref.ref(each)

    def parameter_made(self) -> bool:
        """Note that a module got a parameter. Return whether to look at the next passes, as training has begun."""
        if not self._backwards or self._restarts >= MOST_RESTARTS:
            return False
        if self._backwards > self._looked_from:  # else another one of the same module
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
            if is_dropped:
                use.emptied[state.dropped_at] += 1  # type: ignore[index]
        else:
            use.empty_at_last = 0
            if state.pending:
                use.backward_site = state.pending[-1].event.site
        with torch.no_grad():
            self._note_shared_step(optimizer, state, parameters)
            if self._pending:
                self.settle()
            if is_due(use.followed) or 0 < use.still < STILL:
                use.precisions = precisions_of(optimizer)
                self._sample(use, parameters, state)

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
            owners = self._search_owners()
            use.replaced = sum(id(each) not in owners for _, each in left)
        plain = [each for each in parameters if is_plain(each) and is_plain(each.grad)]
        plain = [each for each in plain if each.device == plain[0].device == each.grad.device]
        samples.comparison = _StepComparison(plain, use.lr or 0.0) if plain else None

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

    # Backward passes

    def backward_begins(self, roots: Any, *, partly: bool) -> None:
        """Look at what a pass will reach. partly: it computes the gradients of some tensors only."""
        self._reached = []
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
        self._looks = not partly and (self._looks or self.lines.on or is_due(self._backwards - self._looked_from))
        if not self._looks:
            return
        note_cut_term(sys._getframe(1), self._facts, self._tracker.steps + 1)
        note_diluted_mean(given[0], self._facts, self._tracker.steps + 1)
        note_crossed_loss(given[0], self._facts, self._tracker.steps + 1, self.lines)
        note_wrong_normalisation(given[0], self._facts, self._tracker.steps + 1, self.lines)
        if self._zeros_wanted is not None and self.lines.on and not partly:
            watch_for_zeros(given[0], self._zeros_wanted)
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
            if isinstance(leaf, nn.Parameter) and not self.is_held(leaf):
                self._reached.append((leaf, user))
            pending += [(before, node) for before, _ in node.next_functions]

    def find_zeros(self, found: Callable[[CallSite], None]) -> None:
        """Look in the next passes for the operation that makes gradients zero."""
        if self._zeros_wanted is None and self.lines.request():
            self._zeros_wanted = found

    def backward_ended(self) -> None:
        self.lines.pass_ended()
        reached, self._reached = self._reached, []
        if not self._looks:
            return
        self._looks = False
        step = self._tracker.steps + 1
        with torch.no_grad():
            for leaf, user in reached:
                if leaf.grad is None:
                    continue
                known = self._outside.get(id(leaf))
                if known is None or known.ref() is not leaf:
                    values = SampledValues(leaf) if is_plain(leaf) else None
                    known = self._outside[id(leaf)] = _Outside(
                        weakref.ref(leaf), tuple(leaf.shape), values, step, self._backwards
                    )
                    if len(self._outside) <= TRACED_BACK:
                        known.after_trained = self._depends_on_held(user)
                elif known.values is not None and not known.changed:
                    self._pending.append((known.values.changed(), partial(_note_change, known)))
                known.samples, known.last_step, known.last_pass = known.samples + 1, step, self._backwards
            if any(each.samples == 2 for each in self._outside.values()) and self._searches < MOST_SEARCHES:
                self._find_owners()
            self._compare_unused()
        self.settle()

    def _depends_on_held(self, node: Any) -> bool:
        """Return whether a node's inputs were computed from a tensor that an optimizer has."""
        pending, seen = [node], set[Any]()
        while pending and len(seen) < MOST_NODES:
            each = pending.pop()
            if each is None or each in seen:
                continue
            seen.add(each)
            leaf = getattr(each, "variable", None)
            if leaf is not None and self.is_held(leaf):
                return True
            pending += [before for before, _ in each.next_functions]
        return False

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

    def is_held(self, parameter: Tensor) -> bool:
        """Whether an optimizer has, or had, the parameter."""
        known = self._held.get(id(parameter))
        return known is not None and known() is parameter

    # Owners

    def _search_owners(self) -> dict[int, tuple[str, nn.Module, nn.Module]]:
        """Return, by id, the parameters of all modules: name, the module itself and the outermost one."""
        self._searches += 1
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        inner = {id(child) for each in modules for child in vars(each).get("_modules", {}).values()}
        found: dict[int, tuple[str, nn.Module, nn.Module]] = {}
        for root in [each for each in modules if id(each) not in inner]:
            for prefix, module in root.named_modules():
                for name, each in module._parameters.items():
                    if each is not None:
                        found.setdefault(id(each), (f"{prefix}.{name}".lstrip("."), module, root))
        return found

    def _find_owners(self) -> None:
        owners = self._search_owners()
        positions = {key: position for position, key in enumerate(owners)}
        held: dict[int, int] = {}  # parameters that optimizers have, by outermost module
        for optimizer, _ in self._tracker.optimizers.pairs():
            for each in parameters_of(optimizer):
                if id(each) in owners:
                    outermost = id(owners[id(each)][2])
                    held[outermost] = held.get(outermost, 0) + 1
        for key, known in self._outside.items():
            if key in owners:
                name, module, root = owners[key]
                known.owner = _Owner(
                    model=type(root).__name__,
                    position=positions[key],
                    key=id(root),
                    name=name_without_wrappers(name),
                    held=held.get(id(root), 0),
                    trained=module.training,
                )
        if any(key not in owners for key in self._outside):
            self._find_converted(owners, held)

    def _find_converted(self, owners: Mapping[int, tuple[str, nn.Module, nn.Module]], held: Mapping[int, int]) -> None:
        """Look for attributes of modules that are made of parameters without a module: ``nn.Parameter(x).float()``."""
        roots = {id(root): root for _, _, root in owners.values()}.values()
        parts = [(prefix, module, root) for root in roots for prefix, module in root.named_modules()]
        for prefix, module, root in parts:
            for name, value in vars(module).items():
                leaf = _leaf_of(value) if isinstance(value, Tensor) else None
                known = self._outside.get(id(leaf))
                if known is None or known.ref() is not leaf or id(leaf) in owners:
                    continue
                known.owner = _Owner(
                    model=type(root).__name__,
                    key=id(root),
                    name=name_without_wrappers(f"{prefix}.{name}".lstrip(".")),
                    held=held.get(id(root), 0),
                    trained=module.training,
                    converted_at=converted_at(type(module), name),
                )

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
        self._facts.outside = list(self._groups())

    def _groups(self) -> Iterator[OutsideParameters]:
        groups: dict[tuple[int, bool, CallSite | None], list[_Outside]] = {}
        clips: dict[tuple[int, bool, CallSite | None], WideClip | None] = {}
        for key, known in self._outside.items():
            if known.changed or known.samples < 3:
                continue
            loaded = self._loaded.get(key)
            owner = known.owner or _Owner()
            is_loaded = loaded is not None and loaded() is known.ref()
            # A network on the output of the trained one is part of the loss; a loss may have parameters of its own.
            judges = known.after_trained and not owner.held and "." in owner.name
            fixed = is_loaded or judges or not owner.trained
            group = (owner.key, fixed, owner.converted_at)
            groups.setdefault(group, []).append(known)
            clips[group] = clips.get(group) or self._wide_clips.over([key])
        for group, members in groups.items():
            members.sort(key=lambda each: each.owner.position if each.owner else 0)
            owner = members[0].owner or _Owner()
            yield OutsideParameters(
                model=owner.model,
                names=[each.owner.name if each.owner else "" for each in members],
                shapes=[each.shape for each in members],
                samples=max(each.samples for each in members),
                first_step=min(each.first_step for each in members),
                last_step=max(each.last_step for each in members),
                passes=max(each.last_pass for each in members) - min(each.first_pass for each in members),
                held=owner.held,
                fixed=group[1],
                converted_at=group[2],
                clip=clips[group],
            )


def _leaf_of(value: Tensor) -> Tensor | None:
    """Return the tensor that a conversion, or several, has made this one of; None if it is something else."""
    node: Any = value.grad_fn
    for _ in range(CONVERSIONS):
        if node is None or hasattr(node, "variable"):
            break
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    return getattr(node, "variable", None)


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


def _note_change(known: _Outside, numbers: list[float]) -> None:
    known.changed |= numbers[0] > 0
