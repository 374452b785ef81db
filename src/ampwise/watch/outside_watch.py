"""Observe parameters that get gradients and that no optimizer has, and find the modules that own them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.graph_cuts import leads_to
from ampwise.watch.inspection import parameters_of
from ampwise.watch.learning import OutsideParameters, WideClip
from ampwise.watch.made_code import assigned_at, converted_at
from ampwise.watch.models import name_without_wrappers
from ampwise.watch.sampled_values import SampledValues, is_plain
from ampwise.watch.tracker import CallTracker

__all__ = ["OutsideWatch"]

TRACED_BACK = 16  # parameters outside of optimizers
MOST_SEARCHES = 4  # for the modules that own a parameter
CONVERSIONS = 4  # between a parameter and the attribute of a module
PLAIN_LEAVES = 64  # that are no parameters

Pending = list[tuple[AsyncScalars, Callable[[list[float]], None]]]


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
    is_inner: bool = False  # the module is a part of the outermost one
    position: int = 0  # among the parameters of the outermost module
    held: int = 0  # parameters of the outermost module that an optimizer has
    trained: bool = True  # the module itself is in training mode
    converted_at: CallSite | None = None  # the line that made an attribute of the module from it


class OutsideWatch:
    """Leaves outside of optimizers that backward passes reach. is_held: whether an optimizer has, or had, a leaf."""

    def __init__(self, tracker: CallTracker, is_held: Callable[[Tensor], bool]) -> None:
        self._tracker, self._is_held = tracker, is_held
        self._known: dict[int, _Outside] = {}
        self._reached: list[tuple[Tensor, Any]] = []  # by the running pass, with the nodes that use them
        self._loaded: dict[int, weakref.ref[Tensor]] = {}
        self._inputs: set[int] = set()  # ids of tensors by which ``autograd.grad`` has differentiated
        self._searches = 0

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def any_loaded(self) -> bool:
        """Whether a model was loaded."""
        return bool(self._loaded)

    def loaded(self, model: nn.Module) -> None:
        """Note that the parameters of a model come from elsewhere, perhaps trained."""
        for each in nn.Module.parameters(model):
            self._loaded[id(each)] = weakref.ref(each)

    def differentiated(self, inputs: tuple[Tensor, ...]) -> None:
        """Note tensors by which the script differentiates itself."""
        self._inputs |= {id(each) for each in inputs if each.is_leaf}

    def held(self, parameter: Tensor) -> None:
        """Note that an optimizer has got a parameter."""
        self._known.pop(id(parameter), None)

    def pass_begins(self) -> None:
        self._reached = []

    def reached(self, leaf: Tensor, user: Any) -> None:
        """Note a leaf that the running pass reaches, and the node that uses it."""
        if not self._is_held(leaf) and self._may_be_trained(leaf):
            self._reached.append((leaf, user))

    def _may_be_trained(self, leaf: Tensor) -> bool:
        """Whether a leaf is a parameter, or a tensor that the script may have meant to be one."""
        if isinstance(leaf, nn.Parameter):
            return True
        is_known = id(leaf) in self._known
        return id(leaf) not in self._inputs and (is_known or len(self._known) < PLAIN_LEAVES)

    def pass_ended(self, step: int, number: int, pending: Pending) -> None:
        """Look at the gradients that a pass has given. number: of the pass. pending: what waits for numbers."""
        reached, self._reached = self._reached, []
        for leaf, user in reached:
            if leaf.grad is None:
                continue
            known = self._known.get(id(leaf))
            if known is None or known.ref() is not leaf:
                values = SampledValues(leaf) if is_plain(leaf) else None
                known = self._known[id(leaf)] = _Outside(weakref.ref(leaf), tuple(leaf.shape), values, step, number)
                if len(self._known) <= TRACED_BACK:
                    known.after_trained = leads_to(user, self._is_held)
            elif known.values is not None and not known.changed:
                pending.append((known.values.changed(), partial(_note_change, known)))
            known.samples, known.last_step, known.last_pass = known.samples + 1, step, number
        if any(each.samples == 2 for each in self._known.values()) and self._searches < MOST_SEARCHES:
            self._find_owners()

    # Owners

    def search_owners(self) -> dict[int, tuple[str, nn.Module, nn.Module]]:
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
        owners = self.search_owners()
        positions = {key: position for position, key in enumerate(owners)}
        held: dict[int, int] = {}  # parameters that optimizers have, by outermost module
        for optimizer, _ in self._tracker.optimizers.pairs():
            for each in parameters_of(optimizer):
                if id(each) in owners:
                    outermost = id(owners[id(each)][2])
                    held[outermost] = held.get(outermost, 0) + 1
        for key, known in self._known.items():
            if key in owners:
                name, module, root = owners[key]
                name = name_without_wrappers(name)
                is_one_of_many = module is root and type(root).__module__.startswith("torch.")  # of which `Linear`?
                if is_one_of_many and (variable := _variable_of(root)):
                    name = f"{variable}.{name}"
                known.owner = _Owner(
                    model=type(root).__name__,
                    position=positions[key],
                    key=id(root),
                    name=name,
                    is_inner=module is not root,
                    held=held.get(id(root), 0),
                    trained=module.training,
                )
        if any(key not in owners for key in self._known):
            self._find_converted(owners, held)

    def _find_converted(self, owners: Mapping[int, tuple[str, nn.Module, nn.Module]], held: Mapping[int, int]) -> None:
        """Look for attributes of modules that are made of parameters without a module: ``nn.Parameter(x).float()``."""
        roots = {id(root): root for _, _, root in owners.values()}.values()
        parts = [(prefix, module, root) for root in roots for prefix, module in root.named_modules()]
        for prefix, module, root in parts:
            for name, value in vars(module).items():
                is_plain = isinstance(value, Tensor) and value.is_leaf and value.requires_grad
                leaf = value if is_plain else _leaf_of(value) if isinstance(value, Tensor) else None
                known = self._known.get(id(leaf))
                if known is None or known.ref() is not leaf or id(leaf) in owners:
                    continue
                known.owner = _Owner(
                    model=type(root).__name__,
                    key=id(root),
                    name=name_without_wrappers(f"{prefix}.{name}".lstrip(".")),
                    is_inner=module is not root,
                    held=held.get(id(root), 0),
                    trained=module.training,
                    converted_at=assigned_at(type(module), name) if is_plain else converted_at(type(module), name),
                )

    # Results

    def groups(self, clip_over: Callable[[list[int]], WideClip | None]) -> Iterator[OutsideParameters]:
        """Yield the parameters that no optimizer had at any time, by module. clip_over: the clip that includes some."""
        groups: dict[tuple[int, bool, CallSite | None], list[_Outside]] = {}
        clips: dict[tuple[int, bool, CallSite | None], WideClip | None] = {}
        for key, known in self._known.items():
            leaf = known.ref()
            is_plain = leaf is not None and not isinstance(leaf, nn.Parameter)
            if known.changed or known.samples < 3 or (is_plain and (known.owner is None or key in self._inputs)):
                continue
            loaded = self._loaded.get(key)
            owner = known.owner or _Owner()
            is_loaded = loaded is not None and loaded() is known.ref()
            # A network on the output of the trained one is part of the loss; a loss may have parameters of its own.
            judges = known.after_trained and not owner.held and owner.is_inner
            fixed = is_loaded or judges or not owner.trained
            group = (owner.key, fixed, owner.converted_at)
            groups.setdefault(group, []).append(known)
            clips[group] = clips.get(group) or clip_over([key])
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
                is_plain=not isinstance(members[0].ref(), nn.Parameter | None),
                clip=clips[group],
            )


def _variable_of(module: nn.Module) -> str:
    """Return what the running code of the script calls a module: a variable, or an attribute of ``self``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if code_owner(frame.f_code.co_filename) == "own":
            here = frame.f_locals
            attributes = getattr(here.get("self"), "__dict__", {})
            called = {**{f"self.{name}": value for name, value in attributes.items()}, **frame.f_globals, **here}
            for name, value in called.items():
                if value is module:
                    return name
        frame = frame.f_back
    return ""


def _leaf_of(value: Tensor) -> Tensor | None:
    """Return the tensor that a conversion, or several, has made this one of; None if it is something else."""
    node: Any = value.grad_fn
    for _ in range(CONVERSIONS):
        if node is None or hasattr(node, "variable"):
            break
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    return getattr(node, "variable", None)


def _note_change(known: _Outside, numbers: list[float]) -> None:
    known.changed |= numbers[0] > 0
