"""Plain Python data and tensors as JSON and back, bit for bit. Reading looks up no class by name and runs no code.

None, bools, integers, finite floats, strings and lists are stored as such. Everything else is an object with one key
that names its type: {"tuple": [...]}, {"float": the bits}, {"dict": {...}}, {"tensor": {...}}. Tensors are stored in
the JSON itself, or by name: {"ref": {"name": ..., "on": "cuda"}}, to be written to a file of tensors. All are restored
contiguous and without shared memory.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.runs.tensor_files import (
    CODES,
    as_stored,
    bytes_of,
    dtype_named,
    from_stored,
    is_shape,
    original_dtype,
)

DEEPEST = 50  # data nested deeper is a mistake, or contains itself
MOST_BYTES = 16_000_000  # of tensors, arrays and bytes in the JSON, in total
MAX_INTEGER_BITS = 4096
LONGEST_NAME = 1000  # characters of a tensor's name
MOST_NAMED_TUPLES = 1000  # types of named tuples: each is a class, which takes a kilobyte
DOUBLE = struct.Struct(">d")
NUMPY_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip
FACTORIES: dict[str, Any] = {
    "none": None, "int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": tuple, "dict": dict,
    "set": set,
}  # fmt: skip
PAIRS: dict[type, str] = {dict: "pairs", OrderedDict: "ordered", Counter: "counter"}
SUPPORTED_TYPES = "Supported: numbers, strings, bytes, None, tensors, arrays, and lists, tuples, sets and dicts of them"


class Encoded(NamedTuple):
    """A value that is JSON data already, and is decoded later, when its tensors are there."""

    node: Any


class AttributeDict(dict[str, Any]):
    """The values of an object that was not a plain dict, by key and by attribute."""

    def __init__(self, values: Mapping[str, Any], kind: str) -> None:
        super().__init__(values)
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            kind = self.__dict__.get("_kind", "dict")  # absent while a copy is made
            raise AttributeError(f"the capsule's values of a {kind!r} have no {name!r}") from None


def to_json(value: Any, where: str) -> Any:
    """Convert to data that ``json.dumps`` accepts. Raise BadInput, naming the value ``where``, for unsupported types.

    >>> to_json({"lr": 0.1, "betas": (0.9, float("inf"))}, "the optimizer")
    {'dict': {'lr': 0.1, 'betas': {'tuple': [0.9, {'float': '7ff0000000000000'}]}}}
    """
    return PlainEncoder().encode(value, where)


def from_json(node: Any) -> Any:
    """Restore the value that ``to_json`` was given. Raise ValueError for invalid data.

    >>> from_json({"dict": {"lr": 0.1, "betas": {"tuple": [0.9, {"float": "7ff0000000000000"}]}}})
    {'lr': 0.1, 'betas': (0.9, inf)}
    """
    return PlainDecoder().decode(node)


# --- writing -------------------------------------------------------------------------------------------------------


class PlainEncoder:
    """Converts values to JSON data.

    tensors: where to put tensors, which the JSON then refers to by name; a tensor that occurs twice is put there once.
        Without it, tensors become part of the JSON.
    objects: also accept objects whose class is not restored: named tuples, mappings and dataclasses come back with the
        same values by name and by attribute; subclasses of numbers, strings, lists and tensors as the plain type.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, *, objects: bool = False) -> None:
        self._tensors, self._objects = tensors, objects
        self._seen: dict[int, tuple[str, Tensor]] = {}  # by id, so they are kept: an id may be used again
        self._bytes = 0

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return JSON data for a value; ``where`` names it in errors, and names its tensors."""
        if value is None or isinstance(value, bool):
            return value
        if depth > DEEPEST:
            raise BadInput(f"{where[:200]} is nested more than {DEEPEST} deep, or contains itself.")
        if isinstance(value, Tensor):
            return self._tensor(value, where) if self._tensors is None else self._reference(value, where)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._array(value, where)
        encoded = self._scalar(value, where)
        if encoded is None:
            encoded = self._container(value, where, depth)
        if encoded is None and self._objects:
            encoded = self._object(value, where, depth)
        if encoded is None:
            raise BadInput(f"{where} is a {type(value).__name__}. {SUPPORTED_TYPES}.")
        return encoded

    def _scalar(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is int:
            if value.bit_length() > MAX_INTEGER_BITS:
                raise BadInput(
                    f"{where} is an integer of {value.bit_length():,} bits; the limit is {MAX_INTEGER_BITS:,}."
                )
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": DOUBLE.pack(value).hex()}
        if kind is str:
            return value if _is_unicode(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is complex:
            return {"complex": [DOUBLE.pack(part).hex() for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            self._refuse_large(len(value), where)
            return {kind.__name__: _base64(value)}
        return {"json": value.node} if kind is Encoded else None

    def _container(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, where, depth)
        if kind is tuple:
            return {"tuple": self._items(value, where, depth)}
        if kind in (set, frozenset):  # sorted, so that equal sets give identical files
            return {kind.__name__: sorted(self._items(value, where, depth), key=json.dumps)}
        if kind is deque:
            return {"deque": [value.maxlen, self._items(value, where, depth)]}
        if kind is dict and all(type(key) is str and _is_unicode(key) for key in value):
            return {"dict": self._by_name(value, where, depth)}
        if kind in PAIRS:
            return {PAIRS[kind]: self._pairs(value, where, depth)}
        if kind is defaultdict:
            for name, factory in FACTORIES.items():
                if value.default_factory is factory:
                    return {"defaultdict": [name, self._pairs(value, where, depth)]}
            raise BadInput(
                f"{where} is a defaultdict with the factory {value.default_factory!r:.80}, which cannot be saved. "
                f"{SUPPORTED_TYPES}."
            )
        return None

    def _object(self, value: Any, where: str, depth: int) -> Any:
        for plain in (int, float, str):
            if isinstance(value, plain):
                return self._scalar(plain(value), where)
        if isinstance(value, list):
            return self._items(value, where, depth)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": self._items(value, where, depth)}
        if isinstance(value, tuple):
            return {"named": self._by_name(value._asdict(), where, depth)}  # type: ignore[attr-defined]
        if isinstance(value, Mapping):
            values = dict(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        else:
            return None
        if not all(isinstance(key, str) and _is_unicode(key) for key in values):
            raise BadInput(f"{where} is a {type(value).__name__} with keys that are not strings. {SUPPORTED_TYPES}.")
        return {"object": [type(value).__name__, self._by_name(values, where, depth)]}

    def _items(self, values: Iterable[Any], where: str, depth: int) -> list[Any]:
        return [self.encode(value, f"{where}[{number}]", depth + 1) for number, value in enumerate(values)]

    def _by_name(self, values: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        return {str(key): self.encode(value, f"{where}[{str(key)!r}]", depth + 1) for key, value in values.items()}

    def _pairs(self, values: Mapping[Any, Any], where: str, depth: int) -> list[list[Any]]:
        return [
            [self.encode(key, f"a key of {where}", depth + 1), self.encode(value, f"{where}[{key!r}]", depth + 1)]
            for key, value in values.items()
        ]

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        if type(tensor) is not Tensor or not _is_plain(tensor.dtype):
            kind = type(tensor).__name__ if type(tensor) is not Tensor else f"tensor of {tensor.dtype}"
            raise BadInput(f"{where} is a {kind}. {SUPPORTED_TYPES}.")
        stored = _stored(tensor, where)
        self._refuse_large(stored.nbytes, where)  # before it is copied
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts = {"dtype": dtype, "shape": list(tensor.shape), "data": _base64(bytes_of(stored))}
        return {"tensor": {**facts, "requires_grad": True} if tensor.requires_grad else facts}

    def _reference(self, tensor: Tensor, where: str) -> dict[str, Any]:
        assert self._tensors is not None
        is_plain = type(tensor) in (Tensor, Parameter) or hasattr(tensor, "_local_tensor")
        if not is_plain and not self._objects:
            raise BadInput(
                f"{where} is a {type(tensor).__name__}, which would be restored as a plain tensor. Save a plain one: "
                ".as_subclass(Tensor)."
            )
        name, _ = self._seen.get(id(tensor), ("", None))
        if not name:
            stored = _stored(tensor.detach(), where)
            is_free = len(where) <= LONGEST_NAME and where not in self._tensors
            name = where if is_free else f"{where[:LONGEST_NAME]} #{len(self._tensors) + 1}"
            self._seen[id(tensor)], self._tensors[name] = (name, tensor), stored
        viewed = original_dtype(tensor)
        facts = {
            "name": name,
            "on": tensor.device.type,
            **({} if viewed is None else {"dtype": viewed}),
            **({"requires_grad": True} if tensor.requires_grad else {}),
            **({"parameter": True} if type(tensor) is Parameter and not self._objects else {}),
        }
        return {"ref": facts}

    def _array(self, array: Any, where: str) -> dict[str, Any]:
        """Convert a numpy array, or a numpy scalar, which computes differently from Python's."""
        if array.dtype.name not in NUMPY_DTYPES or not array.dtype.isnative:
            raise BadInput(f"{where} is a numpy {type(array).__name__} of {array.dtype.str}. {SUPPORTED_TYPES}.")
        self._refuse_large(array.nbytes, where)
        facts = {"dtype": array.dtype.name, "shape": list(array.shape), "data": _base64(array.tobytes())}
        return {"array" if type(array).__name__ == "ndarray" else "numpy": facts}

    def _refuse_large(self, size: int, where: str) -> None:
        if self._bytes + size > MOST_BYTES:
            others = f" and other values have {self._bytes:,}" if self._bytes else ""
            raise BadInput(f"{where} has {size:,} bytes{others}; the limit is {MOST_BYTES:,} in total.")
        self._bytes += size


