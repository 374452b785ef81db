"""``pad_`` and ``unpad_``: padding that does not change what a model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.tune.align.layers import SLICED, PaddedEmbedding, PaddedLinear, TiedEmbedding, crop_to, pad_to
from ampwise.tune.align.padding_plan import Padding, plan_padding

Reshape = Callable[[Tensor, tuple[int, ...]], Tensor]


def pad_(
    model: nn.Module,
    to: int | None = None,
    precision: str = "bf16",
    *,
    only: str | Sequence[str] = (),
    head: str | None = None,
    logits: str = SLICED,
    optimizer: Optimizer | Sequence[Optimizer] = (),
) -> Padding:
    """Pad linear layers, with the embeddings tied to them, to sizes that tensor cores read in whole words.

    The model computes the same: padding is zero, gets gradients of exactly zero, and stays zero under any elementwise
    optimizer. Outputs, losses and state dicts keep their sizes; a checkpoint of either model loads into the other. Only
    parameters change their shapes, in place, so pad before the optimizer's first step, or pass the optimizer.
    ``unpad_`` undoes it.

    Args:
        model: changed in place.
        to: pad to multiples of this; by default of 8 for 16 bits, 4 for TF32 and FP32, 16 for FP8, and of whole cache
            lines (64 for 16 bits) where that adds at most 1%.
        precision: the precision the model is trained in.
        only: names or globs of modules to pad, however small they are.
        head: the module that makes the logits. An embedding whose weight the model's code multiplies with, as in
            ``F.linear(x, self.wte.weight)`` or ``x @ self.wte.weight.T``, is padded only if given here.
        logits: "sliced": unpadded, a view of the padded ones. "masked": padded, with -inf in the padding.
        optimizer: optimizers that have already trained the model, to pad their state, too.

    Returns:
        what was padded, and what was left and why; ``print`` shows it.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

    >>> import torch, ampwise
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 1001), torch.nn.ReLU(), torch.nn.Linear(1001, 512))
    >>> print(ampwise.pad_(model))
    2 weights padded, 7,168 zeros added
      0: 1001×512 → 1008×512, stays padded up to the next layer
      2: 512×1001 → 512×1008, takes padded inputs
    >>> model[0].weight.shape, model.state_dict()["0.weight"].shape
    (torch.Size([1008, 512]), torch.Size([1001, 512]))
    """
    _check(model, "pad_")
    patterns = (only,) if isinstance(only, str) else tuple(only)
    padding = plan_padding(model, precision=precision, to=to, only=patterns, head=head, logits=logits)
    optimizers = _optimizers(optimizer)
    _check_state("pad_", (layer for step in padding.padded for layer in step.layers), optimizers)
    for step in padding.padded:
        layers: Any = step.layers  # their classes change
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.__class__, layer.gives = PaddedLinear, step.gives  # type: ignore[assignment]
            elif step.tied_by_code:
                layer.__class__, layer.gives, layer.logits = TiedEmbedding, SLICED, step.gives
            else:  # an untied embedding may return padding to the next layer, which has the columns
                layer.__class__, layer.gives = PaddedEmbedding, step.gives if len(layers) == 1 else SLICED
        for layer in step.layers:
            for name, shape in {"weight": step.after, "bias": step.after[:1]}.items():
                _reshape_(layer._parameters.get(name), shape, pad_to, optimizers)
    return padding


def unpad_(model: nn.Module, *, optimizer: Optimizer | Sequence[Optimizer] = ()) -> None:
    """Undo ``pad_``: restore the class and size of every padded layer, exactly. Other layers stay as they are.

    Args:
        model: changed in place.
        optimizer: optimizers that have trained the padded model, to cut their state, too.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

    >>> import torch, ampwise
    >>> model = torch.nn.Linear(512, 1001)
    >>> _ = ampwise.pad_(model)
    >>> ampwise.unpad_(model)
    >>> model
    Linear(in_features=512, out_features=1001, bias=True)
    """
    _check(model, "unpad_")
    optimizers = _optimizers(optimizer)
    padded = [module for module in model.modules() if isinstance(module, PaddedLinear | PaddedEmbedding)]
    _check_state("unpad_", padded, optimizers)
    for layer in padded:
        for name, shape in layer.own_shapes().items():
            # A copy frees the memory of the padding.
            _reshape_(layer._parameters[name], shape, lambda *given: crop_to(*given).clone(), optimizers)
        layer.__class__ = nn.Linear if isinstance(layer, PaddedLinear) else nn.Embedding  # type: ignore[assignment]
        for name in ("gives", "logits"):
            layer.__dict__.pop(name, None)


def _check(model: nn.Module, asked: str) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(f"{asked}(): expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise BadInput(
            f"{asked}(): the model is wrapped in DistributedDataParallel, which has sized its gradient buckets. "
            f"Call {asked} on the model first, then wrap it."
        )


def _optimizers(given: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    found = [given] if isinstance(given, Optimizer) else list(given)
    for each in found:
        if not isinstance(each, Optimizer):
            raise BadInput(f"pad_(optimizer=...): expected a torch.optim.Optimizer, got {type(each).__name__}.")
    return found


def _check_state(asked: str, layers: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Check that gradients and optimizer state can be reshaped, before any is."""
    for parameter in (each for layer in layers for each in layer.parameters(recurse=False)):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise BadInput(
                f"{asked}(): a gradient of the model is sparse and cannot be padded. Call zero_grad(), then {asked}."
            )
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                    raise BadInput(
                        f"{asked}(optimizer=...): {type(optimizer).__name__} keeps {key!r} of {tuple(value.shape)} for "
                        f"a parameter of {tuple(parameter.shape)}, which cannot be padded. Call {asked} before the "
                        "first step, with a new optimizer."
                    )


def _reshape_(
    parameter: nn.Parameter | None, shape: tuple[int, ...], reshape: Reshape, optimizers: Sequence[Optimizer]
) -> None:
    """Reshape in place, so that references to the parameter, such as an optimizer's, stay valid."""
    if parameter is None or tuple(parameter.shape) == shape:
        return
    before, gradient = parameter.shape, parameter.grad
    parameter.grad = None  # it must have the parameter's shape at all times
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == before:
                state[key] = reshape(value, shape)
    changed = reshape(parameter.data, shape)
    # A graph still alive keeps the old shape for the parameter's gradient; changing the dtype makes torch drop it.
    other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
    parameter.data = changed.new_empty(0, dtype=other)
    parameter.data = changed
    if gradient is not None:
        parameter.grad = reshape(gradient, shape)
