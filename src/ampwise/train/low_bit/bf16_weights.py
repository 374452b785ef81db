"""Convert a model's weights to BF16 in place, and back to FP32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.train.low_bit.pure_bf16 import PURE
from ampwise.train.low_bit.rounding import join_bf16_, split_bf16_

__all__ = ["bf16_parameters", "find_wrapper", "parameters_to_convert", "to_bf16_", "to_fp32_"]

# Their kernels take 16-bit activations with FP32 weights; with BF16 weights some accept nothing else. They have too few
# weights to save memory.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameters_to_convert(models: Sequence[Module], kept: Collection[Module] = ()) -> list[Parameter]:
    """Return the parameters to convert to BF16: all except those of normalisation layers and of kept modules.

    Some may be BF16 already: from the user, or from an earlier precision.
    """
    wide = {parameter for module in kept for parameter in module.parameters()}
    wide |= {each for module in _within(models) if isinstance(module, NORMALISATIONS) for each in module.parameters()}
    every = _parameters(models)
    if any(is_lazy(parameter) for parameter in every):
        raise BadInput(f"{PURE}: some of the model's parameters have no shape yet. Run it once on a batch first.")
    found = [each for each in every if each.dtype in (torch.float32, torch.bfloat16) and each not in wide]
    fp32 = [parameter for parameter in found if parameter.dtype == torch.float32]
    if fp32 and (wrapper := find_wrapper(models, fp32)) is not None:
        raise BadInput(
            f"Engine(precision={PURE!r}): {wrapper} was created for FP32 weights. "
            f"Convert the model first: model.bfloat16(), then {wrapper}(model)."
        )
    return found


def bf16_parameters(models: Sequence[Module]) -> list[Parameter]:
    """Return the BF16 parameters, without quantized tensor subclasses that only report BF16."""
    return [each for each in _parameters(models) if each.dtype == torch.bfloat16 and type(each.data) is Tensor]


def to_bf16_(parameters: Iterable[Parameter], with_rest: Collection[Parameter] = ()) -> dict[Parameter, Tensor]:
    """Convert FP32 parameters to BF16, to nearest. They stay the same objects.

    Returns the rounding remainders of those in ``with_rest``.
    """
    rests = {}
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            continue
        wide = parameter.detach()
        if parameter in with_rest:
            wide = wide.clone()
            rests[parameter] = split_bf16_(wide)
        _change(parameter, wide.to(torch.bfloat16))
    return rests


def to_fp32_(parameters: Sequence[Parameter], rests: Mapping[Parameter, Tensor]) -> None:
    """Convert parameters back to FP32, adding the rounding remainders that were kept."""
    for parameter in parameters:
        wide = parameter.detach().to(torch.float32)
        _change(parameter, join_bf16_(wide, rests[parameter]) if parameter in rests else wide)


def _change(parameter: Parameter, data: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


def _within(models: Sequence[Module]) -> Iterator[Module]:
    return (module for model in models for module in model.modules())


def _parameters(models: Sequence[Module]) -> list[Parameter]:
    return list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))


def find_wrapper(models: Sequence[Module], parameters: Iterable[Parameter]) -> str | None:
    """Return the name of a wrapper (DDP, FSDP) that relies on the parameters' dtype; None without one."""
    for module in _within(models):
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel) or name == "FullyShardedDataParallel":
            return name
    return "fully_shard" if any(hasattr(parameter, "placements") for parameter in parameters) else None
