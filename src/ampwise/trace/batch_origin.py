"""Observe how a batch is drawn from its dataset, and find what in it made a value that is not finite.

Operations of torch are recorded on a tape. NumPy calls a function at each floating-point error, which changes nothing.
What neither of them computed was in the data already, or was computed in plain Python.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from inspect import unwrap
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, stop_stack_search
from ampwise.trace.diagnosis import findings_about
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import DataOrigin, Origin
from ampwise.trace.module_paths import ModulePaths
from ampwise.trace.names_in_code import assigned_at
from ampwise.trace.numpy_errors import KINDS, NumpyError, as_array, is_bad, numpy_errors
from ampwise.trace.op_inspection import inspect_op
from ampwise.trace.python_state import PythonState, muted_output
from ampwise.trace.ranks import collectives_refused
from ampwise.trace.recorder import OpRecorder, RecordedOp, tensors_in, written_arguments
from ampwise.trace.replay import is_finite
from ampwise.trace.slicing import BackwardSlice, slice_back
from ampwise.train.random_state import capture_random, restore_random

__all__ = ["GUARD", "Observation"]

T = TypeVar("T")

MOST_PARTS = 64  # parts of a dataset's attribute to look at
FEW_COLUMNS = 3
GUARD = (
    "Guard this operation for such samples, or leave them out where the dataset is made. `torch.nan_to_num` on the "
    "batch hides the cause, and the model learns from zeros."
)
CLEAN = (
    "Clean the data before training: leave these samples out, or fill in the missing values. `torch.nan_to_num` on the "
    "batch hides the cause, and the model learns from zeros."
)


class Observation:
    """A context in which functions of a dataset run unnoticed by the script, and are observed.

    Output is dropped; attributes, memory and random numbers are restored at the end; collectives are refused, and
    arrays are read-only. copies_arrays: only large ones are.
    """

    def __init__(self, things: Sequence[Any], *, copies_arrays: bool = False) -> None:
        self._things = things
        self._errors: dict[bool, list[NumpyError]] = {False: [], True: []}  # by whether samples were collated
        self._state = PythonState(copies_arrays=copies_arrays, freezes_others=True)
        self._recorder = _DrawRecorder(ModulePaths([], self._state))
        self._stack = ExitStack()

    def __enter__(self) -> Observation:
        with ExitStack() as stack:
            device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
            stack.callback(restore_random, capture_random(device), device)
            stack.callback(self._state.put_back)
            self._state.note(self._things)
            stack.callback(self._recorder.put_back)
            stack.enter_context(muted_output())
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for context in (torch.inference_mode(False), torch.enable_grad(), collectives_refused()):
                stack.enter_context(context)
            for kind in {"cpu", device.type}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @stop_stack_search  # frames further out are not those of the dataset
    def run(self, function: Callable[[], T], *, collates: bool = False) -> T:
        """Run a function that draws or collates samples."""
        with numpy_errors(self._errors[collates]), self._recorder:
            return function()

    def forget(self) -> None:
        """Forget what was observed so far."""
        for errors in self._errors.values():
            errors.clear()

    # What made a bad value

    def origin_of(
        self, value: Tensor, dataset: Any, index: Any, sample: Any, path: Sequence[Any], collate: Any
    ) -> DataOrigin:
        """Say where a tensor of the drawn batch came from.

        sample: the one of this index. path: the keys that lead to the tensor in the batch.
        """
        known = DataOrigin(dataset=type(dataset).__name__, index=repr(index))
        found = self._sliced(value)
        for op in (*found.computed, *found.literal):
            return self._computed(known, op, by_hand=op in found.literal)
        part = sample
        with suppress(Exception):  # a function of the script's own may have arranged the batch otherwise
            for key in path:
                part = part[key]
        in_samples = is_bad(part)
        leaves = [read.storage.leaf for _, read, _ in found.sources if read.storage.leaf is not None]
        held = _held_by(dataset, index, leaves, by_index=_bad_parts(sample) == 1) if in_samples else None
        errors = self._errors[not in_samples]
        sites = {each.site: each for each in errors if not each.was_given_bad and not each.is_repaired}
        if len(sites) == 1 and (held is None or not held.is_certain):
            error = next(iter(sites.values()))
            cause = f"NumPy reports {KINDS[error.kind]}"
            return replace(known, how="computed", cause=cause, fix=GUARD, site=error.site)
        returned_by = own_function(dataset if in_samples else collate)
        if held is not None and (held.is_certain or not sites):
            site = assigned_at(type(dataset), held.attribute)
            site = site if site.file else returned_by
            return replace(known, how="held", cause=f"{held.name} holds it already", fix=CLEAN, site=site)
        return replace(known, how="drawn", site=returned_by)

    def made(self, value: Tensor) -> tuple[DataOrigin | None, list[Tensor]]:
        """Return the operation that computed a tensor from finite ones; or the bad ones that it was computed from."""
        found = self._sliced(value)
        for op in (*found.computed, *found.literal):
            return self._computed(DataOrigin(dataset="", index=""), op, by_hand=op in found.literal), []
        errors = [each for errors in self._errors.values() for each in errors]
        sites = {each.site: each.kind for each in errors if not each.was_given_bad and not each.is_repaired}
        if len(sites) == 1:
            ((site, kind),) = sites.items()
            cause = f"NumPy reports {KINDS[kind]}"
            return DataOrigin(dataset="", index="", how="computed", cause=cause, fix=GUARD, site=site), []
        return None, [read.storage.leaf for _, read, _ in found.sources if read.storage.leaf is not None]

    def _sliced(self, value: Tensor) -> BackwardSlice:
        given = self._recorder.given(value)
        self._recorder.tape.ranges.settle()
        return slice_back(self._recorder.tape, [given])

    def _computed(self, known: DataOrigin, op: RecordedOp, *, by_hand: bool) -> DataOrigin:
        if by_hand or any(not math.isfinite(each) for each in op.scalars):
            cause, fix = "an infinity or NaN is written as a constant", CLEAN
        else:
            made = self._recorder.tape.made(op) or "nan"
            facts = self._recorder.seen.get(op.index, {})
            origin = Origin(op=op.name, made=made, dtype=op.dtype, site=op.site, **facts)
            explained = findings_about(Failure(origin=origin, has_modules=False))
            cause, fix = (explained[0].message, explained[0].rule.fix) if explained else ("", "")
        is_own = op.site.file is not None and code_owner(op.site.file) == "own"
        site = op.site if is_own else CallSite(function=op.site.function)
        return replace(known, how="computed", cause=cause, fix=fix, site=site)


class _DrawRecorder(OpRecorder):
    """Recorder that also inspects each operation that computes something bad from finite inputs."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__(paths)
        self.seen: dict[int, dict[str, Any]] = {}  # by index: fields of ``Origin``

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        op = self.tape.ops[-1] if self.tape.ops else None
        if op is None or op.name != str(func) or op.index in self.seen or written_arguments(func):
            return result
        made = result if isinstance(result, list | tuple) else (result,)
        given = (*args, *(kwargs or {}).values())
        if not all(map(is_finite, tensors_in(made))) and all(map(is_finite, tensors_in(given))):
            with suppress(Exception):
                self.seen[op.index] = inspect_op(func, args, kwargs or {})[1]
        return result


