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
from ampwise.trace.capsule.arguments import checked_arguments
from ampwise.trace.capsule.contents import Contents
from ampwise.trace.capsule.layout import BATCH, FACTS, FORMAT, LARGEST_FACTS, SEAL, VERSION, WEIGHTS
from ampwise.trace.capsule.tree import Unpacker

__all__ = ["read"]

NAMES = (
    "args", "build", "build_args", "device", "environment", "evaluating", "findings", "kwargs", "loss", "model",
    "policy", "precision", "random", "rank", "scale", "step",
)  # fmt: skip
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
    except ValueError as error:
        raise BadInput(f"{home}: {FACTS} is damaged: {printable(str(error)[:200]).rstrip('.')}.") from error


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
    except ValueError as error:
        raise BadInput(f"{home}: {FACTS} is damaged: {printable(str(error)[:200])}.") from error
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
            path.name
            for path in home.iterdir()
            if not path.name.startswith(".") and not path.is_symlink() and (path / FACTS).exists()
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
            f"{home}: {name} has {path.stat().st_size:,} bytes, not {str(sums['bytes'])[:40]}: it was cut off or "
            "changed."
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
    """ValueError, which says what it is about, for what no ampwise wrote."""
    if missing := [name for name in NAMES if name not in facts]:
        raise ValueError(f"{missing[0]!r} is missing")
    unpacker = Unpacker(tensors, device)
    unpacked = {name: unpacker.unpack(facts[name]) for name in ("loss", "scale", "random", "policy", "environment")}
    model = {"weights": {}, "buffers": {}} if facts["model"] is None else _a(dict, facts["model"], "model")
    return Contents(
        args=tuple(map(unpacker.unpack, _a(list, facts["args"], "args"))),
        kwargs=_unpacked_by_name(unpacker, facts["kwargs"], "kwargs"),
        random=_optional(dict, unpacked["random"], "random"),
        weights=_placed(model.get("weights"), stored, "weights"),
        buffers=_placed(model.get("buffers"), stored, "buffers"),
        precision=_a(str, facts["precision"], "precision"),
        policy=_optional(dict, unpacked["policy"], "policy"),
        scale=_a(float, unpacked["scale"], "scale"),
        step=_optional(int, facts["step"], "step"),
        rank=_a(int, facts["rank"], "rank"),
        loss=_optional(float, unpacked["loss"], "loss"),
        build=_optional(str, facts["build"], "build"),
        build_args=checked_arguments(_unpacked_by_name(unpacker, facts["build_args"], "build_args")),
        findings=[seen.finding for seen in read_findings(facts["findings"])[0]],
        device=_a(str, facts["device"], "device"),
        evaluating=None if facts["evaluating"] is None else _names(facts["evaluating"], "evaluating"),
        environment=_a(dict, unpacked["environment"], "environment"),
    )


def _unpacked_by_name(unpacker: Unpacker, values: Any, name: str) -> dict[str, Any]:
    return {key: unpacker.unpack(value) for key, value in _a(dict, values, name).items()}


def _placed(places: Any, stored: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of a model by name, from where the file has them."""
    found = {}
    for key, place in _a(dict, places, name).items():
        if not isinstance(place, str) or place not in stored:
            raise ValueError(f"{name}: the tensor {str(place)[:80]!r} is missing")
        found[key] = stored[place]
    return found


def _names(values: Any, name: str) -> tuple[str, ...]:
    return tuple(_a(str, value, name) for value in _a(list, values, name))


def _optional(kind: type, value: Any, name: str) -> Any:
    return None if value is None else _a(kind, value, name)


def _a(kind: type, value: Any, name: str) -> Any:
    """The value, which is of this kind; and where that is a number, one that fits into 64 bits."""
    is_number = kind is int and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not (is_number if kind is int else isinstance(value, kind)):
        raise ValueError(f"{name}: {str(value)[:40]!r} is there instead of a {kind.__name__}")
    return value
