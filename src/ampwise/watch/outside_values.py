"""What made a bad value that comes into the step from outside: the script's own statements, run once more.

The functions that led to the step are still running, and their variables, with those of the script's modules, hold
what the statements began with. A statement counts only if it gives the bad tensor again: the same values, or, where it
draws random numbers, a tensor of the same kind that is bad too. What it reads that is bad is followed further back.
"""

from __future__ import annotations

import ast
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampwise.trace.batch_origin import Observation
from ampwise.trace.call_site import code_owner
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import BadTensor, DataOrigin
from ampwise.trace.names_in_code import FUNCTIONS, call_name, tree_of
from ampwise.trace.numpy_errors import as_array, is_bad
from ampwise.trace.op_inspection import values_of
from ampwise.trace.replay import is_finite
from ampwise.trace.sample_draws import generators_of, is_safe_to_draw, next_random_numbers, reachable
from ampwise.watch.batch_draws import BatchDraws
from ampwise.watch.code_slice import RESULT, Parameter, statements_setting, way_to
from ampwise.watch.side_effects import side_effects_refused

__all__ = ["OutsideValues"]

MOST_FRAMES = 12
MOST_PARTS = 1000  # of a container to look into
MOST_DEPTH = 4
MOST_BACK = 6  # tensors to follow back
MOST_SEARCHES = 2  # in a run
MOST_TRIES = 25  # of statements that draw random numbers
MOST_SECONDS = 6.0  # of one search
PURE = ("numpy", "pandas", "scipy", "sklearn", "PIL", "torchvision", "torchaudio", "einops")  # safe to use again
WRAPPERS = ("enumerate", "zip", "tqdm", "iter", "list")


class _Scope(NamedTuple):
    """The variables of a running function, or of a module, and the way in its source to the call that it is making."""

    way: list[ast.AST]  # from the whole file on; only the file, if all of it has run
    file: str
    variables: Mapping[str, Any]
    names: Mapping[str, Any]  # global ones, too
    own: str | None = None  # the name of ``self``
    code: CodeType | None = None


class OutsideValues:
    """Searches for what made bad values outside of the step."""

    def __init__(self) -> None:
        self._searches = 0

    def explained(self, failure: Failure, batch: Mapping[str, Tensor], draws: BatchDraws | None) -> Failure:
        """Return the failure with the line that made its bad tensor, if that is found. Never raises."""
        source = failure.source
        is_outside = source is not None and source.what in ("batch", "other")
        if source is None or not is_outside or (source.drawn is not None and source.drawn.how == "computed"):
            return failure
        if self._searches >= MOST_SEARCHES:
            return failure
        self._searches += 1
        with suppress(Exception, SystemExit):
            scopes = _scopes()
            known = (each.variables for each in scopes)
            tensor = batch.get(source.name) if source.name else None
            if tensor is None:
                tensor = next((each for each in _bad_tensors(known) if _is_described(each, source)), None)
            made = None if tensor is None else _origin_of(tensor.detach(), scopes, draws)
            if made is not None and made.dataset:
                return failure.but(source=replace(source, drawn=made))
            if made is not None and source.drawn is not None:
                cause = f"{made.cause}; {source.drawn.cause}"
                drawn = replace(source.drawn, how="computed", cause=cause, fix=made.fix, site=made.site)
                return failure.but(source=replace(source, drawn=drawn))
            if made is not None:
                return failure.but(source=replace(source, made_at=made.site, made_by=made.cause, advice=made.fix))
        return failure


def _is_described(tensor: Tensor, source: BadTensor) -> bool:
    known, shape = source.values, tuple(tensor.shape)  # the step may read a view of it
    if known is None or math.prod(shape) != math.prod(known.shape):
        return False
    return values_of(tensor) == replace(known, name="", shape=shape)


# Where values are


def _scopes() -> list[_Scope]:
    """Return the running functions of the script, innermost first, and then its modules that have run."""
    found: list[_Scope] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        tree = tree_of(code.co_filename) if code_owner(code.co_filename) == "own" else None
        position = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
        way = None if tree is None or None in position else way_to(tree, position)
        if way is not None:
            here = frame.f_locals
            is_method = bool(code.co_argcount) and code.co_varnames[0] == "self"
            names = {**frame.f_globals, **here}
            found.append(_Scope(way, code.co_filename, here, names, "self" if is_method else None, code))
        frame = frame.f_back
    running = {each.file for each in found if each.code is not None and each.code.co_name == "<module>"}
    sound = set[tuple[int, int]]()  # modules of a program share most of what they hold
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or file in running or code_owner(file) != "own":
            continue
        has_bad = any(_has_bad(each, sound) for each in list(vars(module).values()))
        if has_bad and (tree := tree_of(file)) is not None:  # to parse all of a program takes seconds
            found.append(_Scope([tree], file, vars(module), vars(module)))
    return found


