"""Find the record at a path; if there is none, guess from file names what is there instead."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ampwise.runs.files import TEMPORARY_SUFFIX, read_json
from ampwise.runs.layout import LARGEST_MANIFEST, MANIFEST, is_record

__all__ = ["newest_record", "records_in", "why_not_a_record"]

MOST_NAMES = 10_000  # read from a folder that is not a record

# Descriptions, and the file names of other tools that they apply to.
OTHER_TOOLS = {
    "a TensorBoard log, which ampwise can write but not read": ("events.out.tfevents",),
    "a Weights & Biases log, which ampwise can write but not read": ("wandb", ".wandb"),
    "an MLflow log, which ampwise can write but not read": ("mlruns", "meta.yaml"),
    "an archive; unpack it, and name the folder": (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "a checkpoint, which is not a record of the run": (".pt", ".pth", ".ckpt", ".safetensors", ".bin"),
}


def records_in(folder: Path) -> list[Path]:
    """Return the records in a folder, newest first: by start time, then by name."""
    found = [folder / name for name in _names(folder) if is_record(folder / name)]
    return sorted(found, key=_age, reverse=True)


def newest_record(folder: Path) -> Path | None:
    """Return the record in a folder that started last; None if there is none."""
    return next(iter(records_in(folder)), None)


def why_not_a_record(path: Path) -> str:
    """Return a sentence about what is at a path that is not a readable record; empty if unknown."""
    if is_record(path):
        return ""  # the error already says why it cannot be read
    if path.is_file():
        return f"The record is its folder, {path.parent}." if is_record(path.parent) else _named_like([path.name])
    records = records_in(path)
    if records:
        many = f"{len(records):,} records" if len(records) > 1 else "a record"
        return f"It contains {many}: `ampwise report {records[0]}` shows the newest."
    names = _names(path)
    if MANIFEST + TEMPORARY_SUFFIX in names and MANIFEST not in names:
        return "A run is about to write a record here: try again in a moment."
    # Not resolved, because a link may point to itself.
    return _named_like([os.path.basename(os.path.abspath(path)), *names])  # noqa: PTH100, PTH119


def _age(folder: Path) -> tuple[str, str]:
    """Return the start time in the manifest, which all records write in UTC: a copied record does not become newer."""
    try:
        created = read_json(folder / MANIFEST, LARGEST_MANIFEST).get("created")
    except (OSError, ValueError):  # it has just been removed
        created = None
    return (created if isinstance(created, str) else "", folder.name)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in itertools.islice(folder.iterdir(), MOST_NAMES)]
    except OSError:
        return []


def _named_like(names: list[str]) -> str:
    for what, marks in OTHER_TOOLS.items():
        if any(_has_mark(name.lower(), mark) for name in names for mark in marks):
            return f"It looks like {what}."
    return ""


def _has_mark(name: str, mark: str) -> bool:
    return name.endswith(mark) if mark.startswith(".") else name == mark or name.startswith(f"{mark}.")
