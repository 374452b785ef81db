"""Tensors in a file, in the safetensors format: a header in JSON, then the bytes. No code is in it, and none is run.

Eight bytes say how long the header is (little-endian); the header has for each tensor a name, ``dtype``, ``shape`` and
``data_offsets`` into what follows it, where the tensors lie without a gap. The safetensors package reads what is
written here, and the other way round. A file may come from anybody: all of its header is checked, against itself and
against the length of the file, before memory is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.record.files import opened, write_aside
from ampwise.strict_json import loads

__all__ = [
    "WHOLE_NUMBERS",
    "Entry",
    "OnDisk",
    "entries",
    "filled",
    "read_tensors",
    "refuse_unwritable",
    "size_on_disk",
    "write_tensors",
]

LENGTH = struct.Struct("<Q")  # of the header
LONGEST_HEADER = 32_000_000  # bytes; that of a thousand tensors has a hundred thousand
LONGEST_NAME = 4096
MOST_DIMENSIONS = 64
MOST_VALUES = 2**56  # also where a zero among the sizes leaves none: torch multiplies the others
ALIGNED_TO = 8  # where the bytes of tensors begin; the header is filled up with blanks
CHUNK = 8_000_000  # bytes that are written at a time
METADATA = "__metadata__"  # an entry of the header that is no tensor

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",  # since torch 2.7
}
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in NAMES.items() if hasattr(torch, name)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: bits as they are


class OnDisk(NamedTuple):
    """A file of tensors that was written or read."""

    tensors: dict[str, Tensor]
    size: int  # in bytes
    sha256: str  # of all of them


class Entry(NamedTuple):
    """A tensor in a file, and where its bytes lie."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# --- writing -------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> OnDisk:
    """Write tensors of any device, as many at a time as one; the file is in place when it is whole."""
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in _pieces(tensors):
            digest.update(piece)
            yield piece

    _, size = write_aside(path, pieces())
    return OnDisk(dict(tensors), size, digest.hexdigest())


def size_on_disk(tensors: Mapping[str, Tensor]) -> int:
    """How many bytes ``write_tensors`` would write."""
    return LENGTH.size + len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """UnsupportedTensor for what has no plain values of its own, or a dtype that the format has not."""
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if wraps_others:
        raise UnsupportedTensor(f"{name} is a {type(tensor).__name__}, which a file of tensors has no form for.")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{name} is not dense ({tensor.layout}); a file of tensors holds dense ones.")
    if tensor.device.type == "meta":
        raise UnsupportedTensor(f"{name} is on the meta device, and has no values to write.")
    if tensor.dtype not in CODES:
        raise UnsupportedTensor(f"{name} is {tensor.dtype}, which a file of tensors has no form for.")


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors.items():
        refuse_unwritable(repr(name), tensor)
    header = _header(tensors)
    if len(header) > LONGEST_HEADER:
        raise BadInput(f"{len(tensors):,} tensors have too long a header for one file ({len(header):,} bytes).")
    yield LENGTH.pack(len(header)) + header
    for tensor in tensors.values():
        values = _bytes_of(tensor.detach().cpu()).numpy().data
        for begin in range(0, len(values), CHUNK):
            # As they lie in memory: no copy, during which no other thread could run.
            yield values[begin : begin + CHUNK]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNED_TO)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes, of a tensor whose values lie one after the other."""
    plain = tensor.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)  # flat first: what has no dimension has no other view


# --- reading -------------------------------------------------------------------------------------------------------


def read_tensors(path: Path, *, largest: int | None = None) -> OnDisk:
    """The tensors of a file, on the CPU. BadInput, in a line, for a file that is not as it should be.

    largest: bytes that tensors may take; without it, as many as this machine has memory.
    """
    if sys.byteorder != "little":
        raise BadInput("files of tensors are read on little-endian machines only, and this is none.")
    try:
        with opened(path, os.O_RDONLY, "rb") as file:
            return _read(file, path.name, memory_here() if largest is None else largest)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror or error}.") from error


def _read(file: IO[bytes], name: str, largest: int | None) -> OnDisk:
    size = os.fstat(file.fileno()).st_size
    digest = hashlib.sha256()
    header = _read_header(file, size, name)
    digest.update(LENGTH.pack(len(header)) + header)
    length = size - LENGTH.size - len(header)  # of all tensors
    found = _checked(_parsed(header, name), length, name)
    if largest is not None and length > largest:
        raise BadInput(f"{name} has {length:,} bytes of tensors, and there is room for {largest:,}.")
    tensors = {}
    for entry in found:
        values = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        memory = values.numpy().data
        if filled(file, memory) != len(memory):
            raise BadInput(f"{name} has become shorter while it was read.")
        digest.update(memory)
        tensors[entry.name] = _shaped(values, entry, name)
    return OnDisk(tensors, size, digest.hexdigest())


def entries(file: IO[bytes], name: str) -> dict[str, Entry]:
    """The tensors of an opened file by name, with where in the file they begin and end; BadInput as ``read_tensors``.

    Only the header is read, and held against the length of the file.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header = _read_header(file, size, name)
    data = LENGTH.size + len(header)
    return {
        entry.name: entry._replace(begin=data + entry.begin, end=data + entry.end)
        for entry in _checked(_parsed(header, name), size - data, name)
    }


