"""Hugging Face integration: ``AmpwiseCallback()``, a Trainer callback that watches the training."""

from __future__ import annotations

from ampwise.integrations.transformers_callback import AmpwiseCallback

__all__ = ["AmpwiseCallback"]
