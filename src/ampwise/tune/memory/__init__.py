"""Predict how much memory a training step takes, without allocating it."""
