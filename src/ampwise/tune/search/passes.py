"""Run forward and backward passes of the user's function in any arrangement of formats, restoring all state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.errors import AmpwiseError, BadInput
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.trace.recorder import overwrite
from ampwise.trace.user_code import describe_error
from ampwise.train.arguments import loss_and_extra
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.precision import PRECISIONS
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.onednn import onednn_restored
from ampwise.tune.search.arrangement import WIDEST, FormatArrangement
from ampwise.tune.search.sensitivity import SensitivityProbe, reached_nodes

IN_FP32 = FormatArrangement(base=WIDEST, regions={}, recipes={}, widened=())
FIRST_SCALE = 2.0**16  # initial loss scale in FP16, as of a GradScaler
LOWERED_BY = 2.0**4


@dataclass(frozen=True, slots=True)
class SearchBatch:
    """Arguments of the function; ``place`` is the index among the batches given."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int = 0


@dataclass(frozen=True, slots=True)
class PassResult:
    """Loss and gradients of a pass; None for a parameter that was not used."""

    loss: float
    gradients: tuple[Tensor | None, ...]

    @property
    def finite_gradients(self) -> bool:
        """Whether the gradients are finite, whatever the loss is."""
        return all(bool(each.isfinite().all()) for each in self.gradients if each is not None)


@contextmanager
def errors_in_one_line(on: str = "the first batch") -> Iterator[None]:
    """Turn errors of the user's function in FP32 into one line with their location."""
    try:
        yield
    except (AmpwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(f"search(): the function failed in FP32 on {on}: {describe_error(error)}.") from error


class SavedState:
    """State that every pass starts from: buffers and random number generators. Weights must not change at all."""

    def __init__(self, model: Module, device: torch.device) -> None:
        self._device = device
        self._random = capture_random(device)
        self._buffers = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self._parameters = [(parameter, parameter._version, parameter.grad) for parameter in model.parameters()]

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Run a pass from the saved state, and restore it afterwards."""
        restore_random(self._random, self._device)
        try:
            yield
        finally:
            self.put_back()
        if any(parameter._version != version for parameter, version, _ in self._parameters):
            raise BadInput(
                "search(): the function changes the weights. It must only return the loss, without an optimizer step."
            )
        if any(parameter.grad is not gradient for parameter, _, gradient in self._parameters):
            for parameter, _, gradient in self._parameters:
                parameter.grad = gradient
            raise BadInput("search(): the function must not call backward(): it only returns the loss.")

    def put_back(self) -> None:
        """Restore buffers and random number generators."""
        restore_random(self._random, self._device)
        for module, name, buffer, version, copy in self._buffers:
            module._buffers[name] = buffer
            # Normalisation layers update their buffers without changing the version.
            if buffer._version != version or isinstance(module, _NormBase):
                overwrite(buffer, copy)


class PassRunner:
    """Runs a function on batches, and counts the passes."""

    def __init__(self, function: Callable[..., Any], model: Module, device: torch.device) -> None:
        self.function, self.model, self.device = function, model, device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise BadInput("search(): no parameter of the model requires a gradient, so there is nothing to compare.")
        other = next((each.dtype for each in self.parameters if each.dtype != torch.float32), None)
        if other is not None:
            raise BadInput(
                f"search(): the model's weights are {str(other).removeprefix('torch.')}; expected FP32: call "
                "model.float() first. Formats apply to matmuls; weights stay in FP32."
            )
        self.count = 0
        self._state = SavedState(model, device)
        self._scale = FIRST_SCALE

    def outcome(self, batch: SearchBatch, arrangement: FormatArrangement = IN_FP32) -> PassResult:
        """Return loss and gradients. In FP16 the loss is scaled, by less if gradients overflow."""
        is_scaled = any(PRECISIONS[region].scaled for region in arrangement.regions_used)
        while True:
            self.count += 1
            scale = self._scale if is_scaled else 1.0
            with self._pass(arrangement):
                loss = self._loss(batch, arrangement.base)
                gradients = self.gradients(loss * scale if scale != 1.0 else loss)
            if scale != 1.0:
                gradients = tuple(None if each is None else each / scale for each in gradients)
            found = PassResult(float(loss.detach()), gradients)
            if scale <= 1.0 or not math.isfinite(found.loss) or found.finite_gradients:
                return found
            self._scale /= LOWERED_BY

    def forward(self, batch: SearchBatch) -> Any:
        """Return the loss with its graph, in FP32, to inspect the forward pass."""
        self.count += 1
        with self._pass(IN_FP32), errors_in_one_line():
            return self._loss(batch)

    def watched(self, batch: SearchBatch, looking: SensitivityProbe) -> None:
        """Run a pass in FP32 in which every unit is probed."""
        self.count += 1
        with self._pass(IN_FP32), looking.on():
            loss = self._loss(batch)
            looking.forward_done(loss)
            self.gradients(loss)

    def kept_bytes(self, batch: SearchBatch, arrangement: FormatArrangement) -> int:
        """Return the bytes that a forward pass saves for the backward pass, without weights."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would hold its node, which holds what is packed

        self.count += 1
        with self._pass(arrangement), saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self._loss(batch, arrangement.base)  # its graph keeps the saved tensors, and so their addresses
        for parameter in self.model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        del loss
        return sum(kept.values())

    @contextmanager
    def _pass(self, arrangement: FormatArrangement) -> Iterator[None]:
        fp32 = PrecisionContexts(PRECISIONS[WIDEST], self.device.type)  # FP32 without TF32
        with (
            onednn_restored(),
            torch.enable_grad(),
            self._state.a_pass(),
            fp32.pass_context(),
            run_eagerly(),
            arrangement.on(self.model),
        ):
            yield

    def _loss(self, batch: SearchBatch, base: str = WIDEST) -> Tensor:
        with PrecisionContexts(PRECISIONS[base], self.device.type).forward():
            returned = self.function(*batch.args, **batch.kwargs)
        return loss_and_extra(returned)[0]

    def gradients(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the trained parameters; their ``.grad`` is not touched."""
        found = torch.autograd.grad(loss.float(), self.parameters, allow_unused=True)
        if any(each is None for each in found) and has_hidden_parts(loss):
            raise BadInput(
                "search(): a reentrant checkpoint in the model hides its parameters from autograd.grad; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        return found


def has_hidden_parts(loss: Tensor) -> bool:
    """Whether a part of the graph is a reentrant checkpoint, which hides the path to its parameters."""
    return any(node.name() == "CheckpointFunctionBackward" for node in reached_nodes([loss.grad_fn]))
