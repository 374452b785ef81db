"""Calls of models that train, kept until their step is over, so that one that goes bad can be run again.

All is kept by reference: what a model was given, the state of random numbers and autocast as it began, and the
gradients that came back to what it gave. Nothing is copied but a generator's state, and nothing waits for a device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampwise.evidence.conduct import Forward, Site
from ampwise.randomness import captured, host_differs
from ampwise.trace.ranges import bytes_of
from ampwise.watch.asking import first_parameter, floats_in, tensors_in

__all__ = ["Autocast", "Call", "Calls", "Passed"]

MOST = 8  # calls of a step: the last ones
MOST_INPUTS = 2**30  # bytes: a batch is the script's own, and stays a little longer at most
MOST_GRADIENTS = 2**27  # bytes: these would be gone, but for us
OUTPUTS = 16  # tensors that a model gives
DEEPEST = 4  # lists in lists, that are kept as they were
CPU = torch.device("cpu")
LISTENED_TO = 3  # calls of a model, in which is seen whether it draws from Python's random numbers, or numpy's


class Autocast(NamedTuple):
    """What autocast was set to as a call began."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def here(cls, device: str) -> Autocast | None:
        try:
            enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        except RuntimeError:  # a device that has none
            return None
        return cls(device, enabled, dtype, torch.is_autocast_cache_enabled())


class Passed(NamedTuple):
    """What is kept of a call in a step that is passed over: enough to run it again."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast | None  # None: it is off
    random: Tensor | None  # None: it draws none


@dataclass(slots=True, eq=False)
class Call:
    """A model's forward pass, as it began and as it went on."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    taken: list[tuple[Tensor, int]]  # the tensors among them, each with the number of writes to it
    device: torch.device
    precision: str
    site: Site
    trains: tuple[int, ...]  # optimizers
    updates: dict[int, int]  # that these had made
    autocast: Autocast | None
    random: dict[str, Any]
    in_training_mode: bool
    input_bytes: int = 0
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)  # by output, of each backward pass
    too_large: int = 0  # bytes of a gradient that was not kept
    awaited: bool = False  # a step has taken it, and how that went may not be known yet
    dropped: bool = False
    compiled: bool = False  # in whole or in part; looked at when it is to be run again

    def was_computed(self, tensor: Tensor) -> bool:
        """Whether one that it was given came from another computation of the step, and not from a batch."""
        return tensor.requires_grad and any(tensor is each for each, _ in self.taken)

    @property
    def inputs_unchanged(self) -> bool:
        return all(_version(tensor) == version for tensor, version in self.taken)

    def drop(self) -> None:
        """Let go of all memory: a graph that lives on has this object."""
        self.dropped = True
        self.args, self.kwargs, self.taken, self.random = (), {}, [], {}
        self.gradients.clear()


