"""A layer by its recipe: ampwise's own, torchao's or Transformer Engine's."""

from __future__ import annotations

from functools import cache

from torch import nn

from ampwise.float8.by_torchao import ByTorchao
from ampwise.float8.by_transformer_engine import ByTransformerEngine
from ampwise.float8.layer import How, Ours
from ampwise.float8.recipe import OURS, TORCHAO, TRANSFORMER_ENGINE, Fp8

__all__ = ["is_delayed", "made"]


def made(module: nn.Linear, fp8: Fp8) -> How:
    """What computes a layer, to be put on it by ``fit``: the same for layers alike, where it needs nothing of them."""
    if fp8.made_by == TORCHAO:
        return _by_torchao(fp8.recipe, module.weight.device.type != "cuda")
    if fp8.made_by == TRANSFORMER_ENGINE:
        return ByTransformerEngine(module, fp8)
    return _ours(fp8.gradients == "e5m2")


def is_delayed(fp8: Fp8) -> bool:
    """Whether it goes by the table of scales."""
    return fp8.recipe == "delayed" and fp8.made_by == OURS


@cache
def _ours(e5m2: bool) -> Ours:
    return Ours(e5m2=e5m2)


@cache
def _by_torchao(recipe: str, emulate: bool) -> ByTorchao:
    return ByTorchao(recipe, emulate=emulate)
