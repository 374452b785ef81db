"""Capsules on disk: write one to a new folder, and read it. A capsule is untrusted: nothing in it is run.

A folder holds capsule.json with everything but tensors, a checksum of that file, and one or two files of tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.finding import Finding
from ampwise.finding.strict_json import dumps, loads, refuse_many
from ampwise.finding.terminal import printable
from ampwise.finding.version import installed_version
from ampwise.runs.files import open_regular, write_atomically
from ampwise.runs.findings_json import findings_data, read_findings
from ampwise.runs.json_lines import is_count
from ampwise.runs.plain_data import PlainDecoder, PlainEncoder
from ampwise.runs.rows import CountedFinding
from ampwise.runs.tensor_files import read_tensors, refuse_unwritable, size_on_disk, write_tensors
from ampwise.trace.capsule.builder import checked_arguments
from ampwise.trace.user_code import split_function_name

__all__ = ["CapsuleContents", "next_path", "read", "size_of", "write"]

FORMAT = "ampwise-capsule"
VERSION = 2  # version 1 stored lists as objects, and no bytes, sets or arrays
METADATA = "capsule.json"  # everything but tensors, and the checksums of the tensor files
CHECKSUM = "capsule.sha256"  # checksum of capsule.json, in the format of sha256sum
BATCH = "tensors.safetensors"  # the step's inputs and the random state
WEIGHTS = "weights.safetensors"  # weights and buffers; absent in a capsule without weights
MAX_METADATA_BYTES = 16_000_000  # a real one has a few thousand
MAX_OF_A_STEP = 999  # capsules of one step in a folder
SHOWN = 3  # capsules to name if the folder only contains capsules
CHANGED = "has the wrong checksum: it was changed or damaged after it was written, and is not used."


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsuleContents:
    """The state before a step, and the step's result."""

    args: tuple[Any, ...] = ()  # arguments of the loss function: tensors and plain data
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None  # from random_state
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # empty: not saved
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    precision: str = "fp32"
    policy: Mapping[str, Any] | None = None  # from Policy.as_dict
    scale: float = 1.0  # loss scale
    step: int | None = None
    rank: int = 0
    loss: float | None = None
    build: str | None = None  # function that builds model and loss function: "train:make" or "train.py:make"
    build_args: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()  # reported when it was saved
    evaluating: Sequence[str] | None = None  # names of modules in evaluation mode; None: as the model is built
    device: str | None = None  # device type that it ran on; None: that of its tensors
    environment: Mapping[str, Any] = field(default_factory=dict)  # added when it is written


# --- writing -------------------------------------------------------------------------------------------------------


def size_of(contents: CapsuleContents, weights: bool = True) -> int:
    """Return how many bytes ``write`` will write, within a few hundred; BadInput for contents it would refuse."""
    return _size(*_packed(contents, weights))


def next_path(folder: str | Path, contents: CapsuleContents) -> Path:
    """Return the folder that ``write`` will create, unless another process takes the name first."""
    return next(_free_paths(Path(folder), contents))