class Calls:
    """Those of the present step, and of one before whose end is not known yet."""

    def __init__(self) -> None:
        self._kept: deque[Call] = deque()
        self._running: Call | None = None
        self._updates: Counter[int] = Counter()  # of weights, by optimizer: as one begins, and as it ends
        self._left: set[int] = set()  # optimizers that are none of our business
        self._draws: set[type] = set()  # models that do
        self.draws_from_torch: set[type] = set()
        self._listened: Counter[type] = Counter()
        self._heard: Any = None
        self._gradient_bytes = 0
        self.too_large = 0  # bytes of a call's inputs that were not kept

    def __iter__(self) -> Iterator[Call]:
        return iter(self._kept)

    # Forward and backward

    def begins(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trains: Sequence[int],
        event: Forward,
    ) -> None:
        """A model begins to run, to be trained by these optimizers."""
        self._running = None
        if not trains or self._left.issuperset(trains) or _is_another_kind_of_call():
            return
        first = None if event.device == "cpu" else first_parameter(model)
        device = CPU if first is None else first.device
        taken: list[tuple[Tensor, int]] = []
        call = Call(
            model=model,
            args=tuple(_as_it_is(each, taken) for each in args),
            kwargs={key: _as_it_is(each, taken) for key, each in kwargs.items()},
            taken=taken,
            device=device,
            precision=event.precision,
            site=event.site,
            trains=tuple(trains),
            updates={index: self._updates[index] for index in trains},
            autocast=Autocast.here(device.type),
            random=captured(device, host=type(model) in self._draws),
            in_training_mode=model.training,
        )
        self._listen(type(model))
        self._running = call

    def ends(self, output: Any) -> None:
        """It has run."""
        call, self._running = self._running, None
        if call is None:
            return
        self._hear(call)
        if output is None:  # it has failed
            return
        call.input_bytes = sum(tensor.nbytes for tensor, _ in call.taken if tensor.layout == torch.strided)
        if call.input_bytes > MOST_INPUTS:
            self.too_large = call.input_bytes
            return
        for position, tensor in enumerate(islice(floats_in(output), OUTPUTS)):
            if tensor.grad_fn is not None:
                # Of the node and not of the tensor, which the script may go on to write to, or save.
                tensor.grad_fn.register_prehook(partial(self._gradient_came, call, position, tensor.output_nr))
        self._kept.append(call)
        self._make_room()

    def take_up(self, passed: Passed, trains: Sequence[int], event: Forward) -> None:
        """A call in a step that was passed over so far, which has run."""
        self.begins(passed.model, passed.args, passed.kwargs, trains, event)
        call, self._running, self._heard = self._running, None, None
        if call is not None:
            call.autocast = passed.autocast or Autocast("cpu", enabled=False, dtype=torch.bfloat16, cache=True)
            call.random |= {} if passed.random is None else {"torch": passed.random}
            self._kept.append(call)

    def _make_room(self) -> None:
        while len(self._kept) > MOST or sum(call.input_bytes for call in self._kept) > MOST_INPUTS:
            self._drop(self._kept[0])

    def _gradient_came(self, call: Call, position: int, number: int, gradients: Any) -> None:
        """One gradient for each result of the operation that made an output."""
        gradient = gradients[number]
        if call.dropped or gradient is None:
            return
        size = bytes_of(gradient)
        if self._gradient_bytes + size > MOST_GRADIENTS:
            call.too_large = max(call.too_large, size)
            return
        self._gradient_bytes += size
        call.gradients.setdefault(position, []).append(gradient.detach())  # without a graph for second derivatives

    # Python's random numbers, and numpy's: their states are slow to get, and few models draw from them

    def _listen(self, kind: type) -> None:
        self._heard = None
        if self._listened[kind] < LISTENED_TO and kind not in self._draws:
            self._listened[kind] += 1
            self._heard = captured(CPU)

    def _hear(self, call: Call) -> None:
        if self._heard is not None:
            now, kind = captured(CPU), type(call.model)
            if host_differs(now, self._heard):
                self._draws.add(kind)
            if not torch.equal(now["torch"], call.random["torch"]):
                self.draws_from_torch.add(kind)
        self._heard = None

    # Steps

    def update_begins(self, index: int) -> None:
        """An optimizer is about to change its weights."""
        self._updates[index] += 1

    def step_over(self, index: int, *, ran: bool) -> None:
        """A step has ended, well or not. ran: weights may have changed."""
        if ran:
            self._updates[index] += 1  # once more, for passes within the step itself
        for call in self._kept:
            if index in call.trains:
                call.awaited = True

    def was_skipped(self, index: int) -> None:
        """A step that ran has changed nothing."""
        self._updates[index] -= 2

    def settled(self, index: int, *, now: bool = False) -> None:
        """How its last step went is known, and told. now: that of the step to come."""
        for call in [each for each in self._kept if index in each.trains and (now or each.awaited)]:
            self._drop(call)

    def leave(self, index: int) -> None:
        """Keep nothing more for an optimizer."""
        self._left.add(index)

    def leaves(self, index: int) -> bool:
        return index in self._left

    def forget(self) -> None:
        """All of them."""
        self._running = None
        for call in list(self._kept):
            self._drop(call)

    def is_fresh(self, call: Call) -> bool:
        """Whether the weights are still those that it ran with."""
        return all(self._updates[index] == count for index, count in call.updates.items())

    def _drop(self, call: Call) -> None:
        self._gradient_bytes -= sum(bytes_of(each) for many in call.gradients.values() for each in many)
        call.drop()
        self._kept.remove(call)


def _is_another_kind_of_call() -> bool:
    """Computed again for a backward pass, or for a transform of functions, or written into a CUDA graph."""
    if torch._C._current_autograd_node() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _as_it_is(thing: Any, taken: list[tuple[Tensor, int]], depth: int = DEEPEST) -> Any:
    """The same tensors, in lists of our own: a script may empty its own."""
    if isinstance(thing, Tensor):
        kept = thing if thing.grad_fn is None else thing.detach().requires_grad_()  # without the graph it came from
        taken.append((kept, _version(kept)))
        return kept
    kind = type(thing)
    if depth and kind in (list, tuple):
        return kind(_as_it_is(each, taken, depth - 1) for each in thing)
    if depth and kind is dict:
        return {key: _as_it_is(each, taken, depth - 1) for key, each in thing.items()}
    taken += [(each, _version(each)) for each in tensors_in(thing)]  # in a class of its own, which stays as it is
    return thing


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
