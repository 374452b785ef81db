"""Linear layers whose matmuls run in FP8: which layers, with which scales, by which backend."""

from __future__ import annotations

from ampwise.train.float8.recipe import Fp8

__all__ = ["Fp8"]
