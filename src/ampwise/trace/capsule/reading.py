"""Read a capsule. It is untrusted: nothing in it is run, and a damaged or changed capsule is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.strict_json import loads
from ampwise.finding.terminal import printable
from ampwise.runs.files import open_regular
from ampwise.runs.findings_json import read_findings
from ampwise.runs.tensor_files import read_tensors
from ampwise.trace.capsule.build_arguments import checked_arguments
from ampwise.trace.capsule.contents import CapsuleContents
from ampwise.trace.capsule.layout import BATCH, CHECKSUM, FORMAT, MAX_METADATA_BYTES, METADATA, VERSION, WEIGHTS
from ampwise.trace.capsule.packing import Unpacker

__all__ = ["read"]

NAMES = (
    "args", "build", "build_args", "device", "environment", "evaluating", "findings", "kwargs", "loss", "model",
    "policy", "precision", "random", "rank", "scale", "step",
)  # fmt: skip
SHOWN = 3  # capsules to name if the folder only contains capsules
CHANGED = "has the wrong checksum: it was changed or damaged after it was written, and is not used."


def read(folder: str | Path, where: Callable[[str], torch.device] | None = None) -> CapsuleContents:
    """Read a capsule; BadInput, in one line, if it is not one, is damaged, or was changed.

    where: returns the device for tensors that were on the device that ran the step, given its type, such as "cuda".
    Without it, and for all other tensors, the device is the CPU.
    """
    home = Path(folder)
    facts = _facts(home)
    device = torch.device("cpu") if where is None else where(str(facts.get("device"))[:40])
    tensors, stored = _tensors(home, facts)
    try:
        return _contents(facts, tensors, stored, device)
    except ValueError as error:
        raise BadInput(f"{home}: {METADATA} is damaged: {printable(str(error)[:200]).rstrip('.')}.") from error


# --- the facts -----------------------------------------------------------------------------------------------------


def _facts(home: Path) -> dict[str, Any]:
    if not home.is_dir():
        what = "expected a capsule, which is a folder; got a file" if home.exists() else "there is no such folder"
        raise BadInput(f"{home}: {what}.")
    if not (home / METADATA).exists():
        raise BadInput(f"{home} is not a capsule: it has no {METADATA}.{_hint(home)}")
    data = _bytes(home, METADATA, MAX_METADATA_BYTES)
    try:
        facts = loads(data)
    except ValueError as error:
        raise BadInput(f"{home}: {METADATA} is damaged: {printable(str(error)[:200])}.") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadInput(f"{home} is not a capsule: {METADATA} has another format.")
    if facts.get("version") != VERSION:
        raise BadInput(
            f"{home} is a capsule of version {str(facts.get('version'))[:20]!r}; this ampwise reads version {VERSION}. "
            "Use the version of ampwise that wrote it."
        )
    words = _bytes(home, CHECKSUM, 1000).split()
    if not words or words[0] != hashlib.sha256(data).hexdigest().encode():
        raise BadInput(f"{home}: {METADATA} {CHANGED}")
    return facts


def _bytes(home: Path, name: str, largest: int) -> bytes:
    try:
        with open_regular(home / name, os.O_RDONLY, "rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise BadInput(f"{home}: {name} cannot be read: {error.strerror or error}.") from error
    if len(data) > largest:
        raise BadInput(f"{home}: {name} has more than {largest:,} bytes, the limit for this file.")
    return data


def _hint(home: Path) -> str:
    """Return a hint with the capsules in the folder, if there are any."""
    try:
        names = sorted(
            path.name
            for path in home.iterdir()
            if not path.name.startswith(".") and not path.is_symlink() and (path / METADATA).exists()
        )
    except OSError:
        return ""
    more = ", …" if len(names) > SHOWN else ""
    return f" Give one of the capsules in it: {', '.join(map(ascii, names[:SHOWN]))}{more}." if names else ""


# --- the tensors ---------------------------------------------------------------------------------------------------


def _tensors(home: Path, facts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read the tensors of the step's inputs, and those of the model."""
    files, expected = facts.get("files"), {BATCH} if facts.get("model") is None else {BATCH, WEIGHTS}
    if not isinstance(files, dict) or set(files) != expected:
        raise BadInput(f"{home}: {METADATA} is damaged: it must list the files {' and '.join(sorted(expected))}.")
    found = {name: _checked_tensors(home, name, files[name]) for name in sorted(expected)}
    return found[BATCH], found.get(WEIGHTS, {})


