"""A capsule written: into a new folder, which has its name once it is whole."""

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
from ampwise.printers.tool import installed_version
from ampwise.record.files import write_aside
from ampwise.record.rows import Seen
from ampwise.record.stored import findings_data
from ampwise.strict_json import dumps, refuse_many
from ampwise.tensors_on_disk import refuse_unwritable, size_on_disk, write_tensors
from ampwise.trace.capsule.arguments import checked_arguments
from ampwise.trace.capsule.contents import Contents
from ampwise.trace.capsule.layout import BATCH, FACTS, FORMAT, LARGEST_FACTS, SEAL, VERSION, WEIGHTS
from ampwise.trace.capsule.tree import Packer
from ampwise.user_code import checked_name

__all__ = ["next_path", "size_of", "write"]

MOST = 1000  # capsules of one step in a folder


@dataclass(frozen=True, slots=True)
class _Packed:
    """What goes into which file."""

    facts: dict[str, Any]
    files: dict[str, dict[str, Tensor]]

    @property
    def size(self) -> int:
        return len(dumps(self.facts)) + sum(size_on_disk(tensors) for tensors in self.files.values())


def size_of(contents: Contents, weights: bool = True) -> int:
    """How many bytes ``write`` will write, but for a few hundred; BadInput for what it would refuse."""
    return _packed(contents, weights).size


def next_path(folder: str | Path, contents: Contents) -> Path:
    """Where ``write`` will put it, unless another process is faster."""
    return next(_free_paths(Path(folder), _name(contents)))


def write(folder: str | Path, contents: Contents, weights: bool = True) -> Path:
    """Write a capsule into a new folder below this one, such as ``step-000012``; returns where.

    weights: with weights and buffers; without, what replays it has to bring them. BadInput for what a capsule has no
    form for, or where there is no room; nothing is left behind then.
    """
    packed = _packed(contents, weights)
    home = Path(folder)
    aside = home / f".{_name(contents)}.{secrets.token_hex(4)}.new"
    try:
        home.mkdir(parents=True, exist_ok=True)
        _refuse_without_room(home, packed.size)
        aside.mkdir()
        _write_files(aside, packed)
        return _put_in_place(aside, home, _name(contents))
    except OSError as error:
        raise BadInput(
            f"a capsule cannot be written to {home}: {error.strerror or error}. Name another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # where it is still there, it is not whole


def _write_files(folder: Path, packed: _Packed) -> None:
    sums = {}
    for name, tensors in packed.files.items():
        written = write_tensors(folder / name, tensors)
        sums[name] = {"bytes": written.size, "sha256": written.sha256}
    text = dumps({**packed.facts, "files": sums}).encode()
    if len(text) > LARGEST_FACTS:
        raise BadInput(
            f"what is to be written besides tensors has {len(text):,} bytes, and {LARGEST_FACTS:,} is the most."
        )
    try:
        refuse_many(text)
    except ValueError as error:
        raise BadInput(f"what is to be written besides tensors cannot be read again: {error}.") from error
    write_aside(folder / FACTS, [text])
    write_aside(folder / SEAL, [f"{hashlib.sha256(text).hexdigest()}  {FACTS}\n".encode()])


def _put_in_place(aside: Path, home: Path, name: str) -> Path:
    """Under a name that nothing has. What is there stays."""
    for path in _free_paths(home, name):
        try:
            return aside.rename(path)
        except OSError:  # another process was faster
            if not path.exists():
                raise
    raise AssertionError("there is a path, or an error")


def _free_paths(home: Path, name: str) -> Iterator[Path]:
    for number in range(1, MOST):
        path = home / (name if number == 1 else f"{name}-{number}")
        if not (path.exists() or path.is_symlink()):
            yield path
    raise BadInput(f"{home} has {MOST - 1} capsules of {name} already. Remove some, or name another folder.")


def _refuse_without_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise BadInput(
            f"a capsule of {size:,} bytes is too large for {folder}, where {free:,} are free. Leave out the "
            "weights, or name another folder."
        )


def _name(contents: Contents) -> str:
    step = "step" if contents.step is None else f"step-{contents.step:06d}"
    return f"{step}-rank{contents.rank}" if contents.rank else step


# --- what is written -----------------------------------------------------------------------------------------------


def _packed(contents: Contents, with_weights: bool) -> _Packed:
    device = contents.device or _device_of(contents)
    packer = Packer(device)
    if contents.build is not None:
        checked_name(contents.build, "build")
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
        "findings": findings_data(Seen(finding=finding) for finding in contents.findings),
    }
    if not with_weights or not contents.weights:
        return _Packed({**facts, "model": None}, {BATCH: packer.tensors})
    model, tensors = _stored(contents.weights, contents.buffers)
    return _Packed({**facts, "model": model}, {BATCH: packer.tensors, WEIGHTS: tensors})


def _stored(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Which name is where in the file: tensors that are one, such as tied weights, are there once."""
    both = weights.keys() & buffers.keys()
    if both:
        raise BadInput(f"{min(both)!r} is the name of a weight and of a buffer.")
    tensors: dict[str, Tensor] = {}
    known: dict[Any, str] = {}
    places: dict[str, dict[str, str]] = {"weights": {}, "buffers": {}}
    for room, named in (("weights", weights), ("buffers", buffers)):
        for name, tensor in named.items():
            try:
                refuse_unwritable(f"{room}: {name!r}", tensor)
            except AmpwiseError as error:
                raise BadInput(str(error)) from error
            places[room][name] = stored = known.setdefault(_memory(tensor), name)
            tensors.setdefault(stored, tensor)
    return places, tensors


def _memory(tensor: Tensor) -> Any:
    where = tensor.untyped_storage().data_ptr()
    if not where:  # it is empty, and so is every other of its kind
        return id(tensor)
    return where, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _device_of(contents: Contents) -> str:
    """The kind that computes: the first that is not the CPU."""
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
