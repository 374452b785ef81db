"""What hooks on a model's modules measure: dtypes in one early step, and the largest magnitudes of outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.inspection import autocast_precision, device_and_precision, dtype_name, floats_in
from ampwise.watch.models import (
    CHANGED_BY_HOOKS,
    NEVER_HOOKED,
    Hook,
    Models,
    modules_without,
    name_without_wrappers,
)

__all__ = ["Activations", "DtypeFlow"]

MOST = 2000  # modules
WHAT = "Dtypes of modules were not recorded"
MOST_OPTIMIZERS = 16  # recording takes a step of each
COMPILED = "it is compiled, and a hook would make torch.compile recompile it"
SCRIPTED = "TorchScript modules take no hooks"
OTHER_BITS = "a hook would switch off its fast path"

Named = dict[str, None]  # in order, each once
HookMaker = Callable[[Callable[..., None]], Hook]


# Dtypes


@dataclass(slots=True)
class _RecordedModel:
    """A model in the step in which it is recorded."""

    name: str
    device: str
    optimizer: int  # its index
    handles: list[Any] = field(default_factory=list)  # of its hooks
    on: bool = True
    training: int = 0  # training passes of the whole model that are running

    @property
    def is_training(self) -> bool:
        """Whether a training pass is running; some of its modules may run without gradients."""
        return self.on and (torch.is_grad_enabled() or self.training > 0)

    def remove_hooks(self) -> None:
        self.on = False  # copies of the model still have the hooks
        for handle in self.handles:
            handle.remove()


@dataclass(slots=True)
class _Row:
    """A module's dtypes, over all its calls in the step."""

    model: _RecordedModel
    name: str
    kind: str
    is_model: bool  # the whole model
    device: str = ""
    takes: Named = field(default_factory=dict)
    gives: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    autocast: dict[str | None, None] = field(default_factory=dict)
    calls: int = 0
    with_gradients: bool = False  # gradients were enabled in some call

    def as_dict(self) -> dict[str, Any]:
        several = len(self.autocast) > 1
        return {
            "module": self.name,
            "kind": self.kind,
            "model": self.model.name,
            "takes": list(self.takes),
            "gives": list(self.gives),
            "parameters": list(self.parameters),
            "autocast": " and ".join(each or "off" for each in self.autocast) if several else next(iter(self.autocast)),
            "device": self.device,
            "calls": self.calls,
        }


