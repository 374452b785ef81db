"""Diagnose a bad step: replay it, follow the bad value back to its origin, inspect that operation, and try fixes."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.finding.registry import run_checks
from ampwise.numbers.op_families import base_name, family_of, is_collective
from ampwise.trace.call_arguments import outer_variables
from ampwise.trace.compilers import try_compilers
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import BadTensor, FixTrial, OptimizerFacts, Origin, RoundedLiteral
from ampwise.trace.kernels import try_other_kernels
from ampwise.trace.names_in_code import assigned_at, call_name, nodes_of, uninitialised_at
from ampwise.trace.op_inspection import InspectMode, values_of
from ampwise.trace.ranks import RankGroup
from ampwise.trace.recorder import RecordedOp, Tape, TensorRead, dtype_name, storage_id
from ampwise.trace.remedies import try_remedies
from ampwise.trace.replay import OptimizerPast, RecordedReplay, Replay, ReplaySettings, ReplayStep, is_finite
from ampwise.trace.slicing import first_bad_op, is_literal_infinity, slice_back
from ampwise.trace.torchscript import line_in_script
from ampwise.trace.value_ranges import ALWAYS_FINITE, local_shard, readable_values

__all__ = [
    "compiler_failure",
    "diagnose",
    "diagnose_recorded",
    "explain",
    "findings_about",
    "spoiled_weights",
    "swallowed_in_backward",
    "swallowed_infinities",
]

SINGLE_RANK = RankGroup()
MOST_HOLDERS = 1000  # objects to search for the one that holds a tensor
UNINITIALISED = "it was made from uninitialised memory"
ZERO_SEARCH_DEPTH = 12  # how many operations back from zeros to search for an infinite divisor
LITERAL_SEARCH_DEPTH = 4  # how many operations back from a zero to search for a literal that rounded to zero
NAMED_SAMPLES = 8  # bad samples of a batch to name
# Names of the state that optimizers divide by (or by its root): Adam, RMSprop, Adagrad, Adamax.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf")
LITERAL_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def explain(subject: ReplayStep) -> list[Finding]:
    """Return the findings about a bad step; none if its gradients overflowed only because of the loss scale."""
    failure = diagnose(subject)
    return [] if failure is None else findings_about(failure)


def findings_about(failure: Failure) -> list[Finding]:
    return run_checks(failure)


def diagnose(subject: ReplayStep, together: RankGroup = SINGLE_RANK) -> Failure | None:
    """Diagnose a bad step, with the same result on all ranks.

    Returns None if only the loss scale, which will be lowered, made the gradients overflow.
    """
    with Replay(subject) as replay:
        loss = subject.loss
        may_be_the_scale = subject.scale > 1 and together.all_hold(lambda: loss is not None and math.isfinite(loss))
        if may_be_the_scale and together.all_hold(lambda: replay.plain(ReplaySettings()).finite):
            return None
        # All ranks run the backward pass or none does: it may contain collectives.
        taped = together.each(lambda: replay.taped(ReplaySettings(only_if_finite=not together.several)))
        together = together.with_collectives(any(is_collective(op.name) for op in taped.tape.ops))
        if together.all_hold(lambda: taped.ended.finite):
            return compiler_failure(replay, together) or _not_reproduced(replay, taped.ended.gradients).but(
                ranks=together.size
            )
        failure = together.each(lambda: diagnose_recorded(replay, taped, together))
        return failure if not together.several else _merge_ranks(failure, together)


def diagnose_recorded(replay: Replay, taped: RecordedReplay, together: RankGroup = SINGLE_RANK) -> Failure | None:
    """Diagnose what happened on this rank; None if its replay was finite."""
    diagnosis = None if taped.ended.finite else FailureDiagnosis(replay, taped)
    wanted = [] if diagnosis is None else diagnosis.wanted
    # The backward pass frees sharded weights, so that ranks in step always run it.
    backward = together.in_step or any(op.phase != "forward" for op in wanted)
    seen = inspect_ops(replay, wanted, backward=backward) if wanted or together.in_step else {}
    if diagnosis is None:
        return None
    failure = diagnosis.failure(seen)
    if together.in_step:
        return failure
    remedies = (_with_origin(replay, each) for each in try_remedies(replay, failure))
    return failure.but(trials=try_other_kernels(replay, failure) or tuple(remedies))


def _with_origin(replay: Replay, trial: FixTrial) -> FixTrial:
    """Find where a step that was tried in another precision fails."""
    if trial.change != "precision" or trial.finite:
        return trial
    try:
        taped = replay.taped(ReplaySettings(only_if_finite=True, precision=trial.argument))
        found = None if taped.ended.finite else FailureDiagnosis(replay, taped).failure({})
        return replace(trial, origin=None if found is None else found.origin)
    except Exception:  # raised by the user's code
        return trial


def spoiled_weights(replay: Replay, taped: RecordedReplay) -> Failure | None:
    """Diagnose a run that has made weights bad, although its loss and gradients are finite; None if it has not."""
    if not taped.spoiled:
        return None
    diagnosis = FailureDiagnosis(replay, taped._replace(results=taped.spoiled))
    seen = inspect_ops(replay, diagnosis.wanted, backward=True)
    return diagnosis.failure(seen).but(symptom="weights", loss=None)


def _merge_ranks(failure: Failure | None, together: RankGroup) -> Failure:
    """Return the failure of the rank where it began.

    Other ranks may have received the bad value from there, some in memory without a known owner.
    """
    found = [(rank, each) for rank, each in enumerate(together.all_of(failure)) if each is not None]
    began = [
        (rank, each)
        for rank, each in found
        if each.kind != "from-another-rank" and (each.source is None or each.source.what != "other")
    ]
    (rank, chosen), *others = began or found
    also = [str(other) for other, each in others if (each.kind, each.site) == (chosen.kind, chosen.site)]
    remarks = (*chosen.remarks, f"Also on rank {', '.join(also)}.") if also else chosen.remarks
    return chosen.but(rank=rank, ranks=together.size, remarks=remarks)


def compiler_failure(replay: Replay, together: RankGroup = SINGLE_RANK) -> Failure | None:
    """Describe a step that is finite eagerly, but not as torch.compile has compiled it; None if it is finite there."""
    found = try_compilers(replay, together)
    if found is None:
        return None
    ended, trial = found
    bad_loss = ended.loss is not None and not math.isfinite(ended.loss)
    known = _known(replay.subject, ended.gradients).but(symptom="loss" if bad_loss else "gradients", trials=(trial,))
    return known.but(loss=ended.loss, bad_gradients=ended.bad, has_modules=bool(replay.subject.models))


def _not_reproduced(replay: Replay, gradients: int) -> Failure:
    """Describe a bad step whose replay was finite; replay it twice more with its loss scale, once deterministically."""
    subject = replay.subject
    scaled = ReplaySettings(scale=subject.scale)
    again = [replay.plain(scaled).finite]
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again.append(replay.plain(scaled).finite)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
    tries = f"{1 + sum(again)} of {1 + len(again)} replays from the same weights, batch and random numbers were finite"
    return _known(subject, gradients).but(loss=subject.loss, not_reproduced=tries)


def _known(subject: ReplayStep, gradients: int) -> Failure:
    """Return a failure with what is known before the diagnosis."""
    return Failure(
        precision=subject.precision or "fp32",
        device=subject.device.type,
        scale=subject.scale,
        step=subject.step,
        gradients=gradients,
        compiled=subject.compiled,
        remarks=subject.remarks,
    )


def inspect_ops(replay: Replay, ops: Sequence[RecordedOp], *, backward: bool) -> dict[int, dict[str, Any]]:
    """Replay once more, and return what these operations show as they run: fields of ``Origin``, by index."""
    mode = InspectMode({op.index: op.name for op in ops})
    try:
        replay.plain(ReplaySettings(backward=backward), mode=mode)
    except Exception as error:
        # The user's function cannot be run twice. The diagnosis holds, without the numbers.
        replay.subject.remarks += (
            f"The step could not be replayed once more to inspect the operation ({type(error).__name__}: {error}).",
        )
    return mode.seen


def swallowed_infinities(replay: Replay, taped: RecordedReplay) -> Iterator[Failure]:
    """Yield the infinities that finite inputs produced and that disappeared again: the result is finite."""
    tape = taped.tape
    ops = [op for op in tape.ops if tape.made(op) == "inf" and op.phase == "forward" and not is_literal_infinity(op)]
    made = [op for op in ops if not tape.was_given_bad(op)]
    if not made:
        return
    diagnosis, seen = FailureDiagnosis(replay, taped), inspect_ops(replay, made, backward=False)
    for op in made:
        yield _known(replay.subject, taped.ended.gradients).but(
            symptom="value", origin=diagnosis.origin(op, seen), swallowed=True, has_modules=tape.has_modules
        )


def swallowed_in_backward(replay: Replay, taped: RecordedReplay) -> Failure | None:
    """Return the first NaN that the backward pass computed, and that reached neither the loss nor a gradient."""
    tape = taped.tape
    made = {op: tape.made(op) for op in tape.ops if op.phase == "backward"}
    if "nan" not in made.values():
        return None
    # Often an infinite derivative comes first, which a 0 then turns into NaN.
    op = next((op for op, what in made.items() if what in ("nan", "inf") and not tape.was_given_bad(op)), None)
    if op is None:
        return None
    seen = inspect_ops(replay, [op], backward=True)
    origin = FailureDiagnosis(replay, taped).origin(op, seen)
    known = _known(replay.subject, taped.ended.gradients)
    return known.but(symptom="value", loss=taped.ended.loss, origin=origin, has_modules=taped.tape.has_modules)


class FailureDiagnosis:
    """The diagnosis of a recorded replay that was not finite."""

    def __init__(self, replay: Replay, taped: RecordedReplay) -> None:
        self._subject, self._ended, self._tape = replay.subject, taped.ended, taped.tape
        self._owners = _owners(replay.subject)
        results = [given for given in taped.results if self._tape.ranges.bad(given.slot)]
        self._symptom = "loss" if results else "gradients"
        self._slice = slice_back(self._tape, results or [taped.gradients[name] for name in taped.ended.bad])
        self._op, self._source = self._find_cause()
        later = (each for each in self._slice.from_infinities if self._op is None or each.index > self._op.index)
        self._nan_op = next(later, None)
        hidden = None if self._op is None else self._infinity_behind_zeros(self._op)
        if hidden is not None:
            self._op, self._nan_op = hidden, self._op

    @property
    def wanted(self) -> list[RecordedOp]:
        """Operations to inspect."""
        reader = self._source[0] if self._source is not None else None
        return [op for op in (self._op, self._nan_op, reader) if op is not None]

    def failure(self, seen: Mapping[int, dict[str, Any]]) -> Failure:
        """Return the failure, with what the inspected operations showed."""
        remarks, was, now = self._subject.remarks, self._subject.loss, self._ended.loss
        if was is not None and now is not None and was != now and not (math.isnan(was) and math.isnan(now)):
            remarks = (*remarks, f"The loss of the replay is {now:.6g}; the loss of the step was {was:.6g}.")
        failure = _known(self._subject, self._ended.gradients).but(
            symptom=self._symptom,
            loss=now,
            bad_gradients=self._ended.bad,
            has_modules=self._tape.has_modules,
            remarks=remarks,
        )
        if self._source is not None:
            reader, given = self._source
            source = self._bad_tensor(given, None if reader is None else self.origin(reader, seen))
            what, _, tensor = self._owner(given)
            if what != "parameter" or tensor is None:
                return failure.but(source=source)
            return failure.but(source=source, optimizer=_optimizer_facts(self._subject, tensor))
        if self._op is None:
            return failure
        origin = self.origin(self._op, seen)
        if any(map(math.isnan, self._op.scalars)):
            return failure.but(source=BadTensor(what="number", first_use=origin))
        later = self._nan_op if origin.made != "nan" and self._nan_op is not self._op else None
        facts = [_optimizer_facts(self._subject, group["params"][0]) for group in self._groups() if group["params"]]
        return failure.but(
            origin=origin,
            nan_origin=None if later is None else self.origin(later, seen),
            optimizer=next((each for each in facts if each is not None and each.has_exploded), None),
        )

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._subject.optimizers for group in optimizer.param_groups[:1])

    def origin(self, op: RecordedOp, seen: Mapping[int, dict[str, Any]]) -> Origin:
        """Describe an operation as the origin of a bad value."""
        tape = self._tape
        forward = None if op.forward is None else tape.ops[op.forward]
        made = tape.made(op)
        return Origin(
            op=op.name,
            made=made or "nan",
            dtype=op.dtype,
            phase=op.phase,
            site=_ctc_loss_made_at(op) or line_in_script(op.name, op.site, self._things()),
            live=op.live,
            module=op.module,
            module_class=op.module_class,
            derivative_of="" if forward is None else base_name(forward.name),
            hidden="" if forward is None else tape.made(forward),
            by_hand=op in self._slice.literal,
            # A Python infinity among its arguments may have become NaN: `mask * float('-inf')`.
            from_infinities=op in self._slice.from_infinities or (made == "nan" and any(map(math.isinf, op.scalars))),
            literals=tuple(self._literals(op)),
            exponential=self._exponential_before(op),
            **seen.get(op.index, {}),
        )

    def _things(self) -> tuple[Any, ...]:
        return (*self._subject.models, *self._subject.touched)

    def _literals(self, op: RecordedOp) -> Iterator[RoundedLiteral]:
        """Yield the numbers in the source, on the way to the operation, that its format cannot represent."""
        near, seen = {op.index: op}, set()
        for _ in range(LITERAL_SEARCH_DEPTH):
            for each in near.values():
                dtype = LITERAL_DTYPES.get(each.dtype)
                for value in each.scalars if dtype is not None else ():
                    becomes = float(torch.tensor(value, dtype=dtype))
                    literal = RoundedLiteral(value=value, becomes=becomes, dtype=each.dtype, site=each.site)
                    is_lost = becomes == 0 or math.isinf(becomes)
                    is_lost |= literal.is_bound and base_name(each.name).startswith("clamp")
                    if value and math.isfinite(value) and is_lost:
                        yield literal
            seen |= set(near)
            writers = [given.storage.writers[: given.writers] for each in near.values() for given in each.inputs]
            made = [self._tape.ops[written[-1].op] for written in writers if written]
            near = {each.index: each for each in made if each.index not in seen}

    # The cause

    def _find_cause(self) -> tuple[RecordedOp | None, tuple[RecordedOp | None, TensorRead] | None]:
        """Return the operation or the input that is to blame: the first that was not infinite on purpose."""
        sources = [
            (reader, given)
            for reader, given, kind in self._slice.sources
            if kind == "nan" or not self._is_intended(given)
        ]
        computed = [each for each in self._slice.computed if not self._is_mask(each)]
        op = self._determinant_behind(computed[0]) if computed else None
        if op is None and sources:
            reader, given = sources[0]
            if (reader is None or reader.site.file is None) and self._owner(given)[0] == "other":
                # The value cannot be followed further back: a collective, or memory written without an operation.
                op = first_bad_op(self._tape)
                sources = [] if op is not None else sources
        if sources and (op is None or sources[0][0] is None or sources[0][0].index <= op.index):
            again = self._spoiled_again(sources[0][1])
            return (None, sources[0]) if again is None else (again, None)
        if op is None:
            return next(iter(self._slice.from_infinities or self._slice.literal), None), None
        # If the loss contains a derivative, the forward operation may have been infinite already.
        forward = None if op.live or op.forward is None or self._symptom != "loss" else self._tape.ops[op.forward]
        if forward is not None and self._tape.made(forward) and not self._tape.was_given_bad(forward):
            return forward, None
        return op, None

    def _spoiled_again(self, given: TensorRead) -> RecordedOp | None:
        """Return the operation that makes a buffer bad once more, from finite inputs, in the step that reads it so."""
        if self._owner(given)[0] != "buffer":
            return None
        for write in given.storage.writers[given.writers :]:
            writer = self._tape.ops[write.op]
            inputs = [each for each in writer.inputs if each.storage is not given.storage]
            made = [each for each in slice_back(self._tape, inputs).computed if not self._is_mask(each)]
            if made:
                return made[0]
        return None

    def _reaches_softmax(self) -> bool:
        """Return whether the first operation that made NaN of infinities is a softmax: they may be a mask."""
        return family_of(self._slice.from_infinities[0].name) == "softmax" if self._slice.from_infinities else False

    def _is_intended(self, given: TensorRead) -> bool:
        """Return whether infinities (without NaN) in an input are there on purpose, as in a mask."""
        what, name, tensor = self._owner(given)
        if what == "parameter" or not self._slice.from_infinities:
            return False
        if what == "buffer":  # masks hold -inf, not inf
            is_mask = tensor is not None and not bool((local_shard(tensor) == math.inf).any())
            return is_mask and not name.rpartition(".")[2].startswith("running_")
        return what == "other" or self._reaches_softmax()

    def _is_mask(self, op: RecordedOp) -> bool:
        """Return whether this is the logarithm of a 0/1 mask that goes into a softmax, which is -inf on purpose."""
        ends = [self._tape.ranges[given.slot] for given in op.inputs]
        is_of_mask = family_of(op.name) == "logarithm" and all(each in ((0, 0), (0, 1)) for each in ends)
        return is_of_mask and self._reaches_softmax()

    def _infinity_behind_zeros(self, op: RecordedOp) -> RecordedOp | None:
        """Return the operation whose infinity, as a divisor, made the zeros that ``op`` was given; None if none did."""
        tape, pending = self._tape, [op]
        for _ in range(ZERO_SEARCH_DEPTH):
            zeros = [
                given for each in pending for given in each.inputs if given.writers and _is_all_zero(tape, given.slot)
            ]
            pending = [tape.ops[given.storage.writers[given.writers - 1].op] for given in zeros]
            for each in pending:
                divisors = [given for given in each.inputs[1:] if tape.ranges.bad(given.slot) == "inf"]
                if family_of(each.name) == "division" and divisors:
                    return next(iter(slice_back(tape, divisors).computed), None)
        return None

    def _exponential_before(self, op: RecordedOp) -> CallSite:
        """Return the line of the exponentials whose sum overflows; no place if it is not such a sum."""
        if base_name(op.name) != "sum" or self._tape.made(op) != "inf" or self._tape.was_given_bad(op):
            return CallSite()
        given = op.inputs[0]
        writers = [self._tape.ops[each.op] for each in given.storage.writers[: given.writers]]
        is_exponential = len(writers) == 1 and family_of(writers[0].name) == "exponential"
        return writers[0].site if is_exponential else CallSite()

    def _determinant_behind(self, op: RecordedOp) -> RecordedOp:
        """Return the determinant for the NaN that torch.logdet fills in where it is negative; else ``op``."""
        if not any(map(math.isnan, op.scalars)):
            return op
        near = self._tape.ops[max(op.index - LITERAL_SEARCH_DEPTH, 0) : op.index]
        return next((each for each in near if each.site == op.site and family_of(each.name) == "determinant"), op)

    # Owners of memory

    def _owner(self, given: TensorRead) -> tuple[str, str, Tensor | None]:
        """Return whose memory it is ("parameter", "buffer", "batch" or "other"), and the owner's name and tensor."""
        leaf = given.storage.leaf
        return ("other", "", leaf) if leaf is None else self._owners.get(storage_id(leaf), ("other", "", leaf))

    def _bad_tensor(self, given: TensorRead, first_use: Origin | None) -> BadTensor:
        """Describe a bad input and the operation that read it first."""
        what, name, tensor = self._owner(given)
        rows: list[int] = []
        values = None if tensor is None or what not in ("batch", "other") else readable_values(local_shard(tensor))
        if values is not None and values.dim():
            rows = values.isfinite().logical_not().reshape(len(values), -1).any(-1).nonzero().flatten().tolist()
        owner = None
        if what in ("buffer", "parameter"):
            path = name.rpartition(".")[0]
            owner = next((module for other, module in self._subject.named_modules() if other == path), None)
        found = BadTensor(
            what=what,
            name=name,
            values=None if tensor is None else values_of(tensor),
            module_class="" if owner is None else type(owner).__name__,
            rows=tuple(rows[:NAMED_SAMPLES]),
            bad_rows=len(rows),
            first_use=first_use,
        )
        is_as_made = owner is not None and (self._subject.step == 1 or self._subject.untrained)
        holders = list(self._modules_around(name)) if is_as_made else []
        if what == "other" and tensor is not None:
            holders = list(_holders(self._subject.touched, tensor))
        for holder, attribute in holders:
            empty = uninitialised_at(type(holder), attribute) if holder is owner else CallSite()
            made_at = empty if empty.file else assigned_at(type(holder), attribute)
            if made_at.file:
                made_by = UNINITIALISED if empty.file else f"`{attribute}` of `{type(holder).__name__}` is set"
                return replace(found, made_at=made_at, made_by=made_by)
        return found

    def _modules_around(self, name: str) -> Iterator[tuple[torch.nn.Module, str]]:
        """Yield the modules that a parameter or buffer is in, innermost first, with its name in each."""
        modules = dict(self._subject.named_modules())
        parts = name.split(".")
        for number in range(len(parts) - 1, -1, -1):
            module = modules.get(".".join(parts[:number]))
            if module is not None:
                yield module, ".".join(parts[number:])