# Data


def _bad_parts(sample: Any) -> int:
    """Return how many parts of a sample are not finite; a list of numbers is one part."""
    parts = list(sample.values()) if isinstance(sample, Mapping) else sample
    if not isinstance(parts, list | tuple) or all(isinstance(each, int | float) for each in parts):
        return int(is_bad(sample))
    return sum(map(_bad_parts, parts))


class Held(NamedTuple):
    """What in a dataset holds a bad value."""

    name: str  # in words
    attribute: str
    is_certain: bool  # the value was read from this memory; else it only is bad at the same index


def _held_by(dataset: Any, index: Any, leaves: Sequence[Tensor], *, by_index: bool) -> Held | None:
    """Return what in a dataset holds a bad value; None if it is unclear.

    leaves: what the value was read from. by_index: if only one attribute is bad at the index, the value is from there.
    """
    if isinstance(dataset, list | tuple | dict):
        name = f"the {type(dataset).__name__} that serves as dataset"
        return Held(name, "", is_certain=True) if is_bad(dataset[index]) else None
    found: list[Held] = []
    for attribute, value in list(getattr(dataset, "__dict__", {}).items()):
        parts = [(f"`{attribute}`", value)]
        if isinstance(value, list | tuple) and len(value) <= MOST_PARTS:
            parts += [(f"`{attribute}[{number}]`", each) for number, each in enumerate(value)]
        elif isinstance(value, Mapping) and len(value) <= MOST_PARTS:
            parts += [(f"`{attribute}[{key!r}]`", each) for key, each in value.items()]
        for name, part in parts:
            if any(_shares_memory(part, leaf) for leaf in leaves):
                return Held(name, attribute, is_certain=True)
            with suppress(Exception):
                row = part.iloc[index] if hasattr(part, "iloc") else part[index]
                if by_index and len(part) == len(dataset) and is_bad(row):
                    found.append(Held(f"{name}{_column(part, index)}", attribute, is_certain=False))
    return found[0] if len(found) == 1 else None


def _shares_memory(value: Any, leaf: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.device == leaf.device and value.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    numbers = None if isinstance(value, Mapping) else as_array(value)
    if numbers is None or not leaf.is_cpu or not hasattr(numbers, "__array_interface__"):
        return False
    return bool(sys.modules["numpy"].may_share_memory(numbers, leaf.detach().numpy()))


def _column(table: Any, index: int) -> str:
    """Return which columns of a table of pandas are bad in a row, in words; "" for anything else."""
    if getattr(table, "ndim", 0) != 2 or not hasattr(table, "iloc"):
        return ""
    bad = [str(name) for name, value in table.iloc[index].items() if isinstance(value, float) and is_bad(value)]
    return f" (column {', '.join(map(repr, bad[:FEW_COLUMNS]))})" if bad else ""


# Code


def own_function(thing: Any) -> CallSite:
    """Return the first line of a function, or of the ``__getitem__`` of a dataset, in the script; else no place."""
    function: Any = unwrap(thing) if callable(thing) and hasattr(thing, "__code__") else None
    for name in ("__getitem__", "__getitems__", "__call__") if function is None else ():
        function = function or getattr(type(thing), name, None)
    code = getattr(unwrap(function), "__code__", None) if function is not None else None
    if code is None or code_owner(code.co_filename) != "own":
        return CallSite()
    return CallSite(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)
