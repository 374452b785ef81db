"""``ampwise.diff``: run the same training step on two sides and compare all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.report.formatting import format_bytes
from ampwise.trace.call_arguments import iterator_names
from ampwise.trace.user_code import describe_type
from ampwise.train.precision.policy import Policy
from ampwise.tune.diff.expected_errors import PassComparisons, expected_errors
from ampwise.tune.diff.module_calls import ModuleCall
from ampwise.tune.diff.names import ModuleNames, find_models
from ampwise.tune.diff.op_tape import OpTape
from ampwise.tune.diff.passes import TensorEvent
from ampwise.tune.diff.placed_side import PlacedSide
from ampwise.tune.diff.repeated_step import RepeatedStep
from ampwise.tune.diff.result import Difference
from ampwise.tune.diff.runs import DiffRuns, ParameterGradients, Progress
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.side import Side, parse_side
from ampwise.tune.diff.step_difference import (
    BACKWARD,
    FORWARD,
    ErrorLocation,
    ModuleRow,
    OpRow,
    ParameterRow,
    SideFacts,
    StepDifference,
)
from ampwise.tune.diff.tensor_difference import ComparedTensor

__all__ = ["DiffOptions", "compare_sides", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """What to compare, and how closely."""

    ops: bool = False
    modules: tuple[str, ...] = ()
    floor: bool = True
    progress: Progress = lambda text: None


def diff(
    fn: Callable[..., Any],
    /,
    *args: Any,
    a: str | Policy | Side = "fp32",
    b: str | Policy | Side = "bf16",
    ops: bool = False,
    modules: str | Sequence[str] = (),
    floor: bool = True,
    **kwargs: Any,
) -> Difference:
    """Run a training step on two sides and compare it module by module, forward and backward.

    ``fn(*args, **kwargs)`` returns the loss; it is a function that uses a model, or the model itself. Weights, batch
    and random numbers are the same on both sides; nothing is updated, and all state is restored.

    >>> import torch, ampwise
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> result = ampwise.diff(lambda x: model(x).square().mean(), torch.randn(4, 8), b="bf16")
    >>> result.first is None, [row.name for row in result.rows]
    (True, ['', '0', '1', '2'])
    >>> result.rows[1].error < 0.01
    True

    ``a``, ``b``: fp32, tf32, fp16 (with loss scaling), bf16, fp64, or any format of ``ampwise.find_format`` (emulated
    matmuls), with a device and options: "fp32@cuda", "bf16,attention=math" (flash, efficient, cudnn),
    "bf16,compiled", "fp16,scale=1024", "tf32,emulated"; or an ``ampwise.Policy``.
    ``ops``: also compare operation by operation. ``modules``: patterns of modules to compare. ``floor``: measure how
    much two runs of a differ, which takes one more step.
    """
    if not callable(fn):
        raise BadInput(
            f"diff(): expected a function and its arguments, as in diff(loss_fn, x, y); got {describe_type(fn)}."
        )
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    models = {"": fn} if isinstance(fn, Module) else find_models(fn, args, kwargs)
    options = DiffOptions(ops=ops, modules=patterns, floor=floor)
    return compare_sides(fn, args, kwargs, models, parse_side(a), parse_side(b), options, subject=_name(fn))


def compare_sides(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    models: Mapping[str, Module],
    a: Side,
    b: Side,
    options: DiffOptions,
    *,
    subject: str,
) -> Difference:
    """Compare two sides with explicit models and options."""
    names = ModuleNames(models, options.modules)
    with torch.enable_grad(), RepeatedStep(fn, args, kwargs, names) as stage:
        one, other = (PlacedSide(side.on(stage.device), stage.device) for side in (a, b))
        draws = SharedRandom(torch.device("cpu") if one.device.type != other.device.type else None)
        names.looked_into = not (a.compiled or b.compiled)
        work = DiffRuns(stage, one, other, draws, options.progress)
        compared = _Compared(work, options)
    differing = compared.differing(subject, tuple(iterator_names(fn, args, kwargs)), draws)
    return Difference(differing)


class _Compared:
    """Everything measured on two sides."""

    def __init__(self, work: DiffRuns, options: DiffOptions) -> None:
        self._work, self._options = work, options
        for placed in (work.a, work.b):
            work.find_scale(placed)
        self._forward = work.forward(floor=options.floor)
        self._check_losses()
        self._backward, order, self._gradients = work.backward(floor=options.floor)
        noise = self._gradients.noise
        self._expecting = expected_errors(
            work.outline, self._forward, self._backward, order, work.only_b.values(), noise
        )
        self._tape = self._operations() if options.ops else None
        self._ops = () if self._tape is None else tuple(self._tape[0].rows(self._tape[1]))
        self._spots = tuple(self._with_operations(self._expecting.spots))

    def differing(self, subject: str, draws_from: tuple[str, ...], draws: SharedRandom) -> StepDifference:
        floor, at = self._largest_floor()
        return StepDifference(
            subject=subject,
            a=_facts(self._work.a, self._work.losses["a"]),
            b=_facts(self._work.b, self._work.losses["b"]),
            rows=(*self._expecting.rows(), *self._only_in_b()),
            returned=tuple(self._expecting.returned),
            ops=self._ops,
            parameters=tuple(_parameters(self._gradients)),
            spots=self._spots,
            floor=floor,
            floor_at=at,
            draws_from=draws_from,
            notes=tuple(self._notes(draws)),
        )

    def _check_losses(self) -> None:
        work = self._work
        work.check_patterns()
        losses = {which: work.losses[which] for which in ("a", "b")}
        if all(loss is not None and not math.isfinite(loss) for loss in losses.values()):
            shown = " and ".join(f"{loss}" for loss in losses.values())
            raise BadInput(
                f"diff: the loss is not finite on either side ({shown}), so there is nothing to compare. "
                "`ampwise.trace` finds the operation that produced it."
            )

    # Operations

    def _operations(self) -> tuple[OpTape, PassComparisons]:
        patterns = self._options.modules

        def wanted(module: str, number: int, phase: str) -> bool:
            return not patterns or any(fnmatchcase(module, pattern) for pattern in patterns)

        return self._work.operations(wanted, backward=True)

    def _with_operations(
        self, found: Sequence[tuple[ErrorLocation, TensorEvent, ModuleCall]]
    ) -> Iterator[ErrorLocation]:
        """Yield the spots, the first with its operation."""
        for place, (spot, event, maker) in enumerate(found):
            if place or spot.phase == BACKWARD or spot.compared.flipped:
                yield spot
            else:
                yield replace(spot, op=_worst_op(self._ops_of(event, maker)))

    def _ops_of(self, event: TensorEvent, maker: ModuleCall) -> Sequence[OpRow]:
        """Return the operations of the maker's code that lead to the tensor."""
        code = maker.name, maker.number, FORWARD
        is_known = any((op.module, op.call, op.phase) == code for op in self._ops)
        if self._tape is not None and is_known:
            tape, numbers = self._tape
        else:
            tape, numbers = self._work.operations(lambda *place: place == code, backward=False)
        rows = tape.rows(numbers, tape.leading_to(event.call.place(event.role, event.path)))
        return [op for op in rows if (op.module, op.call, op.phase) == code]

    # Rows and notes

    def _only_in_b(self) -> Iterator[ModuleRow]:
        seen = {call.index: call for call in self._work.only_b.values() if call.module is not None}
        for call in seen.values():
            yield ModuleRow(name=call.name, kind=call.kind, call=call.number, depth=call.depth - 1, only="b")

    def _largest_floor(self) -> tuple[float | None, str]:
        if not self._options.floor:
            return None, ""
        forward = self._expecting.floors()
        found = [*forward, *((name, floor) for name, floor in self._gradients.floors.items())]
        name, floor = max(found, key=lambda pair: pair[1], default=("", 0.0))
        return floor, name if floor else ""

    def _notes(self, draws: SharedRandom) -> Iterator[str]:
        work = self._work
        compiled = [which for which, placed in (("a", work.a), ("b", work.b)) if placed.side.compiled]
        if compiled:
            yield (
                f"{' and '.join(compiled)} {'are' if len(compiled) > 1 else 'is'} compiled, so modules are not "
                "compared: only the function's results and the gradients of parameters."
            )
        if not work.went_back:
            yield "No loss with a gradient was returned: only the forward pass is compared."
        if draws.masked_inside:
            yield (
                "A fused kernel (attention, or a recurrent layer) draws its own dropout masks, which may differ "
                "between the sides: set its dropout to 0 for this comparison."
            )
        if draws.any and compiled:
            yield "Compiled code may draw different random numbers: set dropout to 0 for this comparison."
        for slot in self._expecting.harmless:
            maker, measured = self._expecting.maker_of(slot), self._forward.measured[slot]
            yield (
                f"{measured.changed:,} of {measured.values:,} integers that `{maker}` returns differ; nothing "
                "compared after them exceeds rounding."
            )
        if work.whole_kernels:
            yield (
                f"The matmuls of {', '.join(f'`{name}`' for name in work.whole_kernels)} run inside one fused kernel, "
                "so they are not emulated."
            )
        if work.moved:
            yield f"{format_bytes(work.moved)} were moved to host memory during the comparison."


