"""Read and write tensors in the safetensors format: a JSON header, then the bytes. Files contain no code.

Eight bytes give the length of the header (little-endian). The header has for each tensor a name, ``dtype``, ``shape``
and ``data_offsets`` into the data that follows, where the tensors are stored without gaps. Files are compatible with
the safetensors package. A file is untrusted: its header is checked completely, for consistency and against the size of
the file, before memory is allocated.
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
from ampwise.finding.strict_json import loads
from ampwise.runs.files import open_regular, write_atomically

__all__ = [
    "INTEGER_BY_SIZE",
    "TensorEntry",
    "TensorFile",
    "read_into_memory",
    "read_tensors",
    "refuse_unwritable",
    "size_on_disk",
    "tensor_entries",
    "write_tensors",
]

LENGTH = struct.Struct("<Q")  # length of the header
LONGEST_HEADER = 32_000_000  # bytes; a thousand tensors take about 100,000
LONGEST_NAME = 4096
MOST_DIMENSIONS = 64
MOST_VALUES = 2**56  # not counting sizes of 0: torch multiplies the others
ALIGNED_TO = 8  # alignment of the data; the header is padded with spaces
CHUNK = 8_000_000  # bytes written at a time
METADATA = "__metadata__"  # entry of the header that is not a tensor

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
INTEGER_BY_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by size in bytes, to copy bits unchanged


class TensorFile(NamedTuple):
    """A file of tensors that was written or read."""

    tensors: dict[str, Tensor]
    size: int  # in bytes
    sha256: str  # of the whole file


class TensorEntry(NamedTuple):
    """A tensor in a file, and where its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# --- writing -------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Write tensors from any device, one at a time; the file appears only when it is complete."""
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in _pieces(tensors):
            digest.update(piece)
            yield piece

    _, size = write_atomically(path, pieces())
    return TensorFile(dict(tensors), size, digest.hexdigest())


def size_on_disk(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of bytes that ``write_tensors`` would write."""
    return LENGTH.size + len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedTensor if the tensor is not plain and dense, or has a dtype that the format lacks."""
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if wraps_others:
        raise UnsupportedTensor(f"{name} is a {type(tensor).__name__}, which the safetensors format does not support.")
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(
            f"{name} is not dense ({tensor.layout}); the safetensors format supports only dense tensors."
        )
    if tensor.device.type == "meta":
        raise UnsupportedTensor(f"{name} is on the meta device, and has no values to write.")
    if tensor.dtype not in CODES:
        raise UnsupportedTensor(f"{name} is {tensor.dtype}, which the safetensors format does not support.")


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors.items():
        refuse_unwritable(repr(name), tensor)
    header = _header(tensors)
    if len(header) > LONGEST_HEADER:
        raise BadInput(f"the header of {len(tensors):,} tensors is too long for one file ({len(header):,} bytes).")
    yield LENGTH.pack(len(header)) + header
    for tensor in tensors.values():
        values = _bytes_of(tensor.detach().cpu()).numpy().data
        for begin in range(0, len(values), CHUNK):
            # Without a copy, which would hold the GIL.
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
    """View a tensor's memory as bytes; copy it first if it is not contiguous."""
    plain = tensor.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)  # flatten first: a 0-dimensional tensor cannot be viewed


# --- reading -------------------------------------------------------------------------------------------------------


def read_tensors(path: Path, *, largest: int | None = None) -> TensorFile:
    """Read the tensors of a file to the CPU; raise BadInput if the file is invalid.

    largest: most bytes that the tensors may take; by default, this machine's memory.
    """
    if sys.byteorder != "little":
        raise BadInput("files of tensors can be read only on little-endian machines.")
    try:
        with open_regular(path, os.O_RDONLY, "rb") as file:
            return _read(file, path.name, machine_memory() if largest is None else largest)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror or error}.") from error