def _tensors_of(value: Any, depth: int = MOST_DEPTH, seen: set[tuple[int, int]] | None = None) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a value, also those of arrays, containers and objects of the script.

    seen: ids and depths of what has been looked into, each once.
    """
    seen = set() if seen is None else seen
    tensor, parts = _look_into(value, depth)
    if tensor is not None:
        yield tensor
    for each in parts:
        key = id(each), depth
        if key not in seen:
            seen.add(key)
            yield from _tensors_of(each, depth - 1, seen)


def _look_into(value: Any, depth: int) -> tuple[Tensor | None, Iterable[Any]]:
    """Return the floating-point tensor that a value is, or else what it consists of."""
    if isinstance(value, Tensor):
        return value.detach() if value.is_floating_point() else None, ()
    if not depth or isinstance(value, nn.Module | Optimizer | ModuleType | type | FunctionType | str | int | float):
        return None, ()
    if isinstance(value, Mapping):
        return None, islice(value.values(), MOST_PARTS)
    if isinstance(value, list | tuple | deque):
        return None, islice(value, MOST_PARTS)
    if (numbers := as_array(value)) is not None:
        with suppress(TypeError, ValueError):
            return torch.from_numpy(numbers), ()
        return None, ()
    if isinstance(value, DataLoader):
        return None, (value.dataset,)
    return None, islice(vars(value).values(), MOST_PARTS) if hasattr(value, "__dict__") else ()


def _has_bad(value: Any, sound: set[tuple[int, int]], depth: int = MOST_DEPTH) -> bool:
    """Return whether a tensor in a value is not finite. sound: ids and depths of what has none, noted here, too."""
    key = id(value), depth
    if key in sound:
        return False
    tensor, parts = _look_into(value, depth)
    if (tensor is not None and not is_finite(tensor)) or any(_has_bad(each, sound, depth - 1) for each in parts):
        return True
    sound.add(key)
    return False


def _bad_tensors(variables: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    every = (each for names in variables for value in list(names.values()) for each in _tensors_of(value))
    return (each for each in every if not is_finite(each))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor shares memory with another, or has the same values."""
    if one.layout != torch.strided or other.layout != torch.strided or one.device.type == "meta":
        return False
    if one.device != other.device:
        return False
    if one.numel() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
        return True
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _holds(value: Any, tensor: Tensor) -> bool:
    return any(_is_same(each, tensor) for each in _tensors_of(value))


# What made them


def _origin_of(tensor: Tensor, scopes: Sequence[_Scope], draws: BatchDraws | None) -> DataOrigin | None:
    """Return the operation outside of the step that made a bad tensor; None if that cannot be shown."""
    followed: list[Tensor] = []
    until = time.monotonic() + MOST_SECONDS
    for _ in range(MOST_BACK):
        if any(_is_same(tensor, each) for each in followed):
            return None
        followed.append(tensor)
        made, given = _made_in(scopes, tensor, until)
        if made is not None:
            return made if made.site.file else None
        drawn = None if draws is None or given is not None else draws.origin_of(tensor)
        if drawn is not None and drawn.how == "computed":
            return drawn
        if given is None and drawn is not None and drawn.how == "held" and draws is not None:
            held = [each for each in _tensors_of(draws.dataset_of(tensor)) if not is_finite(each)]
            given = held[0] if held else None
        if given is None:
            return None
        tensor = given
    return None


def _made_in(scopes: Sequence[_Scope], tensor: Tensor, until: float) -> tuple[DataOrigin | None, Tensor | None]:
    """Return what computed a tensor; or else a bad tensor that it was computed from."""
    inner: _Scope | None = None
    given: Tensor | None = None
    for scope in scopes:
        pairs = [*((scope, each) for each in _expressions(scope, inner, tensor)), *_iterated(scope)]
        for at, wanted in pairs:
            made, read = None, list[Tensor]()
            if time.monotonic() > until:
                return None, None
            with suppress(Exception, SystemExit):
                made, read = _run_again(at, wanted, tensor, until)
            if made is not None:
                return made, None
            given = given if given is not None else next((each for each in read if not _is_same(each, tensor)), None)
        inner = scope if scope.code is not None else None
    return None, given


