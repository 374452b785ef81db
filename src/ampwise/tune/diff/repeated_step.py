"""Run a function repeatedly from the same state: weights, buffers, random numbers and Python attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampwise.errors import AmpwiseError, BadInput
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.python_state import PythonState, muted_output
from ampwise.trace.recorder import storage_id
from ampwise.trace.replay import tensors_of
from ampwise.trace.undo import overwrite
from ampwise.trace.user_code import describe_error, describe_type
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.diff.dispatch_mode import DiffMode
from ampwise.tune.diff.module_calls import ModuleCalls
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.placed_side import PlacedSide
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.onednn import onednn_restored

__all__ = ["DroppedTensors", "NeedsSaved", "RepeatedStep", "StepRun"]


class StepRun(NamedTuple):
    """Result of a run."""

    loss: Tensor | None  # one number, on the device; None: the function returned none
    gradients: dict[str, Tensor]  # of the parameters, by name; still scaled
    went_back: bool


class DroppedTensors:
    """Counts and drops tensors saved in a forward pass that no backward pass follows."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}  # weak references that keep the address from being reused
        self.bytes = 0

    def on(self, weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Count and drop while inside; ``weights`` are weights, whose memory is not counted."""
        for tensor in weights:
            self._note(tensor)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> None:
        if self._note(tensor):
            self.bytes += tensor.untyped_storage().nbytes()

    def _note(self, tensor: Tensor) -> bool:
        """Whether its memory is new."""
        storage = storage_id(tensor)
        if storage in self._seen or tensor.layout != torch.strided:
            return False
        self._seen[storage] = StorageWeakRef(tensor.untyped_storage())
        return True


class NeedsSaved(Exception):
    """The function computes derivatives while it runs, so saved tensors cannot be dropped."""


def _unpack(nothing: object) -> Tensor:
    raise NeedsSaved


class RepeatedStep:
    """Runs a function repeatedly from one state. Use it in a ``with``; on exit all state is restored."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: ModuleNames
    ) -> None:
        self._function, self._args, self._kwargs = function, args, dict(kwargs)
        self.names = names
        self._attributes = PythonState()
        self._stack = ExitStack()
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._has_run = False

    @property
    def device(self) -> torch.device:
        """The device of the model, or of the arguments."""
        given = named_tensors(self._function, self._args, self._kwargs).values()
        tensors = [*(each for model in self.names.roots for each in model.parameters()), *given]
        return next((torch.device(each.device) for each in tensors if each.device.type != "cpu"), torch.device("cpu"))

    def __enter__(self) -> RepeatedStep:
        device = self.device
        self._start = capture_random(device)
        self._stack.callback(restore_random, self._start, device)
        self._attributes.note([*self.names.roots, self._function])
        gradients = [(parameter, parameter.grad) for parameter in self.names.parameters()]
        self._stack.callback(_restore, gradients)
        self._drop_gradients()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self,
        placed: PlacedSide,
        calls: ModuleCalls,
        draws: SharedRandom,
        *,
        backward: bool = True,
        dropping: DroppedTensors | None = None,
    ) -> StepRun:
        """Run once on a side, reporting to ``calls``. Raise BadInput, in one line, if the function fails."""
        try:
            return self._run(placed, calls, draws, backward, dropping)
        except (AmpwiseError, NeedsSaved):
            raise
        except Exception as error:
            raise BadInput(f"diff: {placed.side.label}: the step failed: {describe_error(error)}.") from error

    def _run(
        self,
        placed: PlacedSide,
        calls: ModuleCalls,
        draws: SharedRandom,
        backward: bool,
        dropping: DroppedTensors | None,
    ) -> StepRun:
        watching = None if placed.side.compiled else DiffMode(calls, draws)
        restore_random(self._start, placed.device)
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            # Undone in reverse order.
            stack.callback(self._drop_gradients)
            stack.callback(self._attributes.put_back)
            stack.enter_context(muted_output() if self._has_run else nullcontext())
            stack.enter_context(_known_warnings())
            stack.enter_context(onednn_restored())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(placed.in_place(self.names.roots, self.names.main))
            if watching is None:
                stack.enter_context(self._buffers_restored())
            else:
                stack.callback(watching.put_back)
            ran = self._passes(placed, calls, watching, backward, dropping)
        self._has_run = True
        return ran

    def _passes(
        self,
        placed: PlacedSide,
        calls: ModuleCalls,
        watching: DiffMode | None,
        backward: bool,
        dropping: DroppedTensors | None,
    ) -> StepRun:
        function = self._compiled_for(placed)
        args, kwargs = placed.arguments(self._args), placed.arguments(self._kwargs)
        with ExitStack() as stack:
            stack.enter_context(placed.computed(self.names.roots))
            if watching is not None:
                stack.enter_context(calls.watched())
                stack.enter_context(watching)  # entered last, so it sees the operations as the function calls them
            saved = nullcontext() if dropping is None else dropping.on(self.names.parameters())
            with saved, placed.forward():
                result = function(*args, **kwargs)
            calls.finished(result)
            loss = _loss_of(result)
            went_back = backward and loss is not None and loss.requires_grad
            if went_back and loss is not None:
                with placed.backward():
                    _run_backward(loss, placed.scale)
            del result
        names = self._trained(watching, named_tensors(self._function, args, kwargs))
        gradients = {name: tensor.grad for name, tensor in names.items() if tensor.grad is not None}
        return StepRun(None if loss is None else loss.detach(), gradients, went_back)

    def _compiled_for(self, placed: PlacedSide) -> Callable[..., Any]:
        label = placed.side.label
        if label not in self._compiled:
            self._compiled[label] = placed.function(self._function)
        return self._compiled[label]

    def _trained(self, watching: DiffMode | None, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all leaves that receive gradients, by name."""
        leaves = [] if watching is None else [leaf.tensor for leaf in watching.leaves.values()]
        known = {id(tensor): name for name, tensor in given.items()}
        named: dict[str, Tensor] = {}
        for number, tensor in enumerate(dict.fromkeys([*self.names.parameters(), *leaves])):
            name = self.names.of_parameter(tensor) or known.get(id(tensor)) or f"tensor {number + 1}"
            named.setdefault(name, tensor)
        return named

    def _drop_gradients(self) -> None:
        for parameter in self.names.parameters():
            parameter.grad = None

    @contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        """Restore buffers and arguments of a compiled run, which no mode watches."""
        given = named_tensors(self._function, self._args, self._kwargs).values()
        buffers = [*(buffer for model in self.names.roots for buffer in model.buffers()), *given]
        copies = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, copy in zip(buffers, copies, strict=True):
                overwrite(buffer, copy)


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence our own warning: what is not emulated is noted in the result."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ampwise: .* is not emulated")
        yield


def _loss_of(result: Any) -> Tensor | None:
    found = list(tensors_of(result))
    if not found:
        raise BadInput(
            f"diff: the function returned {describe_type(result)}; expected the loss as a tensor, not as a number."
        )
    return next((each for each in found if each.numel() == 1 and each.is_floating_point()), None)


def _run_backward(loss: Tensor, scale: float) -> None:
    # Multiply by a tensor, as scalers do: an FP16 loss becomes FP32 and does not overflow.
    scaled = loss if scale == 1 else loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)
    try:
        scaled.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise BadInput(
            "diff: the function calls backward() itself; return the loss instead: diff runs backward() on each side."
        ) from error


def _restore(gradients: list[tuple[Any, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient
