"""Write a capsule to a new folder, which gets its final name once it is complete."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import AmpwiseError, BadInput
from ampwise.finding.strict_json import dumps, refuse_many
from ampwise.finding.version import installed_version
from ampwise.runs.files import write_atomically
from ampwise.runs.findings_json import findings_data
from ampwise.runs.rows import CountedFinding
from ampwise.runs.tensor_files import refuse_unwritable, size_on_disk, write_tensors
from ampwise.trace.capsule.build_arguments import checked_arguments
from ampwise.trace.capsule.contents import CapsuleContents
from ampwise.trace.capsule.layout import BATCH, CHECKSUM, FORMAT, MAX_METADATA_BYTES, METADATA, VERSION, WEIGHTS
from ampwise.trace.capsule.packing import Packer
from ampwise.trace.user_code import split_function_name

__all__ = ["next_path", "size_of", "write"]

MAX_CAPSULES = 1000  # number of capsules of one step in a folder, plus 1


@dataclass(frozen=True, slots=True)
class _Packed:
    """The contents of each file."""

    facts: dict[str, Any]
    files: dict[str, dict[str, Tensor]]

    @property
    def size(self) -> int:
        return len(dumps(self.facts)) + sum(size_on_disk(tensors) for tensors in self.files.values())


def size_of(contents: CapsuleContents, weights: bool = True) -> int:
    """Return how many bytes ``write`` will write, within a few hundred; BadInput for contents it would refuse."""
    return _packed(contents, weights).size


def next_path(folder: str | Path, contents: CapsuleContents) -> Path:
    """Return the folder that ``write`` will create, unless another process takes the name first."""
    return next(_free_paths(Path(folder), _name(contents)))


def write(folder: str | Path, contents: CapsuleContents, weights: bool = True) -> Path:
    """Write a capsule into a new folder below this one, such as ``step-000012``, and return its path.

    weights: include weights and buffers; without them, the replay must provide them. BadInput for contents that a
    capsule cannot hold, or if the disk is full; then nothing is left behind.
    """
    packed = _packed(contents, weights)
    home = Path(folder)
    aside = home / f".{_name(contents)}.{secrets.token_hex(4)}.new"
    try:
        home.mkdir(parents=True, exist_ok=True)
        _refuse_full_disk(home, packed.size)
        aside.mkdir()
        _write_files(aside, packed)
        return _put_in_place(aside, home, _name(contents))
    except OSError as error:
        raise BadInput(
            f"a capsule cannot be written to {home}: {error.strerror or error}. Choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # if it still exists, it is incomplete


def _write_files(folder: Path, packed: _Packed) -> None:
    sums = {}
    for name, tensors in packed.files.items():
        written = write_tensors(folder / name, tensors)
        sums[name] = {"bytes": written.size, "sha256": written.sha256}
    text = dumps({**packed.facts, "files": sums}).encode()
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


def _put_in_place(aside: Path, home: Path, name: str) -> Path:
    """Rename the finished folder to a free name; existing files are never replaced."""
    for path in _free_paths(home, name):
        try:
            return aside.rename(path)
        except OSError:  # another process took the name first
            if not path.exists():
                raise
    raise AssertionError("_free_paths yields a path or raises")


def _free_paths(home: Path, name: str) -> Iterator[Path]:
    for number in range(1, MAX_CAPSULES):
        path = home / (name if number == 1 else f"{name}-{number}")
        if not (path.exists() or path.is_symlink()):
            yield path
    raise BadInput(f"{home} already has {MAX_CAPSULES - 1} capsules of {name}. Remove some, or choose another folder.")


def _refuse_full_disk(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise BadInput(
            f"a capsule of {size:,} bytes does not fit in {folder}, where {free:,} bytes are free. Leave out the "
            "weights, or choose another folder."
        )


def _name(contents: CapsuleContents) -> str:
    step = "step" if contents.step is None else f"step-{contents.step:06d}"
    return f"{step}-rank{contents.rank}" if contents.rank else step


# --- the contents --------------------------------------------------------------------------------------------------


def _packed(contents: CapsuleContents, with_weights: bool) -> _Packed:
    device = contents.device or _device_of(contents)
    packer = Packer(device)
    if contents.build is not None:
        split_function_name(contents.build, "build")
    facts = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(contents, name) for name in ("precision", "step", "rank", "build")},
        "device": device,
        "evaluating": None if contents.evaluating is None else list(contents.evaluating),
        "scale": packer.pack(float(contents.scale), "scale"),
        "loss": packer.pack(None if contents.loss is None else float(contents.loss), "loss"),
        "policy": packer.pack(contents.policy, "policy"),
        "args": [packer.pack(value, f"argument {number}") for number, value in enumerate(contents.args, 1)],
        "kwargs": {name: packer.pack(value, f"argument {name!r}") for name, value in contents.kwargs.items()},
        "build_args": {
            name: packer.pack(value, f"build_args[{name!r}]")
            for name, value in checked_arguments(contents.build_args).items()
        },
        "random": packer.pack(contents.random, "random"),
        "environment": packer.pack({**_environment(), **contents.environment}, "environment"),
        "findings": findings_data(CountedFinding(finding=finding) for finding in contents.findings),
    }
    if not with_weights or not contents.weights:
        return _Packed({**facts, "model": None}, {BATCH: packer.tensors})
    model, tensors = _stored(contents.weights, contents.buffers)
    return _Packed({**facts, "model": model}, {BATCH: packer.tensors, WEIGHTS: tensors})


def _stored(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the name in the file for each tensor, and the file's tensors: tied weights are stored once."""
    both = weights.keys() & buffers.keys()
    if both:
        raise BadInput(f"{min(both)!r} is the name of both a weight and a buffer.")
    tensors: dict[str, Tensor] = {}
    known: dict[Any, str] = {}
    places: dict[str, dict[str, str]] = {"weights": {}, "buffers": {}}
    for part, named in (("weights", weights), ("buffers", buffers)):
        for name, tensor in named.items():
            try:
                refuse_unwritable(f"{part}: {name!r}", tensor)
            except AmpwiseError as error:
                raise BadInput(str(error)) from error
            places[part][name] = stored = known.setdefault(_memory(tensor), name)
            tensors.setdefault(stored, tensor)
    return places, tensors


def _memory(tensor: Tensor) -> Any:
    where = tensor.untyped_storage().data_ptr()
    if not where:  # empty tensors all have the address 0
        return id(tensor)
    return where, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _device_of(contents: CapsuleContents) -> str:
    """Return the type of the device that ran the step: the first that is not the CPU."""
    given = (contents.weights, list(contents.args), dict(contents.kwargs))
    return next((kind for kind in _device_types(given, 0) if kind != "cpu"), "cpu")


def _device_types(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield value.device.type
    elif isinstance(value, Mapping | list | tuple) and depth < 5:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _device_types(inner, depth + 1)


def _environment() -> dict[str, Any]:
    facts = {
        "ampwise": installed_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
    }
    if torch.cuda.is_initialized():
        facts["cuda"] = str(torch.version.cuda)
        facts["device"] = torch.cuda.get_device_name()
    return facts
