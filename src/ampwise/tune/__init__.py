"""Choose a precision by measuring: advise, bench, memory, align, diff, search; and the classes of what they return."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.tune.advise.advice import Advice as Advice
    from ampwise.tune.align.padding_plan import Padding as Padding
    from ampwise.tune.align.result import Alignment as Alignment
    from ampwise.tune.bench.result import BenchResult as BenchResult
    from ampwise.tune.diff.result import Difference as Difference
    from ampwise.tune.memory.result import MemoryEstimate as MemoryEstimate
    from ampwise.tune.search.result import SearchResult as SearchResult

_HOMES = {
    "Advice": "advise.advice",
    "Alignment": "align.result",
    "BenchResult": "bench.result",
    "Difference": "diff.result",
    "MemoryEstimate": "memory.result",
    "Padding": "align.padding_plan",
    "SearchResult": "search.result",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ampwise.tune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ampwise.tune.{_HOMES[name]}"), name)
