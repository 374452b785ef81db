"""For Hugging Face's Trainer: ``AmpwiseCallback()``, which watches it."""

from __future__ import annotations

from ampwise.integrations.transformers_callback import AmpwiseCallback

__all__ = ["AmpwiseCallback"]
