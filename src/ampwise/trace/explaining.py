"""A step that went bad → an incident: run again, sliced back to where it began, looked at closer, remedies tried."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ampwise.evidence.incident import Birth, Incident, Literal, OptimizerFacts, Source
from ampwise.evidence.op_families import base_name, family_of, is_collective
from ampwise.finding import Finding
from ampwise.rules import rules_about
from ampwise.trace.looking import Look, look
from ampwise.trace.optimizers import facts_of_optimizer
from ampwise.trace.recorder import Looker
from ampwise.trace.replay import Replay, Settings, Subject, Taped
from ampwise.trace.slicing import Ancestry, ancestry_of, first_computed, is_by_hand
from ampwise.trace.sources import Origins
from ampwise.trace.tape import Given, Op, Tape
from ampwise.trace.together import Together
from ampwise.trace.trials import tried

__all__ = ["explain", "findings_of", "found_alone", "incident_of", "swallowed_in"]

ALONE = Together()
NEAR = 4  # operations back from a zero, among which a literal that has become zero is looked for


def explain(subject: Subject, together: Together = ALONE) -> list[Finding]:
    """What is to be said of a bad step; nothing, if its gradients only were too large for the loss scale."""
    incident = incident_of(subject, together)
    return [] if incident is None else findings_of(incident)


def findings_of(incident: Incident) -> list[Finding]:
    return [finding for module in rules_about("op") for finding in module.check(incident)]


def incident_of(subject: Subject, together: Together = ALONE) -> Incident | None:
    """None if there is nothing wrong but the loss scale, which will be lowered. The same on all ranks."""
    with Replay(subject) as replay:
        if _is_ordinary(replay, together):
            return None
        # All go back or none does: there may be exchanges on the way.
        taped = together.each(lambda: replay.taped(Settings(only_if_finite=not together.several)))
        together = together.knowing(exchanges=any(is_collective(op.name) for op in taped.tape.ops))
        if together.all_hold(lambda: taped.ended.finite):
            return _not_reproduced(replay, taped.ended.gradients)
        return _of_all(together.each(lambda: _found(replay, taped, together)), together)


def _is_ordinary(replay: Replay, together: Together) -> bool:
    """Only the scaled gradients are too large: without the scale, all is finite."""
    loss, scale = replay.subject.loss, replay.subject.scale
    may_be = scale > 1 and together.all_hold(lambda: loss is not None and math.isfinite(loss))
    return may_be and together.all_hold(lambda: replay.plain(Settings()).finite)


def _found(replay: Replay, taped: Taped, together: Together) -> Incident | None:
    """What happened on this rank; None if nothing."""
    inquiry = None if taped.ended.finite else Inquiry(replay, taped)
    wanted = [] if inquiry is None else inquiry.wanted
    backward = any(op.phase != "forward" for op in wanted)
    backward |= together.in_step  # sharded weights are given back in the backward pass
    looks = looked_at(replay, wanted, backward=backward) if wanted or together.in_step else {}
    if inquiry is None:
        return None
    incident = inquiry.incident(looks)
    return incident if together.in_step else incident.but(trials=tried(replay, incident))


def found_alone(replay: Replay, taped: Taped) -> Incident:
    """What happened in a replay that was not finite, where there are no other ranks."""
    incident = _found(replay, taped, ALONE)
    assert incident is not None, "it was not finite"
    return incident


def _of_all(incident: Incident | None, together: Together) -> Incident | None:
    """That of the rank where it began: others may have it from there."""
    if not together.several:
        return incident
    found = [(rank, each) for rank, each in enumerate(together.all_of(incident)) if each is not None]
    began = [pair for pair in found if not _came_in(pair[1])] or found
    rank, chosen = began[0]
    also = [str(other) for other, each in began[1:] if (each.kind, each.site) == (chosen.kind, chosen.site)]
    remarks = (*chosen.remarks, f"Also on rank {', '.join(also)}.") if also else chosen.remarks
    return chosen.but(rank=rank, ranks=together.size, remarks=remarks)


def _came_in(incident: Incident) -> bool:
    """From another rank, or from memory of nobody's, which is what some exchanges look like from here."""
    return incident.kind == "from-another-rank" or (incident.source is not None and incident.source.what == "other")


