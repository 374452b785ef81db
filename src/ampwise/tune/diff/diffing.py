"""``diff``: the same training step on two sides, held against each other place by place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module

from ampwise.engine.precision.policy import Policy
from ampwise.errors import BadInput
from ampwise.evidence.compared import Compared
from ampwise.evidence.difference import (
    BACKWARD,
    FORWARD,
    Differing,
    ModuleRow,
    OpRow,
    ParameterRow,
    SideFacts,
    Spot,
)
from ampwise.report.wording import size
from ampwise.trace.names import iterators_of
from ampwise.tune.diff.calls import Call
from ampwise.tune.diff.draws import Draws
from ampwise.tune.diff.expecting import Numbers, expecting_of
from ampwise.tune.diff.names import Names, models_of
from ampwise.tune.diff.ops import Tape
from ampwise.tune.diff.passes import Event
from ampwise.tune.diff.placing import Placed
from ampwise.tune.diff.result import Difference
from ampwise.tune.diff.side import Side, side_of
from ampwise.tune.diff.stage import Stage
from ampwise.tune.diff.work import Gradients, Progress, Work
from ampwise.user_code import kind

__all__ = ["Options", "diff", "difference_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is looked at, and how closely."""

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
    and random numbers are the same on both sides, nothing is updated, and all is left as it was.

    >>> import torch, ampwise
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> result = ampwise.diff(lambda x: model(x).square().mean(), torch.randn(4, 8), b="bf16")
    >>> result.first is None, [row.name for row in result.rows]
    (True, ['', '0', '1', '2'])
    >>> result.rows[1].error < 0.01
    True

    ``a``, ``b``: fp32, tf32, fp16 (its loss is scaled), bf16, fp64, or any format of ``ampwise.find_format`` (its
    products are emulated), with a device and options: "fp32@cuda", "bf16,attention=math" (flash, efficient, cudnn),
    "bf16,compiled", "fp16,scale=1024", "tf32,emulated"; or an ``ampwise.Policy``.
    ``ops``: operation by operation, too. ``modules``: patterns of the modules to look at. ``floor``: measure how far
    two runs of a are apart, which takes a step more.
    """
    if not callable(fn):
        raise BadInput(f"diff() takes a function and what it is given: diff(loss_fn, x, y). Not {kind(fn)}.")
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    models = {"": fn} if isinstance(fn, Module) else models_of(fn, args, kwargs)
    options = Options(ops=ops, modules=patterns, floor=floor)
    return difference_of(fn, args, kwargs, models, side_of(a), side_of(b), options, subject=_name(fn))


def difference_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    models: Mapping[str, Module],
    a: Side,
    b: Side,
    options: Options,
    *,
    subject: str,
) -> Difference:
    """The same with everything said."""
    names = Names(models, options.modules)
    with torch.enable_grad(), Stage(fn, args, kwargs, names) as stage:
        one, other = (Placed(side.on(stage.device), stage.device) for side in (a, b))
        draws = Draws(torch.device("cpu") if one.device.type != other.device.type else None)
        names.looked_into = not (a.compiled or b.compiled)
        work = Work(stage, one, other, draws, options.progress)
        compared = _Compared(work, options)
    differing = compared.differing(subject, tuple(iterators_of(fn, args, kwargs)), draws)
    return Difference(differing)


class _Compared:
    """All that was measured of two sides."""

    def __init__(self, work: Work, options: Options) -> None:
        self._work, self._options = work, options
        for placed in (work.a, work.b):
            work.find_scale(placed)
        self._forward = work.forward(floor=options.floor)
        self._refuse()
        self._backward, order, self._gradients = work.backward(floor=options.floor)
        noise = self._gradients.noise
        self._expecting = expecting_of(work.outline, self._forward, self._backward, order, work.only_b.values(), noise)
        self._tape = self._operations() if options.ops else None
        self._ops = () if self._tape is None else tuple(self._tape[0].rows(self._tape[1]))
        self._spots = tuple(self._closer(self._expecting.spots))

    def differing(self, subject: str, draws_from: tuple[str, ...], draws: Draws) -> Differing:
        floor, at = self._largest_floor()
        return Differing(
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

    def _refuse(self) -> None:
        work = self._work
        work.check_patterns()
        losses = {which: work.losses[which] for which in ("a", "b")}
        if all(loss is not None and not math.isfinite(loss) for loss in losses.values()):
            shown = " and ".join(f"{loss}" for loss in losses.values())
            raise BadInput(
                f"diff: the loss is finite on neither side ({shown}), and there is nothing to compare. `ampwise.trace` "
                "says which operation went bad first."
            )

    # Operations

    def _operations(self) -> tuple[Tape, Numbers]:
        patterns = self._options.modules

        def wanted(module: str, number: int, phase: str) -> bool:
            return not patterns or any(fnmatchcase(module, pattern) for pattern in patterns)

        return self._work.operations(wanted, backward=True)

    def _closer(self, found: Sequence[tuple[Spot, Event, Call]]) -> Iterator[Spot]:
        """The first of them with its operation."""
        for place, (spot, event, maker) in enumerate(found):
            if place or spot.phase == BACKWARD or spot.compared.flipped:
                yield spot
            else:
                yield replace(spot, op=_worst_op(self._ops_of(event, maker)))

    def _ops_of(self, event: Event, maker: Call) -> Sequence[OpRow]:
        """Those of its code that lead to the tensor."""
        code = maker.name, maker.number, FORWARD
        is_known = any((op.module, op.call, op.phase) == code for op in self._ops)
        if self._tape is not None and is_known:
            tape, numbers = self._tape
        else:
            tape, numbers = self._work.operations(lambda *place: place == code, backward=False)
        rows = tape.rows(numbers, tape.leading_to(event.call.place(event.role, event.path)))
        return [op for op in rows if (op.module, op.call, op.phase) == code]

    # The rest

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

    def _notes(self, draws: Draws) -> Iterator[str]:
        work = self._work
        compiled = [which for which, placed in (("a", work.a), ("b", work.b)) if placed.side.compiled]
        if compiled:
            yield (
                f"{' and '.join(compiled)} {'are' if len(compiled) > 1 else 'is'} compiled, where modules cannot be "
                "looked into: compared are what the function returns and the gradients of parameters."
            )
        if not work.went_back:
            yield "There is no loss that leads back to weights: only the forward pass is compared."
        if draws.masked_inside:
            yield (
                "A kernel (of attention, or a recurrent layer) drops values by masks of its own, which may differ "
                "between the sides: set its dropout to 0 for this."
            )
        if draws.any and compiled:
            yield "Random numbers are drawn, and compiled code may draw others: set dropout to 0 for this."
        for slot in self._expecting.harmless:
            maker, measured = self._expecting.maker_of(slot), self._forward.measured[slot]
            yield (
                f"{measured.changed:,} of {measured.values:,} whole numbers that `{maker}` returns are others; nothing "
                "that is compared after them is beyond rounding."
            )
        if work.whole_kernels:
            yield (
                f"The products of {', '.join(f'`{name}`' for name in work.whole_kernels)} are inside one kernel, which "
                "computes as torch does: they are not emulated."
            )
        if work.moved:
            yield f"{size(work.moved)} were kept in the host's memory meanwhile."


def _parameters(gradients: Gradients) -> Iterator[ParameterRow]:
    values = sum(each.values for each in gradients.measured.values())
    squares = math.fsum(each.norm_a**2 for each in gradients.measured.values())
    typical = math.sqrt(squares / values) if values else 0.0
    for name, measured in gradients.measured.items():
        compared = Compared(measured=measured, floor=gradients.floors.get(name))
        yield ParameterRow(name=name, compared=compared, share=measured.rms / typical if typical else None)
    for name, why in gradients.unlike.items():
        yield ParameterRow(name=name, compared=Compared(why_not=why))


def _worst_op(ops: Sequence[OpRow]) -> OpRow | None:
    """The first that is beyond by itself, or the one that is nearest to it."""
    beyond = [op for op in ops if op.compared.beyond]
    if beyond:
        return beyond[0]
    found = max(ops, key=lambda op: op.compared.times or 0.0, default=None)
    return found if found is not None and (found.compared.times or 0.0) > 1 else None


def _facts(placed: Placed, loss: float | None) -> SideFacts:
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
