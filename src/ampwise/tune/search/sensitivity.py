"""Estimate how sensitive each module is to each format, for all modules in one FP32 pass.

In that pass every unit is rerun by itself as soon as its gradient arrives: on its actual inputs and output gradient, in
FP32 and in each format, with everything else wide. What comes before it is not recomputed, and what comes after it is
in the gradient. The result is an estimate that ranks modules; the errors that count are measured later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module, Parameter
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_flatten, tree_map

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.measure import census
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.search.arrangement import WIDEST, FormatChoice, arrange_formats
from ampwise.tune.search.units import REST, SearchUnit

MOST_VALUES = 2**22  # counted per tensor
LARGEST_MATRIX = 1024  # whose singular values are computed

SOFTMAX = re.compile(r"_?((Log)?Softmax|SafeSoftmax)Backward\d*")
# Operations that keep logits logits: shape, dtype, temperature, mask, sum or difference.
LOGITS_STILL = re.compile(
    r"((Unsafe)?View|Reshape|Transpose|T|Permute|Squeeze|Unsqueeze|Expand|Slice|Select|Clone|Alias|ToCopy|Mul|Div|Add"
    r"|Sub|MaskedFill|Where)Backward\d*"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatEffect:
    """What a format changed."""

    moved: float  # root mean square change of an output
    flipped: float  # share of rows in which another output is the largest
    length: float  # of the gradient it passes back, projected on FP32's: 1 equals FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """Measurements of a module in FP32, and in each format."""

    operands: Mapping[str, Census]  # inputs, weight, gradient
    largest_output: float
    cancellation: float | None  # how many times larger its sums would be with terms of random sign
    into_softmax: bool
    formats: Mapping[str, FormatEffect]


@dataclass(slots=True, kw_only=True)
class UnitProbe:
    """Measurements of a unit."""

    locals: dict[str, LocalError] = field(default_factory=dict)  # by format
    facts: UnitFacts | None = None  # of its first call


def scores_of(look: UnitProbe | None, choices: Sequence[FormatChoice]) -> tuple[float, ...]:
    """Return the estimated effect of each format on a unit; 0 if unknown."""
    found = {} if look is None else look.locals
    return tuple(found[choice.name].score if choice.name in found else 0.0 for choice in choices)


class _Call(NamedTuple):
    """Arguments of a unit's call, and the random numbers it began with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: Mapping[str, Any]


class SensitivityProbe:
    """Reruns units by themselves during a pass. ``only``: names of the units to probe."""

    def __init__(
        self,
        units: Sequence[SearchUnit],
        choices: Sequence[FormatChoice],
        device: torch.device,
        only: Container[str],
    ) -> None:
        self.looks = {unit.name: UnitProbe() for unit in units if unit.name != REST and unit.name in only}
        self._loss = 1.0
        self._made: dict[Any, str] = {}  # the unit of an output, by the node that made it
        self._into_softmax: set[str] = set()
        self._units = {unit.name: unit for unit in units}
        self._narrower = [choice for choice in choices if choice.name != WIDEST]
        self._widest = choices[-1]
        self._device = device
        self._alone = False  # whether a unit is being run by itself

    @contextmanager
    def on(self) -> Iterator[None]:
        """Probe units during a forward and a backward pass. Its graph is released afterwards."""
        with ExitStack() as stack:
            for name in self.looks:
                self._watch(self._units[name], stack)
            stack.callback(self._made.clear)
            yield

    def forward_done(self, loss: Tensor) -> None:
        """Note the loss: the forward pass is over, and the backward pass begins."""
        self._loss = float(loss.detach())
        self._into_softmax = {self._made[node] for node in before_softmax(loss) if node in self._made}

    def _watch(self, unit: SearchUnit, stack: ExitStack) -> None:
        calls: list[_Call] = []

        def enters(module: Module, args: Any, kwargs: Any) -> None:
            if not self._alone and torch.is_grad_enabled():
                given, named = tree_map(_leaf, (args, kwargs))
                calls.append(_Call(given, named, capture_random(self._device, host=False)))

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

        stack.callback(unit.module.register_forward_pre_hook(enters, with_kwargs=True).remove)
        stack.callback(unit.module.register_forward_hook(leaves).remove)

    def _look(self, unit: SearchUnit, call: _Call, out_grads: Sequence[Tensor | None]) -> None:
        """Rerun a unit when its gradient has arrived, during the backward pass."""
        if self._alone or not any(each is not None for each in out_grads):
            return
        self._alone = True
        now = capture_random(self._device, host=False)
        try:
            wide = self._run(unit, call, out_grads, self._widest)
            if wide is None:  # it needs more than its arguments: nothing is known of it by itself
                return
            narrow = {choice.name: self._run(unit, call, out_grads, choice) for choice in self._narrower}
            look = self.looks[unit.name]
            if look.facts is None:
                ran_at_all = {name: ran for name, ran in narrow.items() if ran is not None}
                look.facts = measure_facts(unit, wide, ran_at_all, unit.name in self._into_softmax)
            for name, ran in narrow.items():
                local = DOES_NOT_RUN if ran is None else _local(wide, ran, self._loss)
                look.locals[name] = look.locals[name] | local if name in look.locals else local
        finally:
            self._alone = False
            restore_random(now, self._device)

    def _run(
        self, unit: SearchUnit, call: _Call, out_grads: Sequence[Tensor | None], choice: FormatChoice
    ) -> UnitRun | None:
        """Run a unit by itself; None if that fails: mixed dtypes, a missing dtype, or a check in the user's code."""
        restore_random(call.random, self._device)
        inside = [each for each in self._units.values() if each.name.startswith(f"{unit.name}.")]  # these stay wide
        chosen = [choice, *[self._widest] * len(inside)]
        arrangement = arrange_formats([unit, *inside], chosen, self._device, base=WIDEST)
        try:
            with torch.enable_grad(), arrangement.on(unit.module):
                args, kwargs = tree_map(_leaf, (call.args, dict(call.kwargs)))
                tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
                given = [each for each in tensors if each.is_floating_point()]
                returned = _trained(tree_flatten(unit.module(*args, **kwargs))[0])
                pairs = [(out, by.to(out.dtype)) for out, by in zip(returned, out_grads, strict=True) if by is not None]
                inner = [_trained(each.parameters(recurse=False)) for each in unit.module.modules()]
                groups = [_trained(given), *inner]
                gradients = torch.autograd.grad(
                    [out for out, _ in pairs],
                    [each for group in groups for each in group],
                    [by for _, by in pairs],
                    allow_unused=True,
                )
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None
        found = iter(gradients)
        return UnitRun(
            inputs=tuple(each.detach() for each in given),
            outputs=tuple(out.detach().float() for out, _ in pairs),
            out_grads=tuple(by.float() for _, by in pairs),
            gradients=tuple(tuple(each for _ in group if (each := next(found)) is not None) for group in groups),
        )


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


