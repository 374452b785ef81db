"""The precision modes of a script: how each of its training steps may run, by the options that decide it.

A mode is one way in which a forward and the backward that follows it run together: autocast on or off and its dtype,
a scaler that is on, off or absent, and the conditions under which all of this happens. Rules ask whether a mode is
wrong: one is enough, whatever the default.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.cases import (
    ALWAYS,
    FALSE,
    Case,
    Conditions,
    Dtype,
    Known,
    Made,
    Option,
    Value,
    as_display,
    cases_of,
    conditions_at,
    joined,
    results_of_closure,
    switched_on,
    truth_of,
)
from ampwise.check.source.events import EventContext, EventKind, SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.precision import NO_CONTEXT, AutocastContext, argument_of
from ampwise.check.source.project import SourceFile
from ampwise.check.source.steps import BACKWARDS, Region
from ampwise.check.source.torch_names import AUTOCASTS, BF16, FP16, FP32, GRAD_SCALERS, SPELLINGS
from ampwise.check.source.tree_walk import walk

Arguments = dict[str, tuple[ast.expr, Frame]]  # of a call, by name

MOST_MODES = 200  # of one file
NO_AUTOCAST, UNKNOWN = "off", "unknown"
ON, OFF, NONE, UNSEEN = "on", "off", "none", "unseen"  # a scaler
DEFAULT_BF16 = ("cpu", "xla", "tpu")
FP16_SWITCH = LazyPattern(r"fp16|(?<!b)float16|half", re.IGNORECASE)
NOT_CUDA = (*DEFAULT_BF16, "mps", "meta")


@dataclass(frozen=True, slots=True, eq=False)
class Autocast:
    """Autocast under some conditions."""

    dtype: str  # or off, or unknown
    given: Conditions
    node: ast.expr
    frame: Frame
    device: str | None = None  # None: a variable


@dataclass(frozen=True, slots=True, eq=False)
class Scaler:
    """Scaler under some conditions."""

    state: str
    given: Conditions
    node: ast.Call | None = None  # the call that makes it
    frame: Frame | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """A forward and its backward, in one precision."""

    region: Region
    forward: SourceEvent
    backward: SourceEvent
    autocast: Autocast
    scaler: Scaler
    given: Conditions  # of all of it


@functools.lru_cache(maxsize=2)  # several rules use it for each file
def modes_of(code: SourceFile) -> list[Mode]:
    """Return the precision modes of the training steps of a file."""
    found: list[Mode] = []
    for region in code.regions:
        for backward, forward in _computed(region):
            for mode in _modes(region, backward, forward):
                found.append(mode)
                if len(found) >= MOST_MODES:
                    return found
    return found


def _computed(region: Region) -> Iterator[tuple[SourceEvent, SourceEvent]]:
    """Yield each backward with the forwards that may be the last one before it; itself if it is under autocast."""
    seen: set[tuple[SourceEvent, SourceEvent]] = set()
    visits = region.visits(*BACKWARDS)
    if not visits:
        yield from _in_order(region)
    for backward, moments in visits:
        if backward.context.autocasts:
            yield backward, backward
            continue
        for moment in moments:
            forward = next((event for event in moment.earlier(EventKind.FORWARD) if not event.context.no_grad), None)
            forward = forward or _last_under_autocast(region, backward)
            if forward is not None and (backward, forward) not in seen:
                seen.add((backward, forward))
                yield backward, forward
                if not forward.context.autocasts:
                    yield from [(backward, inner) for inner in _under_autocast_inside(region, forward)]


def _in_order(region: Region) -> Iterator[tuple[SourceEvent, SourceEvent]]:
    """Yield each backward of a step with too many paths, with the last forward before it in the source."""
    last = None
    for event in region.events:
        if event.kind == EventKind.FORWARD and not event.context.no_grad:
            last = event
        elif event.kind in BACKWARDS:
            forward = event if event.context.autocasts else last or _last_under_autocast(region, event)
            if forward is not None:
                yield event, forward


@functools.lru_cache(maxsize=64)
def _last_under_autocast(region: Region, backward: SourceEvent) -> SourceEvent | None:
    """Return the last call under autocast before a backward in its function: its forward may be in code unseen."""
    found = None
    for site in region.trace.statements_in(region.loop):
        context, node = site.context, site.node
        is_before = context.frame is backward.frame and getattr(node, "lineno", backward.line) < backward.line
        if is_before and context.autocasts and not context.no_grad:
            call = next((part for part in walk(node) if isinstance(part, ast.Call)), None)
            found = SourceEvent(EventKind.FORWARD, call, context) if call is not None else found
    return found


@functools.lru_cache(maxsize=64)
def _under_autocast_inside(region: Region, forward: SourceEvent) -> list[SourceEvent]:
    """Return what a model computes under an autocast of its own, one event for each autocast."""
    found: dict[ast.expr, SourceEvent] = {}
    for site in region.trace.statements_in(region.loop):
        context = site.context
        autocast = context.autocast
        if autocast is None or autocast.node in found or context.no_grad:
            continue
        if any(frame.call is forward.node for frame in context.frame.callers()):
            call = next((part for part in walk(site.node) if isinstance(part, ast.Call)), None)
            if call is not None:
                found[autocast.node] = SourceEvent(EventKind.FORWARD, call, context)
    return list(found.values())


def _modes(region: Region, backward: SourceEvent, forward: SourceEvent) -> Iterator[Mode]:
    reached = [
        both
        for one in conditions_at(backward.frame, backward.node)
        for other in (conditions_at(forward.frame, forward.node) if forward is not backward else [ALWAYS])
        if (both := joined(one, other)) is not None
    ]
    scalers = list(_scalers(region, backward))
    for autocast in autocasts_in(forward.context):
        for scaler in scalers:
            for given in reached:
                together = joined(autocast.given, scaler.given, given)
                if together is not None and not is_off_gpu(together):
                    yield Mode(region, forward, backward, autocast, scaler, together)


def is_off_gpu(given: Conditions) -> bool:
    """Whether the conditions keep a mode from a CUDA device: ``device.type != "cuda"``, no ``cuda.is_available()``."""
    for name, limit in given.items():
        if name.endswith("cuda.is_available()") and limit.among is not None and limit.among <= FALSE:
            return True
        if "device" in name.lower():
            if any("cuda" in str(value) for value in limit.without):
                return True
            named = [value for value in limit.among or () if isinstance(value, str)]
            if named and all(value.partition(":")[0] in NOT_CUDA for value in named):
                return True
    return False


def asks_for_both(given: Conditions) -> bool:
    """Whether both ``args.fp16`` and ``args.bf16`` are on, which nobody asks for."""
    on = [name.rpartition(".")[2].lower() for name in switched_on(given)]
    return any("bf16" in name or "bfloat16" in name for name in on) and any(map(FP16_SWITCH.search, on))


def autocasts_in(context: EventContext) -> list[Autocast]:
    """Return what autocast may be at some place: the innermost region decides, unless it may be a null context."""
    waiting: list[Conditions] = [ALWAYS]
    found: list[Autocast] = []
    for region in reversed(context.autocasts):
        entered = entered_by(region)
        through = []
        for one in entered:
            for given in waiting:
                together = joined(one.given, given)
                if together is None:
                    continue
                if one.dtype == NO_AUTOCAST and dotted_text(one.node) is None and not _is_autocast(one):
                    through.append(together)
                else:
                    found.append(Autocast(one.dtype, together, one.node, one.frame, one.device))
        waiting = through
    home = context.autocasts[0] if context.autocasts else None
    node = home.node if home is not None else ast.Constant(None)
    return [*found, *[Autocast(NO_AUTOCAST, given, node, context.frame) for given in waiting]]


def _is_autocast(one: Autocast) -> bool:
    return isinstance(one.node, ast.Call) and one.frame.qualified(one.node.func) in AUTOCASTS


def entered_by(region: AutocastContext) -> list[Autocast]:
    """Return what a ``with`` may enter: autocast with its dtype, or something else."""
    if region.manager is None or region.entered_in is None:
        return [Autocast(UNKNOWN, ALWAYS, region.node, region.frame)]
    found: list[Autocast] = []
    for case in cases_of(region.entered_in, region.manager):
        found += _read(case, region)
    return found


def _read(case: Case, region: AutocastContext) -> list[Autocast]:
    value, given = case
    if isinstance(value, Known):
        return [Autocast(NO_AUTOCAST, given, region.node, region.frame)]
    if isinstance(value, Option) or not isinstance(value.node, ast.Call):
        return [Autocast(UNKNOWN, given, region.node, region.frame)]
    call, frame = value.node, value.frame
    qualified = frame.qualified(call.func)
    if qualified in AUTOCASTS:
        return list(_read_call(call, frame, AUTOCASTS[qualified], given))
    name = qualified or dotted_text(call.func) or ""
    if NO_CONTEXT.search(name):
        return [Autocast(NO_AUTOCAST, given, call, frame)]
    found: list[Autocast] = []
    for maker in cases_of(frame, call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ():
        together = joined(given, maker.given)
        if together is None:
            continue
        found += _made_by(maker, call, frame, together)
    return found or [Autocast(UNKNOWN, given, call, frame)]


def _made_by(maker: Case, call: ast.Call, frame: Frame, given: Conditions) -> list[Autocast]:
    """Read ``partial(autocast, ...)()``, ``(lambda: autocast(...))()`` and a class in a variable."""
    if not isinstance(maker.value, Made):
        return [Autocast(UNKNOWN, given, call, frame)]
    made, home = maker.value.node, maker.value.frame
    returned = results_of_closure(maker.value, call)
    if returned:
        cases = [case for value, where in returned for case in cases_of(where, value)]
        results = [(case, joined(case.given, given)) for case in cases]
        region = AutocastContext(call, frame)
        return [one for case, both in results if both is not None for one in _read(Case(case.value, both), region)]
    if isinstance(made, ast.Call) and made.args:
        name = home.qualified(made.func) or dotted_text(made.func) or ""
        wrapped = home.qualified(made.args[0]) if name.rpartition(".")[2] == "partial" else None
        if wrapped in AUTOCASTS:
            return list(_read_call(call, frame, AUTOCASTS[wrapped], given, (made, home)))
        made = made.args[0] if name.rpartition(".")[2] == "partial" else made
    name = home.qualified(made) or dotted_text(made) or ""
    if name in AUTOCASTS:
        return list(_read_call(call, frame, AUTOCASTS[name], given))
    return [Autocast(NO_AUTOCAST if NO_CONTEXT.search(name) else UNKNOWN, given, call, frame)]


def _read_call(
    call: ast.Call, frame: Frame, device: str | None, given: Conditions, partial: tuple[ast.Call, Frame] | None = None
) -> Iterator[Autocast]:
    """Yield what one constructor call makes, for each device, dtype and ``enabled``."""
    names = ("device_type", "dtype", "enabled") if device is None else ("enabled", "dtype")
    ways = _arguments(call, frame, names, partial)
    if ways is None:
        yield Autocast(UNKNOWN, given, call, frame, device)
        return
    for arguments, when in ways:
        together = joined(given, when)
        if together is not None:
            yield from _with_arguments(arguments, call, frame, device, together)


def _with_arguments(
    arguments: Arguments, call: ast.Call, frame: Frame, device: str | None, given: Conditions
) -> Iterator[Autocast]:
    devices: list[tuple[str | None, Conditions]] = [(device, ALWAYS)]
    if "device_type" in arguments:
        node, home = arguments["device_type"]
        devices = [
            (case.value.value.partition(":")[0], case.given)
            if isinstance(case.value, Known) and isinstance(case.value.value, str)
            else (None, case.given)
            for case in cases_of(home, node)
        ]
    dtypes: list[tuple[str | None, Conditions]] = [(None, ALWAYS)]  # None: the device's default
    if "dtype" in arguments:
        node, home = arguments["dtype"]
        dtypes = [(dtype_in(case), case.given) for case in cases_of(home, node)]
    holds: list[Conditions] = [ALWAYS]
    fails: list[Conditions] = []
    if "enabled" in arguments:
        node, home = arguments["enabled"]
        holds, fails = truth_of(home, node)
    off = [together for one in fails if (together := joined(given, one)) is not None]
    yield from [Autocast(NO_AUTOCAST, together, call, frame, device) for together in off]
    for on, (kind, when), (dtype, also) in itertools.product(holds, devices, dtypes):
        together = joined(given, on, when, also)
        if together is not None:
            default = BF16 if kind in DEFAULT_BF16 else FP16
            yield Autocast(NO_AUTOCAST if dtype == FP32 else dtype or default, together, call, frame, kind)


def _arguments(
    call: ast.Call, frame: Frame, names: tuple[str, ...], partial: tuple[ast.Call, Frame] | None
) -> list[tuple[Arguments, Conditions]] | None:
    """Return the arguments of a call by name, with those of ``partial(...)`` and each ``**table``; None if unknown."""
    calls = [(call, frame, 0)] if partial is None else [(*partial, 1), (call, frame, 0)]
    found: list[tuple[Arguments, Conditions]] = [({}, ALWAYS)]
    for one, home, first in calls:
        named = [(name, argument_of(one, name, position + first)) for position, name in enumerate(names)]
        own = {name: (argument, home) for name, argument in named if argument is not None}
        found = [(arguments | own, given) for arguments, given in found]
        for word in one.keywords:
            if word.arg is None:
                tables = [(table_of(case.value), case.given) for case in cases_of(home, word.value)]
                found = [
                    (arguments | (table or {}), both)
                    for arguments, given in found
                    for table, when in tables
                    if (both := joined(given, when)) is not None
                ]
                if any(table is None for table, _ in tables):
                    return None
    return found


def table_of(value: Value) -> Arguments | None:
    """Return the arguments that ``**table`` gives, by name; None if they are unknown."""
    display = as_display(value.node) if isinstance(value, Made) else None
    if not isinstance(display, ast.Dict) or not isinstance(value, Made):
        return None
    keys = [key.value if isinstance(key, ast.Constant) else None for key in display.keys]
    if None in keys:
        return None
    return {str(key): (part, value.frame) for key, part in zip(keys, display.values, strict=True)}


def dtype_in(case: Case) -> str | None:
    """Return the dtype of a value; None for None, which means a default."""
    value = case.value.value if isinstance(case.value, Known) else UNKNOWN
    if isinstance(value, Dtype):
        return value.name
    if isinstance(value, str):
        return SPELLINGS.get(value.lower(), UNKNOWN)
    return None if value is None else UNKNOWN


def scalers_held(frame: Frame, node: ast.expr) -> Iterator[Scaler]:
    """Yield the scalers that an expression may hold, each on, off, absent, or made where we cannot see it."""
    for value, given in cases_of(frame, node):
        if isinstance(value, Known):
            yield Scaler(NONE if not value.value else UNSEEN, given)
        elif isinstance(value, Made) and isinstance(value.node, ast.Call):
            call, home = value.node, value.frame
            if home.qualified(call.func) not in GRAD_SCALERS:
                yield Scaler(UNSEEN, given)
                continue
            made = conditions_at(home, call)  # a constructor under an `if` of another function
            enabled = argument_of(call, "enabled")
            holds, fails = truth_of(home, enabled) if enabled is not None else ([ALWAYS], [])
            for state, sides in ((ON, holds), (OFF, fails)):
                for side in sides:
                    for at in made:
                        together = joined(given, side, at)
                        if together is not None:
                            yield Scaler(state, together, call, home)
        else:
            yield Scaler(UNSEEN, given)


def _scalers(region: Region, backward: SourceEvent) -> Iterator[Scaler]:
    """Yield the scalers of a backward; absent for a plain one."""
    if backward.kind != EventKind.SCALED_BACKWARD:
        yield Scaler(NONE, ALWAYS)
        return
    scaled = [part for part in walk(backward.node) if isinstance(part, ast.Call)]
    for call in scaled:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "scale":
            yield from scalers_held(backward.frame, call.func.value)
            return
    uses = [event for event in region.events if event.key == backward.key and event.kind == EventKind.SCALER_STEP]
    if uses:
        yield from scalers_held(uses[0].frame, uses[0].receiver)
    else:
        yield Scaler(UNSEEN, ALWAYS)
