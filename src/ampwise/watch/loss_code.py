"""The script's own statements that compute a loss, to run them again.

When ``loss.backward()`` is called, the function that calls it is still running. The statements that its loss depends
on are read from the source, and the values that they begin with from the function's variables; nothing is copied but
references. Where the loss was given to a helper as an argument, the code of its caller comes first. Statements before
the first call of the model are left out: what they computed is at hand.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, GeneratorType, ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, own_files, says
from ampwise.trace.names_in_code import FUNCTIONS, call_name, nodes_of, tree_of
from ampwise.trace.replay import is_finite
from ampwise.trace.value_ranges import bytes_of, version_of
from ampwise.watch.code_slice import (
    LOOPS,
    RESULT,
    Attribute,
    Parameter,
    Slice,
    Wanted,
    Yielded,
    blocks_of,
    needs_its_place,
    slice_of,
    way_to,
)
from ampwise.watch.inspection import copied_by_reference, tensors_in

__all__ = [
    "Following",
    "LossCode",
    "Running",
    "code_after",
    "code_between",
    "data_code",
    "loss_code",
    "only_assignment_of",
    "own_caller",
    "running_code",
]

MOST_FRAMES = 4  # a loss that is handed through more functions than this is not followed
REPORTING = ("print", "append", "write", "log", "info", "debug", "warning", "add_scalar", "set_postfix", "save")
PLAIN = (Tensor, int, float, str, type(None))
MOST_LIVE_OBJECTS = 5_000_000  # among which a generator is searched for

Running = tuple[Any, ...]  # a function, its instruction, and the same of the function that it called


@dataclass(slots=True)
class _Stage:
    slice: Slice
    names: dict[str, Any]
    variables: dict[str, Any]
    results_are: tuple[str, ...] = ()  # names under which the next stage gets the results
    takes_item: bool = False  # it begins with the last item of its loop


@dataclass(slots=True)
class LossCode:
    """The code of one loss, outermost function first, with the values it began with."""

    stages: list[_Stage] = field(default_factory=list)
    tensors: list[tuple[Tensor, int]] = field(default_factory=list)  # with their versions

    def run(self) -> Any:
        """Run the statements again and return the loss."""
        given: dict[str, Any] = {}
        result = None
        for stage in self.stages:
            names = {**stage.names, **stage.variables, **given}
            if stage.takes_item and stage.slice.take_item is not None:
                exec(stage.slice.take_item, names)
            exec(stage.slice.code, names)
            result = names[RESULT]
            given = dict(zip(stage.results_are, result, strict=True)) if stage.results_are else {}
        return result

    def batch(self) -> dict[str, Tensor]:
        """Return the tensors that it begins with, by name."""
        pairs = [pair for stage in self.stages for pair in stage.variables.items()]
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def objects(self) -> list[Any]:
        """Return what its statements may change."""
        values = [value for stage in self.stages for value in stage.variables.values()]
        return [value for value in values if not isinstance(value, Tensor)]

    def computed(self) -> list[Tensor]:
        """Return the tensors that it begins with and that were computed before, by code that is not known."""
        return [tensor for tensor, _ in self.tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]

    @property
    def may_use_a_model(self) -> bool:
        """Whether a model may have computed what it gives: not in ``torch.tensor(math.nan)``."""
        used = [each for each in self.objects() if not isinstance(each, ModuleType | int | float | str)]
        return bool(used or self.computed())

    def weakly(self) -> Callable[[], LossCode | None] | None:
        """Return a function that returns it as long as the script keeps its objects alive; None if that is unclear.

        Only tensors and plain values are kept.
        """
        stages: list[tuple[_Stage, dict[str, Any]]] = []
        for stage in self.stages:
            held = {
                name: value if isinstance(value, PLAIN) and not isinstance(value, nn.Parameter) else _weak(value)
                for name, value in stage.variables.items()
            }
            if any(each is _weak for each in held.values()):
                return None
            stages.append((replace(stage, variables={}), held))
        tensors = [pair for pair in self.tensors if not isinstance(pair[0], nn.Parameter)]

        def again() -> LossCode | None:
            found = []
            for stage, held in stages:
                values = {name: each() if isinstance(each, ref) else each for name, each in held.items()}
                if any(values[name] is None and held[name] is not None for name in held):
                    return None
                found.append(replace(stage, variables=values))
            return LossCode(found, tensors)

        return again

    @property
    def bytes(self) -> int:
        """Size of the tensors that it begins with."""
        return sum([bytes_of(tensor) for tensor, _ in self.tensors])

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor that it begins with was written to since."""
        return all(version_of(tensor) == version for tensor, version in self.tensors)


def _weak(value: Any) -> Any:
    """Return a weak reference, or this function where there can be none."""
    try:
        return ref(value)
    except TypeError:
        return _weak


