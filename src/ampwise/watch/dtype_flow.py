"""Input, output and parameter dtypes of a model's modules, recorded in one early step."""

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

from ampwise.watch.hooks import Hook
from ampwise.watch.inspection import autocast_precision, device_and_precision, dtype_name, floats_in
from ampwise.watch.models import CHANGED_BY_HOOKS, NEVER_HOOKED, modules_without, name_without_wrappers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampwise.watch.models import Models

__all__ = ["DtypeFlow"]

MOST = 2000  # modules
WHAT = "Dtypes of modules were not recorded"
MOST_OPTIMIZERS = 16  # recording takes a step of each
COMPILED = "it is compiled, and a hook would make torch.compile recompile it"
SCRIPTED = "TorchScript modules take no hooks"
OTHER_BITS = "a hook would switch off its fast path"

Named = dict[str, None]  # in order, each once


@dataclass(slots=True)
class _RecordedModel:
    """A model in the step in which it is recorded."""

    model: str
    device: str
    on: bool = True
    modules: int = 0  # with hooks on them
    training: int = 0  # training passes of the whole model that are running


@dataclass(slots=True)
class _Row:
    """A module's dtypes, over all its calls in the step."""

    of: _RecordedModel
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


class DtypeFlow:
    """Hooks on the modules of an optimizer's models, during the optimizer's second step.

    The first step is left out, as lazy modules get their shapes in it. Only training passes are recorded; a
    recomputation by activation checkpointing counts as one more call.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._rows: list[_Row] = []  # in the order in which they started
        self._hooked = 0
        self._known: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()  # models; each is recorded once
        self._models: dict[int, list[_RecordedModel]] = {}  # by optimizer, while its models are recorded
        self._handles: dict[int, list[Any]] = {}
        self._done: set[int] = set()
        self._why_not: Named = {}

    def step_over(self, index: int, optimizer: Any, models: Models, *, free: bool) -> None:
        """Start or stop recording as an optimizer's step ends. free: nothing else is measured in its next step."""
        if index in self._done:
            return
        if index in self._handles:
            self._end(index)
        elif len(self._done) + len(self._handles) >= MOST_OPTIMIZERS:
            self._done.add(index)
            self._why_not[f"Dtypes of modules were recorded for the first {MOST_OPTIMIZERS} optimizers only."] = None
        elif free:
            self._begin(index, optimizer, models)

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def stop(self) -> None:
        """Remove all hooks before something is compiled."""
        for index in list(self._handles):
            self._end(index, "were about to be compiled")

    def remove(self) -> None:
        """Remove all hooks as the watch ends."""
        for handle in (each for handles in self._handles.values() for each in handles):
            handle.remove()
        for recorded in (each for passes in self._models.values() for each in passes):
            recorded.on = False
            self._known.clear()  # a watch that is installed again may record them
        self._handles, self._models = {}, {}

    def rows(self) -> list[dict[str, Any]]:
        return [row.as_dict() for row in self._rows]

    def not_measured(self) -> list[str]:
        """Sentences on what was not recorded, and why."""
        if not self._done:
            return [f"{WHAT}: the run ended before an optimizer's second step did."]
        return list(self._why_not)

    def _begin(self, index: int, optimizer: Any, models: Models) -> None:
        self._handles[index], self._models[index] = [], []
        if models.has_compiled_functions:
            self._why_not[
                f"{WHAT}: the script has a compiled function, which hooks could make torch.compile recompile."
            ] = None
        else:
            found = models.of(optimizer)
            if not found:
                self._why_not[f"{WHAT}: no model was found with the parameters of {type(optimizer).__name__}."] = None
            for model in (each for each in found if each not in self._known):
                self._record_model(index, model, models, prefixed=len(found) > 1)
        if not self._handles[index]:
            self._end(index)

    def _record_model(self, index: int, model: nn.Module, models: Models, *, prefixed: bool) -> None:
        self._known[model] = None
        kind = type(model).__name__
        recorded = _RecordedModel(kind, device_and_precision(model)[0])
        skipped: Counter[tuple[str, str]] = Counter()

        def is_skipped(module: nn.Module) -> bool:
            why = _why_not_hooked(module, models)
            skipped[type(module).__name__, why] += bool(why)
            return bool(why)

        modules = modules_without(model, is_skipped)
        for name, module in islice(modules, MOST - self._hooked):
            self._hooked += 1
            recorded.modules += 1
            plain = name_without_wrappers(name) or type(module).__name__
            row = _Row(recorded, f"{kind}.{plain}" if prefixed and plain != kind else plain, type(module).__name__)
            self._handles[index] += self._hooks_on(module, row, is_model=module is model)
        if recorded.modules:
            self._models[index].append(recorded)
        if next(modules, None) is not None:
            self._why_not[f"Dtypes of modules: only the first {MOST} modules were recorded."] = None
        for (name, why), count in (+skipped).items():
            self._why_not[f"Dtypes of modules: {name}{f' ×{count}' * (count > 1)} left out; {why}."] = None

    def _hooks_on(self, module: nn.Module, row: _Row, *, is_model: bool) -> list[Any]:
        before = Hook(partial(self._forward_starts, row, is_model), self._failed)
        after = Hook(partial(self._forward_ended, row, is_model), self._failed)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            # For the whole model also if its pass fails, or it would count as still running.
            module.register_forward_hook(after, always_call=is_model),
        ]

    def _end(self, index: int, why: str = "never ran") -> None:
        for handle in self._handles.pop(index):
            handle.remove()
        for recorded in self._models.pop(index):
            recorded.on = False  # copies of the model still have the hooks
            if not any(row.of is recorded for row in self._rows):
                self._why_not[f"{WHAT}: the modules of {recorded.model} {why}."] = None
        self._done.add(index)

    # Hooks

    def _forward_starts(self, row: _Row, is_model: bool, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        recorded = row.of
        recorded.training += is_model and torch.is_grad_enabled()
        if not _is_training(recorded):
            return
        given, own = list(floats_in([args, kwargs or {}])), _own_parameters(module)
        if not row.calls:
            self._rows.append(row)
            row.device = next((each.device.type for each in (*own, *given)), recorded.device)
        row.calls += 1
        row.takes |= _names(given)
        row.parameters |= _names(own)
        row.autocast[autocast_precision(row.device)] = None

    def _forward_ended(self, row: _Row, is_model: bool, module: nn.Module, args: Any, output: Any) -> None:
        recorded = row.of
        if row.calls and _is_training(recorded):
            row.gives |= _names(floats_in(output))
        recorded.training -= is_model and torch.is_grad_enabled() and recorded.training > 0


def _is_training(recorded: _RecordedModel) -> bool:
    """Whether a training pass is running; some of its modules may run without gradients."""
    return recorded.on and (torch.is_grad_enabled() or recorded.training > 0)


def _why_not_hooked(module: nn.Module, models: Models) -> str:
    if isinstance(module, NEVER_HOOKED):
        return OTHER_BITS if isinstance(module, CHANGED_BY_HOOKS) else SCRIPTED
    return COMPILED if models.is_compiled(module) else ""


def _own_parameters(module: nn.Module) -> list[Tensor]:
    own: Mapping[str, Tensor | None] = module._parameters
    return [each for each in own.values() if each is not None]


def _names(tensors: Iterable[Tensor]) -> Named:
    return {dtype_name(each.dtype): None for each in tensors}
