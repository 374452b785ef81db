"""Accelerate integration: ``fix(accelerator)`` fixes mixed-precision bugs in an Accelerator's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.integrations.deferred_scaler import DeferredScaler, inner_optimizer
from ampwise.integrations.versions import ACCELERATE, require

require(ACCELERATE, "accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

__all__ = ["fix"]

OWN_THE_STEP = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def fix(accelerator: Any) -> Any:
    """Fix an Accelerator in place and return it; call it before ``prepare``.

    ``optimizer_step_was_skipped`` is correct with fused optimizers, too, so that schedulers do not advance on skipped
    steps. Several optimizers may be clipped, together or separately: each is unscaled once, and only those that are
    clipped. A step with a gradient that is not finite is skipped in BF16 and FP32, too. FP16 on a CPU is FP16.
    ``accelerator.scaler`` is an ampwise GradScaler.

    >>> from accelerate import Accelerator
    >>> accelerator = fix(Accelerator(cpu=True))
    >>> accelerator.scaler.skipped
    False
    """
    if not isinstance(accelerator, Accelerator):
        raise BadInput(f"fix(): expected an accelerate.Accelerator, got {type(accelerator).__name__}.")
    if isinstance(accelerator, _FixedAccelerator):
        return accelerator
    if accelerator.distributed_type in OWN_THE_STEP:
        kind = accelerator.distributed_type.value
        raise BadInput(f"fix(): {kind} runs the step itself, so there is nothing of Accelerate's to fix.")
    if accelerator._optimizers:
        raise BadInput("fix(): an optimizer was already prepared. Call fix(accelerator) before prepare().")
    theirs, is_fp16 = accelerator.scaler, accelerator.mixed_precision == "fp16"
    scaling: dict[str, Any] = {}  # the settings of the accelerator's own scaler
    if theirs is not None and is_fp16:
        scaling = {
            "init_scale": theirs.get_scale(),
            "growth_factor": theirs.get_growth_factor(),
            "backoff_factor": theirs.get_backoff_factor(),
            "growth_interval": theirs.get_growth_interval(),
        }
    elif is_fp16 and accelerator.scaler_handler is not None:
        scaling = {name: value for name, value in accelerator.scaler_handler.to_kwargs().items() if name != "enabled"}
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        scaling["process_group"] = torch.distributed.group.WORLD  # the ranks that share the gradients
    accelerator.scaler = DeferredScaler(accelerator.device.type, enabled=is_fp16, **scaling)
    if is_fp16:
        accelerator.native_amp = True  # on a CPU, too, where Accelerate would silently train in FP32
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_FixedAccelerator, kind), {"__module__": kind.__module__})
    return accelerator


class _FixedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Optimizer that gets from the scaler whether a step was skipped."""

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, *([] if closure is None else [closure]))
            self.scaler.update_later()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Syncs with the device if the step is not finished."""
        return bool(self.scaler.skipped_for(self.optimizer))


class _FixedAccelerator(Accelerator):  # type: ignore[misc]
    """Class of an accelerator after ``fix``; never instantiated directly."""

    scaler: Any  # a DeferredScaler; None while a checkpoint is written without one
    _clipped: list[Optimizer] | None = None  # whose gradients are being clipped

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = _FixedOptimizer
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the given optimizers, else those that are being clipped, else all; each once."""
        if self.scaler.is_enabled() and not self.sync_gradients:
            raise BadInput(
                "gradients are clipped or unscaled before the last micro-batch: the next backward() would add scaled "
                "gradients to unscaled ones. Do it once per step: `if accelerator.sync_gradients:`."
            )
        if optimizer is None:
            optimizer = self._optimizers if self._clipped is None else self._clipped
        for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            inner = inner_optimizer(each)
            if not self.scaler.is_unscaled(inner):
                self.scaler.unscale_(inner)  # without a scale, too: the check before clipping decides on a skip
            elif not self.scaler.is_enabled():
                self.scaler.check_again(inner)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        with self._clipping(parameters) as (every, optimizers):
            norm: Tensor | None = super().clip_grad_norm_(every, max_norm, norm_type)
        if norm is not None:
            self.scaler.clipped_by(norm, optimizers)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        with self._clipping(parameters) as (every, _):
            super().clip_grad_value_(every, clip_value)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_disabled_scaler():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_disabled_scaler():
            return super().load_state(*args, **kwargs)

    @contextmanager
    def _without_disabled_scaler(self) -> Iterator[None]:
        """Hide a disabled scaler from checkpoints: Accelerate's own BF16 checkpoints have no scaler state."""
        scaler = self.scaler
        self.scaler = scaler if scaler.is_enabled() else None
        try:
            yield
        finally:
            self.scaler = scaler

    @contextmanager
    def _clipping(self, parameters: Any) -> Iterator[tuple[list[Tensor], list[Optimizer]]]:
        every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {id(each) for each in every}
        inner = [inner_optimizer(each) for each in self._optimizers]
        self._clipped = [each for each in inner if any(id(p) in given for g in each.param_groups for p in g["params"])]
        try:
            yield every, self._clipped
        finally:
            self._clipped = None
