"""For Accelerate: ``mend(accelerator)``, which sets right what goes wrong around its step."""

from __future__ import annotations

from ampwise.integrations.accelerate_mend import mend

__all__ = ["mend"]
