"""A capsule read. It may come from anybody: nothing in it is run, and what is not as it was written is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.printers.terminal import printable
from ampwise.record.files import opened
from ampwise.record.stored import read_findings
from ampwise.strict_json import loads
from ampwise.tensors_on_disk import read_tensors
from ampwise.trace.capsule.contents import Contents
from ampwise.trace.capsule.layout import BATCH, FACTS, FORMAT, LARGEST_FACTS, SEAL, VERSION, WEIGHTS
from ampwise.trace.capsule.tree import Unpacker

__all__ = ["read"]

SHOWN = 3  # capsules in a folder that is none itself
CHANGED = "is not as it was written: its checksum is another. It was changed or damaged, and is not used."


def read(folder: str | Path, where: Callable[[str], torch.device] | None = None) -> Contents:
    """What a capsule holds; BadInput, in a line, where it is none, is damaged, or was changed.

    where: the device for what lay on the one that computed, given the kind that this was, such as "cuda"; without it,
    and for all else, it is the CPU.
    """
    home = Path(folder)
    facts = _facts(home)
    device = torch.device("cpu") if where is None else where(str(facts.get("device"))[:40])
    tensors, stored = _tensors(home, facts)
    try:
        return _contents(facts, tensors, stored, device)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{home}: {FACTS} is damaged: {printable(why[:200])}.") from error


# --- the facts -----------------------------------------------------------------------------------------------------


def _facts(home: Path) -> dict[str, Any]:
    if not home.is_dir():
        what = "is a file, and a capsule is a folder" if home.exists() else "there is no such folder"
        raise BadInput(f"{home}: {what}.")
    if not (home / FACTS).exists():
        raise BadInput(f"{home} is no capsule: it has no {FACTS}.{_hint(home)}")
    data = _bytes(home, FACTS, LARGEST_FACTS)
    try:
        facts = loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{home}: {FACTS} is damaged: {error}.") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadInput(f"{home} is no capsule: {FACTS} is of another kind.")
    if facts.get("version") != VERSION:
        raise BadInput(
            f"{home} is a capsule of version {str(facts.get('version'))[:20]!r}, and this ampwise reads version "
            f"{VERSION}. Another version of ampwise wrote it: use that one."
        )
    words = _bytes(home, SEAL, 1000).split()
    if not words or words[0] != hashlib.sha256(data).hexdigest().encode():
        raise BadInput(f"{home}: {FACTS} {CHANGED}")
    return facts


def _bytes(home: Path, name: str, largest: int) -> bytes:
    try:
        with opened(home / name, os.O_RDONLY, "rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise BadInput(f"{home}: {name} cannot be read: {error.strerror or error}.") from error
    if len(data) > largest:
        raise BadInput(f"{home}: {name} has more than {largest:,} bytes, and none of ours has.")
    return data


def _hint(home: Path) -> str:
    """Whether capsules lie in it."""
    try:
        names = sorted(
            path.name for path in home.iterdir() if not path.name.startswith(".") and (path / FACTS).exists()
        )
    except OSError:
        return ""
    more = ", …" if len(names) > SHOWN else ""
    return f" Name one of those in it: {', '.join(map(ascii, names[:SHOWN]))}{more}." if names else ""


# --- the tensors ---------------------------------------------------------------------------------------------------


def _tensors(home: Path, facts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the step was given, and what the model held."""
    files, expected = facts.get("files"), {BATCH} if facts.get("model") is None else {BATCH, WEIGHTS}
    if not isinstance(files, dict) or set(files) != expected:
        raise BadInput(f"{home}: {FACTS} is damaged: its files are to be {' and '.join(sorted(expected))}.")
    found = {name: _checked_tensors(home, name, files[name]) for name in sorted(expected)}
    return found[BATCH], found.get(WEIGHTS, {})


def _checked_tensors(home: Path, name: str, sums: Any) -> dict[str, Tensor]:
    if not isinstance(sums, dict) or set(sums) != {"bytes", "sha256"}:
        raise BadInput(f"{home}: {FACTS} is damaged: {name} has no checksum.")
    path = home / name
    if path.exists() and path.stat().st_size != sums["bytes"]:
        raise BadInput(
            f"{home}: {name} has {path.stat().st_size:,} bytes, not {sums['bytes']}: it was cut off or changed."
        )
    try:
        read = read_tensors(path)
    except BadInput as error:
        raise BadInput(f"{home}: {error}") from error
    if read.sha256 != sums["sha256"]:
        raise BadInput(f"{home}: {name} {CHANGED}")
    return read.tensors


# --- all together --------------------------------------------------------------------------------------------------


def _contents(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], device: torch.device
) -> Contents:
    unpacker = Unpacker(tensors, device)
    model = {"weights": {}, "buffers": {}} if facts["model"] is None else facts["model"]
    evaluating = facts["evaluating"]
    findings, _ = read_findings(facts["findings"])
    loss, random, policy = (unpacker.unpack(facts[name]) for name in ("loss", "random", "policy"))
    return Contents(
        args=tuple(map(unpacker.unpack, _a(list, facts["args"]))),
        kwargs={name: unpacker.unpack(value) for name, value in _a(dict, facts["kwargs"]).items()},
        random=None if random is None else _a(dict, random),
        weights={name: stored[place] for name, place in model["weights"].items()},
        buffers={name: stored[place] for name, place in model["buffers"].items()},
        precision=_a(str, facts["precision"]),
        policy=None if policy is None else _a(dict, policy),
        scale=float(_a(float, unpacker.unpack(facts["scale"]))),
        step=None if facts["step"] is None else _a(int, facts["step"]),
        rank=_a(int, facts["rank"]),
        loss=None if loss is None else float(loss),
        build=None if facts["build"] is None else _a(str, facts["build"]),
        build_args={name: unpacker.unpack(value) for name, value in _a(dict, facts["build_args"]).items()},
        findings=[seen.finding for seen in findings],
        device=_a(str, facts["device"]),
        evaluating=None if evaluating is None else tuple(_a(list, evaluating)),
        environment=_a(dict, unpacker.unpack(facts["environment"])),
    )


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:40]!r} is there instead of a {kind.__name__}")
    return value