def _stored(tensor: Tensor, where: str) -> Tensor:
    try:
        return as_stored(tensor, where)
    except UnsupportedTensor as error:
        raise BadInput(str(error)) from error


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in CODES or dtype.is_complex


def _is_unicode(text: str) -> bool:
    """Whether text can be encoded as UTF-8; file names that are not UTF-8 have lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(values: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(values).decode()


# --- reading -------------------------------------------------------------------------------------------------------


def _on_cpu(kind: str) -> torch.device:
    return torch.device("cpu")


class PlainDecoder:
    """Converts the JSON data of a ``PlainEncoder`` back to values; ValueError for other JSON.

    tensors: those that the JSON refers to by name; each is copied. One that occurs twice is one object again.
    device: returns the device for a tensor, given the type of the device that it was on.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor] | None = None, device: Callable[[str], torch.device] = _on_cpu
    ) -> None:
        self._tensors, self._device = tensors or {}, device
        self._made: dict[str, Tensor] = {}
        self._named_tuples: dict[tuple[str, ...], Any] = {}
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "float": lambda node, depth: _float(node),
            "text": lambda node, depth: _bytes(node).decode("utf-8", "surrogatepass"),
            "complex": lambda node, depth: complex(*map(_float, _list(node, 2))),
            "bytes": lambda node, depth: _bytes(node),
            "bytearray": lambda node, depth: bytearray(_bytes(node)),
            "json": lambda node, depth: Encoded(node),
            "tuple": lambda node, depth: tuple(self._items(node, depth)),
            "set": lambda node, depth: set(_check_distinct(self._items(node, depth))),
            "frozenset": lambda node, depth: frozenset(_check_distinct(self._items(node, depth))),
            "deque": self._deque,
            "dict": self._by_name,
            "pairs": self._pairs,
            "ordered": lambda node, depth: OrderedDict(self._pairs(node, depth)),
            "counter": lambda node, depth: Counter(self._pairs(node, depth)),
            "defaultdict": self._defaultdict,
            "named": self._named,
            "object": self._object,
            "tensor": lambda node, depth: _tensor(node),
            "ref": lambda node, depth: self._reference(node),
            "array": lambda node, depth: _array(node),
            "numpy": lambda node, depth: _numpy_scalar(node),
        }

    def decode(self, node: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if isinstance(node, list):
            return self._items(node, depth)
        if isinstance(node, dict):
            kind, inner = next(iter(node.items()), ("", None))
            if len(node) != 1 or kind not in self._kinds:
                raise ValueError(f"a value of unknown type: {', '.join(map(repr, node))[:80]}")
            return self._kinds[kind](inner, depth)
        if isinstance(node, float) and not math.isfinite(node):
            raise ValueError("NaN and infinity are not allowed here")
        if isinstance(node, int) and node.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"an integer of more than {MAX_INTEGER_BITS:,} bits")
        if node is not None and type(node) not in (bool, int, float, str):
            raise ValueError(f"a {type(node).__name__} is not a JSON value")
        return node

    def _items(self, node: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in _list(node)]

    def _by_name(self, node: Any, depth: int) -> dict[str, Any]:
        if not isinstance(node, dict):
            raise ValueError("expected values by name")
        return {name: self.decode(inner, depth + 1) for name, inner in node.items()}

    def _pairs(self, node: Any, depth: int) -> dict[Any, Any]:
        pairs = [_list(pair, 2) for pair in _list(node)]
        keys = _check_distinct([self.decode(key, depth + 1) for key, _ in pairs])
        return dict(zip(keys, (self.decode(value, depth + 1) for _, value in pairs), strict=True))

    def _defaultdict(self, node: Any, depth: int) -> defaultdict[Any, Any]:
        name, pairs = _list(node, 2)
        if not isinstance(name, str) or name not in FACTORIES:
            raise ValueError("a defaultdict with an unknown factory")
        return defaultdict(FACTORIES[name], self._pairs(pairs, depth))

    def _deque(self, node: Any, depth: int) -> deque[Any]:
        longest, items = _list(node, 2)
        if longest is not None and (type(longest) is not int or not len(_list(items)) <= longest < 2**63):
            raise ValueError("a deque longer than its maxlen")
        return deque(self._items(items, depth), longest)

    def _named(self, node: Any, depth: int) -> tuple[Any, ...]:
        values = self._by_name(node, depth)
        names = tuple(values)
        if names not in self._named_tuples:
            if len(self._named_tuples) == MOST_NAMED_TUPLES:
                raise ValueError(f"more than {MOST_NAMED_TUPLES:,} types of named tuples")
            self._named_tuples[names] = named_tuple(names)
        return self._named_tuples[names](*values.values())  # type: ignore[no-any-return]

    def _object(self, node: Any, depth: int) -> AttributeDict:
        kind, values = _list(node, 2)
        if not isinstance(kind, str):
            raise ValueError("an object without a class name")
        return AttributeDict(self._by_name(values, depth), kind[:80])

    def _reference(self, node: Any) -> Tensor:
        if not isinstance(node, dict) or not node.keys() <= {"name", "on", "dtype", "requires_grad", "parameter"}:
            raise ValueError("a tensor with unknown keys")
        name = node.get("name")
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"the tensor {str(name)[:80]!r} is missing")
        if name not in self._made:
            made = self._tensors[name].to(self._device(str(node.get("on"))), copy=True)
            if "dtype" in node:
                made = from_stored(made, dtype_named(node["dtype"]))
            needs_grad = node.get("requires_grad") is True
            if needs_grad and not (made.is_floating_point() or made.is_complex()):
                raise ValueError(f"the tensor {name[:80]!r} cannot require gradients: it is not floating-point")
            is_parameter = node.get("parameter") is True
            self._made[name] = Parameter(made, needs_grad) if is_parameter else made.requires_grad_(needs_grad)
        return self._made[name]


