"""FP8 layers by NVIDIA's Transformer Engine, if it is installed.

Written against its documentation (te.Linear, te.fp8_autocast, recipe.DelayedScaling, recipe.Float8CurrentScaling) and
tested with a mock; never run with the real package.

Its scales and histories are not saved. ``get_extra_state`` returns a pickle as a tensor, and ``set_extra_state``
unpickles it: a checkpoint could then run code, which SECURITY.md promises that it cannot. A resumed run starts with an
empty history.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from ampwise.errors import MissingDependency
from ampwise.train.float8.recipe import Fp8

__all__ = ["TransformerEngineForward", "transformer_engine"]

PACKAGE = "transformer_engine"


class TransformerEngineForward:
    """Forward that computes like te.Linear, with the module's own parameters."""

    def __init__(self, module: nn.Linear, fp8: Fp8) -> None:
        self._te = transformer_engine(fp8.recipe)
        self._recipe = _recipe(fp8)
        bias = module.bias is not None
        weight = module.weight
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
        return importlib.import_module(f"{PACKAGE}.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependency(
            f"Fp8({recipe!r}, backend='transformer-engine'): Transformer Engine is not installed or does not load "
            f"({str(error).strip().partition(chr(10))[0]}). Install it: pip install 'transformer-engine[pytorch]'; or "
            "remove backend=...: ampwise has this recipe itself."
        ) from error


def _recipe(fp8: Fp8) -> Any:
    recipes = importlib.import_module(f"{PACKAGE}.common.recipe")
    formats = recipes.Format.HYBRID if fp8.gradients == "e5m2" else recipes.Format.E4M3
    if fp8.recipe == "current":
        return recipes.Float8CurrentScaling(fp8_format=formats)
    rule = "max" if fp8.update == "max" else "most_recent"
    return recipes.DelayedScaling(
        margin=fp8.margin, fp8_format=formats, amax_history_len=fp8.history, amax_compute_algo=rule
    )
