"""The same training step in several precisions: is it the same computation, how fast is it, and why not faster."""
