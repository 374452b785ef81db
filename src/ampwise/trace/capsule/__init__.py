"""A bad step on disk, to be run again elsewhere: plain data and tensors in a folder, and no code.

``contents`` is what a capsule holds; ``tree`` turns what a function was given into plain data and tensors, and back;
``layout`` names the files; ``writing`` and ``reading`` are the two ways. ``building`` calls the function that makes the
model, and ``rerunning`` runs the step again.
"""

from ampwise.trace.capsule.contents import Contents
from ampwise.trace.capsule.reading import read
from ampwise.trace.capsule.writing import next_path, size_of, write

__all__ = ["Contents", "next_path", "read", "size_of", "write"]
