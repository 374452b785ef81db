"""The FP8 forward for a recipe: ampwise's own, torchao's or Transformer Engine's."""

from __future__ import annotations

from functools import cache

from torch import nn

from ampwise.train.float8.layer_forward import AmpwiseForward, Fp8Forward
from ampwise.train.float8.recipe import OURS, TORCHAO, TRANSFORMER_ENGINE, Fp8
from ampwise.train.float8.torchao_backend import TorchaoForward
from ampwise.train.float8.transformer_engine_backend import TransformerEngineForward

__all__ = ["is_delayed", "make_forward"]


def make_forward(module: nn.Linear, fp8: Fp8) -> Fp8Forward:
    """Return the forward that computes a layer, for ``install_forward``; layers share one where possible."""
    if fp8.made_by == TORCHAO:
        return _by_torchao(fp8.recipe, module.weight.device.type != "cuda")
    if fp8.made_by == TRANSFORMER_ENGINE:
        return TransformerEngineForward(module, fp8)
    return _ours(fp8.gradients == "e5m2")


def is_delayed(fp8: Fp8) -> bool:
    """Return whether the recipe is ampwise's delayed scaling."""
    return fp8.recipe == "delayed" and fp8.made_by == OURS


@cache
def _ours(e5m2: bool) -> AmpwiseForward:
    return AmpwiseForward(e5m2=e5m2)


@cache
def _by_torchao(recipe: str, emulate: bool) -> TorchaoForward:
    return TorchaoForward(recipe, emulate=emulate)
