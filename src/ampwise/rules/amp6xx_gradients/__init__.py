"""Gradients and loss scale of a run."""
