"""Back from a bad value, through the operations that made it, to where its infinities and its NaNs were born."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isinf

from ampwise.evidence.op_families import family_of, is_collective
from ampwise.trace.tape import Given, Op, Tape

__all__ = ["Ancestry", "ancestry_of", "first_computed", "is_by_hand", "producer_of"]

NAN, INF = "nan", "inf"


@dataclass(slots=True)
class Ancestry:
    """Where what is bad in some values came from."""

    computed: list[Op] = field(default_factory=list)  # bad results of finite inputs
    by_hand: list[Op] = field(default_factory=list)  # infinities that were written as such
    from_infinities: list[Op] = field(default_factory=list)  # NaN of infinities
    # What came in, bad, and who read it: it was there before, or nobody was seen to have put it there.
    sources: list[tuple[Op | None, Given, str]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.computed or self.by_hand or self.from_infinities or self.sources)


def ancestry_of(tape: Tape, targets: Iterable[Given]) -> Ancestry:
    """Of all that is bad in the targets."""
    found, targets = Ancestry(), list(targets)
    seen: set[object] = set()
    waiting: list[tuple[Op | None, Given, str]] = [(None, given, _badness(tape, given)) for given in targets]
    while waiting:
        reader, given, kind = waiting.pop()
        if not kind:
            continue
        op = producer_of(tape, given, kind)
        key = (id(given.storage), kind) if op is None else (op.index, kind)
        if key in seen:
            continue
        seen.add(key)
        if op is not None:
            waiting += _followed(tape, op, kind, found)
        else:
            found.sources.append((reader, given, kind))
    for ops in (found.computed, found.by_hand, found.from_infinities):
        ops.sort(key=lambda op: op.index)
    if found.sources:
        needed = _needed(tape, targets)
        found.sources = [(_first_reader(tape, needed, *source[:2]), *source[1:]) for source in found.sources]
    found.sources.sort(key=lambda source: -1 if source[0] is None else source[0].index)
    return found


def _needed(tape: Tape, targets: Iterable[Given]) -> set[int]:
    """The operations that the targets come from, whatever these made: also those that chose an index."""
    needed: set[int] = set()
    seen: dict[int, int] = {}  # how many of a memory's writers were followed
    waiting = list(targets)
    while waiting:
        given = waiting.pop()
        writers = given.storage.writers[seen.get(id(given.storage), 0) : given.writers]
        seen[id(given.storage)] = max(seen.get(id(given.storage), 0), given.writers)
        new = {each.op for each in writers} - needed
        needed |= new
        waiting += [each for index in new for each in tape.ops[index].inputs]
    return needed


def _first_reader(tape: Tape, needed: set[int], reader: Op | None, given: Given) -> Op | None:
    """Of those that the targets come from, the first that took it and made something bad of it."""
    for op in tape.ops[: 0 if reader is None else reader.index]:
        takes = any(each.storage is given.storage and tape.ranges.is_bad(each.slot) for each in op.inputs)
        if takes and op.index in needed and tape.made(op):
            return op
    return reader


def producer_of(tape: Tape, given: Given, kind: str) -> Op | None:
    """The last operation that has put such a value there; None if it was there before, or nobody was seen."""
    earlier = given.storage.writers[: given.writers][::-1]
    exact = [each for each in earlier if _is(tape, each.slot, kind)]
    any_bad = exact or [each for each in earlier if tape.ranges.is_bad(each.slot)]
    # What other ranks have sent is not measured when it is asked for, as it is not there yet.
    sent = [each for each in earlier if is_collective(tape.ops[each.op].name)]
    found = any_bad or sent
    return tape.ops[found[0].op] if found else None


def _followed(tape: Tape, op: Op, kind: str, found: Ancestry) -> list[tuple[Op | None, Given, str]]:
    """What of its inputs to follow; an operation that has none is where it was born."""
    nans = [given for given in op.inputs if tape.ranges.has_nan(given.slot)]
    infs = [given for given in op.inputs if tape.ranges.has_inf(given.slot)]
    if kind == NAN and nans:
        return [(op, given, NAN) for given in nans]
    if infs:
        if kind == NAN:
            found.from_infinities.append(op)
        return [(op, given, INF) for given in infs]
    if nans:
        return [(op, given, NAN) for given in nans]
    if kind == INF and is_by_hand(op):
        found.by_hand.append(op)
    else:
        found.computed.append(op)
    return []


def first_computed(tape: Tape) -> Op | None:
    """The first operation of all that made something bad of finite inputs, whoever read it."""
    for op in tape.ops:
        made = tape.made(op)
        of_finite = made and not tape.was_given_bad(op)
        if of_finite and not (made == INF and is_by_hand(op)):
            return op
    return None


def is_by_hand(op: Op) -> bool:
    """An infinity was asked for: ``masked_fill(mask, -inf)``, ``full(..., inf)``."""
    return any(map(isinf, op.scalars)) and family_of(op.name) in ("filling", "")


def _badness(tape: Tape, given: Given) -> str:
    if tape.ranges.has_nan(given.slot):
        return NAN
    return INF if tape.ranges.has_inf(given.slot) else ""


def _is(tape: Tape, slot: int, kind: str) -> bool:
    return tape.ranges.has_nan(slot) if kind == NAN else tape.ranges.has_inf(slot)
