"""Training calls of models, kept until their step is over, so that a bad step can be replayed.

Everything is kept by reference: a model's inputs, the states of random generators and autocast at the start, and the
gradients of its outputs. Only the generator's state is copied, and nothing syncs with a device.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner
from ampwise.trace.value_ranges import bytes_of, version_of
from ampwise.train.random_state import HostRandomUse
from ampwise.watch.inspection import copied_by_reference, first_parameter, floats_in, is_capturing
from ampwise.watch.loss_code import LossCode, Running, loss_code, own_caller, running_code
from ampwise.watch.run_events import ForwardCall

__all__ = ["AutocastState", "KeptLoss", "LossStart", "ModelCall", "ModelCalls"]

MOST = 8  # calls to keep: the last of a step
MOST_INPUTS = 2**30  # bytes: batches stay in memory a little longer
MOST_GRADIENTS = 2**27  # bytes: without ampwise these would be freed
MOST_USUAL = 2**26  # bytes of an earlier step's batch
OUTPUTS = 16  # most output tensors of a model
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
    running: Running = ()  # the functions that led to the call
    compiled: bool = False  # the model or a part of it; set by a replay

    def was_computed(self, tensor: Tensor) -> bool:
        """Whether an input was computed in the step, and is not part of a batch."""
        return tensor.requires_grad and any(tensor is each for each, _ in self.tensors)

    @property
    def inputs_unchanged(self) -> bool:
        return all(version_of(tensor) == version for tensor, version in self.tensors)


@dataclass(slots=True, eq=False)
class LossStart:
    """The state in which the code of a loss begins: at the first call of a model since the last backward pass."""

    device: torch.device = CPU
    precision: str = ""  # unknown
    random: dict[str, Any] = field(default_factory=dict)  # empty: unknown
    models: dict[nn.Module, None] = field(default_factory=dict)  # those called, in order
    running: dict[Running, None] = field(default_factory=dict)  # what was running at the first calls
    trains: set[int] = field(default_factory=set)  # indices of optimizers
    data_random: Tensor | None = None  # torch's random state at the end of the step before


@dataclass(slots=True, eq=False)
class KeptLoss:
    """A loss that the script has used: in a backward pass, or to look at its value."""

    code: LossCode | None  # that computed it
    value: Tensor  # detached
    start: LossStart
    updates: dict[int, int]  # counts of the optimizers' updates at the time
    used_at: tuple[CodeType, int] | None = None  # the script's function that used it, and its instruction
    awaited: bool = False  # its step has ended

    def models(self) -> list[nn.Module]:
        """Return the models that compute it: those that were called, or that its code names, or objects in it hold."""
        objects = [] if self.code is None else self.code.objects()
        found = list(dict.fromkeys([*self.start.models, *(each for each in objects if isinstance(each, nn.Module))]))
        owners = [each for each in objects if not isinstance(each, ModuleType | type)]
        held = [each for thing in owners for each in getattr(thing, "__dict__", {}).values()]
        return found or list(dict.fromkeys(each for each in held if isinstance(each, nn.Module)))


class ModelCalls:
    """Calls of the current step, and of earlier steps whose result is not known yet."""

    def __init__(self) -> None:
        self._kept: deque[ModelCall] = deque()
        self._running: ModelCall | None = None
        self._start = LossStart()
        self.losses: deque[KeptLoss] = deque(maxlen=MOST)  # of the same steps
        # The last loss of an earlier step, to try fixes on: its value, and its code while its objects live.
        self.usual: tuple[Tensor, Callable[[], LossCode | None]] | None = None
        self.backward_passes = 0
        self._data_random: Tensor | None = None
        self.updates: Counter[int] = Counter()  # by optimizer; counted at the start and at the end of each update
        self.ignored: set[int] = set()  # optimizers for which no calls are kept
        self._host_random: defaultdict[type, HostRandomUse] = defaultdict(HostRandomUse)  # by class of the model
        self._gradient_bytes = 0
        self.too_large = 0  # bytes of a call's inputs that were not kept

    def __iter__(self) -> Iterator[ModelCall]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_running(self) -> bool:
        """Whether a training pass of a model is running."""
        return self._running is not None

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
            args=tuple([copied_by_reference(each, tensors) for each in args]),
            kwargs={key: copied_by_reference(each, tensors) for key, each in kwargs.items()},
            tensors=tensors,
            device=device,
            precision=event.precision,
            site=event.site,
            trains=tuple(trains),
            updates={index: self.updates[index] for index in trains},
            autocast=AutocastState.here(device.type),
            random=self._host_random[type(model)].begin(device),
            in_training_mode=model.training,
            running=running_code(),
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
        self._keep(call)
        while len(self._kept) > MOST or sum([each.input_bytes for each in self._kept]) > MOST_INPUTS:
            self._drop(self._kept[0])

    def _keep(self, call: ModelCall) -> None:
        self._kept.append(call)
        start = self._start
        if not start.models:
            start.device, start.precision, start.random = call.device, call.precision, call.random.copy()
            start.data_random = self._data_random
        start.models[call.model] = None
        start.trains.update(call.trains)
        if len(start.running) < MOST:
            start.running[call.running] = None

    def keep_loss(
        self, frame: FrameType | None, loss: Tensor, *, ends: bool = True, instruction: int | None = None
    ) -> KeptLoss | None:
        """Keep a loss with the code that computed it; None if no call of a model led to it and it has no graph.

        frame: of the function that uses the loss. instruction: that uses it, if the function has gone on. ends: the
        next calls of models belong to another loss.
        """
        start = self._start
        if not start.models:
            if not ends and loss.grad_fn is None:
                return None
            start.device, start.data_random = loss.device, self._data_random
        if ends:
            self._start = LossStart()
            self.backward_passes += 1
        if frame is not None and code_owner(frame.f_code.co_filename) != "own":
            frame, instruction = own_caller(frame), None
        kept = KeptLoss(None, loss.detach(), start, dict(self.updates))
        if frame is not None:
            kept.used_at = frame.f_code, frame.f_lasti if instruction is None else instruction
            kept.code = loss_code(frame, list(start.running), instruction)
        self.losses.append(kept)
        return kept

    def adopt(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: AutocastState | None,
        random: Tensor,
        running: Running,
        *,
        trains: Sequence[int],
        event: ForwardCall,
    ) -> None:
        """Keep a finished call of a step that was skipped so far. autocast: None where it was off."""
        self.begins(model, args, kwargs, trains, event)
        call, self._running = self._running, None
        if call is not None:
            call.autocast = autocast or AutocastState("cpu", enabled=False, dtype=torch.bfloat16, cache=True)
            call.random["torch"], call.running = random, running
            self._start = LossStart()
            self._keep(call)

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
        self._data_random = torch.default_generator.get_state()
        if ran:
            self.updates[index] += 1  # a second time, for passes within the step
        for call in self._kept:
            if index in call.trains:
                call.awaited = True
        for loss in self._losses_of(index):
            loss.awaited = True

    def settled(self, index: int, *, now: bool = False) -> None:
        """Drop the calls of an optimizer's ended step, whose result is known. now: also those of its next step."""
        for call in list(self._kept):
            if index in call.trains and (now or call.awaited):
                self._drop(call)
        for loss in self._losses_of(index):
            if now or loss.awaited:
                self.losses.remove(loss)
                small = loss.code is not None and loss.code.bytes <= MOST_USUAL
                again = loss.code.weakly() if loss.code is not None and small else None
                self.usual = None if again is None else (loss.value, again)

    def _losses_of(self, index: int) -> list[KeptLoss]:
        return [each for each in self.losses if index in each.start.trains or not each.start.trains]

    def forget(self) -> None:
        """Drop all calls."""
        self._running = None
        for call in list(self._kept):
            self._drop(call)
        self.losses.clear()
        self.usual = None
        self._start = LossStart()

    def is_fresh(self, kept: ModelCall | KeptLoss) -> bool:
        """Whether the weights are still those that the call, or the loss, was computed with."""
        return all(self.updates[index] == count for index, count in kept.updates.items())

    def _drop(self, call: ModelCall) -> None:
        """Free all memory of a call: an autograd graph may still refer to the object."""
        for gradient in [each for many in call.gradients.values() for each in many]:
            self._gradient_bytes -= bytes_of(gradient)
        call.dropped = True
        call.args, call.kwargs, call.tensors, call.random = (), {}, [], {}
        call.gradients.clear()
        call.running = ()
        self._kept.remove(call)
