"""How much each module suffers from each format, for all modules in one pass in FP32.

In that pass every unit is run once more by itself, just when its gradient has arrived: on the very inputs it had, and
back from the very gradient it got, in FP32 and in each format with the rest left wide. What is before it is not
computed again, and what comes after it is in the gradient. What this gives is an estimate, by which modules are
ranked; what counts is measured afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_map

from ampwise.randomness import captured, restore_random
from ampwise.tune.search.arrangement import Arrangement, arrangement_of
from ampwise.tune.search.choices import WIDEST, Choice
from ampwise.tune.search.graph import before_softmax
from ampwise.tune.search.units import REST, Unit

__all__ = ["Local", "Look", "Looking", "Ran", "scores_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What a format does to a module by itself."""

    output: float  # the squared relative error of what it returns
    gradient: float  # that of what it passes back, or of the gradient of its parameters, whichever is worse
    row: float  # that of the loss of a row of the batch, to first order, as far as the module's output moves it
    loss: float  # the relative error of the loss of the batch, where the errors of rows are independent

    @property
    def score(self) -> float:
        """An estimate of the error that the whole has where this module alone has the format."""
        return max(max(self.gradient, self.output) / 2 + self.row, self.loss)

    def __or__(self, other: Local) -> Local:
        """The worse of two calls."""
        return max(self, other, key=lambda local: local.score)


