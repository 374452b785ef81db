"""Capsules: a bad step saved to a folder as plain data and tensors, without code, to be replayed elsewhere.

``contents`` is what a capsule holds; ``packing`` converts a function's arguments to plain data and tensors, and back;
``layout`` names the files; ``writing`` and ``reading`` write and read them. ``builder`` calls the user's function that
builds the model, and ``capsule_replay`` replays the step. ``saving`` saves bad steps of an Engine.
"""

from ampwise.trace.capsule.contents import CapsuleContents
from ampwise.trace.capsule.reading import read
from ampwise.trace.capsule.writing import next_path, size_of, write

__all__ = ["CapsuleContents", "next_path", "read", "size_of", "write"]