def named_tuple(names: tuple[str, ...]) -> Any:
    """Create a class like that of collections.namedtuple, without compiling code that contains the names.

    >>> named_tuple(("loss", "scale"))(0.5, 1.0).scale
    1.0
    """
    if not all(name.isidentifier() and not name.startswith("_") for name in names):
        raise ValueError("a named tuple with invalid field names")
    # The attributes by which torch recognizes a named tuple when it searches for tensors.
    attributes: dict[str, Any] = {
        "__slots__": (),
        "__new__": lambda kind, *values: tuple.__new__(kind, values),
        "_make": classmethod(lambda kind, values: kind(*values)),
        "_asdict": lambda self: dict(zip(self._fields, self, strict=True)),
        "_fields": names,
    }
    parts = {name: property(itemgetter(number)) for number, name in enumerate(names)}
    return type("Named", (tuple,), {**attributes, **parts})


def _list(node: Any, length: int | None = None) -> list[Any]:
    if not isinstance(node, list) or (length is not None and len(node) != length):
        raise ValueError("expected a list" if length is None else f"expected a list of {length}")
    return node


def _check_distinct(values: list[Any]) -> list[Any]:
    """Check that values are hashable and distinct, as the keys of a dict or the items of a set must be."""
    try:
        if len(set(values)) != len(values):
            raise ValueError("a duplicate key")
    except TypeError:
        raise ValueError("a key that is not hashable") from None
    return values


