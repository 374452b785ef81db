"""Which formats the modules of a model take and give, looked at in one early step and never again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.watch.asking import autocast_precision, dtype_name, floats_in, runs_in
from ampwise.watch.hook import Hook
from ampwise.watch.models import OTHER_WITH_HOOKS, UNTOUCHED, plain_name, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampwise.watch.models import Models

__all__ = ["Flow"]

MOST = 2000  # modules
WHAT = "Which formats modules ran in was not looked at"
COMPILED = "torch.compile has it, and would compile it again for a hook"
SCRIPTED = "TorchScript takes no hooks"
OTHER_BITS = "with a hook it would compute in another way"

Named = dict[str, None]  # in order, each once


@dataclass(slots=True)
class _Pass:
    """A model in the step in which it is looked at."""

    model: str
    device: str
    on: bool = True
    modules: int = 0  # with hooks on them
    training: int = 0  # passes of the model as a whole that are on their way


@dataclass(slots=True)
class _Row:
    """A module, over all its calls in the step."""

    of: _Pass
    name: str
    kind: str
    device: str = ""
    takes: Named = field(default_factory=dict)
    gives: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    autocast: dict[str | None, None] = field(default_factory=dict)
    calls: int = 0

    def as_dict(self) -> dict[str, Any]:
        several = len(self.autocast) > 1
        return {
            "module": self.name,
            "kind": self.kind,
            "model": self.of.model,
            "takes": list(self.takes),
            "gives": list(self.gives),
            "parameters": list(self.parameters),
            "autocast": " and ".join(each or "off" for each in self.autocast) if several else next(iter(self.autocast)),
            "device": self.device,
            "calls": self.calls,
        }


class Flow:
    """Hooks on the modules of an optimizer's models, from the end of its first step to that of its second.

    The first is passed over, as modules may take their shape in it. Only passes that train are looked at; what is
    computed again for a backward pass counts as one more call.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._rows: list[_Row] = []  # in the order in which they started
        self._hooked = 0
        self._known: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()  # models: none is looked at twice
        self._passes: dict[int, list[_Pass]] = {}  # by optimizer, while they are looked at
        self._handles: dict[int, list[Any]] = {}
        self._done: set[int] = set()
        self._why_not: Named = {}

    def step_over(self, index: int, optimizer: Any, models: Models, *, free: bool) -> None:
        """An optimizer has stepped. free: nothing else is being measured in its next step."""
        if index in self._done:
            return
        if index in self._handles:
            self._end(index)
        elif free:
            self._begin(index, optimizer, models)

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def stop(self) -> None:
        """Take all hooks off, as something is to be compiled: it must have none of them."""
        for index in list(self._handles):
            self._end(index, "were about to be compiled")

    def remove(self) -> None:
        """Take all hooks off, as the watch ends."""
        for handle in (each for handles in self._handles.values() for each in handles):
            handle.remove()
        for looked in (each for passes in self._passes.values() for each in passes):
            looked.on = False
            self._known.clear()  # they may be looked at if the watch goes on
        self._handles, self._passes = {}, {}

    def rows(self) -> list[dict[str, Any]]:
        return [row.as_dict() for row in self._rows]

    def not_measured(self) -> list[str]:
        """What was not looked at, and why."""
        if not self._done:
            return [f"{WHAT}: the run ended before the second step of an optimizer did."]
        return list(self._why_not)

    def _begin(self, index: int, optimizer: Any, models: Models) -> None:
        self._handles[index], self._passes[index] = [], []
        if models.has_compiled_functions:
            self._why_not[f"{WHAT}: the script has compiled a function, which a hook could make it do again."] = None
        else:
            found = models.of(optimizer)
            if not found:
                self._why_not[f"{WHAT}: none was found that has the parameters of {type(optimizer).__name__}."] = None
            for model in (each for each in found if each not in self._known):
                self._look_at(index, model, models, prefixed=len(found) > 1)
        if not self._handles[index]:
            self._end(index)

    def _look_at(self, index: int, model: nn.Module, models: Models, *, prefixed: bool) -> None:
        self._known[model] = None
        kind = type(model).__name__
        looked = _Pass(kind, runs_in(model)[0])
        closed: Counter[tuple[str, str]] = Counter()

        def is_closed(module: nn.Module) -> bool:
            why = _why_closed(module, models)
            closed[type(module).__name__, why] += bool(why)
            return bool(why)

        modules = within(model, is_closed)
        for name, module in islice(modules, MOST - self._hooked):
            self._hooked += 1
            looked.modules += 1
            plain = plain_name(name) or type(module).__name__
            row = _Row(looked, f"{kind}.{plain}" if prefixed and plain != kind else plain, type(module).__name__)
            self._handles[index] += self._hooks_on(module, row, is_whole=module is model)
        if looked.modules:
            self._passes[index].append(looked)
        if next(modules, None) is not None:
            self._why_not[f"Which formats modules ran in: only the first {MOST} of them were looked at."] = None
        for (name, why), count in (+closed).items():
            self._why_not[f"Which formats modules ran in: {name}{f' ×{count}' * (count > 1)} left out; {why}."] = None

    def _hooks_on(self, module: nn.Module, row: _Row, *, is_whole: bool) -> list[Any]:
        before = Hook(partial(self._begins, row, is_whole), self._failed)
        after = Hook(partial(self._ends, row, is_whole), self._failed)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            # Of the whole even if its pass fails, or it would seem to go on.
            module.register_forward_hook(after, always_call=is_whole),
        ]

    def _end(self, index: int, why: str = "were not seen to run") -> None:
        for handle in self._handles.pop(index):
            handle.remove()
        for looked in self._passes.pop(index):
            looked.on = False  # copies of the model have the hooks still
            if not any(row.of is looked for row in self._rows):
                self._why_not[f"{WHAT}: those of {looked.model} {why}."] = None
        self._done.add(index)

    # What hooks tell

    def _begins(self, row: _Row, is_whole: bool, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        looked = row.of
        looked.training += is_whole and torch.is_grad_enabled()
        if not _is_training(looked):
            return
        given, own = list(floats_in([args, kwargs or {}])), _own_parameters(module)
        if not row.calls:
            self._rows.append(row)
            row.device = next((each.device.type for each in (*own, *given)), looked.device)
        row.calls += 1
        row.takes |= _names(given)
        row.parameters |= _names(own)
        row.autocast[autocast_precision(row.device)] = None

    def _ends(self, row: _Row, is_whole: bool, module: nn.Module, args: Any, output: Any) -> None:
        looked = row.of
        if row.calls and _is_training(looked):
            row.gives |= _names(floats_in(output))
        looked.training -= is_whole and torch.is_grad_enabled() and looked.training > 0


def _is_training(looked: _Pass) -> bool:
    """Or part of it: within a pass that trains, some modules run without gradients."""
    return looked.on and (torch.is_grad_enabled() or looked.training > 0)


def _why_closed(module: nn.Module, models: Models) -> str:
    if isinstance(module, UNTOUCHED):
        return OTHER_BITS if isinstance(module, OTHER_WITH_HOOKS) else SCRIPTED
    return COMPILED if models.is_compiled(module) else ""


def _own_parameters(module: nn.Module) -> list[Tensor]:
    own: Mapping[str, Tensor | None] = module._parameters
    return [each for each in own.values() if each is not None]


def _names(tensors: Iterable[Tensor]) -> Named:
    return {dtype_name(each.dtype): None for each in tensors}
