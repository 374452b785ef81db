"""The files of a capsule."""

from __future__ import annotations

__all__ = ["BATCH", "CHECKSUM", "FORMAT", "MAX_METADATA_BYTES", "METADATA", "VERSION", "WEIGHTS"]

FORMAT = "ampwise-capsule"
VERSION = 1
METADATA = "capsule.json"  # everything but tensors, and the checksums of the tensor files
CHECKSUM = "capsule.sha256"  # checksum of capsule.json, in the format of sha256sum
BATCH = "tensors.safetensors"  # the step's inputs and the random state
WEIGHTS = "weights.safetensors"  # weights and buffers; absent in a capsule without weights
MAX_METADATA_BYTES = 16_000_000  # bytes; a real one has a few thousand