def running_code() -> Running:
    """Return the functions on the stack, each with the instruction that it is running. This runs at each step."""
    found: Running = ()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = (frame.f_code, frame.f_lasti, found)
        frame = frame.f_back
    return found


def loss_code(
    frame: FrameType | None, model_calls: Sequence[Running], instruction: int | None = None
) -> LossCode | None:
    """Return the code of the loss that the innermost own function on the stack is using now; None if it is unknown.

    model_calls: what was running when models were called, the first call first. instruction: the one that uses it, if
    the function has gone on since.
    """
    model_lines: dict[CodeType, int] = {}
    for running in reversed(model_calls):
        while running:  # the outermost function is at the front
            code, number, running = running
            if code_owner(code.co_filename) == "own":
                model_lines[code] = _line_of(code, number)
    return _code(frame, instruction, _has_graph, lambda frame: model_lines.get(frame.f_code, 0))


def data_code(frame: FrameType | None, instruction: int, *, loaded: bool) -> LossCode | None:
    """Return the code of a bad loss from where its data were finite; None if it is unknown.

    Only what is bad is computed again, as far out as the last batch of a generator. loaded: DataLoaders give batches.
    """
    return _code(frame, instruction, _is_bad, lambda frame: 0, at_hand=True, loaded=loaded)


