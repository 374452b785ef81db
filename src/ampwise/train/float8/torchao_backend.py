"""FP8 layers by torchao: its recipes on existing layers, and its all-gather in FP8 under FSDP2."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.errors import BadInput, MissingDependency
from ampwise.train.float8.fp8_cast import ALIGNMENT
from ampwise.train.float8.fp8_linear import linear_of_empty_batch, out_dtype
from ampwise.train.float8.layer_choice import choose_layers
from ampwise.train.float8.recipe import RECIPES, TORCHAO, Fp8

__all__ = ["TorchaoForward", "float8_of_torchao", "prepare"]

LOWEST, BELOW = (0, 12), (1, 0)  # versions that have recipes by these names
SETTINGS = ("config", "linear_mm_config")  # attributes that its forward reads besides parameters
GET_IT = "pip install 'ampwise[fp8]'"

# torchao's names of the recipes.
NAMES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise+hp-weight-grad": "rowwise_with_gw_hp"}


class TorchaoForward:
    """Forward that computes like torchao's layer, with the module's own parameters."""

    def __init__(self, recipe: str, *, emulate: bool = False) -> None:
        float8 = float8_of_torchao(recipe)
        config = _config(float8, recipe, emulate=emulate)
        # A torchao layer, for its forward and settings; the parameters are the module's, which FSDP may replace.
        made: Any = float8.convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
        self._forward = type(made).forward
        self.attributes = {name: getattr(made, name) for name in SETTINGS}  # which its forward reads from a layer

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not x.numel():
            return linear_of_empty_batch(x, module.weight, module.bias)
        rows = x.numel() // x.shape[-1]
        short = -rows % ALIGNMENT  # rows are what the weight's gradient sums over
        given = F.pad(x.reshape(rows, -1), (0, 0, 0, short)) if short else x
        out: Tensor = self._forward(module, given.to(out_dtype(x)))  # torchao only checks CUDA's autocast
        return out[:rows].reshape(*x.shape[:-1], -1) if short else out


def prepare(
    model: nn.Module, fp8: str | Fp8 = "tensorwise", *, all_gather: bool = True, emulate: bool = False
) -> nn.Module:
    """Convert layers to torchao's FP8 layers before ``fully_shard``, so that FSDP2 gathers weights in FP8.

    Converts the layers that ``Engine(model, optimizer, precision="fp8")`` would choose, which then uses them. Returns
    the model, changed in place. Create the optimizer after ``fully_shard``, as always.
    """
    asked = fp8 if isinstance(fp8, Fp8) else Fp8(fp8)
    if asked.made_by != TORCHAO or (all_gather and asked.recipe != "tensorwise"):
        expected = "'tensorwise', to gather weights in FP8" if all_gather else f"one of {', '.join(NAMES)}"
        raise BadInput(f"prepare(fp8={asked.recipe!r}): expected a recipe of torchao, {expected}.")
    float8 = float8_of_torchao(asked.recipe)
    config = _config(float8, asked.recipe, emulate=emulate, enable_fsdp_float8_all_gather=all_gather)
    chosen = {module for module, choice in choose_layers(model, {}, asked).items() if choice.fp8}
    converted: nn.Module = float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, _: module in chosen, config=config
    )
    return converted


def float8_of_torchao(recipe: str) -> Any:
    """Return ``torchao.float8``; raise if it is missing or of an unsupported version."""
    asked = f"Fp8({recipe!r})"
    others = ", ".join(repr(name) for name, backends in RECIPES.items() if backends[0] != TORCHAO)
    try:
        found = importlib.metadata.version(TORCHAO)
        float8 = importlib.import_module(f"{TORCHAO}.float8")
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MissingDependency(
            f"{asked} needs torchao, which is not installed or does not load ({reason}). "
            f"Install it: {GET_IT}; or use {others}, which need no package."
        ) from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if not LOWEST <= numbers < BELOW:
        low, high = (".".join(map(str, each)) for each in (LOWEST, BELOW))
        raise MissingDependency(
            f"{asked} needs torchao {low} or later, below {high}; {found} is installed. Install it: {GET_IT}; or "
            f"use {others}, which need no package."
        )
    return float8


def _config(float8: Any, recipe: str, **changes: Any) -> Any:
    config = float8.Float8LinearConfig.from_recipe_name(NAMES[recipe])
    changes = {key: value for key, value in changes.items() if value}
    return replace(config, **changes) if changes else config
