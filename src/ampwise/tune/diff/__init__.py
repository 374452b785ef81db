"""Compare a training step on two sides, module by module: what a precision, a kernel or a device changes."""
