"""Which names a folder of checkpoints has, and which files a checkpoint is made of."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

__all__ = [
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
    "OF_A_RANK",
    "OURS",
    "SEAL",
    "VERSION",
    "aside",
    "folder_name",
    "plain_file",
    "tensors_file",
]

FORMAT = "ampwise-checkpoint"
VERSION = 2  # 1: without buffers that are not persistent, and nested names that could collide
MANIFEST = "checkpoint.json"  # written last: which files, how long, with which sums, and where each tensor lies
SEAL = "checkpoint.sha256"  # the checksum of the manifest, as sha256sum writes and checks it
MARK = "mark.json"  # added later: good, or not to be resumed from
LOCK = "lock"  # beside the checkpoints: the run that writes here

LARGEST_MANIFEST = 64_000_000  # bytes; that of a model of some hundred tensors has a hundred thousand
LARGEST_PLAIN = 64_000_000
MOST_PARTS = 3_000_000  # lists and objects in either: what they take in memory is many times their bytes
LARGEST_MARK = 10_000
MOST_RANKS = 100_000

FOLDER = re.compile(r"step-([0-9]{8,18})(?:-[0-9]{1,6})?")
LEFTOVER = re.compile(r"\.step-[0-9]{8,18}\.[0-9a-f]{8}\.(?:new|old)")
OF_A_RANK = re.compile(r"tensors-[0-9]{5}\.safetensors|plain-[0-9]{5}\.json")
# What may be removed with a checkpoint; a file that was being written when its process was killed ends in .new.
OURS = re.compile(rf"(?:{OF_A_RANK.pattern}|{re.escape(MANIFEST)}|{re.escape(SEAL)}|{re.escape(MARK)})(?:\.new)?")


def folder_name(step: int, attempt: int = 1) -> str:
    """The name of a checkpoint; a step that was gone through again, after a rollback, has several attempts.

    >>> folder_name(100), folder_name(100, 2)
    ('step-00000100', 'step-00000100-2')
    """
    return f"step-{step:08d}" if attempt == 1 else f"step-{step:08d}-{attempt}"


def aside(directory: Path, step: int, ending: str) -> Path:
    """A new name beside the checkpoints: ``new`` for one that is not whole yet, ``old`` for one being removed."""
    return directory / f".{folder_name(step)}.{secrets.token_hex(4)}.{ending}"


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def plain_file(rank: int) -> str:
    return f"plain-{rank:05d}.json"