def filled(file: IO[bytes], memory: memoryview) -> int:
    """How much of the memory was filled from the file: less than all of it at the file's end."""
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):  # type: ignore[attr-defined]
        done += count
    return done


def _read_header(file: IO[bytes], size: int, name: str) -> bytes:
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size:
        raise BadInput(f"{name} is no file of tensors: it has {size} bytes.")
    (length,) = LENGTH.unpack(first)
    if length > LONGEST_HEADER or length > size - LENGTH.size:
        raise BadInput(f"{name} is damaged: it says that its header has {length:,} bytes, and the file has {size:,}.")
    header = file.read(length)
    if len(header) < length:
        raise BadInput(f"{name} has become shorter while it was read.")
    return header


def _parsed(header: bytes, name: str) -> dict[str, Any]:
    try:
        data = loads(header.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{name} is damaged: its header makes no sense ({error}).") from error
    if not isinstance(data, dict):
        raise BadInput(f"{name} is damaged: its header is no JSON object.")
    return data


def _checked(header: Mapping[str, Any], length: int, file: str) -> list[Entry]:
    """The tensors, in the order in which they lie in the file: one after the other, from its beginning to its end."""
    found = [_entry(name, facts, file) for name, facts in header.items() if name != METADATA]
    found.sort(key=lambda entry: (entry.begin, entry.end))
    reached = 0
    for entry in found:
        if entry.begin != reached:
            raise BadInput(f"{file} is damaged: {entry.name[:80]!r} begins at {entry.begin:,}, not at {reached:,}.")
        reached = entry.end
    if reached != length:
        raise BadInput(
            f"{file} is damaged: its header tells of {reached:,} bytes of tensors, and {length:,} are there."
        )
    return found


def _entry(name: str, facts: Any, file: str) -> Entry:
    shown = f"{file} is damaged: {name[:80]!r}"
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise BadInput(f"{shown} is no name for a tensor.")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{shown} is to have a dtype, a shape and data_offsets, and nothing else.")
    shape, offsets = facts["shape"], facts["data_offsets"]
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) > MOST_VALUES:
        raise BadInput(f"{shown} has no shape that makes sense.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise BadInput(f"{shown} has no data_offsets that make sense.")
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise BadInput(f"{file}: {name[:80]!r} is {str(facts['dtype'])[:20]!r}, and this torch has {known}.")
    dtype, (begin, end) = DTYPES[facts["dtype"]], offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BadInput(f"{shown} has {end - begin:,} bytes, and {facts['dtype']} of shape {shape} takes others.")
    return Entry(name, dtype, tuple(shape), begin, end)


def _are_counts(values: Any) -> bool:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    return isinstance(values, list) and all(map(is_count, values))


def _shaped(values: Tensor, entry: Entry, file: str) -> Tensor:
    if entry.dtype == torch.bool and values.numel() and int(values.max()) > 1:  # torch would compute nonsense with it
        raise BadInput(f"{file} is damaged: {entry.name[:80]!r} has truth values that are neither 0 nor 1.")
    return values.view(entry.dtype).reshape(entry.shape)


def memory_here() -> int | None:
    """The memory of this machine in bytes; None where the system does not tell."""
    names: Iterable[str] = getattr(os, "sysconf_names", ())
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
