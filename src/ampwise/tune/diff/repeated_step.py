"""Run a function repeatedly from the same state, on one side or the other; afterwards all state is restored.

State means weights, buffers, gradients, arguments, random numbers, Python attributes, and torch's settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.attention import sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from ampwise.errors import AmpwiseError, BadInput
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.trace.call_arguments import named_tensors
from ampwise.trace.python_state import PythonState, muted_output
from ampwise.trace.recorder import overwrite, storage_id
from ampwise.trace.replay import autocast_forced_to, tensors_of
from ampwise.trace.user_code import describe_error, describe_type
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.precision import PRECISIONS
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.diff.module_calls import DiffMode, ModuleCalls
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.side import ATTENTION, Side
from ampwise.tune.diff.tensor_store import BatchRows
from ampwise.tune.onednn import onednn_restored


class StepRun(NamedTuple):
    """Result of a run."""

    loss: Tensor | None  # one number, on the device; None: the function returned none
    gradients: dict[str, Tensor]  # of the parameters, by name; still scaled
    went_back: bool


class PlacedSide:
    """A side on a device, with the loss scale it uses."""

    def __init__(self, side: Side, home: torch.device, function: Callable[..., Any] | None = None) -> None:
        self.side, self.device, self.scale = side, side.device or home, 1.0
        self.function = function  # of this side alone; None: the step's
        self.moves = side.is_wider or side.device is not None
        self.contexts = PrecisionContexts(side.arithmetic, self.device.type)

    def moved(self, leaf: Any) -> Any:
        """Return a tensor as this side takes it; anything else is returned as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        is_wide = self.side.is_wider and leaf.is_floating_point()
        moved = leaf.detach().to(self.device, torch.float64 if is_wide else leaf.dtype)
        return moved.requires_grad_(leaf.requires_grad) if leaf.requires_grad else moved

    @contextmanager
    def in_place(self, models: list[Module], main: Module | None) -> Iterator[None]:
        """Convert and move weights, and set torch's switches, for forward and backward."""
        side = self.side
        with ExitStack() as stack:
            if self.moves:
                stack.enter_context(self._models_moved(models))
            if side.is_wider:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            if side.policy is not None:
                for model in models if main is None else (main,):
                    stack.enter_context(side.policy.apply(model))
            stack.enter_context(self.contexts.pass_context())
            if side.attention:
                stack.enter_context(sdpa_kernel(ATTENTION[side.attention]))
            if side.compiled:
                import torch._inductor.config as config

                stack.enter_context(torch.compiler.set_stance("default"))  # whatever stance the user has set
                stack.enter_context(config.patch(fallback_random=True))  # draw random numbers as eager code does
            else:
                stack.enter_context(run_eagerly())
            yield

    @contextmanager
    def _models_moved(self, models: list[Module]) -> Iterator[None]:
        """Move weights by replacing their data: references to the parameters stay valid."""
        weights = list(dict.fromkeys(each for model in models for each in model.parameters() if not is_lazy(each)))
        buffers = [
            (module, name, buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        before = [weight.data for weight in weights]
        try:
            for weight in weights:
                weight.data = self.moved(weight.data)
            for module, name, buffer in buffers:
                module._buffers[name] = self.moved(buffer)
            yield
        finally:
            for weight, data in zip(weights, before, strict=True):
                weight.grad = None  # its dtype or device would not match the restored weight
                weight.data = data
            for module, name, buffer in buffers:
                module._buffers[name] = buffer


class NeedsSaved(Exception):
    """The function computes derivatives while it runs, so saved tensors cannot be dropped."""


class DroppedTensors:
    """Counts and drops tensors saved in a forward pass that no backward pass follows."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}  # weak references that keep the address from being reused
        self.bytes = 0

    def on(self, weights: list[Any]) -> AbstractContextManager[Any]:
        """Count and drop while inside; the memory of ``weights`` is not counted."""

        def unpack(nothing: object) -> Tensor:
            raise NeedsSaved

        for tensor in weights:
            self._pack(tensor)
        self.bytes = 0
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> None:
        storage = storage_id(tensor)
        if storage not in self._seen and tensor.layout == torch.strided:
            self._seen[storage] = StorageWeakRef(tensor.untyped_storage())
            self.bytes += tensor.untyped_storage().nbytes()


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
        for parameter in self.names.parameters():
            self._stack.callback(setattr, parameter, "grad", parameter.grad)
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
        mode = None if placed.side.compiled else DiffMode(calls, draws)
        restore_random(self._start, placed.device)
        torch.clear_autocast_cache()
        try:
            with ExitStack() as stack:
                # Undone in reverse order.
                stack.callback(self._drop_gradients)
                stack.callback(self._attributes.put_back)
                stack.enter_context(muted_output() if self._has_run else nullcontext())
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="ampwise: .* is not emulated")  # the result notes it
                stack.enter_context(onednn_restored())
                stack.enter_context(torch.enable_grad())
                stack.enter_context(placed.in_place(self.names.roots, self.names.main))
                if mode is None:
                    stack.enter_context(self._buffers_restored())
                else:
                    stack.callback(mode.put_back)
                ran = self._passes(placed, calls, mode, backward, dropping)
        except (AmpwiseError, NeedsSaved):
            raise
        except Exception as error:
            raise BadInput(f"diff: {placed.side.label}: the step failed: {describe_error(error)}.") from error
        self._has_run = True
        return ran

    def _passes(
        self,
        placed: PlacedSide,
        calls: ModuleCalls,
        mode: DiffMode | None,
        backward: bool,
        dropping: DroppedTensors | None,
    ) -> StepRun:
        side, function = placed.side, placed.function or self._function
        if side.compiled:
            if side.label not in self._compiled:
                self._compiled[side.label] = torch.compile(function, dynamic=False, backend=side.compiled)
            function = self._compiled[side.label]
        args, kwargs = self._args, self._kwargs
        if placed.moves:
            args, kwargs = tree_map(placed.moved, args), tree_map(placed.moved, kwargs)
        # Autocast that the function enters itself is turned off, except for a policy, or in compiled code.
        forced = None
        if side.policy is None and not side.compiled:
            forced = side.arithmetic.name if side.arithmetic.name in PRECISIONS else "fp32"
        with ExitStack() as stack:
            if side.recipe is not None:
                for model in self.names.roots:
                    stack.enter_context(emulated(model, {model: side.recipe}))
            if mode is not None:
                stack.enter_context(calls.watched())
                stack.enter_context(mode)  # entered last, so it sees the operations as the function calls them
            saved = nullcontext() if dropping is None else dropping.on(self.names.parameters())
            losses: list[Tensor] = []
            went_back = False
            for rows, own_args, own_kwargs in self._batches(side, args, kwargs):
                if rows is not None:
                    calls.begin_rows(rows)
                with saved, placed.contexts.forward(), autocast_forced_to(forced, placed.device):
                    result = function(*own_args, **own_kwargs)
                calls.finished(result)
                loss, share = _loss_of(result), 1.0 if rows is None else rows.number / rows.total
                went_back = backward and loss is not None and loss.requires_grad
                if went_back and loss is not None:
                    with placed.contexts.backward():
                        _run_backward(loss, placed.scale * share)
                del result
                if loss is not None:
                    losses.append(loss.detach() if rows is None else loss.detach() * share)
        leaves = [] if mode is None else [leaf.tensor for leaf in mode.leaves.values()]
        gradients = self._gradients(leaves, named_tensors(self._function, args, kwargs))
        return StepRun(sum(losses[1:], losses[0]) if losses else None, gradients, went_back)

    def _batches(
        self, side: Side, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[BatchRows | None, tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments of each call of the function: once, or with some rows of the batch at a time."""
        total = next((leaf.shape[0] for leaf in tensors_of((args, kwargs)) if leaf.ndim), None)
        if side.batch is None or (total is not None and side.batch >= total):
            yield None, args, kwargs
            return
        if total is None:
            raise BadInput(f"diff: {side.label}: the function's arguments have no rows; pass the batch as an argument.")
        for first in range(0, total, side.batch):
            rows = BatchRows(first, min(side.batch, total - first), total)

            def part(leaf: Any, rows: BatchRows = rows) -> Any:
                has_rows = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows.total
                return leaf[rows.first : rows.first + rows.number] if has_rows else leaf

            yield rows, tree_map(part, args), tree_map(part, kwargs)

    def _gradients(self, leaves: list[Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of parameters and other leaves, by name."""
        known = {id(tensor): name for name, tensor in given.items()}
        found: dict[str, Tensor] = {}
        for number, tensor in enumerate(dict.fromkeys([*self.names.parameters(), *leaves]), 1):
            if tensor.grad is not None:
                name = self.names.of_parameter(tensor) or known.get(id(tensor)) or f"tensor {number}"
                found.setdefault(name, tensor.grad)
        return found

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
