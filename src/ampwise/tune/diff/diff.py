"""``ampwise.diff``: run the same training step on two sides and compare all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.report.formatting import format_bytes
from ampwise.trace.call_arguments import iterator_names
from ampwise.trace.user_code import describe_type
from ampwise.train.precision.policy import Policy
from ampwise.tune.diff.expected_errors import ExpectedErrors, PassComparisons, expected_errors
from ampwise.tune.diff.module_calls import ModuleCall
from ampwise.tune.diff.names import ModuleNames, find_models
from ampwise.tune.diff.op_tape import OpTape
from ampwise.tune.diff.passes import TensorEvent
from ampwise.tune.diff.policy_trials import Batch, check_trials, try_policies
from ampwise.tune.diff.repeated_step import PlacedSide, RepeatedStep
from ampwise.tune.diff.result import Difference
from ampwise.tune.diff.runs import DiffRuns, Progress
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.side import Side, parse_side
from ampwise.tune.diff.step_difference import (
    FORWARD,
    ModuleRow,
    OpRow,
    SideFacts,
    StepDifference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """What to compare, and how closely."""

    ops: bool = False
    modules: tuple[str, ...] = ()
    floor: bool = True
    b_fn: Callable[..., Any] | None = None  # what b runs instead of the function
    held_back: tuple[Batch, ...] = ()  # more batches, on which policies are tried
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
    b_fn: Callable[..., Any] | None = None,
    held_back: Sequence[Any] = (),
    **kwargs: Any,
) -> Difference:
    """Run a training step on two sides and compare it module by module, forward and backward.

    Weights, batch and random numbers are the same on both sides; nothing is updated, and all state is restored.

    Args:
        fn: returns the loss: a function that uses a model, or the model itself.
        *args: passed to ``fn``.
        a, b: the two sides: fp32, tf32, fp16 (with loss scaling), bf16, fp64, or any format of ``ampwise.find_format``
            (emulated matmuls), with a device and options: "fp32@cuda", "bf16,attention=math" (flash, efficient, cudnn),
            "bf16,compiled", "fp16,scale=1024", "tf32,emulated"; "bf16,batch=1" for b computes the batch in parts of so
            many rows; or an ``ampwise.Policy``.
        ops: also compare operation by operation.
        modules: patterns of modules to compare.
        floor: measure how much two runs of a differ, which takes one more step.
        b_fn: a function that b runs instead of ``fn``, on the same arguments: another library, a padded batch, decoding
            token by token. Then results, log-probabilities and gradients are compared, and no modules.
        held_back: more batches, each a tuple of the function's positional arguments. Policies are tried that bring the
            log-probabilities of the two sides together, and verified on these.
        **kwargs: passed to ``fn``.

    Returns:
        the error of each module, where it first grows beyond what the formats explain, and findings; ``print`` shows
        it.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

    >>> import torch, ampwise
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> result = ampwise.diff(lambda x: model(x).square().mean(), torch.randn(4, 8), b="bf16")
    >>> result.first is None, [row.name for row in result.rows]
    (True, ['', '0', '1', '2'])
    >>> result.rows[1].error < 0.01
    True
    """
    if not callable(fn):
        raise BadInput(
            f"diff(): expected a function and its arguments, as in diff(loss_fn, x, y); got {describe_type(fn)}."
        )
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    if b_fn is not None and not callable(b_fn):
        raise BadInput(f"diff(b_fn=...): expected a function of the same arguments; got {describe_type(b_fn)}.")
    models = {"": fn} if isinstance(fn, Module) else find_models(fn, args, kwargs)
    if b_fn is not None:
        models |= {
            name: model for name, model in find_models(b_fn, args, kwargs).items() if model not in models.values()
        }
    more = tuple((tuple(each) if isinstance(each, tuple | list) else (each,), kwargs) for each in held_back)
    options = DiffOptions(ops=ops, modules=patterns, floor=floor, b_fn=b_fn, held_back=more)
    name = str(getattr(fn, "__name__", type(fn).__name__))
    return compare_sides(fn, args, kwargs, models, parse_side(a), parse_side(b), options, name=name)


def compare_sides(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    models: Mapping[str, Module],
    a: Side,
    b: Side,
    options: DiffOptions,
    *,
    name: str,
) -> Difference:
    """Compare two sides with explicit models and options."""
    if a.batch is not None:
        raise BadInput(f"diff: {a.label}: side a computes the whole batch; give batch= to b, and swap the sides.")
    if b.batch is not None and options.ops:
        raise BadInput(f"diff: {b.label}: operations are compared on the whole batch; leave out ops, or batch=.")
    batches: list[Batch] = [(args, kwargs), *options.held_back]
    if options.held_back:
        check_trials(batches, models, b)
    names = ModuleNames(models, options.modules)
    with torch.enable_grad(), RepeatedStep(fn, args, kwargs, names) as step:
        one, other = (
            PlacedSide(side.on(step.device), step.device, own) for side, own in ((a, None), (b, options.b_fn))
        )
        draws = SharedRandom(torch.device("cpu") if one.device.type != other.device.type else None)
        names.looked_into = not (a.compiled or b.compiled or options.b_fn)
        runs = DiffRuns(step, one, other, draws, options.progress)
        runs.find_scale(one)
        runs.find_scale(other)
        forward = runs.forward(floor=options.floor)
        names.check_patterns()
        losses = runs.losses["a"], runs.losses["b"]
        if all(loss is not None and not math.isfinite(loss) for loss in losses):
            raise BadInput(
                f"diff: the loss is not finite on either side ({losses[0]} and {losses[1]}), so there is nothing to "
                "compare. `ampwise.trace` finds the operation that produced it."
            )
        backward, order, parameters = runs.backward(floor=options.floor)
        only_b = list(runs.only_b.values())
        found = expected_errors(runs.outline, forward, backward, order, only_b, runs.noise)
        tape = runs.operations(lambda module, *_: names.matches(module), backward=True) if options.ops else None
        ops = () if tape is None else tuple(tape.rows())
        spots = [replace(spot, in_parts=b.batch is not None) for spot, _, _ in found.spots]
        if spots and spots[0].phase == FORWARD and not spots[0].compared.flipped and b.batch is None:
            spots[0] = replace(spots[0], op=_worst_op(runs, tape, ops, *found.spots[0][1:]))
    floors = [(event.call.label, forward.floors.get(event.slot)) for event in runs.outline.events]
    floors += [(row.name, row.compared.floor) for row in parameters]
    floor_at, floor = max(floors, key=lambda pair: pair[1] or 0.0, default=("", 0.0))
    extra = {call.index: call for call in only_b if call.module is not None}.values()
    evidence = StepDifference(
        name=name,
        a=_facts(one, losses[0]),
        b=_facts(other, losses[1]),
        rows=(
            *found.rows(),
            *(ModuleRow(name=c.name, kind=c.kind, call=c.number, depth=c.depth - 1, only="b") for c in extra),
        ),
        returned=tuple(found.returned),
        ops=ops,
        parameters=tuple(parameters),
        spots=tuple(spots),
        floor=(floor or 0.0) if options.floor else None,
        floor_at=floor_at if floor else "",
        tokens=runs.tokens,
        token_noise=None if runs.token_noise is None else runs.token_noise.rms,
        draws_from=tuple(iterator_names(fn, args, kwargs)),
        notes=tuple(_notes(runs, draws, found, forward)),
    )
    if options.held_back:
        if evidence.tokens is None:
            raise BadInput(
                "diff: no log-probabilities were seen, which held-back batches are compared by: compute the loss with "
                "cross_entropy, or gather the targets from log-probabilities, in eager code."
            )
        head = next((row.name for row in reversed(evidence.rows) if row.is_leaf and row.kind == "Linear"), "")
        suspects = [head] if evidence.starts_in is None else [head, evidence.starts_in.name]
        evidence = replace(
            evidence,
            remedies=try_policies(fn, batches, models, a, b, suspects, options.progress, b_fn=options.b_fn),
        )
    return Difference(evidence)


def _worst_op(
    runs: DiffRuns,
    tape: OpTape | None,
    known: Sequence[OpRow],
    event: TensorEvent,
    maker: ModuleCall,
) -> OpRow | None:
    """Return, of the operations in the maker's code that lead to a tensor, the first beyond rounding, or the closest.

    They are compared now, unless they are known.
    """
    code = maker.name, maker.number, FORWARD
    if tape is None or not any((op.module, op.call, op.phase) == code for op in known):
        tape = runs.operations(lambda *place: place == code, backward=False)
    rows = tape.rows(tape.leading_to(event.call.place(event.role, event.path)))
    ops = [op for op in rows if (op.module, op.call, op.phase) == code]
    beyond = next((op for op in ops if op.compared.beyond), None)
    if beyond is not None:
        return beyond
    closest = max(ops, key=lambda op: op.compared.times or 0.0, default=None)
    return closest if closest is not None and (closest.compared.times or 0.0) > 1 else None


def _facts(placed: PlacedSide, loss: float | None) -> SideFacts:
    side = placed.side
    return SideFacts(
        label=side.label,
        precision=side.precision,
        device=str(placed.device),
        roundoff=side.roundoffs[0],
        gradient_roundoff=side.roundoffs[1],
        loss=loss,
        scale=placed.scale if placed.scale != 1.0 else None,
        compiled=bool(side.compiled),
    )


def _notes(runs: DiffRuns, draws: SharedRandom, found: ExpectedErrors, forward: PassComparisons) -> Iterator[str]:
    compiled = [which for which, placed in (("a", runs.a), ("b", runs.b)) if placed.side.compiled]
    if compiled:
        yield (
            f"{' and '.join(compiled)} {'are' if len(compiled) > 1 else 'is'} compiled, so modules are not "
            "compared: only the function's results and the gradients of parameters."
        )
    if runs.b.function is not None:
        yield "b runs a function of its own, so modules are not compared."
    if not runs.went_back:
        yield "No loss with a gradient was returned: only the forward pass is compared."
    if draws.masked_inside:
        yield (
            "A fused kernel (attention, or a recurrent layer) draws its own dropout masks, which may differ "
            "between the sides: set its dropout to 0 for this comparison."
        )
    if draws.any and runs.b.side.batch is not None:
        yield "The parts of the batch draw their own random numbers: set dropout to 0 for this comparison."
    if draws.any and compiled:
        yield "Compiled code may draw different random numbers: set dropout to 0 for this comparison."
    for slot in found.harmless:
        maker = next(event.call.label for event in runs.outline.events if event.slot == slot)
        measured = forward.measured[slot]
        yield (
            f"{measured.changed:,} of {measured.values:,} integers that `{maker}` returns differ; nothing "
            "compared after them exceeds rounding."
        )
    if runs.whole_kernels:
        yield (
            f"The matmuls of {', '.join(f'`{name}`' for name in runs.whole_kernels)} run inside one fused kernel, "
            "so they are not emulated."
        )
    if runs.moved:
        yield f"{format_bytes(runs.moved)} were moved to host memory during the comparison."
