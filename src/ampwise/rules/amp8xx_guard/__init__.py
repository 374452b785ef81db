"""Guarded runs: what needs your attention."""