def _float(node: Any) -> float:
    digits = set("0123456789abcdef")  # fromhex would accept spaces
    if not isinstance(node, str) or len(node) != 2 * DOUBLE.size or not digits.issuperset(node):
        raise ValueError("a float that is not 16 hexadecimal digits")
    (number,) = DOUBLE.unpack(bytes.fromhex(node))
    return float(number)


def _bytes(node: Any) -> bytes:
    if not isinstance(node, str):
        raise ValueError("bytes that are not base64")
    try:
        return base64.b64decode(node, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"bytes that are not base64 ({error})") from None


def _array_facts(node: Any, known: Callable[[str], Any], optional: str | None = None) -> tuple[Any, list[int], bytes]:
    """Return dtype, shape and bytes of an array, which fit together; ``known`` returns the dtype of a name."""
    if not isinstance(node, dict) or set(node) - {optional} != {"dtype", "shape", "data"}:
        raise ValueError("an array without its dtype, shape and data")
    shape, name, values = node["shape"], node["dtype"], _bytes(node["data"])
    if not is_shape(shape):
        raise ValueError("an array with an invalid shape")
    dtype = known(name)
    if math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{name} of shape {shape} with {len(values):,} bytes")
    if name == "bool" and values and max(values) > 1:  # torch and numpy compute nonsense with others
        raise ValueError("bools that are neither 0 nor 1")
    return dtype, shape, values