def _checked_tensors(home: Path, name: str, sums: Any) -> dict[str, Tensor]:
    if not isinstance(sums, dict) or set(sums) != {"bytes", "sha256"}:
        raise BadInput(f"{home}: {METADATA} is damaged: {name} has no checksum.")
    path = home / name
    if path.exists() and path.stat().st_size != sums["bytes"]:
        raise BadInput(
            f"{home}: {name} has {path.stat().st_size:,} bytes, expected {str(sums['bytes'])[:40]}: it was truncated "
            "or changed."
        )
    try:
        read = read_tensors(path)
    except BadInput as error:
        raise BadInput(f"{home}: {error}") from error
    if read.sha256 != sums["sha256"]:
        raise BadInput(f"{home}: {name} {CHANGED}")
    return read.tensors


# --- the contents --------------------------------------------------------------------------------------------------


def _contents(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], device: torch.device
) -> CapsuleContents:
    """Build the contents from the facts and tensors; ValueError for data that ampwise never writes."""
    if missing := [name for name in NAMES if name not in facts]:
        raise ValueError(f"{missing[0]!r} is missing")
    unpacker = Unpacker(tensors, device)
    unpacked = {name: unpacker.unpack(facts[name]) for name in ("loss", "scale", "random", "policy", "environment")}
    model = {"weights": {}, "buffers": {}} if facts["model"] is None else _checked(dict, facts["model"], "model")
    return CapsuleContents(
        args=tuple(map(unpacker.unpack, _checked(list, facts["args"], "args"))),
        kwargs=_unpacked_by_name(unpacker, facts["kwargs"], "kwargs"),
        random=_optional(dict, unpacked["random"], "random"),
        weights=_placed(model.get("weights"), stored, "weights"),
        buffers=_placed(model.get("buffers"), stored, "buffers"),
        precision=_checked(str, facts["precision"], "precision"),
        policy=_optional(dict, unpacked["policy"], "policy"),
        scale=_checked(float, unpacked["scale"], "scale"),
        step=_optional(int, facts["step"], "step"),
        rank=_checked(int, facts["rank"], "rank"),
        loss=_optional(float, unpacked["loss"], "loss"),
        build=_optional(str, facts["build"], "build"),
        build_args=checked_arguments(_unpacked_by_name(unpacker, facts["build_args"], "build_args")),
        findings=[counted.finding for counted in read_findings(facts["findings"])[0]],
        device=_checked(str, facts["device"], "device"),
        evaluating=None if facts["evaluating"] is None else _names(facts["evaluating"], "evaluating"),
        environment=_checked(dict, unpacked["environment"], "environment"),
    )


def _unpacked_by_name(unpacker: Unpacker, values: Any, name: str) -> dict[str, Any]:
    return {key: unpacker.unpack(value) for key, value in _checked(dict, values, name).items()}


def _placed(places: Any, stored: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return a model's tensors by name, from the names that they have in the file."""
    found = {}
    for key, place in _checked(dict, places, name).items():
        if not isinstance(place, str) or place not in stored:
            raise ValueError(f"{name}: the tensor {str(place)[:80]!r} is missing")
        found[key] = stored[place]
    return found


def _names(values: Any, name: str) -> tuple[str, ...]:
    return tuple(_checked(str, value, name) for value in _checked(list, values, name))


def _optional(kind: type, value: Any, name: str) -> Any:
    return None if value is None else _checked(kind, value, name)


def _checked(kind: type, value: Any, name: str) -> Any:
    """Return the value if it has this type; integers must also be non-negative and fit into 64 bits."""
    is_number = kind is int and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not (is_number if kind is int else isinstance(value, kind)):
        raise ValueError(f"{name}: expected {kind.__name__}, got {str(value)[:40]!r}")
    return value
