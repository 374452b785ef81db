"""Shapes of popular models, and gradients that resemble theirs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["GPT2_124M", "GPT_1_3B", "GPT_20M", "gradients_like"]


def _gpt(layers: int, width: int, vocabulary: int = 50304, context: int = 1024) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocabulary, width), "wpe": (context, width)}
    for layer in range(layers):
        for name, inputs, outputs in (
            ("attention", width, 3 * width), ("projection", width, width),
            ("expand", width, 4 * width), ("contract", 4 * width, width),
        ):  # fmt: skip
            shapes[f"h.{layer}.{name}.weight"] = (outputs, inputs)
            shapes[f"h.{layer}.{name}.bias"] = (outputs,)
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = (width,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


GPT_20M = _gpt(layers=6, width=512, vocabulary=256, context=256)
GPT2_124M = _gpt(layers=12, width=768)
GPT_1_3B = _gpt(layers=24, width=2048)


def gradients_like(
    shapes: dict[str, tuple[int, ...]], device: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random gradients: each tensor on its own scale, tails heavier than normal, unused embedding rows zero."""
    generator = torch.Generator(device).manual_seed(0)
    gradients = {}
    for index, (name, shape) in enumerate(shapes.items()):
        scale = 10.0 ** -(3 + 4 * math.sin(index) ** 2)
        values = torch.randn(shape, device=device, generator=generator)
        values *= torch.randn(shape, device=device, generator=generator).abs() * scale
        if name == "wte":
            values[torch.rand(shape[0], device=device, generator=generator) < 0.6] = 0.0
        gradients[name] = values.to(dtype)
    return gradients
