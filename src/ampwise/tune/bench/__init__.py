"""Benchmark one training step in several precisions: is the loss the same, how fast is it, and why not faster."""
