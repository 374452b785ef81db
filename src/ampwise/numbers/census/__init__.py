"""Counts of a tensor's values by power of two: the queries (without torch), and counting on CPU and GPU."""

from __future__ import annotations

from ampwise.numbers.census.algebra import Census, Count

__all__ = ["Census", "Count"]
