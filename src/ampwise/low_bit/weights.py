"""Which weights of a model become BF16, in place, and how they become FP32 again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.low_bit.pure import PURE
from ampwise.low_bit.rounding import join_

__all__ = ["narrow_", "to_narrow", "widen_"]

# Their kernels take activations in 16 bits with weights in FP32; with weights in BF16 some take no others, and there
# are so few of these weights that nothing is gained.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def to_narrow(models: Sequence[Module], kept: Collection[Module] = ()) -> list[Parameter]:
    """The FP32 parameters that become BF16: all but those of normalisations, and of modules that are kept."""
    wide = {parameter for module in kept for parameter in module.parameters()}
    wide |= {each for module in _within(models) if isinstance(module, NORMALISATIONS) for each in module.parameters()}
    every = list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))
    if any(is_lazy(parameter) for parameter in every):
        raise BadInput(f"{PURE}: some of the model's parameters have no shape yet. Run it once on a batch before.")
    found = [parameter for parameter in every if parameter.dtype == torch.float32 and parameter not in wide]
    if found:
        _refuse_wrapped(models, found)
    return found


def narrow_(parameters: Sequence[Parameter]) -> None:
    """To BF16, to nearest. They stay the same objects, and what holds them goes on holding them."""
    for parameter in parameters:
        _change(parameter, parameter.detach().to(torch.bfloat16))


def widen_(parameters: Sequence[Parameter], rests: Mapping[Parameter, Tensor]) -> None:
    """Back to FP32, with what was kept of each that BF16 does not hold."""
    for parameter in parameters:
        wide = parameter.detach().to(torch.float32)
        _change(parameter, join_(wide, rests[parameter]) if parameter in rests else wide)


def _change(parameter: Parameter, data: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


def _within(models: Sequence[Module]) -> Iterator[Module]:
    return (module for model in models for module in model.modules())


def _refuse_wrapped(models: Sequence[Module], found: Sequence[Parameter]) -> None:
    """Wrappers that have made buffers, or hold gradients' hooks, for weights as they were."""
    wrapper = next((type(each).__name__ for each in _within(models) if _wraps(each)), None)
    if wrapper is None and any(hasattr(parameter, "placements") for parameter in found):
        wrapper = "fully_shard"
    if wrapper is not None:
        raise BadInput(
            f"Engine(precision={PURE!r}): the model's weights are FP32, and {wrapper} has been made for these. "
            f"Make them BF16 before it is wrapped: model.bfloat16(), then {wrapper}(model)."
        )


def _wraps(module: Module) -> bool:
    return isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"
