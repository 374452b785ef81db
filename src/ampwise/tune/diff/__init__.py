"""A training step on two sides, compared module by module: what a precision, a kernel or a device changes."""
