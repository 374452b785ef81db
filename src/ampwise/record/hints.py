"""Which record is meant by a path; and where it holds none, what it is instead, as far as names tell."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ampwise.record.files import ASIDE, read_json
from ampwise.record.layout import LARGEST_MANIFEST, MANIFEST, is_record

__all__ = ["newest_record", "records_in", "why_not_a_record"]

MOST_NAMES = 10_000  # in a folder that is no record: enough to see what it is

# How the files of other tools are called, and what one does about it.
LOOKS = {
    "a log of TensorBoard; ampwise may write one, and reads its own records only": ("events.out.tfevents",),
    "a log of Weights & Biases; ampwise may write one, and reads its own records only": ("wandb", ".wandb"),
    "a log of MLflow; ampwise may write one, and reads its own records only": ("mlruns", "meta.yaml"),
    "an archive; unpack it, and name the folder": (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "a checkpoint, which says nothing of how it was trained": (".pt", ".pth", ".ckpt", ".safetensors", ".bin"),
}


def records_in(folder: Path) -> list[Path]:
    """The records that lie side by side in a folder, the newest first: by when each began, then by name."""
    found = [folder / name for name in _names(folder) if is_record(folder / name)]
    return sorted(found, key=_age, reverse=True)


def newest_record(folder: Path) -> Path | None:
    """The record in a folder of records that began last; None where there is none."""
    return next(iter(records_in(folder)), None)


def why_not_a_record(path: Path) -> str:
    """A sentence more about a path that holds no record that can be read; empty where nobody can tell."""
    if is_record(path):
        return ""  # one that cannot be read, and the error has said why
    if path.is_file():
        return f"The record is its folder, {path.parent}." if is_record(path.parent) else _named_like([path.name])
    records = records_in(path)
    if records:
        many = f"{len(records):,} records are" if len(records) > 1 else "A record is"
        return f"{many} in it: `ampwise report {records[0]}` shows the newest."
    names = _names(path)
    if MANIFEST + ASIDE in names and MANIFEST not in names:
        return "A run is about to write one here: ask again in a moment."
    # Not resolved: a link that leads to itself has a name, too.
    return _named_like([os.path.basename(os.path.abspath(path)), *names])  # noqa: PTH100, PTH119


def _age(folder: Path) -> tuple[str, str]:
    """When it began, which all records write in the same form, in UTC: a copy of a record is no newer for it."""
    try:
        created = read_json(folder / MANIFEST, LARGEST_MANIFEST).get("created")
    except (OSError, ValueError):  # it was there a moment ago
        created = None
    return (created if isinstance(created, str) else "", folder.name)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in itertools.islice(folder.iterdir(), MOST_NAMES)]
    except OSError:
        return []


def _named_like(names: list[str]) -> str:
    for what, marks in LOOKS.items():
        if any(_has_mark(name.lower(), mark) for name in names for mark in marks):
            return f"It looks like {what}."
    return ""


def _has_mark(name: str, mark: str) -> bool:
    return name.endswith(mark) if mark.startswith(".") else name == mark or name.startswith(f"{mark}.")
