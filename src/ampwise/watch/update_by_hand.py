"""Replay an update that the script makes by itself, without an optimizer of torch, if it spoils the weights.

The statements that follow a backward pass, up to the end of the loop around it, are known from the source. What they
may change is copied on the CPU, so that they can run once more under the op recorder: one by one, up to the first after
which something is not finite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, code_owner
from ampwise.trace.diagnosis import diagnose
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import OptimizerFacts
from ampwise.trace.replay import ReplayStep
from ampwise.watch.call_replay import is_finite_unrecorded
from ampwise.watch.code_slice import RESULT
from ampwise.watch.inspection import tensors_in
from ampwise.watch.loss_code import Following, code_after

__all__ = ["UpdateByHand", "WeightNorms"]

MOST_COPIED = 2**26  # bytes
MOST_OBJECTS = 4096


@dataclass(slots=True)
class UpdateByHand:
    """The statements after a backward pass, with the values that they begin with."""

    number: int  # of the step
    statements: Sequence[Following]
    weights: list[Tensor]
    before: _Values
    result: Any = None  # of the call that computed the gradients

    @classmethod
    def after(
        cls, frame: FrameType | None, instruction: int, models: Sequence[nn.Module], number: int, result: Any = None
    ) -> UpdateByHand | None:
        """Copy what the statements after a backward pass may change; None if it is too much, or not on the CPU."""
        statements = [] if frame is None else code_after(frame, instruction)
        if not statements:
            return None
        used = [each.names[name] for each in statements for name in _names(each.codes) if name in each.names]
        parameters = [each for model in models for each in model.parameters()]
        before = _Values.of([*used, *parameters])
        if before is None:
            return None
        weights = [each for each, *_ in before.tensors if each.requires_grad and each.is_leaf]
        return cls(number, statements, weights, before, result) if weights else None

    def diagnose(self) -> Failure | None:
        """Run the statements once more, and find the operation that spoils something; None if none does."""
        if not all(is_finite_unrecorded(copy) for _, copy, *_ in self.before.tensors if copy.is_floating_point()):
            return None
        now = _Values.of([*(each for each, *_ in self.before.tensors), *self.before.objects()])
        objects = [value for each in self.statements for value in each.names.values() if not isinstance(value, Tensor)]
        subject = ReplayStep(
            run=lambda settings: self._run(), device=torch.device("cpu"), step=self.number, touched=objects
        )
        try:
            found = diagnose(subject)
        finally:
            if now is not None:
                now.put_back()
        is_cause = found is not None and not found.not_reproduced
        return found.but(symptom="weights", loss=None, trials=()) if found is not None and is_cause else None

    def _run(self) -> list[Tensor]:
        self.before.put_back()
        return self._run_statements()

    def _run_statements(self) -> list[Tensor]:
        """Run the statements. Return what is not finite then."""
        for each in self.statements:
            names = {**each.names, RESULT: self.result}
            for code in each.codes:
                exec(code, names)
                bound = [value for name in code.co_names if isinstance(value := names.get(name), Tensor)]
                bad = [
                    tensor
                    for tensor in (*self.weights, *bound)
                    if tensor.is_floating_point() and not is_finite_unrecorded(tensor)
                ]
                if bad:
                    return bad
        return [torch.zeros(())]

    def site(self) -> CallSite:
        """Return the line that changes a weight first; unknown where weights are replaced by new ones."""
        now, first = _Values.of([each for each, *_ in self.before.tensors]), _FirstWrite(self.weights)
        try:
            self.before.put_back()
            with first:
                self._run_statements()
        except Exception:  # the statements do not run on their own
            return CallSite()
        finally:
            if now is not None:
                now.put_back()
        return first.site


class WeightNorms:
    """The norm of weights that the script updates by itself: before the first update, and the last finite one."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.steps = 0

    def note(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            norms = torch._foreach_norm([each.detach() for each in weights if each.is_floating_point()])
            norm = float(torch.stack([each.double() for each in norms]).norm()) if norms else 0.0
        self.first = norm if self.first is None else self.first
        self.last, self.steps = norm, self.steps + 1

    def facts(self, made_at: CallSite) -> OptimizerFacts:
        return OptimizerFacts(
            name="the script's own update",
            steps=self.steps,
            made_at=made_at,
            first_norm=self.first,
            norm=self.last,
        )


class _FirstWrite(TorchDispatchMode):
    """Notes the line of the first operation that writes to one of these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {each.data_ptr() for each in tensors}
        self.site = CallSite()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if func._schema.is_mutable and args else None
        for each in tensors_in(written) if self.site.file is None else ():
            if each.data_ptr() in self._places:
                self.site = calling_site()
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Values:
    """Tensors, their gradients, and Python objects, as they were."""

    tensors: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    lists: list[tuple[list[Any], list[Any]]] = field(default_factory=list)

    @classmethod
    def of(cls, things: Iterable[Any]) -> _Values | None:
        """Copy the tensors that these lead to, on the CPU; not through modules, functions and objects of libraries."""
        found, size = cls(), 0
        for each in _reached(things):
            if isinstance(each, Tensor):
                gradient = each.grad if each.is_leaf else None
                held = [each] if gradient is None else [each, gradient]
                size += sum(one.nbytes for one in held)
                if size > MOST_COPIED or not all(one.is_cpu and one.layout == torch.strided for one in held):
                    return None
                copies = [one.detach().clone() for one in held]
                found.tensors.append((each, copies[0], gradient, None if gradient is None else copies[1]))
            elif isinstance(each, list):
                found.lists.append((each, list(each)))
            else:
                found.dicts.append((each, dict(each)))
        return found

    def objects(self) -> list[Any]:
        return [*(each for each, _ in self.dicts), *(each for each, _ in self.lists)]

    def put_back(self) -> None:
        for inner, entries in self.dicts:
            inner.clear()
            inner.update(entries)
        for items, before in self.lists:
            items[:] = before
        with torch.no_grad():
            for tensor, copy, gradient, gradient_copy in self.tensors:
                tensor.detach().copy_(copy)
                if gradient is not None and gradient_copy is not None:
                    gradient.detach().copy_(gradient_copy)
                if tensor.is_leaf and tensor.grad is not gradient:
                    tensor.grad = gradient


def _reached(things: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors, lists, dicts and the attributes of the script's own objects, each once."""
    pending, seen = list(things), set[int]()
    while pending and len(seen) < MOST_OBJECTS:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            pending.extend(each)
        elif isinstance(each, list) and len(each) <= MOST_OBJECTS:
            pending.extend(each)
            yield each
        elif isinstance(each, dict) and len(each) <= MOST_OBJECTS:
            pending.extend(each.values())
            yield each
        elif _is_own(each):
            pending.extend(vars(each).values())
            yield vars(each)


def _is_own(thing: Any) -> bool:
    """Whether it is an object of a class of the script, with attributes; not a module, a class or a function."""
    kind = type(thing)
    if not hasattr(thing, "__dict__") or isinstance(thing, nn.Module | type):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and code_owner(file) == "own")


def _names(codes: Iterable[CodeType]) -> set[str]:
    inner = [each for code in codes for each in code.co_consts if isinstance(each, CodeType)]
    return set().union(*(code.co_names for code in codes), _names(inner) if inner else ())