def write(folder: str | Path, contents: CapsuleContents, weights: bool = True) -> Path:
    """Write a capsule into a new folder below this one, such as ``step-000012``, and return its path.

    weights: include weights and buffers; without them, the replay must provide them. BadInput for contents that a
    capsule cannot hold, or if the disk is full; then nothing is left behind.
    """
    facts, files = _packed(contents, weights)
    home = Path(folder)
    aside = home / f".{_name(contents)}.{secrets.token_hex(4)}.new"
    try:
        home.mkdir(parents=True, exist_ok=True)
        size, free = _size(facts, files), shutil.disk_usage(home).free
        if size > free:
            raise BadInput(
                f"a capsule of {size:,} bytes does not fit in {home}, where {free:,} bytes are free. Leave out the "
                "weights, or choose another folder."
            )
        aside.mkdir()
        _write_files(aside, facts, files)
        for path in _free_paths(home, contents):
            try:
                return aside.rename(path)
            except OSError:  # another process took the name first
                if not path.exists():
                    raise
        raise AssertionError("_free_paths yields a path or raises")
    except OSError as error:
        raise BadInput(
            f"a capsule cannot be written to {home}: {error.strerror or error}. Choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # if it still exists, it is incomplete


def _write_files(folder: Path, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> None:
    sums = {}
    for name, tensors in files.items():
        written = write_tensors(folder / name, tensors)
        sums[name] = {"bytes": written.size, "sha256": written.sha256}
    text = dumps({**facts, "files": sums}).encode()
    if len(text) > MAX_METADATA_BYTES:
        raise BadInput(
            f"the capsule's data besides tensors has {len(text):,} bytes; the limit is {MAX_METADATA_BYTES:,}."
        )
    try:
        refuse_many(text)
    except ValueError as error:
        raise BadInput(f"the capsule's data besides tensors could not be read again: {error}.") from error
    write_atomically(folder / METADATA, [text])
    write_atomically(folder / CHECKSUM, [f"{hashlib.sha256(text).hexdigest()}  {METADATA}\n".encode()])


def _size(facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> int:
    return len(dumps(facts)) + sum(size_on_disk(tensors) for tensors in files.values())


def _name(contents: CapsuleContents) -> str:
    step = "step" if contents.step is None else f"step-{contents.step:06d}"
    return f"{step}-rank{contents.rank}" if contents.rank else step


def _free_paths(home: Path, contents: CapsuleContents) -> Iterator[Path]:
    name = _name(contents)
    for number in range(1, MAX_OF_A_STEP + 1):
        path = home / (name if number == 1 else f"{name}-{number}")
        if not (path.exists() or path.is_symlink()):
            yield path
    raise BadInput(f"{home} already has {MAX_OF_A_STEP} capsules of {name}. Remove some, or choose another folder.")


def _packed(contents: CapsuleContents, with_weights: bool) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the contents of capsule.json, but for checksums, and the tensors of each file."""
    if contents.build is not None:
        split_function_name(contents.build, "build")
    batch: dict[str, Tensor] = {}
    encode = PlainEncoder(batch, objects=True).encode
    checked_arguments(contents.build_args)
    environment = {
        "ampwise": installed_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
    }
    if torch.cuda.is_initialized():
        environment |= {"cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name()}
    facts = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(contents, name) for name in ("precision", "step", "rank", "build")},
        "evaluating": None if contents.evaluating is None else list(contents.evaluating),
        "scale": encode(float(contents.scale), "scale"),
        "loss": encode(None if contents.loss is None else float(contents.loss), "loss"),
        "policy": encode(contents.policy, "policy"),
        "args": [encode(value, f"argument {number}") for number, value in enumerate(contents.args, 1)],
        "kwargs": {name: encode(value, f"argument {name!r}") for name, value in contents.kwargs.items()},
        "build_args": {name: encode(value, f"build_args[{name!r}]") for name, value in contents.build_args.items()},
        "random": encode(contents.random, "random"),
        "environment": encode({**environment, **contents.environment}, "environment"),
        "findings": findings_data(CountedFinding(finding=finding) for finding in contents.findings),
    }
    devices = (tensor.device.type for tensor in (*contents.weights.values(), *batch.values()))
    facts["device"] = contents.device or next((kind for kind in devices if kind != "cpu"), "cpu")
    if not with_weights or not contents.weights:
        return {**facts, "model": None}, {BATCH: batch}
    model, weights = _model(contents.weights, contents.buffers)
    return {**facts, "model": model}, {BATCH: batch, WEIGHTS: weights}


def _model(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the name in the file for each tensor, and the file's tensors: tied weights are stored once."""
    both = weights.keys() & buffers.keys()
    if both:
        raise BadInput(f"{min(both)!r} is the name of both a weight and a buffer.")
    tensors: dict[str, Tensor] = {}
    known: dict[Any, str] = {}
    names: dict[str, dict[str, str]] = {"weights": {}, "buffers": {}}
    for part, named in (("weights", weights), ("buffers", buffers)):
        for name, tensor in named.items():
            try:
                refuse_unwritable(f"{part}: {name!r}", tensor)
            except UnsupportedTensor as error:
                raise BadInput(str(error)) from error
            memory: Any = id(tensor)
            if address := tensor.untyped_storage().data_ptr():  # empty tensors all have the address 0
                layout = tensor.storage_offset(), tensor.shape, tensor.stride()
                memory = address, tensor.device, tensor.dtype, layout
            names[part][name] = stored = known.setdefault(memory, name)
            tensors.setdefault(stored, tensor)
    return names, tensors


# --- reading -------------------------------------------------------------------------------------------------------


def read(folder: str | Path, where: Callable[[str], torch.device] | None = None) -> CapsuleContents:
    """Read a capsule; BadInput, in one line, if it is not one, is damaged, or was changed.

    where: returns the device for tensors that were on the device that ran the step, given its type, such as "cuda".
    Without it, and for all other tensors, the device is the CPU.
    """
    home = Path(folder)
    facts = _facts(home)
    own, cpu = str(facts.get("device"))[:40], torch.device("cpu")
    device = cpu if where is None else where(own)
    files, expected = facts.get("files"), {BATCH} if facts.get("model") is None else {BATCH, WEIGHTS}
    if not isinstance(files, dict) or set(files) != expected:
        raise BadInput(f"{home}: {METADATA} is damaged: it must list the files {' and '.join(sorted(expected))}.")
    tensors = {name: _tensors(home, name, files[name]) for name in sorted(expected)}
    try:
        decoder = PlainDecoder(tensors[BATCH], lambda kind: device if kind == own else cpu)
        return _contents(facts, decoder, tensors.get(WEIGHTS, {}))
    except KeyError as error:
        raise BadInput(f"{home}: {METADATA} is damaged: {error.args[0]!r} is missing.") from error
    except ValueError as error:
        raise BadInput(f"{home}: {METADATA} is damaged: {printable(str(error)[:200]).rstrip('.')}.") from error


def _facts(home: Path) -> dict[str, Any]:
    if not home.is_dir():
        what = "expected a capsule, which is a folder; got a file" if home.exists() else "there is no such folder"
        raise BadInput(f"{home}: {what}.")
    if not (home / METADATA).exists():
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(
                path.name
                for path in home.iterdir()
                if not path.name.startswith(".") and not path.is_symlink() and (path / METADATA).exists()
            )
        listed = ", ".join(map(ascii, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
        hint = f" Give one of the capsules in it: {listed}." if names else ""
        raise BadInput(f"{home} is not a capsule: it has no {METADATA}.{hint}")
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


def _tensors(home: Path, name: str, sums: Any) -> dict[str, Tensor]:
    """Read a file of tensors, and compare its checksum."""
    if not isinstance(sums, dict) or set(sums) != {"bytes", "sha256"}:
        raise BadInput(f"{home}: {METADATA} is damaged: {name} has no checksum.")
    path = home / name
    if path.exists() and path.stat().st_size != sums["bytes"]:
        raise BadInput(
            f"{home}: {name} has {path.stat().st_size:,} bytes, expected {str(sums['bytes'])[:40]}: it was truncated "
            "or changed."
        )
    try:
        found = read_tensors(path)
    except BadInput as error:
        raise BadInput(f"{home}: {error}") from error
    if found.sha256 != sums["sha256"]:
        raise BadInput(f"{home}: {name} {CHANGED}")
    return found.tensors


def _contents(facts: Mapping[str, Any], decoder: PlainDecoder, weights: Mapping[str, Tensor]) -> CapsuleContents:
    """Build the contents; KeyError or ValueError for data that ampwise never writes."""

    def plain(name: str, kind: type, *, optional: bool = False) -> Any:
        return _checked(name, facts[name], kind, optional=optional)

    def decoded(name: str, kind: type, *, optional: bool = False) -> Any:
        return _checked(name, decoder.decode(facts[name]), kind, optional=optional)

    def by_name(name: str) -> dict[str, Any]:
        return {key: decoder.decode(value) for key, value in plain(name, dict).items()}

    def tensors(part: str) -> dict[str, Tensor]:
        model = plain("model", dict, optional=True)
        names = {} if model is None else _checked(part, model.get(part), dict)
        for stored in names.values():
            if not isinstance(stored, str) or stored not in weights:
                raise ValueError(f"{part}: the tensor {str(stored)[:80]!r} is missing")
        return {name: weights[stored] for name, stored in names.items()}

    evaluating = plain("evaluating", list, optional=True)
    return CapsuleContents(
        args=tuple(map(decoder.decode, plain("args", list))),
        kwargs=by_name("kwargs"),
        random=decoded("random", dict, optional=True),
        weights=tensors("weights"),
        buffers=tensors("buffers"),
        precision=plain("precision", str),
        policy=decoded("policy", dict, optional=True),
        scale=decoded("scale", float),
        step=plain("step", int, optional=True),
        rank=plain("rank", int),
        loss=decoded("loss", float, optional=True),
        build=plain("build", str, optional=True),
        build_args=checked_arguments(by_name("build_args")),
        findings=[counted.finding for counted in read_findings(facts["findings"])[0]],
        device=plain("device", str),
        evaluating=None if evaluating is None else tuple(_checked("evaluating", each, str) for each in evaluating),
        environment=decoded("environment", dict),
    )


def _checked(name: str, value: Any, kind: type, *, optional: bool = False) -> Any:
    """Return the value if it has this type; integers must also be non-negative and fit into 64 bits."""
    is_valid = is_count(value) if kind is int else isinstance(value, kind)
    if not is_valid and not (optional and value is None):
        raise ValueError(f"{name}: expected {kind.__name__}, got {str(value)[:40]!r}")
    return value
