"""File and folder names of checkpoints, and size limits."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

__all__ = [
    "CHECKPOINT_FILE",
    "FOLDER",
    "FORMAT",
    "LARGEST_MANIFEST",
    "LARGEST_MARK",
    "LARGEST_PLAIN",
    "LEFTOVER",
    "LOCK",
    "MANIFEST",
    "MARK",
    "MOST_PARTS",
    "MOST_RANKS",
    "RANK_FILE",
    "SEAL",
    "VERSION",
    "folder_name",
    "plain_file",
    "temporary_folder",
    "tensors_file",
]

FORMAT = "ampwise-checkpoint"
VERSION = 2  # version 1 had no non-persistent buffers, and nested names could collide
MANIFEST = "checkpoint.json"  # files, their sizes and checksums, and where each tensor is; written last
SEAL = "checkpoint.sha256"  # checksum of the manifest, in the format of sha256sum
MARK = "mark.json"  # added later: good, or not to be resumed
LOCK = "lock"  # next to the checkpoints: the run that writes here

LARGEST_MANIFEST = 64_000_000  # bytes; a model of a few hundred tensors takes about 100,000
LARGEST_PLAIN = 64_000_000
MOST_PARTS = 3_000_000  # lists and objects in either file: in memory they take many times their bytes
LARGEST_MARK = 10_000
MOST_RANKS = 100_000

FOLDER = re.compile(r"step-([0-9]{8,18})(?:-[0-9]{1,6})?")
LEFTOVER = re.compile(r"\.step-[0-9]{8,18}\.[0-9a-f]{8}\.(?:new|old)")
RANK_FILE = re.compile(r"tensors-[0-9]{5}\.safetensors|plain-[0-9]{5}\.json")
# Files that may be removed with a checkpoint; .new: its process was killed while writing it.
CHECKPOINT_FILE = re.compile(
    rf"(?:{RANK_FILE.pattern}|{re.escape(MANIFEST)}|{re.escape(SEAL)}|{re.escape(MARK)})(?:\.new)?"
)


def folder_name(step: int, attempt: int = 1) -> str:
    """Return the folder name of a checkpoint; a step that is repeated after a rollback has several attempts.

    >>> folder_name(100), folder_name(100, 2)
    ('step-00000100', 'step-00000100-2')
    """
    return f"step-{step:08d}" if attempt == 1 else f"step-{step:08d}-{attempt}"


def temporary_folder(directory: Path, step: int, ending: str) -> Path:
    """Return a temporary folder name: ending ``new`` for a checkpoint being written, ``old`` for one being removed."""
    return directory / f".{folder_name(step)}.{secrets.token_hex(4)}.{ending}"


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def plain_file(rank: int) -> str:
    return f"plain-{rank:05d}.json"