def _not_reproduced(replay: Replay, gradients: int) -> Incident:
    """It was bad, and is not now: once more, as it was scaled, with what torch has against chance."""
    subject = replay.subject
    scaled = Settings(scale=subject.scale)
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


def looked_at(replay: Replay, ops: Sequence[Op], *, backward: bool) -> dict[int, Look]:
    """Run it once more, and look at these operations as they run."""
    seen: dict[int, Look] = {}

    def look_at(index: int, func: Any, args: Any, kwargs: Any) -> Any:
        result, seen[index] = look(func, args, kwargs)
        return result

    try:
        replay.plain(Settings(backward=backward), mode=Looker({op.index: op.name for op in ops}, look_at))
    except Exception as error:
        # The script's own: a function that cannot be run twice. What was found stands, without the numbers.
        replay.subject.remarks += (
            f"It could not be run once more for a closer look ({type(error).__name__}: {error}).",
        )
    return seen


def _known(subject: Subject, gradients: int) -> Incident:
    """What is known before anything is found."""
    return Incident(
        precision=subject.precision or "fp32",
        device=subject.device.type,
        scale=subject.scale,
        step=subject.step,
        gradients=gradients,
        remarks=subject.remarks,
    )


class Inquiry:
    """Into a run that was written down, and is bad."""

    def __init__(self, replay: Replay, taped: Taped) -> None:
        self._replay, self._taped, self._tape = replay, taped, taped.tape
        self._origins = Origins(replay.subject)
        results = [given for given in taped.results if self._tape.ranges.is_bad(given.slot)]
        gradients = [taped.gradients[name] for name in taped.ended.bad]
        self._symptom = "loss" if results else "gradients"
        self._ancestry = ancestry_of(self._tape, results or gradients)
        self._op, self._source = self._guilty(self._ancestry)
        later = (each for each in self._ancestry.from_infinities if self._op is None or each.index > self._op.index)
        self._nan_op = next(later, None)

    @property
    def wanted(self) -> list[Op]:
        """Operations to look at closer."""
        reader = self._source[0] if self._source is not None else None
        return [op for op in (self._op, self._nan_op, reader) if op is not None]

    def incident(self, looks: Mapping[int, Look]) -> Incident:
        """What happened."""
        ended = self._taped.ended
        incident = _known(self._replay.subject, ended.gradients).but(
            symptom=self._symptom,
            loss=ended.loss,
            bad_gradients=ended.bad,
            has_modules=self._tape.has_modules,
            remarks=self._remarks(),
        )
        if self._source is not None:
            reader, given = self._source
            first_use = None if reader is None else self.birth(reader, looks)
            found = self._origins.source(given, first_use)
            return incident.but(source=found, optimizer=self._optimizer_of(given))
        birth = None if self._op is None else self.birth(self._op, looks)
        if self._op is not None and birth is not None and any(map(math.isnan, self._op.scalars)):
            return incident.but(source=Source(what="number", first_use=birth))
        is_later = birth is not None and birth.made != "nan" and self._nan_op is not self._op
        later = self.birth(self._nan_op, looks) if is_later and self._nan_op is not None else None
        return incident.but(birth=birth, nan_birth=later)

    def _remarks(self) -> tuple[str, ...]:
        was, now = self._replay.subject.loss, self._taped.ended.loss
        remarks = self._replay.subject.remarks
        if was is None or now is None or was == now or (math.isnan(was) and math.isnan(now)):
            return remarks
        return (*remarks, f"The loss of the replay is {now:.6g}, and that of the step was {was:.6g}.")

    def _optimizer_of(self, given: Given) -> OptimizerFacts | None:
        parameter = self._origins.parameter(given)
        subject = self._replay.subject
        if parameter is None:
            return None
        return facts_of_optimizer(subject.optimizers, parameter, taken=(subject.step or 1) - 1)

    def _guilty(self, ancestry: Ancestry) -> tuple[Op | None, tuple[Op | None, Given] | None]:
        """The operation, or what came in: whichever is first of those that did not mean to."""
        sources = [
            (reader, given)
            for reader, given, kind in ancestry.sources
            if kind == "nan" or not self._origins.is_meant(given, ancestry)
        ]
        computed = [each for each in ancestry.computed if not self._is_mask(each, ancestry)]
        op = self._asked_for(computed[0]) if computed else None
        if op is None and sources and self._is_nobodys(*sources[0]):
            # The way back is lost, in an exchange among ranks or in memory that was written to unseen.
            op = first_computed(self._tape)
            sources = [] if op is not None else sources
        if sources and (op is None or sources[0][0] is None or sources[0][0].index <= op.index):
            return None, sources[0]
        meant = ancestry.from_infinities or ancestry.by_hand
        return self._began(op) if op is not None else (meant[0] if meant else None), None

    def _began(self, op: Op) -> Op:
        """A gradient that the loss is made of may be the derivative of what was infinite before: there it began."""
        forward = None if op.live or op.forward is None else self._tape.ops[op.forward]
        if forward is None or self._symptom != "loss" or not self._tape.made(forward):
            return op
        return op if self._tape.was_given_bad(forward) else forward

    def _is_nobodys(self, reader: Op | None, given: Given) -> bool:
        return (reader is None or reader.site.file is None) and self._origins.is_unknown(given)

    def _has_infinite_number(self, op: Op) -> bool:
        """Of Python's, among its arguments, and made NaN of it: `mask * float('-inf')`."""
        return any(map(math.isinf, op.scalars)) and self._tape.made(op) == "nan"

    def _is_mask(self, op: Op, ancestry: Ancestry) -> bool:
        """The logarithm of what is 0 or 1, on its way into a softmax, is -inf on purpose."""
        reaches = ancestry.from_infinities and family_of(ancestry.from_infinities[0].name) == "softmax"
        ends = [self._tape.ranges[given.slot] for given in op.inputs]
        return bool(reaches) and family_of(op.name) == "logarithm" and all(each in ((0, 0), (0, 1)) for each in ends)

    def _asked_for(self, op: Op) -> Op:
        """torch.logdet fills in NaN by itself where the determinant is negative: then it is the determinant's."""
        near = self._tape.ops[max(op.index - NEAR, 0) : op.index] if any(map(math.isnan, op.scalars)) else ()
        return next((each for each in near if each.site == op.site and family_of(each.name) == "determinant"), op)

    def birth(self, op: Op, looks: Mapping[int, Look]) -> Birth:
        tape, seen = self._tape, looks.get(op.index)
        forward = None if op.forward is None else tape.ops[op.forward]
        birth = Birth(
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
            by_hand=op in self._ancestry.by_hand,
            from_infinities=op in self._ancestry.from_infinities or self._has_infinite_number(op),
            literals=tuple(self._literals(op)),
        )
        if seen is None:
            return birth
        return replace(
            birth,
            inputs=seen.inputs,
            output=seen.output,
            exact=seen.exact,
            exact_largest=seen.exact_largest,
            zero_divisors=seen.zero_divisors,
            outside_domain=seen.outside_domain,
            masked_rows=seen.masked_rows,
        )

    def _literals(self, op: Op) -> Iterator[Literal]:
        """Numbers in the source, on the way to the operation, that its format does not hold."""
        near, seen = [op], set()
        for _ in range(NEAR):
            for each in near:
                yield from _lost(each)
            seen |= {each.index for each in near}
            made = [_maker(self._tape, given) for each in near for given in each.inputs]
            near = list({each.index: each for each in made if each is not None and each.index not in seen}.values())


def _lost(op: Op) -> Iterator[Literal]:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(op.dtype)
    for value in op.scalars if dtype is not None else ():
        becomes = float(torch.tensor(value, dtype=dtype))
        if value and math.isfinite(value) and (becomes == 0 or math.isinf(becomes)):
            yield Literal(value=value, becomes=becomes, dtype=op.dtype, site=op.site)


def _maker(tape: Tape, given: Given) -> Op | None:
    writers = given.storage.writers[: given.writers]
    return tape.ops[writers[-1].op] if writers else None


def swallowed_in(replay: Replay, taped: Taped) -> Iterator[Incident]:
    """Infinities that were made of finite numbers, went away again, and left finite values."""
    tape = taped.tape
    ops = [op for op in tape.ops if tape.made(op) == "inf" and op.phase == "forward" and not is_by_hand(op)]
    made = [op for op in ops if not tape.was_given_bad(op)]
    if not made:
        return
    inquiry, looks = Inquiry(replay, taped), looked_at(replay, made, backward=False)
    for op in made:
        yield _known(replay.subject, taped.ended.gradients).but(
            symptom="value", birth=inquiry.birth(op, looks), swallowed=True, has_modules=tape.has_modules
        )
