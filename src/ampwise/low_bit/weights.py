"""Which weights of a model become BF16, in place, and how they become FP32 again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.low_bit.pure import PURE
from ampwise.low_bit.rounding import join_, split_

__all__ = ["narrow_", "narrow_buffers", "narrow_ones", "to_narrow", "widen_", "widen_buffers_", "wrapper_of"]

# Their kernels take activations in 16 bits with weights in FP32; with weights in BF16 some take no others, and there
# are so few of these weights that nothing is gained.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def to_narrow(models: Sequence[Module], kept: Collection[Module] = ()) -> list[Parameter]:
    """The parameters that are to be BF16: all but those of normalisations, and of modules that are kept.

    Some may be so already: given that way, or narrowed for what this comes after.
    """
    wide = {parameter for module in kept for parameter in module.parameters()}
    wide |= {each for module in _within(models) if isinstance(module, NORMALISATIONS) for each in module.parameters()}
    every = _parameters(models)
    if any(is_lazy(parameter) for parameter in every):
        raise BadInput(f"{PURE}: some of the model's parameters have no shape yet. Run it once on a batch before.")
    found = [each for each in every if each.dtype in (torch.float32, torch.bfloat16) and each not in wide]
    fp32 = [parameter for parameter in found if parameter.dtype == torch.float32]
    if fp32 and (wrapper := wrapper_of(models, fp32)) is not None:
        raise BadInput(
            f"Engine(precision={PURE!r}): the model's weights are FP32, and {wrapper} has been made for these. "
            f"Make them BF16 before it is wrapped: model.bfloat16(), then {wrapper}(model)."
        )
    return found


def narrow_ones(models: Sequence[Module]) -> list[Parameter]:
    """The parameters that are BF16, whoever made them so; none that are coded in some way and only look like it."""
    return [each for each in _parameters(models) if each.dtype == torch.bfloat16 and type(each.data) is Tensor]


def narrow_(parameters: Iterable[Parameter], with_rest: Collection[Parameter] = ()) -> dict[Parameter, Tensor]:
    """FP32 to BF16, to nearest. They stay the same objects, and what holds them goes on holding them.

    Of those in ``with_rest``, what BF16 does not hold is returned.
    """
    rests = {}
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            continue
        wide = parameter.detach()
        if parameter in with_rest:
            wide = wide.clone()
            rests[parameter] = split_(wide)
        _change(parameter, wide.to(torch.bfloat16))
    return rests


def widen_(parameters: Sequence[Parameter], rests: Mapping[Parameter, Tensor]) -> None:
    """Back to FP32, with what was kept of each that BF16 does not hold."""
    for parameter in parameters:
        wide = parameter.detach().to(torch.float32)
        _change(parameter, join_(wide, rests[parameter]) if parameter in rests else wide)


def narrow_buffers(models: Sequence[Module]) -> list[Tensor]:
    """The buffers that are BF16."""
    return [each for model in models for each in model.buffers() if each.dtype == torch.bfloat16]


def widen_buffers_(buffers: Iterable[Tensor]) -> None:
    """To FP32, the same objects."""
    for buffer in buffers:
        buffer.data = buffer.detach().to(torch.float32)


def _change(parameter: Parameter, data: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


def _within(models: Sequence[Module]) -> Iterator[Module]:
    return (module for model in models for module in model.modules())


def _parameters(models: Sequence[Module]) -> list[Parameter]:
    return list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))


def wrapper_of(models: Sequence[Module], parameters: Iterable[Parameter]) -> str | None:
    """What has made buffers, or holds gradients' hooks, for weights as they are; None: nothing."""
    wrapper = next((type(each).__name__ for each in _within(models) if _wraps(each)), None)
    if wrapper is None and any(hasattr(parameter, "placements") for parameter in parameters):
        wrapper = "fully_shard"
    return wrapper


def _wraps(module: Module) -> bool:
    return isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"
