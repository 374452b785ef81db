"""Optimizers by name: torch's, and torchao's with 8 or 4 bits of state."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput, MissingDependency, UnknownName

__all__ = ["OPTIMIZER_NAMES", "make_optimizer"]

TORCH_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
TORCHAO_OPTIMIZERS = {
    "adamw8bit": "AdamW8bit",
    "adamw4bit": "AdamW4bit",
    "adamwfp8": "AdamWFp8",
    "adam8bit": "Adam8bit",
    "adam4bit": "Adam4bit",
    "adamfp8": "AdamFp8",
}
OPTIMIZER_NAMES = (*TORCH_OPTIMIZERS, *TORCHAO_OPTIMIZERS)
GET_TORCHAO = "pip install 'ampwise[fp8]'"


def make_optimizer(name: str, parameters: Module | Iterable[Any], **options: Any) -> Optimizer:
    """Create an optimizer by name: "adamw", "adam", "sgd", "adafactor"; "adamw8bit", "adamw4bit", "adamwfp8".

    The last three, and "adam8bit", "adam4bit", "adamfp8", are torchao's: two moments in 8 or 4 bits instead of 32 each.
    ``parameters`` is a model, or what torch's optimizers take; options are the optimizer's own. On a GPU, torch's
    optimizers are fused.

    >>> import ampwise
    >>> model = torch.nn.Linear(4, 4)
    >>> ampwise.make_optimizer("adamw", model, lr=3e-4).defaults["lr"]
    0.0003
    """
    kind = _kind(name)
    trained = list(parameters.parameters() if isinstance(parameters, Module) else parameters)
    if not trained:
        raise BadInput(f"make_optimizer({name!r}): expected at least one parameter.")
    if "fused" in inspect.signature(kind).parameters and _all_on_cuda(trained):
        options = {"fused": True, **options}
    try:
        made: Optimizer = kind(trained, **options)
    except TypeError as error:
        raise BadInput(f"make_optimizer({name!r}): {error}. The options are those of {kind.__name__}.") from None
    return made


def _kind(name: Any) -> Any:
    if name in TORCH_OPTIMIZERS:
        return getattr(torch.optim, TORCH_OPTIMIZERS[name])
    if name not in TORCHAO_OPTIMIZERS:
        raise UnknownName(
            "optimizer", str(name), OPTIMIZER_NAMES, listing=f"The optimizers are {', '.join(OPTIMIZER_NAMES)}."
        )
    try:
        return getattr(importlib.import_module("torchao.optim"), TORCHAO_OPTIMIZERS[name])
    except ImportError as error:
        missing = _version() is None
        reason = "which is not installed" if missing else f"and {_version()} lacks it or does not load"
        raise MissingDependency(f"optimizer {name!r} is torchao's, {reason} ({error}): {GET_TORCHAO}") from error
    except AttributeError as error:
        raise MissingDependency(
            f"optimizer {name!r} is torchao's, and {_version()} has no {TORCHAO_OPTIMIZERS[name]}: "
            f"{GET_TORCHAO} --upgrade"
        ) from error


def _version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"torchao {version('torchao')}"
    except PackageNotFoundError:
        return None


def _all_on_cuda(trained: Iterable[Any]) -> bool:
    every = [each for entry in trained for each in (entry["params"] if isinstance(entry, dict) else [entry])]
    every = [each[1] if isinstance(each, tuple) else each for each in every]  # with names
    return all(isinstance(each, Tensor) and each.is_cuda for each in every)