def _leaf(leaf: Any) -> Any:
    """Detach a tensor; it still requires a gradient if it did."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _trained(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def measure_facts(unit: SearchUnit, wide: UnitRun, narrow: Mapping[str, UnitRun], into_softmax: bool) -> UnitFacts:
    """Measure the first call of a unit."""
    weight = _weight(unit)
    operands = {
        "inputs": next(iter(wide.inputs), None),
        "weight": weight,
        "gradient": next(iter(wide.out_grads), None),
    }
    counted = {}
    for role, tensor in operands.items():
        if tensor is not None:
            flat = tensor.detach().reshape(-1)
            counted[role] = census(flat[:: max(1, -(-flat.numel() // MOST_VALUES))])  # a sample
    output = wide.outputs[0]
    return UnitFacts(
        operands=counted,
        largest_output=float(output.abs().amax()) if output.numel() else 0.0,
        cancellation=_cancellation(unit, wide, weight),
        into_softmax=into_softmax,
        formats={name: _in_format(wide, ran) for name, ran in narrow.items()},
    )


def singular_range(unit: SearchUnit) -> tuple[float, float] | None:
    """Return the largest and the smallest singular value of its weight; None without a weight, or for a large one."""
    weight = _weight(unit)
    if weight is None or min(weight.flatten(1).shape) > LARGEST_MATRIX or not weight.isfinite().all():
        return None
    values = torch.linalg.svdvals(weight.flatten(1).float().cpu())
    return float(values[0]), float(values[-1])


def _weight(unit: SearchUnit) -> Tensor | None:
    weight = getattr(unit.module, "weight", None)
    return weight.detach() if isinstance(weight, Parameter) and weight.ndim > 1 else None


def _cancellation(unit: SearchUnit, wide: UnitRun, weight: Tensor | None) -> float | None:
    """Compare the sums with those of random signs, where squares of terms add up, input by input."""
    is_known = isinstance(unit.module, nn.Linear | _ConvNd) and not isinstance(unit.module, _ConvTransposeNd)
    if weight is None or not wide.inputs or not is_known:
        return None
    output, given, channels = wide.outputs[0], wide.inputs[0].float(), 1 - weight.ndim
    bias = getattr(unit.module, "bias", None)
    if isinstance(bias, Tensor):
        output = output - bias.detach().reshape(-1, *[1] * (weight.ndim - 2))
    inputs = given.square().movedim(channels, 0).flatten(1).mean(1)
    weights = weight.float().square().reshape(*weight.shape[:2], -1).sum(2)
    groups = len(inputs) // weights.shape[1]  # of a convolution, each with its own inputs
    terms = weights.reshape(groups, -1, weights.shape[1]) * inputs.reshape(groups, 1, -1)
    actual, random = float(output.square().mean()), float(terms.sum(2).mean())
    return math.sqrt(random / actual) if actual > 0 and math.isfinite(random / actual) else None


def _in_format(wide: UnitRun, narrow: UnitRun) -> FormatEffect:
    output, other = wide.outputs[0], narrow.outputs[0]
    flipped = (output.argmax(-1) != other.argmax(-1)).float().mean() if output.ndim else torch.zeros(())
    pairs = [
        pair for groups in zip(wide.gradients, narrow.gradients, strict=True) for pair in zip(*groups, strict=True)
    ]
    along = sum(float((one * two).sum(dtype=torch.float32)) for one, two in pairs)
    whole = sum(float(one.square().sum(dtype=torch.float32)) for one, _ in pairs)
    return FormatEffect(
        moved=float((other - output).square().mean().sqrt()),
        flipped=float(flipped),
        length=along / whole if whole else 1.0,
    )


def before_softmax(loss: Tensor) -> Iterator[Any]:
    """Yield the graph nodes whose results go into a softmax, unchanged or nearly so."""
    for node in reached_nodes([loss.grad_fn]):
        if SOFTMAX.fullmatch(node.name()):
            starts = [after for after, _ in node.next_functions]
            yield from reached_nodes(starts, lambda node: LOGITS_STILL.fullmatch(node.name()) is not None)


def reached_nodes(starts: Iterable[Any], goes_on: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield the reachable nodes of a graph; ``goes_on`` says whether to continue from a node."""
    pending, seen = list(starts), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if goes_on(node):
            pending += [after for after, _ in node.next_functions]
