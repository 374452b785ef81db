"""FP8: values that its layers lose."""
