"""Differences between two precisions, found by `ampwise diff`."""
