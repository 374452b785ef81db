"""Forward and backward passes of the user's function, in any arrangement of formats, that leave all as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

from ampwise.compiled import as_written
from ampwise.engine.arguments import loss_and_extra
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.precision import PRECISIONS
from ampwise.errors import BadInput
from ampwise.tune.onednn import onednn_as_it_was
from ampwise.tune.search.arrangement import Arrangement
from ampwise.tune.search.choices import WIDEST
from ampwise.tune.search.graph import has_hidden_parts
from ampwise.tune.search.sensitivity import Looking
from ampwise.tune.search.state import Unchanged, told_if_it_fails

__all__ = ["IN_FP32", "Batch", "Outcome", "Passes"]

IN_FP32 = Arrangement(base=WIDEST, regions={}, recipes={}, widened=())
FIRST_SCALE = 2.0**16  # of the loss in FP16, as a GradScaler begins
LOWERED_BY = 2.0**4


@dataclass(frozen=True, slots=True)
class Batch:
    """What the function is called with; ``place`` is its place among those given."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass gives; None where a parameter was not used."""

    loss: float
    gradients: tuple[Tensor | None, ...]

    @property
    def finite(self) -> bool:
        """Whether all of it is."""
        return math.isfinite(self.loss) and self.finite_gradients

    @property
    def finite_gradients(self) -> bool:
        """Whether these are, whatever the loss is."""
        return all(bool(each.isfinite().all()) for each in self.gradients if each is not None)


class Passes:
    """Runs a function on batches; ``count`` is how often."""

    def __init__(self, function: Callable[..., Any], model: Module, device: torch.device) -> None:
        self.function, self.model, self.device = function, model, device
        self.parameters = _trained(model)
        self.count = 0
        self._unchanged = Unchanged(model, device)
        self._scale = FIRST_SCALE

    def outcome(self, batch: Batch, arrangement: Arrangement = IN_FP32) -> Outcome:
        """Loss and gradients. In FP16 the loss is scaled, by less where gradients overflow."""
        scaled = any(PRECISIONS[region].scaled for region in arrangement.regions_used)
        while True:
            scale = self._scale if scaled else 1.0
            found = self._outcome(batch, arrangement, scale)
            if scale <= 1.0 or not math.isfinite(found.loss) or found.finite_gradients:
                return found
            self._scale /= LOWERED_BY

    def forward(self, batch: Batch) -> Any:
        """The loss alone, with its graph, in FP32: for a look at what happens on the way."""
        self.count += 1
        with self._pass(IN_FP32), told_if_it_fails():
            return self._loss(batch)

    def watched(self, batch: Batch, looking: Looking) -> None:
        """A pass in FP32, in which every unit is looked at."""
        self.count += 1
        with self._pass(IN_FP32), looking.on():
            loss = self._loss(batch)
            looking.comes_back(loss)
            self.gradients(loss)

    def kept_bytes(self, batch: Batch, arrangement: Arrangement) -> int:
        """How much a forward pass keeps for the backward pass, weights aside."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep the node that made it, which keeps what is packed

        self.count += 1
        with self._pass(arrangement), saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self._loss(batch, arrangement.base)  # its graph holds what is kept, and so the addresses
        for parameter in self.model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        del loss
        return sum(kept.values())

    def _outcome(self, batch: Batch, arrangement: Arrangement, scale: float) -> Outcome:
        self.count += 1
        with self._pass(arrangement):
            loss = self._loss(batch, arrangement.base)
            gradients = self.gradients(loss * scale if scale != 1.0 else loss)
        if scale != 1.0:
            gradients = tuple(None if each is None else each / scale for each in gradients)
        return Outcome(float(loss.detach()), gradients)

    @contextmanager
    def _pass(self, arrangement: Arrangement) -> Iterator[None]:
        fp32 = Arithmetic(PRECISIONS[WIDEST], self.device.type)  # what is FP32 is not TF32
        with (
            onednn_as_it_was(),
            torch.enable_grad(),
            self._unchanged.a_pass(),
            fp32.products(),
            as_written(),
            arrangement.on(self.model),
        ):
            yield

    def _loss(self, batch: Batch, base: str = WIDEST) -> Tensor:
        with Arithmetic(PRECISIONS[base], self.device.type).forward():
            returned = self.function(*batch.args, **batch.kwargs)
        return loss_and_extra(returned)[0]

    def gradients(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Of the trained parameters; what is in their ``.grad`` stays."""
        found = torch.autograd.grad(loss.float(), self.parameters, allow_unused=True)
        if any(each is None for each in found) and has_hidden_parts(loss):
            raise BadInput(
                "search(): a checkpoint in the model hides its parameters from whoever asks for their gradients; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        return found


def _trained(model: Module) -> list[Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise BadInput("search(): none of the model's parameters requires a gradient: there are none to compare.")
    other = next((each.dtype for each in trained if each.dtype != torch.float32), None)
    if other is not None:
        raise BadInput(
            f"search(): the model's weights are {str(other).removeprefix('torch.')}, and what it is compared with is "
            "FP32: call model.float() first. Formats are for products; weights stay in FP32."
        )
    return trained
