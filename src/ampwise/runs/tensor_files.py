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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.finding.strict_json import loads
from ampwise.runs.files import open_regular, write_atomically
from ampwise.runs.json_lines import is_count

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
# By size in bytes, to copy bits unchanged.
INTEGER_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorFile(NamedTuple):
    """A file of tensors that was written or read."""

    tensors: dict[str, Tensor]
    size: int  # in bytes
    sha256: str  # of the whole file


class _Entry(NamedTuple):
    """A tensor in a file, and where its bytes are, after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# --- dtypes --------------------------------------------------------------------------------------------------------


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


def as_stored(tensor: Tensor, name: str) -> Tensor:
    """Return a view that can be written (a copy for conjugated or negated views); raise UnsupportedTensor if none.

    Complex dtypes that the format lacks become pairs of real numbers; others become integers of the same size.
    """
    if hasattr(tensor, "_local_tensor"):  # a DTensor, which is saved in shards
        return tensor
    if tensor.is_quantized:
        raise UnsupportedTensor(f"{name}: it is quantised ({tensor.dtype}); only plain tensors can be saved.")
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps_others and tensor.layout == torch.strided:
        if type(tensor) not in (Tensor, Parameter):
            tensor = tensor.detach().as_subclass(Tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype not in CODES:
            plain = tensor.detach()
            tensor = torch.view_as_real(plain) if plain.is_complex() else plain.view(INTEGER_BY_SIZE[plain.itemsize])
    refuse_unwritable(name, tensor)
    return tensor


def stored_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of the view that ``as_stored`` makes of a tensor."""
    if dtype in CODES:
        return dtype, shape
    return (dtype.to_real(), (*shape, 2)) if dtype.is_complex else (INTEGER_BY_SIZE[dtype.itemsize], shape)


def from_stored(stored: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Undo ``as_stored``; ValueError if the tensor cannot be stored that way. dtype: the original one, or None."""
    if dtype is None or dtype == stored.dtype:
        return stored
    expected, ending = stored_dtype_and_shape(dtype, ())
    if stored.dtype != expected or (ending and stored.shape[-1:] != ending):
        raise ValueError(f"a tensor of {dtype} is not stored as {stored.dtype} of shape {tuple(stored.shape)}")
    return torch.view_as_complex(stored.contiguous()) if dtype.is_complex else stored.view(dtype)


def original_dtype(tensor: Tensor) -> str | None:
    """Return the name of a tensor's dtype if ``as_stored`` changes it; else None."""
    return None if tensor.dtype in CODES else str(tensor.dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """Return the dtype of this name, such as "float32"; BadInput if this torch has none."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or name.startswith("q"):  # quantised, which are never saved
        raise BadInput(f"the state has tensors of {str(name)[:40]!r}, which this torch does not have.")
    return found


# --- writing -------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Write tensors from any device, one at a time; the file appears only when it is complete."""
    for name, tensor in tensors.items():
        refuse_unwritable(repr(name), tensor)
    header = _header(tensors)
    if len(header) > LONGEST_HEADER:
        raise BadInput(f"the header of {len(tensors):,} tensors is too long for one file ({len(header):,} bytes).")
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        digest.update(LENGTH.pack(len(header)) + header)
        yield LENGTH.pack(len(header)) + header
        for tensor in tensors.values():
            values = bytes_of(tensor)
            for begin in range(0, len(values), CHUNK):  # without a copy, which would hold the GIL
                digest.update(values[begin : begin + CHUNK])
                yield values[begin : begin + CHUNK]

    _, size = write_atomically(path, pieces())
    return TensorFile(dict(tensors), size, digest.hexdigest())


def size_on_disk(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of bytes that ``write_tensors`` would write."""
    return LENGTH.size + len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes: its memory, or a copy if it is on a device or not contiguous."""
    plain = tensor.detach().cpu().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    # Flatten first: a 0-dimensional tensor cannot be viewed as bytes.
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy().data)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNED_TO)


# --- reading -------------------------------------------------------------------------------------------------------


def read_tensors(path: Path, *, only: Collection[str] | None = None, largest: int | None = None) -> TensorFile:
    """Read the tensors of a file to the CPU, and compute its checksum in the same pass; BadInput if it is invalid.

    only: names of tensors to return; the others are read for the checksum, and not kept.
    largest: most bytes that the tensors may take; by default, this machine's memory.
    """
    if sys.byteorder != "little":
        raise BadInput("files of tensors can be read only on little-endian machines.")
    try:
        with open_regular(path, os.O_RDONLY, "rb") as file:
            return _read(file, path.name, only, machine_memory() if largest is None else largest)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror or error}.") from error