def _parameters(gradients: ParameterGradients) -> Iterator[ParameterRow]:
    values = sum(each.values for each in gradients.measured.values())
    squares = math.fsum(each.norm_a**2 for each in gradients.measured.values())
    typical = math.sqrt(squares / values) if values else 0.0
    for name, measured in gradients.measured.items():
        compared = ComparedTensor(measured=measured, floor=gradients.floors.get(name))
        yield ParameterRow(name=name, compared=compared, share=measured.rms / typical if typical else None)
    for name, why in gradients.unlike.items():
        yield ParameterRow(name=name, compared=ComparedTensor(why_not=why))


def _worst_op(ops: Sequence[OpRow]) -> OpRow | None:
    """Return the first operation beyond rounding, or the one closest to it."""
    beyond = [op for op in ops if op.compared.beyond]
    if beyond:
        return beyond[0]
    found = max(ops, key=lambda op: op.compared.times or 0.0, default=None)
    return found if found is not None and (found.compared.times or 0.0) > 1 else None


def _facts(placed: PlacedSide, loss: float | None) -> SideFacts:
    side = placed.side
    forward, backward = side.roundoffs
    return SideFacts(
        label=side.label,
        precision=side.precision,
        device=str(placed.device),
        roundoff=forward,
        gradient_roundoff=backward,
        loss=loss,
        scale=placed.scale if placed.scale != 1.0 else None,
        compiled=bool(side.compiled),
    )


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
