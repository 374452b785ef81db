"""What a tensor holds, counted by powers of two: the algebra (no torch), and measuring on CPU and GPU.

The room can be called, as the function ``ampwise.census`` whose name it shares: ``help(ampwise.census.census)``.
"""

from __future__ import annotations

from ampwise.census.algebra import Census
from ampwise.census.count import Count
from ampwise.rooms import share_name

__all__ = ["Census", "Count"]

share_name(__name__, "DeviceCensus")
