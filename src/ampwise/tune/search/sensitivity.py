"""Estimate how sensitive each module is to each format, for all modules in one FP32 pass.

In that pass every unit is rerun by itself as soon as its gradient arrives: on its actual inputs and output gradient, in
FP32 and in each format, with everything else wide. What comes before it is not recomputed, and what comes after it is
in the gradient. The result is an estimate that ranks modules; the errors that count are measured later.
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

from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.search.arrangement import FormatArrangement, arrange_formats
from ampwise.tune.search.format_choices import WIDEST, FormatChoice
from ampwise.tune.search.graph import before_softmax
from ampwise.tune.search.units import REST, SearchUnit

__all__ = ["LocalError", "SensitivityProbe", "UnitProbe", "UnitRun", "scores_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalError:
    """Effect of a format on a module by itself."""

    output: float  # squared relative error of its output
    gradient: float  # of the gradient it passes back, or of its parameters' gradients, whichever is worse
    row: float  # of the loss of a row of the batch, to first order, as moved by the module's output
    loss: float  # relative error of the batch's loss, if the errors of rows are independent

    @property
    def score(self) -> float:
        """Estimated error of the whole model when only this module has the format."""
        return max(max(self.gradient, self.output) / 2 + self.row, self.loss)

    def __or__(self, other: LocalError) -> LocalError:
        """Return the worse of two calls."""
        return max(self, other, key=lambda local: local.score)


DOES_NOT_RUN = LocalError(output=math.inf, gradient=math.inf, row=math.inf, loss=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """One run of a module by itself: inputs, outputs, and gradients."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    out_grads: tuple[Tensor, ...]  # the gradients of the outputs
    gradients: tuple[tuple[Tensor, ...], ...]  # of the inputs; then of the parameters, grouped by module


@dataclass(slots=True, kw_only=True)
class UnitProbe:
    """Measurements of a unit."""

    locals: dict[str, LocalError] = field(default_factory=dict)  # by format
    facts: Any = None


def scores_of(look: UnitProbe | None, choices: Sequence[FormatChoice]) -> tuple[float, ...]:
    """Return the estimated effect of each format on a unit; 0 if unknown."""
    found = {} if look is None else look.locals
    return tuple(found[choice.name].score if choice.name in found else 0.0 for choice in choices)


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a unit's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: Mapping[str, Any]


Facts = Callable[
    [SearchUnit, UnitRun, Mapping[str, UnitRun], bool], Any
]  # the last: whether its output goes into a softmax


