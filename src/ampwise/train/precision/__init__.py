"""Training precisions: what each means, which ones a device can run, and torch's TF32 settings."""