def code_between(frame: FrameType, instruction: int) -> Callable[[], None] | None:
    """Return a function that runs the statements between one that a frame has run and its current one; None if none.

    Those that only report something are left out, and those that cannot run elsewhere.
    """
    tree, code = tree_of(frame.f_code.co_filename), frame.f_code
    ways = [
        way_to(tree, position)
        for each in (instruction, frame.f_lasti)
        if tree is not None and None not in (position := next(islice(code.co_positions(), each // 2, None), (None,)))
    ]
    if len(ways) < 2 or ways[0] is None or ways[1] is None:
        return None
    apart: list[tuple[Any, Any]] = [(a, b) for a, b in zip(*ways, strict=False) if a is not b]
    if not apart:
        return None
    first, last = apart[0]
    parent = ways[0][ways[0].index(first) - 1]
    block = next((block for block in blocks_of(parent) if first in block and last in block), [])
    between = block[block.index(first) + 1 : block.index(last)] if block else []
    kept = [each for each in between if not _only_reports(each) and not needs_its_place(each)]
    if not kept:
        return None
    between_them = compile(ast.Module(body=kept, type_ignores=[]), code.co_filename, "exec", dont_inherit=True)
    names = {**frame.f_globals, **frame.f_locals}
    return lambda: exec(between_them, dict(names))


@dataclass(frozen=True, slots=True)
class Following:
    """Statements of one function that follow a call, with the values of its variables at the time of the call."""

    codes: tuple[CodeType, ...]
    names: dict[str, Any]


def code_after(frame: FrameType, instruction: int) -> list[Following]:
    """Return the statements after a call, up to the end of the loop around it, also in the functions that led to it.

    Those that only report something are left out, and those that cannot run elsewhere. The first sets what the call's
    own statement sets, from ``RESULT``.
    """
    found: list[Following] = []
    outer: FrameType | None = frame
    for _ in range(MOST_FRAMES):
        if outer is None:
            break
        codes, in_loop = _statements_after(outer.f_code, instruction, with_result=not found)
        if codes:
            found.append(Following(codes, {**outer.f_globals, **outer.f_locals}))
        if in_loop:
            break
        outer = own_caller(outer)
        instruction = 0 if outer is None else outer.f_lasti
    return found


@lru_cache(maxsize=256)
def _statements_after(code: CodeType, instruction: int, *, with_result: bool) -> tuple[tuple[CodeType, ...], bool]:
    """Return the statements after a call, each compiled, and whether there is a loop around it."""
    tree = tree_of(code.co_filename)
    position = next(islice(code.co_positions(), instruction // 2, None), (None,))
    way = None if tree is None or None in position else way_to(tree, position)
    if way is None:
        return (), False
    kept: list[ast.stmt] = []
    own = way[-1]
    in_loop = False
    for outer, inner in zip(reversed(way[:-1]), reversed(way[1:]), strict=True):
        if isinstance(inner, ast.Assign) and inner.value is own and with_result:
            kept.append(ast.copy_location(ast.Assign(inner.targets, ast.Name(RESULT, ast.Load())), inner))
        if isinstance(inner, ast.stmt):
            block = next((block for block in blocks_of(outer) if inner in block), [inner])
            kept += [each for each in block[block.index(inner) + 1 :] if not _only_reports(each)]
        in_loop = isinstance(outer, LOOPS)
        if in_loop or isinstance(outer, FUNCTIONS):
            break
    modules = [ast.fix_missing_locations(ast.Module([each], [])) for each in kept if not needs_its_place(each)]
    return tuple(compile(each, code.co_filename, "exec", dont_inherit=True) for each in modules), in_loop


def _only_reports(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and call_name(call) in REPORTING


def only_assignment_of(key: str, near: str | None) -> CallSite | None:
    """Return the only line that assigns to an item of this name, such as ``group["lr"]``.

    near: a file to look into; if none is there, in all of the script's own code.
    """
    found = _assignments(key, {near or ""})
    if not found:
        found = _assignments(key, set(own_files()))
    return found[0] if len(found) == 1 else None


def _assignments(key: str, files: Set[str]) -> list[CallSite]:
    return [
        CallSite(file=file, line=node.lineno)
        for file in files
        if file.endswith(".py") and code_owner(file) == "own" and (says(file, f'["{key}"]') or says(file, f"['{key}']"))
        for node in nodes_of(file)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == key
    ]


def _code(
    frame: FrameType | None,
    instruction: int | None,
    is_computed: Callable[[Any], bool],
    first_line: Callable[[FrameType], int],
    *,
    at_hand: bool = False,
    loaded: bool = False,
) -> LossCode | None:
    """Return the statements that compute the loss in a function, in its callers, and in generators that it reads.

    is_computed: whether a value that a function was given must be computed again. at_hand: no other value is.
    """
    if frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame, instruction = own_caller(frame), None
    made = LossCode()
    wanted: Wanted = ()  # of the inner function, whose values this one computes
    this: Any = None  # the object whose attribute it is
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        own, here = _own_name(frame), frame.f_locals
        line = first_line(frame)
        good = frozenset(name for name, value in here.items() if at_hand and not is_computed(value))
        instruction = frame.f_lasti if instruction is None else instruction
        found = slice_of(frame.f_code, instruction, line, wanted, own, good)
        if found is None or (any(isinstance(each, Attribute) for each in wanted) and here.get(own or "") is not this):
            return None
        names = {name: here[name] for name in found.names if name in here}
        if any(isinstance(value, Iterator) for value in names.values()):
            return None  # running the statements would advance it
        this = here.get(own) if own is not None else None
        given = [name for name in names if name in found.parameters and is_computed(names[name])]
        attributes = [name for name in found.attributes if is_computed(getattr(this, name, None))]
        yielded = [name for name in names if name in found.loop_target and is_computed(names[name])]
        if not line and not found.rebound.issubset({*given, *yielded}):
            return None
        kept = {
            name: copied_by_reference(value, made.tensors) if isinstance(value, Tensor | list | tuple | dict) else value
            for name, value in names.items()
            if name not in given and name not in yielded
        }
        results = tuple(each.name for each in wanted)
        made.stages.insert(0, _Stage(found, frame.f_globals, kept, results, takes_item=bool(yielded)))
        if not given and not attributes and not yielded:
            return made
        if bool(given) + bool(attributes) + bool(yielded) > 1 or len(attributes) > 1:
            return None
        instruction = None
        if yielded:
            wanted, frame = (Yielded(),), _suspended(frame.f_code, found.iterates, by_name=loaded)
        elif given:
            wanted = tuple(Parameter.of(frame.f_code, name, is_method=own is not None) for name in given)
            frame = own_caller(frame)
        else:
            wanted, frame = (Attribute(attributes[0]),), own_caller(frame)
    return None


def _own_name(frame: FrameType) -> str | None:
    """Return the name of ``self`` in a method; None in other functions."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else None
    if first is None or first == "self":
        return first
    method = getattr(type(frame.f_locals.get(first)), code.co_name, None)
    return first if getattr(method, "__code__", None) is code else None


def _suspended(reader: CodeType, names: Set[str], *, by_name: bool) -> FrameType | None:
    """Return the frame of the script's only suspended generator that a loop reads; None if there are several.

    Its function is named so, or it is a generator expression of the function that reads it; else there is no other.
    """
    every = gc.get_objects()
    if len(every) > MOST_LIVE_OBJECTS:
        return None
    generators = [each for each in every if type(each) is GeneratorType and each.gi_suspended]
    found = [each for each in generators if code_owner(each.gi_code.co_filename) == "own"]
    named = [each for each in found if each.gi_code.co_name in names or each.gi_code in reader.co_consts]
    frames = [each.gi_frame for each in named or ([] if by_name else found)]
    return frames[0] if len(frames) == 1 else None


@lru_cache(maxsize=1024)
def _line_of(code: CodeType, instruction: int) -> int:
    return next(islice(code.co_positions(), instruction // 2, None), (0,))[0] or 0


def own_caller(frame: FrameType) -> FrameType | None:
    """Return the innermost frame of the script's own code that led to a frame."""
    outer = frame.f_back
    while outer is not None and code_owner(outer.f_code.co_filename) != "own":
        outer = outer.f_back
    return outer


def _is_bad(value: Any) -> bool:
    return any(tensor.is_floating_point() and not is_finite(tensor) for tensor in tensors_in(value))


def _has_graph(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_graph, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.grad_fn is not None
