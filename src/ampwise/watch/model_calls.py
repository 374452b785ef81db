"""Training calls of models, kept until their step is over, so that a bad step can be replayed.

Everything is kept by reference: a model's inputs, the states of random generators and autocast at the start, and the
gradients of its outputs. Only the generator's state is copied, and nothing syncs with a device.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.value_ranges import bytes_of
from ampwise.train.random_state import HostRandomUse
from ampwise.watch.inspection import first_parameter, floats_in, is_capturing, tensors_in
from ampwise.watch.run_events import ForwardCall

__all__ = ["AutocastState", "ModelCall", "ModelCalls"]

MOST = 8  # calls to keep: the last of a step
MOST_INPUTS = 2**30  # bytes: batches stay in memory a little longer
MOST_GRADIENTS = 2**27  # bytes: without ampwise these would be freed
OUTPUTS = 16  # most output tensors of a model
DEEPEST = 4  # nesting depth of containers that are copied
CPU = torch.device("cpu")


class AutocastState(NamedTuple):
    """Autocast's settings at the start of a call."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def here(cls, device: str) -> AutocastState | None:
        try:
            enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        except RuntimeError:  # a device without autocast
            return None
        return cls(device, enabled, dtype, torch.is_autocast_cache_enabled())


@dataclass(slots=True, eq=False)
class ModelCall:
    """A model's forward pass: its inputs and state at the start, and the gradients of its outputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[tuple[Tensor, int]]  # input tensors with their versions
    device: torch.device
    precision: str
    site: CallSite
    trains: tuple[int, ...]  # indices of the optimizers it trains for
    updates: dict[int, int]  # their update counts at the start
    autocast: AutocastState | None
    random: dict[str, Any]
    in_training_mode: bool
    input_bytes: int = 0
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)  # by output, one for each backward pass
    too_large: int = 0  # bytes of a gradient that was too large to keep
    awaited: bool = False  # its step has ended, and the result may not be known yet
    dropped: bool = False
    compiled: bool = False  # the model or a part of it; set by a replay

    def was_computed(self, tensor: Tensor) -> bool:
        """Whether an input was computed in the step, and is not part of a batch."""
        return tensor.requires_grad and any(tensor is each for each, _ in self.tensors)

    @property
    def inputs_unchanged(self) -> bool:
        return all(_version(tensor) == version for tensor, version in self.tensors)


class ModelCalls:
    """Calls of the current step, and of earlier steps whose result is not known yet."""

    def __init__(self) -> None:
        self._kept: deque[ModelCall] = deque()
        self._running: ModelCall | None = None
        self.updates: Counter[int] = Counter()  # by optimizer; counted at the start and at the end of each update
        self.ignored: set[int] = set()  # optimizers for which no calls are kept
        self._host_random: defaultdict[type, HostRandomUse] = defaultdict(HostRandomUse)  # by class of the model
        self._gradient_bytes = 0
        self.too_large = 0  # bytes of a call's inputs that were not kept

    def __iter__(self) -> Iterator[ModelCall]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # Forward and backward

    def begins(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trains: Sequence[int],
        event: ForwardCall,
    ) -> None:
        """Note the start of a model's training pass. trains: indices of the optimizers."""
        self._running = None
        if not trains or self.ignored.issuperset(trains) or is_capturing():
            return
        if torch._C._current_autograd_node() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return  # a recomputation in a backward pass, or a functorch transform
        first = None if event.device == "cpu" else first_parameter(model)
        device = CPU if first is None else first.device
        tensors: list[tuple[Tensor, int]] = []
        self._running = ModelCall(
            model=model,
            args=tuple([_copied(each, tensors) for each in args]),
            kwargs={key: _copied(each, tensors) for key, each in kwargs.items()},
            tensors=tensors,
            device=device,
            precision=event.precision,
            site=event.site,
            trains=tuple(trains),
            updates={index: self.updates[index] for index in trains},
            autocast=AutocastState.here(device.type),
            random=self._host_random[type(model)].begin(device),
            in_training_mode=model.training,
        )

    def ends(self, output: Any) -> None:
        """Note the end of the pass, and keep it."""
        call, self._running = self._running, None
        if call is None:
            return
        self._host_random[type(call.model)].end(call.random)
        if output is None:  # the pass has failed
            return
        call.input_bytes = sum([tensor.nbytes for tensor, _ in call.tensors if tensor.layout == torch.strided])
        if call.input_bytes > MOST_INPUTS:
            self.too_large = call.input_bytes
            return
        for position, tensor in enumerate(islice(floats_in(output), OUTPUTS)):
            if tensor.grad_fn is not None:
                # On the node, not on the tensor, which the script may modify or save.
                tensor.grad_fn.register_prehook(partial(self._keep_gradient, call, position, tensor.output_nr))
        self._kept.append(call)
        while len(self._kept) > MOST or sum([each.input_bytes for each in self._kept]) > MOST_INPUTS:
            self._drop(self._kept[0])

    def adopt(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: AutocastState | None,
        random: Tensor,
        *,
        trains: Sequence[int],
        event: ForwardCall,
    ) -> None:
        """Keep a finished call of a step that was skipped so far. autocast: None where it was off."""
        self.begins(model, args, kwargs, trains, event)
        call, self._running = self._running, None
        if call is not None:
            call.autocast = autocast or AutocastState("cpu", enabled=False, dtype=torch.bfloat16, cache=True)
            call.random["torch"] = random
            self._kept.append(call)

    def _keep_gradient(self, call: ModelCall, position: int, number: int, gradients: Any) -> None:
        """Keep the gradient of an output. gradients: one for each result of the node that made it."""
        gradient = gradients[number]
        if call.dropped or gradient is None:
            return
        size = bytes_of(gradient)
        if self._gradient_bytes + size > MOST_GRADIENTS:
            call.too_large = max(call.too_large, size)
            return
        self._gradient_bytes += size
        call.gradients.setdefault(position, []).append(gradient.detach())  # without a graph

    # Steps

    def step_over(self, index: int, *, ran: bool) -> None:
        """Note the end of a step. ran: weights may have changed."""
        if ran:
            self.updates[index] += 1  # a second time, for passes within the step
        for call in self._kept:
            if index in call.trains:
                call.awaited = True

    def settled(self, index: int, *, now: bool = False) -> None:
        """Drop the calls of an optimizer's ended step, whose result is known. now: also those of its next step."""
        for call in list(self._kept):
            if index in call.trains and (now or call.awaited):
                self._drop(call)

    def forget(self) -> None:
        """Drop all calls."""
        self._running = None
        for call in list(self._kept):
            self._drop(call)

    def is_fresh(self, call: ModelCall) -> bool:
        """Whether the weights are still those that the call ran with."""
        return all(self.updates[index] == count for index, count in call.updates.items())

    def _drop(self, call: ModelCall) -> None:
        """Free all memory of a call: an autograd graph may still refer to the object."""
        for gradient in [each for many in call.gradients.values() for each in many]:
            self._gradient_bytes -= bytes_of(gradient)
        call.dropped = True
        call.args, call.kwargs, call.tensors, call.random = (), {}, [], {}
        call.gradients.clear()
        self._kept.remove(call)


def _copied(thing: Any, tensors: list[tuple[Tensor, int]], depth: int = DEEPEST) -> Any:
    """Copy containers, but not tensors: a script may change its containers."""
    if isinstance(thing, Tensor):
        kept = thing if thing.grad_fn is None else thing.detach().requires_grad_()  # without its graph
        tensors.append((kept, _version(kept)))
        return kept
    kind = type(thing)
    if depth and kind in (list, tuple):
        return kind([_copied(each, tensors, depth - 1) for each in thing])
    if depth and kind is dict:
        return {key: _copied(each, tensors, depth - 1) for key, each in thing.items()}
    tensors += [(each, _version(each)) for each in tensors_in(thing)]  # an unknown class is kept as it is
    return thing


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
