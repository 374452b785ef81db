"""Diagnose a bad step: replay it, follow the bad value back to its origin, inspect that operation, and try fixes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ampwise.finding import Finding
from ampwise.numbers.op_families import base_name, family_of, is_collective
from ampwise.rules import run_checks
from ampwise.trace.failure import BadTensor, Failure, OptimizerFacts, Origin, RoundedLiteral
from ampwise.trace.fix_trials import try_remedies
from ampwise.trace.op_inspection import OpInspection, inspect_op
from ampwise.trace.optimizer_facts import optimizer_facts_of
from ampwise.trace.rank_group import RankGroup
from ampwise.trace.recorder import InspectMode
from ampwise.trace.replay import RecordedReplay, Replay, ReplaySettings, ReplayStep
from ampwise.trace.slicing import BackwardSlice, first_bad_op, is_literal_infinity, slice_back
from ampwise.trace.tape import RecordedOp, Tape, TensorRead
from ampwise.trace.tensor_owners import TensorOwners

__all__ = ["diagnose", "diagnose_recorded", "explain", "findings_about", "swallowed_infinities"]

SINGLE_RANK = RankGroup()
LITERAL_SEARCH_DEPTH = 4  # how many operations back from a zero to search for a literal that rounded to zero


def explain(subject: ReplayStep, together: RankGroup = SINGLE_RANK) -> list[Finding]:
    """Return the findings about a bad step; none if its gradients overflowed only because of the loss scale."""
    failure = diagnose(subject, together)
    return [] if failure is None else findings_about(failure)


def findings_about(failure: Failure) -> list[Finding]:
    return run_checks(failure)


def diagnose(subject: ReplayStep, together: RankGroup = SINGLE_RANK) -> Failure | None:
    """Diagnose a bad step, with the same result on all ranks.

    Returns None if only the loss scale, which will be lowered, made the gradients overflow.
    """
    with Replay(subject) as replay:
        if _only_scale_overflows(replay, together):
            return None
        # All ranks run the backward pass or none does: it may contain collectives.
        taped = together.each(lambda: replay.taped(ReplaySettings(only_if_finite=not together.several)))
        together = together.with_collectives(any(is_collective(op.name) for op in taped.tape.ops))
        if together.all_hold(lambda: taped.ended.finite):
            return _not_reproduced(replay, taped.ended.gradients)
        return _merge_ranks(together.each(lambda: _diagnose_rank(replay, taped, together)), together)


def _only_scale_overflows(replay: Replay, together: RankGroup) -> bool:
    """Return whether only the scaled gradients overflow: without the loss scale, everything is finite."""
    loss, scale = replay.subject.loss, replay.subject.scale
    is_possible = scale > 1 and together.all_hold(lambda: loss is not None and math.isfinite(loss))
    return is_possible and together.all_hold(lambda: replay.plain(ReplaySettings()).finite)


def _diagnose_rank(replay: Replay, taped: RecordedReplay, together: RankGroup) -> Failure | None:
    """Diagnose what happened on this rank; None if its replay was finite."""
    inquiry = None if taped.ended.finite else FailureDiagnosis(replay, taped)
    wanted = [] if inquiry is None else inquiry.wanted
    backward = any(op.phase != "forward" for op in wanted)
    backward |= together.in_step  # the backward pass frees sharded weights
    looks = inspect_ops(replay, wanted, backward=backward) if wanted or together.in_step else {}
    if inquiry is None:
        return None
    failure = inquiry.failure(looks)
    return failure if together.in_step else failure.but(trials=try_remedies(replay, failure))


def diagnose_recorded(replay: Replay, taped: RecordedReplay) -> Failure:
    """Diagnose a replay that was not finite, on a single rank."""
    failure = _diagnose_rank(replay, taped, SINGLE_RANK)
    assert failure is not None, "the replay was not finite"
    return failure


def _merge_ranks(failure: Failure | None, together: RankGroup) -> Failure | None:
    """Return the failure of the rank where it began: other ranks may have received the bad value from there."""
    if not together.several:
        return failure
    found = [(rank, each) for rank, each in enumerate(together.all_of(failure)) if each is not None]
    began = [pair for pair in found if not _was_received(pair[1])] or found
    rank, chosen = began[0]
    also = [str(other) for other, each in began[1:] if (each.kind, each.site) == (chosen.kind, chosen.site)]
    remarks = (*chosen.remarks, f"Also on rank {', '.join(also)}.") if also else chosen.remarks
    return chosen.but(rank=rank, ranks=together.size, remarks=remarks)


def _was_received(failure: Failure) -> bool:
    """Return whether the bad value came from another rank, or from memory without a known owner (some collectives)."""
    return failure.kind == "from-another-rank" or (failure.source is not None and failure.source.what == "other")


def _not_reproduced(replay: Replay, gradients: int) -> Failure:
    """Describe a bad step whose replay was finite; replay it twice more with its loss scale, once deterministically."""
    subject = replay.subject
    scaled = ReplaySettings(scale=subject.scale)
    again = [replay.plain(scaled).finite]
    with _deterministic():
        again.append(replay.plain(scaled).finite)
    tries = f"{1 + sum(again)} of {1 + len(again)} replays from the same weights, batch and random numbers were finite"
    return _known(subject, gradients).but(loss=subject.loss, not_reproduced=tries)


@contextmanager
def _deterministic() -> Iterator[None]:
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def inspect_ops(replay: Replay, ops: Sequence[RecordedOp], *, backward: bool) -> dict[int, OpInspection]:
    """Replay once more, and inspect these operations as they run."""
    seen: dict[int, OpInspection] = {}

    def look_at(index: int, func: Any, args: Any, kwargs: Any) -> Any:
        result, seen[index] = inspect_op(func, args, kwargs)
        return result

    try:
        replay.plain(ReplaySettings(backward=backward), mode=InspectMode({op.index: op.name for op in ops}, look_at))
    except Exception as error:
        # The user's function cannot be run twice. The diagnosis holds, without the numbers.
        replay.subject.remarks += (
            f"The step could not be replayed once more to inspect the operation ({type(error).__name__}: {error}).",
        )
    return seen


def _known(subject: ReplayStep, gradients: int) -> Failure:
    """Return a failure with what is known before the diagnosis."""
    return Failure(
        precision=subject.precision or "fp32",
        device=subject.device.type,
        scale=subject.scale,
        step=subject.step,
        gradients=gradients,
        remarks=subject.remarks,
    )


class FailureDiagnosis:
    """The diagnosis of a recorded replay that was not finite."""

    def __init__(self, replay: Replay, taped: RecordedReplay) -> None:
        self._replay, self._taped, self._tape = replay, taped, taped.tape
        self._origins = TensorOwners(replay.subject)
        results = [given for given in taped.results if self._tape.ranges.is_bad(given.slot)]
        gradients = [taped.gradients[name] for name in taped.ended.bad]
        self._symptom = "loss" if results else "gradients"
        self._ancestry = slice_back(self._tape, results or gradients)
        self._op, self._source = self._find_cause(self._ancestry)
        later = (each for each in self._ancestry.from_infinities if self._op is None or each.index > self._op.index)
        self._nan_op = next(later, None)

    @property
    def wanted(self) -> list[RecordedOp]:
        """Operations to inspect."""
        reader = self._source[0] if self._source is not None else None
        return [op for op in (self._op, self._nan_op, reader) if op is not None]

    def failure(self, looks: Mapping[int, OpInspection]) -> Failure:
        """Return the failure, with what the inspected operations showed."""
        ended = self._taped.ended
        failure = _known(self._replay.subject, ended.gradients).but(
            symptom=self._symptom,
            loss=ended.loss,
            bad_gradients=ended.bad,
            has_modules=self._tape.has_modules,
            remarks=self._remarks(),
        )
        if self._source is not None:
            reader, given = self._source
            first_use = None if reader is None else self.origin(reader, looks)
            found = self._origins.source(given, first_use)
            return failure.but(source=found, optimizer=self._optimizer_of(given))
        origin = None if self._op is None else self.origin(self._op, looks)
        if self._op is not None and origin is not None and any(map(math.isnan, self._op.scalars)):
            return failure.but(source=BadTensor(what="number", first_use=origin))
        is_later = origin is not None and origin.made != "nan" and self._nan_op is not self._op
        nan_origin = self.origin(self._nan_op, looks) if is_later and self._nan_op is not None else None
        return failure.but(origin=origin, nan_origin=nan_origin)

    def _remarks(self) -> tuple[str, ...]:
        was, now = self._replay.subject.loss, self._taped.ended.loss
        remarks = self._replay.subject.remarks
        if was is None or now is None or was == now or (math.isnan(was) and math.isnan(now)):
            return remarks
        return (*remarks, f"The loss of the replay is {now:.6g}; the loss of the step was {was:.6g}.")

    def _optimizer_of(self, given: TensorRead) -> OptimizerFacts | None:
        parameter = self._origins.parameter(given)
        subject = self._replay.subject
        if parameter is None:
            return None
        return optimizer_facts_of(subject.optimizers, parameter, taken=(subject.step or 1) - 1)

    def _find_cause(
        self, ancestry: BackwardSlice
    ) -> tuple[RecordedOp | None, tuple[RecordedOp | None, TensorRead] | None]:
        """Return the operation or the input that is to blame: the first that was not infinite on purpose."""
        sources = [
            (reader, given)
            for reader, given, kind in ancestry.sources
            if kind == "nan" or not self._origins.is_intended(given, ancestry)
        ]
        computed = [each for each in ancestry.computed if not self._is_mask(each, ancestry)]
        op = self._determinant_behind(computed[0]) if computed else None
        if op is None and sources and self._is_unowned(*sources[0]):
            # The value cannot be followed further back: a collective, or memory written without an operation.
            op = first_bad_op(self._tape)
            sources = [] if op is not None else sources
        if sources and (op is None or sources[0][0] is None or sources[0][0].index <= op.index):
            return None, sources[0]
        intended = ancestry.from_infinities or ancestry.literal
        return self._forward_origin(op) if op is not None else (intended[0] if intended else None), None

    def _forward_origin(self, op: RecordedOp) -> RecordedOp:
        """Return the forward operation that was already infinite, if the loss contains its derivative; else ``op``."""
        forward = None if op.live or op.forward is None else self._tape.ops[op.forward]
        if forward is None or self._symptom != "loss" or not self._tape.made(forward):
            return op
        return op if self._tape.was_given_bad(forward) else forward

    def _is_unowned(self, reader: RecordedOp | None, given: TensorRead) -> bool:
        return (reader is None or reader.site.file is None) and self._origins.is_unknown(given)

    def _has_infinite_number(self, op: RecordedOp) -> bool:
        """Return whether a Python infinity among its arguments became NaN: `mask * float('-inf')`."""
        return any(map(math.isinf, op.scalars)) and self._tape.made(op) == "nan"

    def _is_mask(self, op: RecordedOp, ancestry: BackwardSlice) -> bool:
        """Return whether this is the logarithm of a 0/1 mask that goes into a softmax, which is -inf on purpose."""
        reaches = ancestry.from_infinities and family_of(ancestry.from_infinities[0].name) == "softmax"
        ends = [self._tape.ranges[given.slot] for given in op.inputs]
        return bool(reaches) and family_of(op.name) == "logarithm" and all(each in ((0, 0), (0, 1)) for each in ends)

    def _determinant_behind(self, op: RecordedOp) -> RecordedOp:
        """Return the determinant for the NaN that torch.logdet fills in where it is negative; else ``op``."""
        near = (
            self._tape.ops[max(op.index - LITERAL_SEARCH_DEPTH, 0) : op.index]
            if any(map(math.isnan, op.scalars))
            else ()
        )
        return next((each for each in near if each.site == op.site and family_of(each.name) == "determinant"), op)

    def origin(self, op: RecordedOp, looks: Mapping[int, OpInspection]) -> Origin:
        """Describe an operation as the origin of a bad value."""
        tape, seen = self._tape, looks.get(op.index)
        forward = None if op.forward is None else tape.ops[op.forward]
        origin = Origin(
            op=op.name,
            made=tape.made(op) or "nan",
            dtype=op.dtype,
            phase=op.phase,
            site=op.site,
            live=op.live,
            module=op.module,
            module_class=op.module_class,
            derivative_of="" if forward is None else base_name(forward.name),
            hidden="" if forward is None else tape.made(forward),
            by_hand=op in self._ancestry.literal,
            from_infinities=op in self._ancestry.from_infinities or self._has_infinite_number(op),
            literals=tuple(self._literals(op)),
        )
        if seen is None:
            return origin
        return replace(
            origin,
            inputs=seen.inputs,
            output=seen.output,
            exact=seen.exact,
            exact_largest=seen.exact_largest,
            zero_divisors=seen.zero_divisors,
            outside_domain=seen.outside_domain,
            masked_rows=seen.masked_rows,
        )

    def _literals(self, op: RecordedOp) -> Iterator[RoundedLiteral]:
        """Yield the numbers in the source, on the way to the operation, that its format cannot represent."""
        near, seen = [op], set()
        for _ in range(LITERAL_SEARCH_DEPTH):
            for each in near:
                yield from _unrepresentable(each)
            seen |= {each.index for each in near}
            made = [_last_writer(self._tape, given) for each in near for given in each.inputs]
            near = list({each.index: each for each in made if each is not None and each.index not in seen}.values())


def _unrepresentable(op: RecordedOp) -> Iterator[RoundedLiteral]:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(op.dtype)
    for value in op.scalars if dtype is not None else ():
        becomes = float(torch.tensor(value, dtype=dtype))
        if value and math.isfinite(value) and (becomes == 0 or math.isinf(becomes)):
            yield RoundedLiteral(value=value, becomes=becomes, dtype=op.dtype, site=op.site)


def _last_writer(tape: Tape, given: TensorRead) -> RecordedOp | None:
    writers = given.storage.writers[: given.writers]
    return tape.ops[writers[-1].op] if writers else None


def swallowed_infinities(replay: Replay, taped: RecordedReplay) -> Iterator[Failure]:
    """Yield the infinities that finite inputs produced and that disappeared again: the result is finite."""
    tape = taped.tape
    ops = [op for op in tape.ops if tape.made(op) == "inf" and op.phase == "forward" and not is_literal_infinity(op)]
    made = [op for op in ops if not tape.was_given_bad(op)]
    if not made:
        return
    inquiry, looks = FailureDiagnosis(replay, taped), inspect_ops(replay, made, backward=False)
    for op in made:
        yield _known(replay.subject, taped.ended.gradients).but(
            symptom="value", origin=inquiry.origin(op, looks), swallowed=True, has_modules=tape.has_modules
        )
