"""Linear layers whose matmuls run in FP8: which layers, with which scales, by which backend."""