def _expressions(scope: _Scope, inner: _Scope | None, tensor: Tensor) -> Iterator[ast.expr]:
    """Yield what in a function, or a module, has the tensor as its value, or as a part of it."""
    call = scope.way[-1]
    for name, value in list(scope.variables.items()):
        if name == scope.own:
            for attribute, part in list(getattr(value, "__dict__", {}).items()):
                if _holds(part, tensor):
                    yield ast.Attribute(ast.Name(name, ast.Load()), attribute, ast.Load())
        elif _holds(value, tensor):
            yield ast.Name(name, ast.Load())
    if inner is not None and isinstance(call, ast.Call) and inner.code is not None:
        for name in inner.code.co_varnames[: inner.code.co_argcount + inner.code.co_kwonlyargcount]:
            if name in inner.variables and name != inner.own and _holds(inner.variables[name], tensor):
                given = Parameter.of(inner.code, name, is_method=inner.own is not None).in_caller(call, scope.own)
                if given is not None and not isinstance(given, ast.Name):
                    yield given


def _iterated(scope: _Scope) -> Iterator[tuple[_Scope, ast.expr]]:
    """Yield what the loops around the call go over, where that has no name: ``enumerate(DataLoader(Images()))``."""
    for number, node in enumerate(scope.way):
        if not isinstance(node, ast.For) or any(isinstance(each, FUNCTIONS) for each in scope.way[number:]):
            continue
        pending = [node.iter]
        while pending:
            each = pending.pop()
            if isinstance(each, ast.Call) and call_name(each) in WRAPPERS:
                pending += each.args
            elif isinstance(each, ast.Call):
                yield scope._replace(way=scope.way[: number + 1]), each


def _run_again(scope: _Scope, wanted: ast.expr, tensor: Tensor, until: float) -> tuple[DataOrigin | None, list[Tensor]]:
    """Compute an expression again, with all that is bad in it; return what made the tensor, and what it was made of."""
    bad = {name for name, value in scope.variables.items() if _is_bad_here(value, tensor)}
    if isinstance(wanted, ast.Attribute) and scope.own is not None:
        bad.add(f"{scope.own}.{wanted.attr}")
    at_hand = frozenset(name for name in scope.names if name not in bad)
    found = statements_setting(scope.way, wanted, scope.own, at_hand)
    if found is None or (not found.body and isinstance(wanted, ast.Name | ast.Attribute)):
        return None, []
    read = {name for name in found.names if not name.startswith("self.")}
    values = {name: scope.names[name] for name in read if name in scope.names}
    things = [*values.values()]
    if any(_is_bad_here(values.get(name), tensor) for name in found.rebound) or not _may_run(things):
        return None, []
    result = ast.copy_location(ast.Assign([ast.Name(RESULT, ast.Store())], wanted), scope.way[-1])
    if not hasattr(result, "lineno"):
        result.lineno = 1
    module = ast.fix_missing_locations(ast.Module([*found.body, result], []))
    code = compile(module, scope.file, "exec", dont_inherit=True)
    generators = generators_of(things, None)

    def run() -> Any:
        names = {**scope.names, **values}
        exec(code, names)
        return names[RESULT]

    with Observation([*things, *generators], copies_arrays=True) as seen, side_effects_refused(until):
        for _ in range(MOST_TRIES):
            before = next_random_numbers(generators)
            value = seen.run(run)
            is_drawn = next_random_numbers(generators) != before
            again = next((each for each in _tensors_of(value) if _is_again(each, tensor, is_drawn=is_drawn)), None)
            if again is not None:
                return seen.made(again)
            if not is_drawn:
                break
            seen.forget()
    return None, []


def _is_bad_here(value: Any, tensor: Tensor) -> bool:
    """Return whether a value must be computed again: an object only if it holds the tensor."""
    is_plain = isinstance(value, Tensor | Mapping | list | tuple) or as_array(value) is not None
    return (is_plain and is_bad(value)) or (isinstance(value, float) and is_bad(value)) or _holds(value, tensor)


def _is_again(value: Tensor, tensor: Tensor, *, is_drawn: bool) -> bool:
    """Return whether a tensor that was computed again is the bad one. is_drawn: from other random numbers."""
    if value.dtype != tensor.dtype or value.dim() != tensor.dim() or is_finite(value):
        return False
    if value.shape == tensor.shape and torch.equal(value.isfinite().cpu(), tensor.isfinite().cpu()):
        return True
    return is_drawn and value.shape[1:] == tensor.shape[1:]


def _may_run(things: Sequence[Any]) -> bool:
    """Return whether code can use these objects again such that the script does not notice."""
    every = list(reachable(list(things), None))
    return is_safe_to_draw(list(things), None) and not any(map(_is_foreign, every))


def _is_foreign(thing: Any) -> bool:
    """Return whether an object is of a library that may keep state which cannot be restored: an environment."""
    if isinstance(thing, type | ModuleType | FunctionType) or callable(thing):
        return False
    name = type(thing).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and code_owner(file) == "library" and name.partition(".")[0] not in PURE