class DtypeFlow:
    """Input, output and parameter dtypes of the modules of an optimizer's models, in the optimizer's second step.

    The first step is left out, as lazy modules get their shapes in it. Only training passes are recorded; a
    recomputation by activation checkpointing counts as one more call.
    """

    def __init__(self, hook: HookMaker) -> None:
        self._hook = hook
        self._rows: list[_Row] = []  # in the order in which they started
        self._hooked = 0
        self._known: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()  # models; each is recorded once
        self._recorded: dict[int, list[_RecordedModel]] = {}  # by optimizer, while its models are recorded
        self._done: set[int] = set()
        self._why_not: Named = {}

    def step_over(self, index: int, optimizer: Any, models: Models, *, free: bool) -> None:
        """Start or stop recording as an optimizer's step ends. free: nothing else is measured in its next step."""
        if index in self._done:
            return
        if index in self._recorded:
            self._end(index)
        elif len(self._done) + len(self._recorded) >= MOST_OPTIMIZERS:
            self._done.add(index)
            self._why_not[f"Dtypes of modules were recorded for the first {MOST_OPTIMIZERS} optimizers only."] = None
        elif free:
            self._recorded[index] = []
            found = [] if models.has_compiled_functions else models.of(optimizer)
            if models.has_compiled_functions:
                why = "the script has a compiled function, which hooks could make torch.compile recompile"
                self._why_not[f"{WHAT}: {why}."] = None
            elif not found:
                self._why_not[f"{WHAT}: no model was found with the parameters of {type(optimizer).__name__}."] = None
            for model in [each for each in found if each not in self._known]:
                self._record(index, model, models, prefixed=len(found) > 1)
            if not any(recorded.handles for recorded in self._recorded[index]):
                self._end(index)

    @property
    def on(self) -> bool:
        return bool(self._recorded)

    def stop(self) -> None:
        """Remove all hooks before something is compiled."""
        for index in list(self._recorded):
            self._end(index, "were about to be compiled")

    def remove(self) -> None:
        """Remove all hooks as the watch ends."""
        for recorded in [each for models in self._recorded.values() for each in models]:
            recorded.remove_hooks()
            self._known.clear()  # a watch that is installed again may record them
        self._recorded = {}

    def rows(self) -> list[dict[str, Any]]:
        return [row.as_dict() for row in self._rows]

    def modules_of(self, index: int) -> dict[str, bool]:
        """Return an optimizer's modules with parameters, as they ran, and whether gradients were enabled."""
        return {row.name: row.with_gradients for row in self._rows if row.parameters and row.model.optimizer == index}

    def not_measured(self) -> list[str]:
        """Sentences on what was not recorded, and why."""
        if not self._done:
            return [f"{WHAT}: the run ended before an optimizer's second step did."]
        return list(self._why_not)

    def _record(self, index: int, model: nn.Module, models: Models, *, prefixed: bool) -> None:
        self._known[model] = None
        recorded = _RecordedModel(type(model).__name__, device_and_precision(model)[0], index)
        self._recorded[index].append(recorded)
        skipped: Counter[tuple[str, str]] = Counter()

        def is_skipped(module: nn.Module) -> bool:
            if isinstance(module, NEVER_HOOKED):
                why = OTHER_BITS if isinstance(module, CHANGED_BY_HOOKS) else SCRIPTED
            else:
                why = COMPILED if models.is_compiled(module) else ""
            skipped[type(module).__name__, why] += bool(why)
            return bool(why)

        modules = modules_without(model, is_skipped)
        for name, module in islice(modules, MOST - self._hooked):
            self._hooked += 1
            plain, is_model = name_without_wrappers(name) or type(module).__name__, module is model
            shown = f"{recorded.name}.{plain}" if prefixed and plain != recorded.name else plain
            row = _Row(recorded, shown, type(module).__name__, is_model)
            before, after = (self._hook(partial(each, row)) for each in (self.forward_starts, self.forward_ended))
            recorded.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # For the whole model also if its pass fails, or it would count as still running.
            recorded.handles.append(module.register_forward_hook(after, always_call=is_model))
        if next(modules, None) is not None:
            self._why_not[f"Dtypes of modules: only the first {MOST} modules were recorded."] = None
        for (name, why), count in (+skipped).items():
            self._why_not[f"Dtypes of modules: {name}{f' ×{count}' * (count > 1)} left out; {why}."] = None

    def _end(self, index: int, why: str = "never ran") -> None:
        for recorded in self._recorded.pop(index):
            recorded.remove_hooks()
            if recorded.handles and not any(row.model is recorded for row in self._rows):
                self._why_not[f"{WHAT}: the modules of {recorded.name} {why}."] = None
        self._done.add(index)

    def forward_starts(self, row: _Row, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        model = row.model
        model.training += row.is_model and torch.is_grad_enabled()
        if not model.is_training:
            return
        given = list(floats_in([args, kwargs or {}]))
        own = [each for each in module._parameters.values() if each is not None]
        if not row.calls:
            self._rows.append(row)
            row.device = next((each.device.type for each in (*own, *given)), model.device)
        row.calls += 1
        row.with_gradients |= torch.is_grad_enabled()
        row.takes |= _names(given)
        row.parameters |= _names(own)
        row.autocast[autocast_precision(row.device)] = None

    def forward_ended(self, row: _Row, module: nn.Module, args: Any, output: Any) -> None:
        model = row.model
        if row.calls and model.is_training:
            row.gives |= _names(floats_in(output))
        model.training -= row.is_model and torch.is_grad_enabled() and model.training > 0


def _names(tensors: Iterable[Tensor]) -> Named:
    return {dtype_name(each.dtype): None for each in tensors}


# Activations


class Activations:
    """The largest magnitude among each module's outputs, from ``begin`` to ``end``, computed and kept on the device."""

    def __init__(self, hook: HookMaker) -> None:
        self._hook = hook
        self._handles: dict[int, list[Any]] = {}  # by model
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._largest: list[Tensor] = []
        self._posted: list[tuple[list[str], list[str], AsyncScalars]] = []  # of each step that has ended

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def begin(self, model: nn.Module) -> None:
        """Measure the outputs of the model's modules from now on."""
        if id(model) not in self._handles:
            # Inner modules end first: the module that made a bad value comes before the modules that contain it.
            self._handles[id(model)] = [
                module.register_forward_hook(self._hook(partial(self.measure, name or type(model).__name__)))
                for name, module in modules_without(model, lambda module: isinstance(module, NEVER_HOOKED))
            ]

    def end(self) -> None:
        for handle in [each for handles in self._handles.values() for each in handles]:
            handle.remove()
        self._handles = {}

    def step_over(self) -> None:
        """Start to copy what was measured in this step to the host, without a sync."""
        if self._largest:
            home = self._largest[0].device
            there = [each.to(home, non_blocking=True) for each in self._largest]
            self._posted.append((self._names, self._dtypes, AsyncScalars(torch.stack(there))))
            self._names, self._dtypes, self._largest = [], [], []

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[str, str, float]]:
        """Yield (module, dtype, largest magnitude) of outputs, in the order in which they were made; NaN where one is.

        wait: sync for those that have not arrived.
        """
        while self._posted and (wait or self._posted[0][2].arrived):
            names, dtypes, posted = self._posted.pop(0)
            yield from zip(names, dtypes, posted.read(), strict=True)

    def measure(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in floats_in(output):
            if tensor.numel() and tensor.layout == torch.strided:
                with torch.no_grad():
                    self._largest.append(tensor.detach().abs().amax().float())
                self._names.append(name)
                self._dtypes.append(str(tensor.dtype).removeprefix("torch."))