def bad_weight(subject: ReplayStep) -> Failure | None:
    """Describe the first weight that is not finite, of which this rank may have a shard; nothing is run."""
    for name, weight in subject.parameters().items():
        if not is_finite(weight):
            modules, path = dict(subject.named_modules()), name.rpartition(".")[0]
            owner = "" if path not in modules else type(modules[path]).__name__
            source = BadTensor(what="parameter", name=name, values=values_of(weight), module_class=owner)
            return Failure(
                loss=subject.loss,
                source=source,
                precision=subject.precision,
                device=subject.device.type,
                step=subject.step,
                optimizer=_optimizer_facts(subject, weight),
            )
    return None


def _holders(things: Sequence[Any], tensor: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield objects that hold a tensor as an attribute, with its name: among these things, and what they refer to."""
    seen: set[int] = set()
    pending = list(things)
    for thing in things:
        pending.append(getattr(thing, "__self__", None))
        pending += outer_variables(thing).values() if isinstance(thing, FunctionType) else ()
    while pending and len(seen) < MOST_HOLDERS:
        each = pending.pop(0)
        if id(each) in seen or isinstance(each, Tensor | type | ModuleType):
            continue
        seen.add(id(each))
        parts = getattr(each, "__dict__", {})
        yield from ((each, name) for name, value in parts.items() if value is tensor)
        pending += parts.values()


def _ctc_loss_made_at(op: RecordedOp) -> CallSite | None:
    """Return the line that makes a file's only ``CTCLoss``, if this is its result and an option is missing there."""
    if not base_name(op.name).endswith("ctc_loss") or not op.site.file:
        return None
    calls = [node for node in nodes_of(op.site.file) if isinstance(node, ast.Call)]
    made = [each for each in calls if call_name(each) == "CTCLoss"]
    if len(made) != 1 or any(call_name(each) == "ctc_loss" for each in calls):
        return None
    has_option = len(made[0].args) > 2 or any(each.arg in (None, "zero_infinity") for each in made[0].keywords)
    return None if has_option else replace(op.site, line=made[0].lineno, function="")


def _is_all_zero(tape: Tape, slot: int) -> bool:
    return slot != ALWAYS_FINITE and tape.ranges[slot] == (0, 0)


def _owners(subject: ReplayStep) -> dict[int, tuple[str, str, Tensor]]:
    """Return the owner of each storage: a parameter, a buffer or the batch, also of its views."""
    named = [("batch", subject.batch)]
    for what, method in (("buffer", "named_buffers"), ("parameter", "named_parameters")):
        of_others = [(type(model).__name__, pair) for model in subject.others for pair in getattr(model, method)()]
        named.append((what, {f"{owner}.{name}": tensor for owner, (name, tensor) in of_others}))
    named += [("buffer", subject.buffers()), ("parameter", subject.parameters())]
    return {storage_id(tensor): (what, name, tensor) for what, some in named for name, tensor in some.items()}


def _optimizer_facts(subject: ReplayStep, parameter: Tensor) -> OptimizerFacts | None:
    """Describe the optimizer of a parameter; None if there is none, or it has taken no step yet."""
    pairs = list(zip(subject.optimizers, [*subject.pasts, *[OptimizerPast()] * len(subject.optimizers)], strict=False))
    groups = ((optimizer, past, group) for optimizer, past in pairs for group in optimizer.param_groups)
    found = next((each for each in groups if any(one is parameter for one in each[2]["params"])), None)
    if found is None:
        return None
    taken = (subject.step or 1) - 1  # for an optimizer that does not count them
    optimizer, past, group = found
    state, rate, eps = optimizer.state.get(parameter, {}), group.get("lr"), group.get("eps")
    rate = rate if past.lr is None else past.lr
    decay = group.get("weight_decay")
    # An optimizer with eps has state from its first step on: without state, all steps so far were skipped.
    uncounted = taken if "eps" not in group else 0
    is_number = isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.numel() == 1)
    facts = OptimizerFacts(
        name=type(optimizer).__name__,
        steps=int(float(state.get("step", uncounted or (1 if state else 0)))),
        lr=float(rate) if rate is not None and is_number else None,
        weight_decay=float(decay) if isinstance(decay, int | float) else None,
        made_at=past.made_at,
        lr_set_at=past.lr_set_at,
        first_norm=past.first_norm,
        norm=past.norm,
    )
    if not facts.steps:
        return facts if facts.has_absurd_lr else None
    values = local_shard(parameter).detach()
    bad = values.isfinite().logical_not()
    second, zeros = next((state[name] for name in SECOND_MOMENTS if name in state), None), None
    if isinstance(second, Tensor) and second.shape == parameter.shape:
        zeros = int(((local_shard(second) == 0) & bad).sum())
    if isinstance(eps, int | float):
        facts = replace(facts, eps=float(eps), eps_becomes=float(torch.tensor(eps, dtype=values.dtype)))
    return replace(facts, dtype=dtype_name(values.dtype), zero_denominators=zeros, bad_weights=int(bad.sum()))
