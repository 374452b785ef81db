"""Which files a capsule is made of."""

from __future__ import annotations

__all__ = ["BATCH", "FACTS", "FORMAT", "LARGEST_FACTS", "SEAL", "VERSION", "WEIGHTS"]

FORMAT = "ampwise-capsule"
VERSION = 1
FACTS = "capsule.json"  # all but tensors, and the checksums of the files that hold these
SEAL = "capsule.sha256"  # the checksum of capsule.json, as sha256sum writes and checks it
BATCH = "tensors.safetensors"  # what the step was given, and the state of random numbers
WEIGHTS = "weights.safetensors"  # weights and buffers; not there without weights
LARGEST_FACTS = 16_000_000  # bytes; a real one has some thousands
