"""Optimizers by name: torch's, and torchao's with 8 or 4 bits of state; and which of them keep small updates."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput, MissingDependency, UnknownName

__all__ = [
    "OPTIMIZER_NAMES",
    "PROTECTED_OPTIMIZERS",
    "QUANTIZED_OPTIMIZERS",
    "QuantizedMoments",
    "has_stochastic_rounding",
    "keeps_small_updates",
    "make_optimizer",
]

TORCH_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
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

# Moments of smaller tensors, or of those that are not a multiple of a block, are not quantized by torchao.
MIN_QUANTIZED_ELEMENTS = 4096
FP32_BYTES = 4  # of a scale, and of an entry of a lookup table

PROTECTED_OPTIMIZERS: WeakSet[Any] = WeakSet()  # optimizers whose updates ampwise rounds itself ("bf16-pure")


def make_optimizer(name: str, parameters: Module | Iterable[Any], **options: Any) -> Optimizer:
    """Create an optimizer by name: "adamw", "adam", "sgd", "adafactor", "muon"; "adamw8bit", "adamw4bit", "adamwfp8".

    "muon" takes matrices only, and needs torch 2.9. The last three, and "adam8bit", "adam4bit", "adamfp8", are
    torchao's: two moments in 8 or 4 bits instead of 32 each. On a GPU, torch's optimizers are fused.

    Args:
        name: one of those.
        parameters: a model, or what torch's optimizers take.
        **options: the optimizer's own, such as ``lr``.

    Returns:
        the optimizer.

    Raises:
        UnknownName: no optimizer of that name.
        BadInput: no parameters, or some that the optimizer does not take.
        MissingDependency: it is torchao's, which is not installed, or this version of torch lacks it.

    >>> import ampwise
    >>> model = torch.nn.Linear(4, 4)
    >>> ampwise.make_optimizer("adamw", model, lr=3e-4).defaults["lr"]
    0.0003
    """
    kind = _kind(name)
    trained = list(parameters.parameters() if isinstance(parameters, Module) else parameters)
    if not trained:
        raise BadInput(f"make_optimizer({name!r}): expected at least one parameter.")
    every = [each for entry in trained for each in (entry["params"] if isinstance(entry, dict) else [entry])]
    every = [each[1] if isinstance(each, tuple) else each for each in every]  # with names
    others = [each for each in every if name == "muon" and isinstance(each, Tensor) and each.dim() != 2]
    if others:
        raise BadInput(
            f"make_optimizer('muon'): expected matrices; {len(others)} of {len(every)} parameters are none, such as "
            f"one of shape {tuple(others[0].shape)}. Give it those with .dim() == 2 (without embeddings and the "
            "output layer), and another optimizer the others: Engine(model, [muon, adamw])."
        )
    has_fused = "fused" in inspect.signature(kind).parameters
    if has_fused and all(isinstance(each, Tensor) and each.is_cuda for each in every):
        options = {"fused": True, **options}
    try:
        made: Optimizer = kind(trained, **options)
    except TypeError as error:
        raise BadInput(f"make_optimizer({name!r}): {error}. The options are those of {kind.__name__}.") from None
    return made


def _kind(name: Any) -> Any:
    if name in TORCH_OPTIMIZERS:
        if not hasattr(torch.optim, TORCH_OPTIMIZERS[name]):
            raise MissingDependency(f"optimizer {name!r} is torch's, and torch {torch.__version__} lacks it.")
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
    try:
        return f"torchao {version('torchao')}"
    except PackageNotFoundError:
        return None


def has_stochastic_rounding(optimizer: Any) -> bool:
    """Return whether it has stochastic rounding of its own for BF16 weights, as torchao's optimizers have."""
    return hasattr(optimizer, "bf16_stochastic_round")


def keeps_small_updates(optimizer: Any) -> bool:
    """Return whether an update of less than half a BF16 step has an effect, at once or on average."""
    # By identity: an optimizer may define __eq__.
    return any(each is optimizer for each in PROTECTED_OPTIMIZERS) or bool(
        getattr(optimizer, "bf16_stochastic_round", False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMoments:
    """How torchao quantizes an optimizer's two moments, according to its source.

    >>> QUANTIZED_OPTIMIZERS["adamw8bit"].moment_bytes(2**20, 4) / 2**20
    1.0166015625
    """

    bits: int
    block: int  # elements that share a scale
    table: int  # entries of the lookup table per tensor; 0 if codes are floating-point numbers

    def codes(self, elements: int) -> bool:
        """Return whether the moments of a tensor with this many elements are quantized."""
        return elements >= MIN_QUANTIZED_ELEMENTS and elements % self.block == 0

    def moment_bytes(self, elements: int, weight_bytes: int) -> int:
        """Return the bytes of one moment of a tensor with ``weight_bytes`` per element."""
        if not self.codes(elements):
            return elements * weight_bytes
        codes = elements * self.bits // 8
        return codes + (elements // self.block + self.table) * FP32_BYTES

    @property
    def text(self) -> str:
        """Description in words."""
        return (
            f"two moments of {self.bits} bits, and a scale for every {self.block} of them; in the weights' dtype for "
            f"tensors of fewer than {MIN_QUANTIZED_ELEMENTS} elements, or not a multiple of {self.block}"
        )


QUANTIZED_OPTIMIZERS = {
    "adamw8bit": QuantizedMoments(bits=8, block=256, table=256),
    "adamw4bit": QuantizedMoments(bits=4, block=128, table=16),
    "adamwfp8": QuantizedMoments(bits=8, block=256, table=0),
}