def _read(file: IO[bytes], name: str, only: Collection[str] | None, largest: int | None) -> TensorFile:
    size = os.fstat(file.fileno()).st_size
    header = _read_header(file, size, name)
    digest = hashlib.sha256(LENGTH.pack(len(header)) + header)
    length = size - LENGTH.size - len(header)  # bytes of all tensors
    entries = _entries(header, length, name)
    if largest is not None and length > largest:
        raise BadInput(f"{name} has {length:,} bytes of tensors; the limit is {largest:,}.")
    tensors = {}
    for entry in entries:
        values = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        memory, done = values.numpy().data, 0
        while done < len(memory) and (count := file.readinto(memory[done : done + CHUNK])):  # type: ignore[attr-defined]
            digest.update(memory[done : done + count])  # while it is in the processor's cache
            done += count
        if done != len(memory):
            raise BadInput(f"{name} was truncated while it was read.")
        if entry.dtype == torch.bool and values.numel() and int(values.max()) > 1:  # torch computes nonsense with those
            raise BadInput(f"{name} is damaged: {entry.name[:80]!r} has bools that are neither 0 nor 1.")
        if only is None or entry.name in only:
            tensors[entry.name] = values.view(entry.dtype).reshape(entry.shape)
    return TensorFile(tensors, size, digest.hexdigest())


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


def _entries(header: bytes, length: int, file: str) -> list[_Entry]:
    """Return the tensors in the order of the file, after checking that they fill its ``length`` bytes without gaps."""
    try:
        facts = loads(header.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} is damaged: its header is invalid ({error}).") from error
    if not isinstance(facts, dict):
        raise BadInput(f"{file} is damaged: its header is not a JSON object.")
    found = [_entry(name, each, file) for name, each in facts.items() if name != METADATA]
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


def _entry(name: str, facts: Any, file: str) -> _Entry:
    shown = f"{file} is damaged: {name[:80]!r}"
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise BadInput(f"{shown} is not a valid tensor name.")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{shown} must have exactly dtype, shape and data_offsets.")
    shape, offsets = facts["shape"], facts["data_offsets"]
    if not is_shape(shape):
        raise BadInput(f"{shown} has an invalid shape.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise BadInput(f"{shown} has invalid data_offsets.")
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise BadInput(f"{file}: {name[:80]!r} has dtype {str(facts['dtype'])[:20]!r}; this torch supports {known}.")
    dtype, (begin, end) = DTYPES[facts["dtype"]], offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BadInput(f"{shown} has {end - begin:,} bytes, which does not fit {facts['dtype']} of shape {shape}.")
    return _Entry(name, dtype, tuple(shape), begin, end)


def is_shape(value: Any) -> bool:
    """Whether a value from a file is a list of sizes that torch can multiply without overflow."""
    return (
        isinstance(value, list)
        and len(value) <= MOST_DIMENSIONS
        and all(map(is_count, value))
        and math.prod(filter(None, value)) <= MOST_VALUES
    )


def machine_memory() -> int | None:
    """Return this machine's memory in bytes; None if the system does not report it."""
    names = getattr(os, "sysconf_names", ())
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
