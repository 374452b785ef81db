"""Which precision, and why: hardware first, then the model, then what goes wrong, then measurement.

Nothing here needs torch but to look at a model or at this machine.
"""

from __future__ import annotations

from ampwise.tune.advise.asking import advise

__all__ = ["advise"]