class SensitivityProbe:
    """Reruns units by themselves during a pass. ``only``: names of the units to probe."""

    def __init__(
        self,
        units: Sequence[SearchUnit],
        choices: Sequence[FormatChoice],
        device: torch.device,
        facts: Facts,
        only: Container[str],
    ) -> None:
        self.looks = {unit.name: UnitProbe() for unit in units if unit.name != REST and unit.name in only}
        self._loss = 1.0
        self._made: dict[Any, str] = {}  # the unit of an output, by the node that made it
        self._into_softmax: set[str] = set()
        self._units = {unit.name: unit for unit in units}
        self._narrower = [choice for choice in choices if choice.name != WIDEST]
        self._widest = choices[-1]
        self._device, self._facts = device, facts
        self._arranged: dict[tuple[str, str], FormatArrangement] = {}
        self._alone = False  # whether a unit is being run by itself

    @contextmanager
    def on(self) -> Iterator[None]:
        """Probe units during a forward and a backward pass. Its graph is released afterwards."""
        with ExitStack() as stack:
            for name in self.looks:
                unit, calls = self._units[name], []  # type: tuple[SearchUnit, list[_Call]]
                stack.callback(unit.module.register_forward_pre_hook(self._enters(calls), with_kwargs=True).remove)
                stack.callback(unit.module.register_forward_hook(self._leaves(unit, calls, stack)).remove)
            stack.callback(self._made.clear)
            yield

    def forward_done(self, loss: Tensor) -> None:
        """Note the loss: the forward pass is over, and the backward pass begins."""
        self._loss = float(loss.detach())
        self._into_softmax = {self._made[node] for node in before_softmax(loss) if node in self._made}

    def _enters(self, calls: list[_Call]) -> Callable[..., None]:
        def enters(module: Module, args: Any, kwargs: Any) -> None:
            if not self._alone and torch.is_grad_enabled():
                calls.append(
                    _Call(tree_map(_detach, args), tree_map(_detach, kwargs), capture_random(self._device, host=False))
                )

        return enters

    def _leaves(self, unit: SearchUnit, calls: list[_Call], stack: ExitStack) -> Callable[..., None]:
        def leaves(module: Module, args: Any, output: Any) -> None:
            if self._alone or not calls:
                return
            call = calls.pop()
            outputs = _trained(tree_flatten(output)[0])
            self._made.update((each.grad_fn, unit.name) for each in outputs)
            if outputs:
                # A hook and its nodes hold each other until the hook is removed.
                hook = register_multi_grad_hook(outputs, lambda gradients: self._look(unit, call, gradients))
                stack.callback(hook.remove)

        return leaves

    def _look(self, unit: SearchUnit, call: _Call, out_grads: Sequence[Tensor | None]) -> None:
        """Rerun a unit when its gradient has arrived, during the backward pass."""
        if self._alone or not any(each is not None for each in out_grads):
            return
        self._alone = True
        now = capture_random(self._device, host=False)
        try:
            wide = self._try_run(unit, call, out_grads, self._widest)
            if wide is None:  # it needs more than its arguments: nothing is known of it by itself
                return
            narrow = {choice.name: self._try_run(unit, call, out_grads, choice) for choice in self._narrower}
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

    def _try_run(
        self, unit: SearchUnit, call: _Call, out_grads: Sequence[Tensor | None], choice: FormatChoice
    ) -> UnitRun | None:
        try:
            return self._run(unit, call, out_grads, choice)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # mixed dtypes, an operation without that dtype, or a check in the user's code
            return None

    def _run(self, unit: SearchUnit, call: _Call, out_grads: Sequence[Tensor | None], choice: FormatChoice) -> UnitRun:
        restore_random(call.random, self._device)
        with torch.enable_grad(), self._arrangement(unit, choice).on(unit.module):
            args, kwargs = tree_map(_leaf, call.args), tree_map(_leaf, dict(call.kwargs))
            given = [each for each in tree_flatten((args, kwargs))[0] if _is_float(each)]
            returned = _trained(tree_flatten(unit.module(*args, **kwargs))[0])
            pairs = [(out, by.to(out.dtype)) for out, by in zip(returned, out_grads, strict=True) if by is not None]
            groups = [_trained(given), *(_trained(inner.parameters(recurse=False)) for inner in unit.module.modules())]
            gradients = torch.autograd.grad(
                [out for out, _ in pairs],
                [each for group in groups for each in group],
                [by for _, by in pairs],
                allow_unused=True,
            )
        found = iter(gradients)
        return UnitRun(
            inputs=tuple(each.detach() for each in given),
            outputs=tuple(out.detach().float() for out, _ in pairs),
            out_grads=tuple(by.float() for _, by in pairs),
            gradients=tuple(tuple(each for _ in group if (each := next(found)) is not None) for group in groups),
        )

    def _arrangement(self, unit: SearchUnit, choice: FormatChoice) -> FormatArrangement:
        """Arrange the unit alone in a format, with everything inside it wide."""
        key = (unit.name, choice.name)
        if key not in self._arranged:
            inside = [each for each in self._units.values() if each.name.startswith(f"{unit.name}.")]
            chosen = [choice, *[self._widest] * len(inside)]
            self._arranged[key] = arrange_formats([unit, *inside], chosen, self._device, base=WIDEST)
        return self._arranged[key]


def _local(wide: UnitRun, narrow: UnitRun, loss: float) -> LocalError:
    moved = [
        (_squares(by) * _squares(own - other), own.shape[-1] if own.ndim else 1, own.numel())
        for own, other, by in zip(wide.outputs, narrow.outputs, wide.out_grads, strict=True)
        if own.numel()
    ]
    whole = loss * loss or 1.0
    return LocalError(
        output=_relative_error(wide.outputs, narrow.outputs),
        gradient=max(map(_relative_error, wide.gradients, narrow.gradients)),
        row=_or_infinite(sum(squares / width for squares, width, _ in moved) / whole),
        loss=_or_infinite(math.sqrt(sum(squares / count for squares, _, count in moved) / whole)),
    )


def _relative_error(wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> float:
    """Return the squared relative error over several tensors."""
    if not wide:
        return 0.0
    whole = sum(map(_squares, wide))
    difference = sum(_squares(one - other) for one, other in zip(wide, narrow, strict=True))
    return _or_infinite(difference / whole if whole else 0.0)


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float())) ** 2


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _detach(leaf: Any) -> Any:
    """Detach a tensor, and note whether it required a gradient."""
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
