"""Linear layers whose products run in FP8: which layers, with which scales, by whose kernels."""

from __future__ import annotations

from ampwise.float8.recipe import Fp8

__all__ = ["Fp8"]
