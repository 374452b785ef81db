"""Accelerate integration: ``fix(accelerator)`` fixes mixed-precision bugs in an Accelerator's step."""

from __future__ import annotations

from ampwise.integrations.accelerate_fixes import fix

__all__ = ["fix"]
