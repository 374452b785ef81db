"""Capsules: a bad step saved to a folder as plain data and tensors, without code, to be replayed elsewhere.

``capsule_files`` writes and reads them. ``builder`` calls the user's function that builds the model, and
``capsule_replay`` replays the step. ``saving`` saves bad steps of an Engine.
"""

from ampwise.trace.capsule.capsule_files import CapsuleContents, next_path, read, size_of, write

__all__ = ["CapsuleContents", "next_path", "read", "size_of", "write"]