def _tensor(node: Any) -> Tensor:
    def known(name: Any) -> torch.dtype:
        dtype = dtype_named(name)
        if not _is_plain(dtype):
            raise ValueError(f"a tensor of unsupported dtype {name[:20]!r}")
        return dtype

    dtype, shape, values = _array_facts(node, known, optional="requires_grad")
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    if "requires_grad" not in node:
        return tensor
    if node["requires_grad"] is not True or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError("requires_grad on a tensor that cannot have a gradient")
    return tensor.requires_grad_()


def _array(node: Any) -> Any:
    import numpy  # needed only if an array was saved

    def known(name: Any) -> Any:
        if not isinstance(name, str) or name not in NUMPY_DTYPES:
            raise ValueError(f"an array of unsupported dtype {str(name)[:20]!r}")
        return numpy.dtype(name)

    dtype, shape, values = _array_facts(node, known)
    try:
        return numpy.frombuffer(bytearray(values), dtype=dtype).reshape(shape)
    except ValueError as error:  # numpy allows fewer dimensions than torch
        raise ValueError(f"an array with an invalid shape ({error})") from None


def _numpy_scalar(node: Any) -> Any:
    array = _array(node)
    if array.shape != ():
        raise ValueError("a numpy scalar with a shape")
    return array[()]
