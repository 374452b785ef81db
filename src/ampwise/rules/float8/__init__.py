"""Rules about FP8 layers: values lost at their scales."""