DOES_NOT_RUN = Local(output=math.inf, gradient=math.inf, row=math.inf, loss=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A module that was run by itself: what it was given, what it returned and what it was told of that."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    told: tuple[Tensor, ...]  # the gradients of the outputs
    gradients: tuple[tuple[Tensor, ...], ...]  # of the inputs; then of the parameters, those of a module together


@dataclass(slots=True, kw_only=True)
class Look:
    """What was seen of a unit."""

    locals: dict[str, Local] = field(default_factory=dict)  # by format
    facts: Any = None


def scores_of(look: Look | None, choices: Sequence[Choice]) -> tuple[float, ...]:
    """What each format is thought to do to a unit; 0 where nothing is known."""
    found = {} if look is None else look.locals
    return tuple(found[choice.name].score if choice.name in found else 0.0 for choice in choices)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of a unit was made with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: Mapping[str, Any]


Facts = Callable[[Unit, Ran, Mapping[str, Ran], bool], Any]  # the last: whether its output goes into a softmax


class Looking:
    """Runs units by themselves while a pass goes through them. ``only``: the names of those that are looked at."""

    def __init__(
        self,
        units: Sequence[Unit],
        choices: Sequence[Choice],
        device: torch.device,
        facts: Facts,
        only: Container[str],
    ) -> None:
        self.looks = {unit.name: Look() for unit in units if unit.name != REST and unit.name in only}
        self._loss = 1.0
        self._made: dict[Any, str] = {}  # by the node that made an output, whose it is
        self._into_softmax: set[str] = set()
        self._units = {unit.name: unit for unit in units}
        self._narrower = [choice for choice in choices if choice.name != WIDEST]
        self._widest = choices[-1]
        self._device, self._facts = device, facts
        self._arranged: dict[tuple[str, str], Arrangement] = {}
        self._alone = False  # a unit is being run by itself

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a forward and a backward pass. Nothing of its graph is held afterwards."""
        with ExitStack() as stack:
            for name in self.looks:
                unit, calls = self._units[name], []  # type: tuple[Unit, list[_Call]]
                stack.callback(unit.module.register_forward_pre_hook(self._enters(calls), with_kwargs=True).remove)
                stack.callback(unit.module.register_forward_hook(self._leaves(unit, calls, stack)).remove)
            stack.callback(self._made.clear)
            yield

    def comes_back(self, loss: Tensor) -> None:
        """The forward pass is over, and the backward pass begins."""
        self._loss = float(loss.detach())
        self._into_softmax = {self._made[node] for node in before_softmax(loss) if node in self._made}

    def _enters(self, calls: list[_Call]) -> Callable[..., None]:
        def enters(module: Module, args: Any, kwargs: Any) -> None:
            if not self._alone and torch.is_grad_enabled():
                calls.append(
                    _Call(tree_map(_apart, args), tree_map(_apart, kwargs), captured(self._device, host=False))
                )

        return enters

    def _leaves(self, unit: Unit, calls: list[_Call], stack: ExitStack) -> Callable[..., None]:
        def leaves(module: Module, args: Any, output: Any) -> None:
            if self._alone or not calls:
                return
            call = calls.pop()
            outputs = _trained(tree_flatten(output)[0])
            self._made.update((each.grad_fn, unit.name) for each in outputs)
            if outputs:
                # A hook knows the nodes that it is on: as long as it is there, each keeps the other.
                hook = register_multi_grad_hook(outputs, lambda gradients: self._look(unit, call, gradients))
                stack.callback(hook.remove)

        return leaves

    def _look(self, unit: Unit, call: _Call, told: Sequence[Tensor | None]) -> None:
        """When the gradient has arrived: in the midst of the backward pass."""
        if self._alone or not any(each is not None for each in told):
            return
        self._alone = True
        now = captured(self._device, host=False)
        try:
            wide = self._run_if_it_can(unit, call, told, self._widest)
            if wide is None:  # it needs more than its arguments: nothing is known of it by itself
                return
            narrow = {choice.name: self._run_if_it_can(unit, call, told, choice) for choice in self._narrower}
            look = self.looks[unit.name]
            if look.facts is None:
                ran_at_all = {name: ran for name, ran in narrow.items() if ran is not None}
                look.facts = self._facts(unit, wide, ran_at_all, unit.name in self._into_softmax)
            for name, ran in narrow.items():
                local = DOES_NOT_RUN if ran is None else _local(wide, ran, self._loss)
                look.locals[name] = look.locals[name] | local if name in look.locals else local
        finally:
            self._alone = False
            restore_random(now, self._device)

    def _run_if_it_can(self, unit: Unit, call: _Call, told: Sequence[Tensor | None], choice: Choice) -> Ran | None:
        try:
            return self._run(unit, call, told, choice)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # two types in one operation, an operation that has no such type, whatever a user checks
            return None

    def _run(self, unit: Unit, call: _Call, told: Sequence[Tensor | None], choice: Choice) -> Ran:
        restore_random(call.random, self._device)
        with torch.enable_grad(), self._arrangement(unit, choice).on(unit.module):
            args, kwargs = tree_map(_leaf, call.args), tree_map(_leaf, dict(call.kwargs))
            given = [each for each in tree_flatten((args, kwargs))[0] if _is_float(each)]
            returned = _trained(tree_flatten(unit.module(*args, **kwargs))[0])
            pairs = [(out, by.to(out.dtype)) for out, by in zip(returned, told, strict=True) if by is not None]
            groups = [_trained(given), *(_trained(inner.parameters(recurse=False)) for inner in unit.module.modules())]
            gradients = torch.autograd.grad(
                [out for out, _ in pairs],
                [each for group in groups for each in group],
                [by for _, by in pairs],
                allow_unused=True,
            )
        found = iter(gradients)
        return Ran(
            inputs=tuple(each.detach() for each in given),
            outputs=tuple(out.detach().float() for out, _ in pairs),
            told=tuple(by.float() for _, by in pairs),
            gradients=tuple(tuple(each for _ in group if (each := next(found)) is not None) for group in groups),
        )

    def _arrangement(self, unit: Unit, choice: Choice) -> Arrangement:
        """The unit alone in a format, and what is in it wide."""
        key = (unit.name, choice.name)
        if key not in self._arranged:
            inside = [each for each in self._units.values() if each.name.startswith(f"{unit.name}.")]
            chosen = [choice, *[self._widest] * len(inside)]
            self._arranged[key] = arrangement_of([unit, *inside], chosen, self._device, base=WIDEST)
        return self._arranged[key]


def _local(wide: Ran, narrow: Ran, loss: float) -> Local:
    moved = [
        (_squares(by) * _squares(own - other), own.shape[-1] if own.ndim else 1, own.numel())
        for own, other, by in zip(wide.outputs, narrow.outputs, wide.told, strict=True)
        if own.numel()
    ]
    whole = loss * loss or 1.0
    return Local(
        output=_apart_by(wide.outputs, narrow.outputs),
        gradient=max(map(_apart_by, wide.gradients, narrow.gradients)),
        row=_or_infinite(sum(squares / width for squares, width, _ in moved) / whole),
        loss=_or_infinite(math.sqrt(sum(squares / count for squares, _, count in moved) / whole)),
    )


def _apart_by(wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> float:
    """The squared relative error of several tensors together."""
    if not wide:
        return 0.0
    whole = sum(map(_squares, wide))
    apart = sum(_squares(one - other) for one, other in zip(wide, narrow, strict=True))
    return _or_infinite(apart / whole if whole else 0.0)


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float())) ** 2


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _apart(leaf: Any) -> Any:
    """A tensor without its graph, and whether it had one."""
    return _Given(leaf.detach(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True)
class _Given:
    tensor: Tensor
    trained: bool


def _leaf(leaf: Any) -> Any:
    return leaf.tensor.detach().requires_grad_(leaf.trained) if isinstance(leaf, _Given) else leaf


def _trained(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
