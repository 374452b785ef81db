"""The FP8 forward for a recipe: ampwise's own, torchao's or Transformer Engine's; and whether it works here."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.float8.block_check import blas_has_blocks, wrong_block_results
from ampwise.train.float8.fp8_cast import cast_reference, cast_to_fp8
from ampwise.train.float8.layer_forward import AmpwiseForward, BlockForward, Fp8Forward
from ampwise.train.float8.recipe import BLOCK_RECIPE, OURS, TORCHAO, TRANSFORMER_ENGINE, Fp8
from ampwise.train.float8.torchao_backend import TorchaoForward

__all__ = [
    "TransformerEngineForward",
    "is_delayed",
    "make_forward",
    "refuse_wrong_kernels",
    "transformer_engine",
    "wrong_results",
]

TRANSFORMER_ENGINE_PACKAGE = "transformer_engine"
CHECKED_SHAPE = (256, 384)  # several tiles each way, with sizes like those of layers
CHECKED_OPERANDS = (
    ("an input", torch.bfloat16, False),
    ("a weight", torch.float32, False),
    ("a gradient", torch.bfloat16, True),
)

# Layers share a forward where possible: torch.compile then compiles identical blocks once.
_shared_ampwise_forward = cache(AmpwiseForward)
_shared_block_forward = cache(BlockForward)
_shared_torchao_forward = cache(TorchaoForward)


def make_forward(module: nn.Linear, fp8: Fp8) -> Fp8Forward:
    """Return the forward that computes a layer, for ``install_forward``."""
    if fp8.made_by == TORCHAO:
        return _shared_torchao_forward(fp8.recipe, emulate=module.weight.device.type != "cuda")
    if fp8.made_by == TRANSFORMER_ENGINE:
        return TransformerEngineForward(module, fp8)
    if fp8.recipe == BLOCK_RECIPE:
        return _shared_block_forward(blas=blas_has_blocks(module.weight.device))
    return _shared_ampwise_forward(e5m2=fp8.gradients == "e5m2", matmuls=fp8.matmuls)


def is_delayed(fp8: Fp8) -> bool:
    """Return whether the recipe is ampwise's delayed scaling."""
    return fp8.recipe == "delayed" and fp8.made_by == OURS


def refuse_wrong_kernels(fp8: Fp8, device: torch.device) -> None:
    """Raise if ampwise's own FP8 layers are not available or compute wrong results on this device.

    Some versions of Triton compile a transposed store of bytes wrongly on some devices. The results are finite, so a
    model would train on them, badly.
    """
    if device.type != "cuda":
        return
    try:
        import triton
    except ImportError as error:
        raise MissingDependency(
            f"Fp8({fp8.recipe!r}): ampwise's FP8 layers need Triton, which is not installed. Install it: pip install "
            "triton; or use torchao's: Fp8('tensorwise')."
        ) from error
    if fp8.recipe == BLOCK_RECIPE:
        found = wrong_block_results(device)
    else:
        cast = wrong_results(device, fp8.recipe != "delayed", fp8.gradients == "e5m2")
        found = f"casts {cast}" if cast else ""
    if found:
        raise PrecisionUnavailable(
            f"Engine(precision='fp8'): Triton {triton.__version__} {found} wrongly on "
            f"{torch.cuda.get_device_name(device)}, so ampwise's kernels are not used. Use torchao's, "
            "Fp8('tensorwise'), or another version of Triton."
        )


@cache
def wrong_results(device: torch.device, current: bool, e5m2: bool) -> str:
    """Return an operand whose cast differs from the reference; empty if none does. Syncs with the device."""
    # From a generator of its own, so that the user's random numbers do not change.
    # In steps of 1/64: then sums are exact, in any order.
    numbers = torch.randn(CHECKED_SHAPE, generator=torch.Generator().manual_seed(0))
    numbers = ((numbers * 64).round() / 64).to(device)
    for name, dtype, is_gradient in CHECKED_OPERANDS:
        x = numbers.to(dtype)
        scale = None if current else torch.full((), 256.0, device=device)
        found = cast_to_fp8(x, scale, e5m2=e5m2 and is_gradient, rows=True, columns=True, sums=True)
        expected = cast_reference(x, scale, e5m2 and is_gradient, True, True, True)
        for one, other in zip(found, expected, strict=True):
            if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
                return name
    return ""


class TransformerEngineForward:
    """Forward that computes like te.Linear of NVIDIA's Transformer Engine, with the module's own parameters.

    Written against its documentation (te.Linear, te.fp8_autocast, recipe.DelayedScaling, recipe.Float8CurrentScaling)
    and tested with a mock; never run with the real package.

    Its scales and histories are not saved. ``get_extra_state`` returns a pickle as a tensor, and ``set_extra_state``
    unpickles it: a checkpoint could then run code, which docs/security.md rules out. A resumed run starts with an empty
    history.
    """

    def __init__(self, module: nn.Linear, fp8: Fp8) -> None:
        self._te = transformer_engine(fp8.recipe)
        recipes = importlib.import_module(f"{TRANSFORMER_ENGINE_PACKAGE}.common.recipe")
        formats = recipes.Format.HYBRID if fp8.gradients == "e5m2" else recipes.Format.E4M3
        if fp8.recipe == "current":
            self._recipe = recipes.Float8CurrentScaling(fp8_format=formats)
        else:
            self._recipe = recipes.DelayedScaling(
                margin=fp8.margin,
                fp8_format=formats,
                amax_history_len=fp8.history,
                amax_compute_algo="max" if fp8.update == "max" else "most_recent",
            )
        bias, weight = module.bias is not None, module.weight
        self._twin = self._te.Linear(
            module.in_features, module.out_features, bias=bias, params_dtype=weight.dtype, device=weight.device
        )

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        for name in ("weight", "bias"):  # at each call, as FSDP replaces a module's parameters
            if getattr(module, name) is not None:
                self._twin._parameters[name] = getattr(module, name)
        self._twin.train(module.training)
        # Newer versions call it autocast, and the argument recipe.
        if hasattr(self._te, "fp8_autocast"):
            around = self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        else:
            around = self._te.autocast(enabled=True, recipe=self._recipe)
        with around:
            out: Tensor = self._twin(x)
        return out


def transformer_engine(recipe: str) -> Any:
    """Return ``transformer_engine.pytorch``; raise if it is missing."""
    try:
        return importlib.import_module(f"{TRANSFORMER_ENGINE_PACKAGE}.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependency(
            f"Fp8({recipe!r}, backend='transformer-engine'): Transformer Engine is not installed or does not load "
            f"({str(error).strip().partition(chr(10))[0]}). Install it: pip install 'transformer-engine[pytorch]'; or "
            "remove backend=...: ampwise has this recipe itself."
        ) from error
