"""Follow a bad value back through the operations that made it, to the origin of its infinities and NaNs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isinf

from ampwise.numbers.op_families import family_of, is_collective
from ampwise.trace.recorder import RecordedOp, Tape, TensorRead

__all__ = ["BackwardSlice", "first_bad_op", "is_literal_infinity", "slice_back"]


@dataclass(slots=True)
class BackwardSlice:
    """The origins of the infinities and NaNs in some values."""

    computed: list[RecordedOp] = field(default_factory=list)  # bad results from finite inputs
    literal: list[RecordedOp] = field(default_factory=list)  # infinities written as such, such as a mask of -inf
    from_infinities: list[RecordedOp] = field(default_factory=list)  # NaN computed from infinities
    # Bad inputs, with the operation that read them: bad before the step, or written by no recorded operation.
    sources: list[tuple[RecordedOp | None, TensorRead, str]] = field(default_factory=list)


def slice_back(tape: Tape, targets: Iterable[TensorRead]) -> BackwardSlice:
    """Find the origins of everything bad in the targets."""
    found, targets, bad = BackwardSlice(), list(targets), tape.ranges.bad
    seen: set[object] = set()
    pending: list[tuple[RecordedOp | None, TensorRead, str]] = []
    pending += [(None, given, kind) for given in targets if (kind := bad(given.slot))]
    while pending:
        reader, given, kind = pending.pop()
        op = _producer_of(tape, given, kind)
        key = (id(given.storage), kind) if op is None else (op.index, kind)
        if key in seen:
            continue
        seen.add(key)
        if op is None:
            found.sources.append((reader, given, kind))
            continue
        nans = [each for each in op.inputs if bad(each.slot) == "nan"]
        infs = [each for each in op.inputs if bad(each.slot) == "inf"]
        if infs and not (kind == "nan" and nans):
            pending += [(op, each, "inf") for each in infs]
            if kind == "nan":
                found.from_infinities.append(op)
        elif nans:
            pending += [(op, each, "nan") for each in nans]
        elif kind == "inf" and is_literal_infinity(op):
            found.literal.append(op)
        else:
            found.computed.append(op)
    for ops in (found.computed, found.literal, found.from_infinities):
        ops.sort(key=lambda op: op.index)
    if found.sources:
        needed = _needed(tape, targets)
        found.sources = [(_first_reader(tape, needed, *source[:2]), *source[1:]) for source in found.sources]
    found.sources.sort(key=lambda source: -1 if source[0] is None else source[0].index)
    return found


def _producer_of(tape: Tape, given: TensorRead, kind: str) -> RecordedOp | None:
    """Return the last operation that wrote such a value; None if it was there before, or no operation was recorded."""
    earlier = given.storage.writers[: given.writers][::-1]
    exact = [each for each in earlier if tape.ranges.bad(each.slot) == kind]
    any_bad = exact or [each for each in earlier if tape.ranges.bad(each.slot)]
    # The result of a collective is not measured: when the call returns, the values have not arrived yet.
    found = any_bad or [each for each in earlier if is_collective(tape.ops[each.op].name)]
    return tape.ops[found[0].op] if found else None


def _needed(tape: Tape, targets: Iterable[TensorRead]) -> set[int]:
    """Return the indices of all operations that the targets depend on, also those that computed an index."""
    needed: set[int] = set()
    seen: dict[int, int] = {}  # how many writers of each storage were followed
    pending = list(targets)
    while pending:
        given = pending.pop()
        writers = given.storage.writers[seen.get(id(given.storage), 0) : given.writers]
        seen[id(given.storage)] = max(seen.get(id(given.storage), 0), given.writers)
        new = {each.op for each in writers} - needed
        needed |= new
        pending += [each for index in new for each in tape.ops[index].inputs]
    return needed


def _first_reader(tape: Tape, needed: set[int], reader: RecordedOp | None, given: TensorRead) -> RecordedOp | None:
    """Return the first operation that read the bad input, returned something bad, and that the targets depend on."""
    for op in tape.ops[: 0 if reader is None else reader.index]:
        takes = any(each.storage is given.storage and tape.ranges.bad(each.slot) for each in op.inputs)
        if takes and op.index in needed and tape.made(op):
            return op
    return reader


def first_bad_op(tape: Tape) -> RecordedOp | None:
    """Return the first operation on the tape that computed something bad from finite inputs."""
    for op in tape.ops:
        made = tape.made(op)
        if made and not tape.was_given_bad(op) and not (made == "inf" and is_literal_infinity(op)):
            return op
    return None


def is_literal_infinity(op: RecordedOp) -> bool:
    """Return whether the code passed an infinity on purpose: ``masked_fill(mask, -inf)``, ``full(..., inf)``."""
    return any(map(isinf, op.scalars)) and family_of(op.name) in ("filling", "")