def _read(file: IO[bytes], name: str, largest: int | None) -> TensorFile:
    size = os.fstat(file.fileno()).st_size
    digest = hashlib.sha256()
    header = _read_header(file, size, name)
    digest.update(LENGTH.pack(len(header)) + header)
    length = size - LENGTH.size - len(header)  # bytes of all tensors
    found = _checked(_parsed(header, name), length, name)
    if largest is not None and length > largest:
        raise BadInput(f"{name} has {length:,} bytes of tensors; the limit is {largest:,}.")
    tensors = {}
    for entry in found:
        values = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        memory = values.numpy().data
        if read_into_memory(file, memory) != len(memory):
            raise BadInput(f"{name} was truncated while it was read.")
        digest.update(memory)
        tensors[entry.name] = _shaped(values, entry, name)
    return TensorFile(tensors, size, digest.hexdigest())


def tensor_entries(file: IO[bytes], name: str) -> dict[str, TensorEntry]:
    """Return the tensors of an open file by name, with their offsets in the file; raise BadInput as ``read_tensors``.

    Only the header is read, and checked against the size of the file.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header = _read_header(file, size, name)
    data = LENGTH.size + len(header)
    return {
        entry.name: entry._replace(begin=data + entry.begin, end=data + entry.end)
        for entry in _checked(_parsed(header, name), size - data, name)
    }


def read_into_memory(file: IO[bytes], memory: memoryview) -> int:
    """Read from the file into memory; return the number of bytes read, which is less at the end of the file."""
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):  # type: ignore[attr-defined]
        done += count
    return done


def _read_header(file: IO[bytes], size: int, name: str) -> bytes:
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size:
        raise BadInput(f"{name} is not a file of tensors: it has only {size} bytes.")
    (length,) = LENGTH.unpack(first)
    if length > LONGEST_HEADER or length > size - LENGTH.size:
        raise BadInput(f"{name} is damaged: its header should have {length:,} bytes, but the file has {size:,}.")
    header = file.read(length)
    if len(header) < length:
        raise BadInput(f"{name} was truncated while it was read.")
    return header


def _parsed(header: bytes, name: str) -> dict[str, Any]:
    try:
        data = loads(header.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{name} is damaged: its header is invalid ({error}).") from error
    if not isinstance(data, dict):
        raise BadInput(f"{name} is damaged: its header is not a JSON object.")
    return data


def _checked(header: Mapping[str, Any], length: int, file: str) -> list[TensorEntry]:
    """Return the tensors in the order of the file, after checking that they fill it without gaps."""
    found = [_entry(name, facts, file) for name, facts in header.items() if name != METADATA]
    found.sort(key=lambda entry: (entry.begin, entry.end))
    reached = 0
    for entry in found:
        if entry.begin != reached:
            raise BadInput(f"{file} is damaged: {entry.name[:80]!r} begins at {entry.begin:,}, expected {reached:,}.")
        reached = entry.end
    if reached != length:
        raise BadInput(
            f"{file} is damaged: its header lists {reached:,} bytes of tensors, but the file has {length:,}."
        )
    return found


def _entry(name: str, facts: Any, file: str) -> TensorEntry:
    shown = f"{file} is damaged: {name[:80]!r}"
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise BadInput(f"{shown} is not a valid tensor name.")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{shown} must have exactly dtype, shape and data_offsets.")
    shape, offsets = facts["shape"], facts["data_offsets"]
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) > MOST_VALUES:
        raise BadInput(f"{shown} has an invalid shape.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise BadInput(f"{shown} has invalid data_offsets.")
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise BadInput(f"{file}: {name[:80]!r} has dtype {str(facts['dtype'])[:20]!r}; this torch supports {known}.")
    dtype, (begin, end) = DTYPES[facts["dtype"]], offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BadInput(f"{shown} has {end - begin:,} bytes, which does not fit {facts['dtype']} of shape {shape}.")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _are_counts(values: Any) -> bool:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    return isinstance(values, list) and all(map(is_count, values))


def _shaped(values: Tensor, entry: TensorEntry, file: str) -> Tensor:
    if (
        entry.dtype == torch.bool and values.numel() and int(values.max()) > 1
    ):  # torch computes nonsense with other values
        raise BadInput(f"{file} is damaged: {entry.name[:80]!r} has bools that are neither 0 nor 1.")
    return values.view(entry.dtype).reshape(entry.shape)


def machine_memory() -> int | None:
    """Return this machine's memory in bytes; None if the system does not report it."""
    names: Iterable[str] = getattr(os, "sysconf_names", ())
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
