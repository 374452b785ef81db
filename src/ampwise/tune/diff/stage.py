"""A function, run again and again as at first: with its weights, buffers, random numbers, and Python's variables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampwise.errors import AmpwiseError, BadInput
from ampwise.randomness import captured, restore_random
from ampwise.trace.kept import Attributes, silent
from ampwise.trace.names import named_tensors
from ampwise.trace.recorder import storage_id
from ampwise.trace.replay import tensors_of
from ampwise.trace.undo import overwrite
from ampwise.tune.diff.calls import Calls
from ampwise.tune.diff.draws import Draws
from ampwise.tune.diff.mode import Watching
from ampwise.tune.diff.names import Names
from ampwise.tune.diff.placing import Placed
from ampwise.tune.onednn import onednn_as_it_was
from ampwise.user_code import failure, kind

__all__ = ["Dropping", "NeedsSaved", "Ran", "Stage"]


class Ran(NamedTuple):
    """What a run has left."""

    loss: Tensor | None  # one number, on the device; None: it returned none
    gradients: dict[str, Tensor]  # of the parameters, by name; still scaled
    went_back: bool


class Dropping:
    """A forward pass that no backward pass will follow: what is saved for it is counted and let go."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}  # which keep the address from being another's
        self.bytes = 0

    def on(self, there_anyway: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """While inside. there_anyway: weights, which take no memory by being saved."""
        for tensor in there_anyway:
            self._note(tensor)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> None:
        if self._note(tensor):
            self.bytes += tensor.untyped_storage().nbytes()

    def _note(self, tensor: Tensor) -> bool:
        """Whether its memory is met for the first time."""
        storage = storage_id(tensor)
        if storage in self._seen or tensor.layout != torch.strided:
            return False
        self._seen[storage] = StorageWeakRef(tensor.untyped_storage())
        return True


class NeedsSaved(Exception):
    """A function takes derivatives while it runs."""


def _unpack(nothing: object) -> Tensor:
    raise NeedsSaved


class Stage:
    """What is run. To be used in a ``with``, at whose end everything is as it was."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Names
    ) -> None:
        self._function, self._args, self._kwargs = function, args, dict(kwargs)
        self.names = names
        self._attributes = Attributes()
        self._stack = ExitStack()
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._has_run = False

    @property
    def device(self) -> torch.device:
        """Where the model is, or what it is given."""
        given = named_tensors(self._function, self._args, self._kwargs).values()
        tensors = [*(each for model in self.names.roots for each in model.parameters()), *given]
        return next((torch.device(each.device) for each in tensors if each.device.type != "cpu"), torch.device("cpu"))

    def __enter__(self) -> Stage:
        device = self.device
        self._start = captured(device)
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
        placed: Placed,
        calls: Calls,
        draws: Draws,
        *,
        backward: bool = True,
        dropping: Dropping | None = None,
    ) -> Ran:
        """Once, on a side; ``calls`` see what is computed. What the function raises is an error of ours, in a line."""
        try:
            return self._run(placed, calls, draws, backward, dropping)
        except (AmpwiseError, NeedsSaved):
            raise
        except Exception as error:
            raise BadInput(f"diff: {placed.side.label}: the step failed: {failure(error)}.") from error

    def _run(self, placed: Placed, calls: Calls, draws: Draws, backward: bool, dropping: Dropping | None) -> Ran:
        watching = None if placed.side.compiled else Watching(calls, draws)
        restore_random(self._start, placed.device)
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            # In the order in which they are undone, from the last.
            stack.callback(self._drop_gradients)
            stack.callback(self._attributes.put_back)
            stack.enter_context(silent() if self._has_run else nullcontext())
            stack.enter_context(_known_warnings())
            stack.enter_context(onednn_as_it_was())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(placed.in_place(self.names.roots, self.names.main))
            if watching is None:
                stack.enter_context(self._buffers_as_they_were())
            else:
                stack.callback(watching.put_back)
            ran = self._passes(placed, calls, watching, backward, dropping)
        self._has_run = True
        return ran

    def _passes(
        self, placed: Placed, calls: Calls, watching: Watching | None, backward: bool, dropping: Dropping | None
    ) -> Ran:
        function = self._as_asked(placed)
        args, kwargs = placed.arguments(self._args), placed.arguments(self._kwargs)
        with ExitStack() as stack:
            stack.enter_context(placed.computed(self.names.roots))
            if watching is not None:
                stack.enter_context(calls.watched())
                stack.enter_context(watching)  # the last to be put on sees operations as the function asks for them
            saved = nullcontext() if dropping is None else dropping.on(self.names.parameters())
            with saved, placed.forward():
                result = function(*args, **kwargs)
            calls.finished(result)
            loss = _loss_of(result)
            went_back = backward and loss is not None and loss.requires_grad
            if went_back and loss is not None:
                with placed.backward():
                    _go_back(loss, placed.scale)
            del result
        names = self._trained(watching, named_tensors(self._function, args, kwargs))
        gradients = {name: tensor.grad for name, tensor in names.items() if tensor.grad is not None}
        return Ran(None if loss is None else loss.detach(), gradients, went_back)

    def _as_asked(self, placed: Placed) -> Callable[..., Any]:
        label = placed.side.label
        if label not in self._compiled:
            self._compiled[label] = placed.function(self._function)
        return self._compiled[label]

    def _trained(self, watching: Watching | None, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All leaves that gradients arrive at, by name."""
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
    def _buffers_as_they_were(self) -> Iterator[None]:
        """Of a run that nobody watches; and what the function is given."""
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
    """What is not emulated is noted by us."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ampwise: .* is not emulated")
        yield


def _loss_of(result: Any) -> Tensor | None:
    found = list(tensors_of(result))
    if not found:
        raise BadInput(
            f"diff: the function returned {kind(result)}, and no tensor; return the loss, a tensor and not a number."
        )
    return next((each for each in found if each.numel() == 1 and each.is_floating_point()), None)


def _go_back(loss: Tensor, scale: float) -> None:
    # By a tensor, as scalers do: a loss in FP16 becomes FP32 and does not overflow by itself.
    scaled = loss if scale == 1 else loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)
    try:
        scaled.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise BadInput(
            "diff: the function runs backward() by itself; return the loss and leave that out: it is done here, on "
            "each side."
        ) from error


def _restore(gradients: list[tuple[Any, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient
