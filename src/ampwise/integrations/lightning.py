"""Lightning integration: ``Watch()``, a Trainer callback; ``Precision("fp16")``, a plugin for Trainer and Fabric."""

from __future__ import annotations

from ampwise.integrations.lightning_precision import Precision
from ampwise.integrations.lightning_watch import Watch

__all__ = ["Precision", "Watch"]
