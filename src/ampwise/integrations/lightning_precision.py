"""Lightning's precision plugin, for its Trainer and for Fabric, with our scaler in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.engine.precision.precision import PRECISIONS, facts_of
from ampwise.errors import BadInput, PrecisionUnavailable
from ampwise.integrations.late_scaler import LateScaler
from ampwise.integrations.versions import LIGHTNING, lightning_name, require

require(LIGHTNING, lightning_name())
if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import Precision as PrecisionPlugin
else:
    pl = importlib.import_module(lightning_name())
    PrecisionPlugin = importlib.import_module(f"{lightning_name()}.plugins.precision").Precision

from lightning_utilities.core.apply_func import apply_to_collection  # noqa: E402

__all__ = ["Precision"]

NAMES = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}  # as Lightning has them
HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")  # whose authors look at gradients
THEIR_KEY = "MixedPrecision"  # in checkpoints, of Lightning's own plugin


class Precision(PrecisionPlugin):
    """FP16, BF16 or FP32 for ``Trainer(plugins=[Precision("fp16")])`` and ``Fabric(plugins=[Precision("fp16")])``.

    In place of ``precision="16-mixed"``: a fused optimizer and clipping go together, a step with a gradient that is
    not finite is skipped in every precision, and the Trainer's schedulers of interval "step" wait for skipped steps.
    ``skipped`` tells whether the last step was; ``scaler`` is ampwise's GradScaler, with its norm and census.

    device: "cuda" or "cpu", where passes run; by default the Trainer's, and with Fabric the GPU if there is one.
    scaling: settings of the GradScaler, such as ``{"init_scale": 1024.0}``.

    >>> plugin = Precision("fp16", device="cpu")
    >>> plugin.precision, plugin.scaler.is_enabled()
    ('16-mixed', True)
    """

    def __init__(
        self, precision: str = "fp16", *, device: str | None = None, scaling: Mapping[str, Any] | None = None
    ) -> None:
        if precision not in NAMES:
            theirs = {lightning: ours for ours, lightning in NAMES.items()}
            hint = f" Here that is called {theirs[precision]!r}." if precision in theirs else ""
            raise BadInput(f"ampwise.lightning.Precision({precision!r}): the precisions are {', '.join(NAMES)}.{hint}")
        self.precision = NAMES[precision]
        self._asked, self._scaling = PRECISIONS[precision], dict(scaling or {})
        self._device_given = device is not None
        self._held: pl.LightningModule | None = None  # whose schedulers wait
        self._is_trainers = False
        self._settle_on(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _settle_on(self, device: str) -> None:
        try:
            self._device = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise BadInput(f"ampwise.lightning.Precision(device={device!r}): 'cuda' or 'cpu' is expected.") from error
        self.scaler = LateScaler(self._device, enabled=self._asked.scaled, **self._scaling)

    @property
    def skipped(self) -> bool:
        """Whether the last step left the weights alone. Waits for the device."""
        return self.scaler.skipped

    # Passes

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Nothing is converted: weights stay FP32. The first moment at which the Trainer's device is known."""
        trainer = _trainer_of(module)
        self._is_trainers = trainer is not None
        kind = None if trainer is None else trainer.strategy.root_device.type
        if kind is not None and kind != self._device and not self._device_given:
            self._settle_on(kind)
        facts = facts_of(torch.device(self._device))
        if self._asked.name in facts.lacks:
            raise PrecisionUnavailable(
                f"ampwise.lightning.Precision({self._asked.name!r}): {facts.lacks[self._asked.name]} "
                f"It runs {', '.join(name for name in facts.runs if name in NAMES)}."
            )
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast. Without its cache, which fails where a pass without gradients comes before one with."""
        if self._asked.dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._asked.dtype, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        """Fabric's own mixed precisions take FP64, which autocast leaves alone; the Trainer's do not touch batches."""
        if self._is_trainers or self._asked.dtype is None:
            return data
        return apply_to_collection(data, Tensor, _narrowed)

    def convert_output(self, data: Any) -> Any:
        """Fabric computes losses outside of autocast: in FP32."""
        return apply_to_collection(data, Tensor, _widened)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss, for the Trainer, which goes on with what this returns; Fabric does not."""
        if tensor.device.type != self._device and self._asked.dtype is not None:
            raise BadInput(
                f"ampwise.lightning.Precision({self._asked.name!r}) was made for {self._device}, and the loss is on "
                f"{tensor.device.type}, where nothing was cast. Say so: Precision({self._asked.name!r}, "
                f"device={tensor.device.type!r})."
            )
        if _trainer_of(module) is None:
            return None
        return super().pre_backward(self.scaler.scale(tensor), module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """With a loss that is scaled: already, for the Trainer, whose optimizer is among the arguments.

        Outside of autocast, in which `manual_backward` is called: there, what the module keeps in FP32 would have its
        gradients computed in 16 bits.
        """
        with torch.autocast(self._device, enabled=False):
            if _trainer_of(model) is not None:
                super().backward(tensor, model, *args, **kwargs)
            else:
                self.scaler.scale(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return None if _trainer_of(module) is None else super().post_backward(tensor, module)

    # Steps

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """The Trainer gives a closure that computes gradients; of Fabric's loop, they are there."""
        trainer = _trainer_of(model)
        if isinstance(optimizer, LBFGS):
            if self.scaler.is_enabled():
                raise BadInput("LBFGS computes its gradients several times a step and cannot be scaled: use bf16.")
            given = kwargs if closure is None else {"closure": closure, **kwargs}
            return optimizer.step(**given) if trainer is None else super().optimizer_step(optimizer, model, **given)
        if trainer is None or closure is None:
            return self._step(optimizer, kwargs if closure is None else {"closure": closure, **kwargs})
        self._hold_schedulers(model)
        result = closure()
        if result is None and model.automatic_optimization:  # the module has passed over this batch
            self._after_closure(model, optimizer)
            return result
        if _somebody_looks(model, trainer) or not getattr(optimizer, "_step_supports_amp_scaling", False):
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        return self._step(optimizer, kwargs)

    def _step(self, optimizer: Any, given: dict[str, Any]) -> Any:
        result = self.scaler.step(optimizer, **given)
        self.scaler.update_later()
        return result

    # Clipping: in true units, whatever the optimizer

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale, unless that was done: for whoever is to look at them."""
        if not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Gradients of a fused optimizer are clipped within its step, which costs nothing."""
        self.scaler.clip_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.unscale_gradients(optimizer)
        super().clip_grad_by_value(optimizer, clip_val)

    # Schedulers

    def _hold_schedulers(self, model: pl.LightningModule) -> None:
        """Let the module's schedulers wait for skipped steps, until the training is over.

        The module's hook is the one place that the Trainer's moves of a scheduler go through. A scheduler itself keeps
        what is set on it in its state.
        """
        if self._held is model:
            return
        self._let_go()
        model.lr_scheduler_step = _Waiting(self, model)  # type: ignore[method-assign]
        self._held = model

    def _waits(self, scheduler: Any, model: pl.LightningModule) -> bool:
        if isinstance(scheduler, ReduceLROnPlateau) or getattr(scheduler, "optimizer", None) is None:
            return False
        configs = [each for each in model.trainer.lr_scheduler_configs if each.scheduler is scheduler]
        by_step = any(each.interval == "step" for each in configs)
        return by_step and self.scaler.skipped_for(scheduler.optimizer)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.__dict__.pop("lr_scheduler_step", None)
            self._held = None

    def teardown(self) -> None:
        """The training is over, well or not."""
        self._let_go()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The scaler's. The Trainer saves it by itself; with Fabric, ``fabric.save(path, {"precision": plugin})``."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.scaler.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint that was written with ``precision="16-mixed"`` is gone on from."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint.get(THEIR_KEY) or {})


class _Waiting:
    """A module's ``lr_scheduler_step`` while it is trained. In copies of the module, and saved, it is its own again."""

    def __init__(self, plugin: Precision, model: pl.LightningModule) -> None:
        self._plugin, self._model, self._move = plugin, model, model.lr_scheduler_step

    def __call__(self, scheduler: Any, metric: Any) -> None:
        if not self._plugin._waits(scheduler, self._model):
            self._move(scheduler, metric)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._move,)


def _trainer_of(module: Any) -> pl.Trainer | None:
    """None with Fabric, and for modules that no Trainer runs."""
    trainer = getattr(module, "_trainer", None) if isinstance(module, pl.LightningModule) else None
    return trainer if isinstance(trainer, pl.Trainer) else None


def _somebody_looks(model: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Whether there is code of the user's between backward and step, which is to find gradients in true units."""
    watchers = [(model, pl.LightningModule), *((each, pl.Callback) for each in trainer.callbacks)]  # type: ignore[attr-defined]
    return any(
        getattr(type(each), hook, None) is not getattr(kind, hook, None) for each, kind in watchers for hook in HOOKS
    )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _narrowed(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor
