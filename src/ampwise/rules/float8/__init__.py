"""Layers that run in FP8: what their scales lose."""
