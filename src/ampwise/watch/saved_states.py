"""States of models that the script keeps to restore them later, and that follow the training."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, code_owner
from ampwise.trace.names_in_code import nodes_of
from ampwise.watch.inspection import parameters_of
from ampwise.watch.learning import CountedCalls, Learning

if TYPE_CHECKING:
    from ampwise.watch.overhead import StepSkipper
    from ampwise.watch.tracker import CallTracker

__all__ = ["SavedStates"]

MARKED = 8  # tensors of a state by which it is known again
MOST_MARKS = 1024
MOST_VIEWS = 64
SHARING = ("detach", "cpu", "contiguous", "data")  # what gives a tensor in the same memory, on a CPU at least


@dataclass(frozen=True, slots=True)
class _State:
    """A call of ``state_dict()``."""

    site: CallSite
    module: weakref.ref[nn.Module]
    steps: dict[int, int]  # of each optimizer, by index


class SavedStates:
    """Remember where states were made, and notice when one is loaded that has changed with the model since."""

    def __init__(self, facts: Learning, tracker: CallTracker, skipper: StepSkipper) -> None:
        self._facts, self._tracker, self._skipper = facts, tracker, skipper
        self._marks: dict[int, tuple[weakref.ref[Tensor], _State]] = {}
        self._views: dict[
            tuple[CallSite, int], _State
        ] = {}  # of which the script makes other tensors, by line and model

    def made(self, module: nn.Module, state: Any, frame: FrameType) -> None:
        """Note a call of ``state_dict()`` by the script itself."""
        while (
            frame.f_code.co_name == "state_dict" and frame.f_back is not None and _is_own(frame)
        ):  # of the script's own
            frame = frame.f_back
        if not _is_own(frame) or not isinstance(state, Mapping):
            return
        tensors = [each for each in state.values() if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
        site = CallSite(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)
        made = _State(site, weakref.ref(module), self._steps())
        if len(self._marks) > MOST_MARKS:
            self._marks = {key: mark for key, mark in self._marks.items() if mark[0]() is not None}
        if len(self._marks) <= MOST_MARKS:
            for each in tensors[:: max(len(tensors) // MARKED, 1)]:
                self._marks[id(each)] = (weakref.ref(each), made)
        if len(self._views) < MOST_VIEWS and _makes_views(frame.f_code.co_filename, frame.f_lineno):
            self._views[site, id(module)] = made

    def loaded(self, module: nn.Module, state: Any) -> None:
        """Look at a state that the script loads, before it is loaded."""
        if not isinstance(state, Mapping) or not _is_own_memory(module, state):
            return
        made = self._made(module, state)
        what = type(module).__name__
        here = calling_site()
        at_once = made is not None and made.module() is module and _line_of(made.site) == _line_of(here)
        if made is not None and at_once and not self._is_trained(module):
            # Made and loaded by one line, which leaves no time to change it. Where it is trained, that does no harm.
            calls = self._facts.loaded_into_itself.setdefault(
                made.site, CountedCalls(step=self._tracker.steps + 1, what=what)
            )
            calls.times += 1
            return
        if made is None or not self._has_stepped(module, made):
            return
        calls = self._facts.followed_states.setdefault(
            made.site, CountedCalls(step=self._tracker.steps + 1, what=what, at=calling_site())
        )
        calls.times += 1

    def _made(self, module: nn.Module, state: Mapping[str, Any]) -> _State | None:
        """Return the call that made a state; None if it is unknown."""
        for each in state.values():
            refer, made = self._marks.get(id(each), (None, None))
            if refer is not None and refer() is each:
                return made
        found = [made for made in self._views.values() if made.module() is module]
        return found[0] if len(found) == 1 else None

    def _steps(self) -> dict[int, int]:
        skipped = self._skipper.skipped
        pairs = self._tracker.optimizers.pairs()
        return {state.index: state.steps + skipped.get(id(optimizer), 0) for optimizer, state in pairs}

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer has parameters of the module."""
        own = {id(each) for each in nn.Module.parameters(module)}
        return any(
            id(each) in own for optimizer, _ in self._tracker.optimizers.pairs() for each in parameters_of(optimizer)
        )

    def _has_stepped(self, module: nn.Module, made: _State) -> bool:
        """Whether an optimizer that has parameters of the module has made steps since."""
        own, steps = {id(each) for each in nn.Module.parameters(module)}, self._steps()
        return any(
            steps[state.index] > made.steps.get(state.index, 0)
            and any(id(each) in own for each in parameters_of(optimizer))
            for optimizer, state in self._tracker.optimizers.pairs()
        )


def _line_of(site: CallSite) -> tuple[str | None, int | None]:
    return site.file, site.line


def _is_own(frame: FrameType) -> bool:
    return code_owner(frame.f_code.co_filename) == "own"


def _is_own_memory(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether loading a state copies each value of the module to itself, as it has the module's own memory."""
    own = dict(_named_tensors(module))
    pairs = [(own[name], each) for name, each in state.items() if isinstance(each, Tensor) and name in own]
    if any(hasattr(each, "placements") or each.is_meta for pair in pairs for each in pair):
        return False
    pairs = [(mine, each) for mine, each in pairs if mine.numel()]
    return any(isinstance(mine, nn.Parameter) for mine, _ in pairs) and all(
        mine.device == each.device and mine.shape == each.shape and mine.data_ptr() == each.data_ptr()
        for mine, each in pairs
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    named = nn.Module.named_parameters(module, remove_duplicate=False)
    return chain(named, nn.Module.named_buffers(module, remove_duplicate=False))


@lru_cache(maxsize=256)
def _makes_views(file: str, line: int) -> bool:
    """Whether a line makes a dictionary of views of a state's values: ``{k: v.detach() for k, v in ...}``."""
    nodes = nodes_of(file)
    return any(
        isinstance(node, ast.DictComp) and node.lineno <= line <= (node.end_lineno or line) and _is_view(node.value)
        for node in nodes
    )


def _is_view(value: ast.expr) -> bool:
    """Whether an expression is a name, or a chain of calls on it that keep the memory."""
    while not isinstance(value, ast.Name):
        value = value.func if isinstance(value, ast.Call) and not value.args else value
        if not isinstance(value, ast.Attribute) or value.attr not in SHARING:
            return False
        value = value.value
    return True
