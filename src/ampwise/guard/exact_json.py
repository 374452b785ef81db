"""Plain Python data as JSON and back, bit for bit. Reading looks up no class by name and runs no code.

None, bools, integers, finite floats, strings and lists are stored as such. Everything else is an object with one key
that names its type: {"tuple": [...]}, {"float": the bits}, {"dict": {...}}, {"tensor": {...}}. Small tensors and arrays
are stored in the JSON itself; they are restored on the CPU, contiguous and without shared memory.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.runs.tensor_files import CODES, DTYPES, MOST_DIMENSIONS, refuse_unwritable
from ampwise.trace.capsule.packing import DOUBLE, MAX_INTEGER_BITS

__all__ = ["from_json", "to_json"]

DEEPEST = 50  # data nested deeper is a mistake, or contains itself
MOST_BYTES = 16_000_000  # of tensors, arrays and bytes, in total
EXTRA_DTYPES = {"C32": torch.complex32, "C128": torch.complex128}  # dtypes that a file of tensors does not have
DTYPE_BY_CODE = DTYPES | EXTRA_DTYPES
CODE_BY_DTYPE = CODES | {dtype: code for code, dtype in EXTRA_DTYPES.items()}
NUMPY_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip
FACTORIES: dict[str, Any] = {
    "none": None, "int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": tuple, "dict": dict,
    "set": set,
}  # fmt: skip
SUPPORTED_TYPES = "Supported: numbers, strings, bytes, None, tensors, arrays, and lists, tuples, sets and dicts of them"


def to_json(value: Any, where: str) -> Any:
    """Convert to data that ``json.dumps`` accepts. Raise BadInput, naming the value ``where``, for unsupported types.

    >>> to_json({"lr": 0.1, "betas": (0.9, float("inf"))}, "the optimizer")
    {'dict': {'lr': 0.1, 'betas': {'tuple': [0.9, {'float': '7ff0000000000000'}]}}}
    """
    return _JsonWriter().node(value, where, 0)


def from_json(node: Any) -> Any:
    """Restore the value that ``to_json`` was given. Raise ValueError for invalid data.

    >>> from_json({"dict": {"lr": 0.1, "betas": {"tuple": [0.9, {"float": "7ff0000000000000"}]}}})
    {'lr': 0.1, 'betas': (0.9, inf)}
    """
    return _value(node, 0)


# --- writing -------------------------------------------------------------------------------------------------------


class _JsonWriter:
    def __init__(self) -> None:
        self._bytes = 0
        self._forms: dict[type, Callable[[Any, str, int], Any]] = {
            int: _integer,
            float: lambda value, where, depth: value if math.isfinite(value) else {"float": _float_bits(value)},
            str: lambda value, where, depth: value if _is_unicode(value) else {"text": _surrogates(value)},
            complex: lambda value, where, depth: {"complex": [_float_bits(value.real), _float_bits(value.imag)]},
            bytes: lambda value, where, depth: {"bytes": self._packed(value, where)},
            bytearray: lambda value, where, depth: {"bytearray": self._packed(value, where)},
            list: self._items,
            tuple: lambda value, where, depth: {"tuple": self._items(value, where, depth)},
            set: lambda value, where, depth: {"set": self._unordered(value, where, depth)},
            frozenset: lambda value, where, depth: {"frozenset": self._unordered(value, where, depth)},
            deque: lambda value, where, depth: {"deque": [value.maxlen, self._items(value, where, depth)]},
            dict: self._dict,
            OrderedDict: lambda value, where, depth: {"ordered": self._pairs(value, where, depth)},
            Counter: lambda value, where, depth: {"counter": self._pairs(value, where, depth)},
            defaultdict: self._with_default,
            Tensor: self._tensor,
        }

    def node(self, value: Any, where: str, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if depth > DEEPEST:
            raise BadInput(f"{where[:200]} is nested more than {DEEPEST} deep, or contains itself.")
        write = self._forms.get(type(value)) or self._numpy_writer(value)
        if write is None:
            raise BadInput(f"{where} is a {type(value).__name__}. {SUPPORTED_TYPES}.")
        return write(value, where, depth)

    def _numpy_writer(self, value: Any) -> Callable[[Any, str, int], Any] | None:
        numpy = sys.modules.get("numpy")
        if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return None
        return self._array

    def _items(self, values: Iterable[Any], where: str, depth: int) -> list[Any]:
        return [self.node(value, f"{where}[{number}]", depth + 1) for number, value in enumerate(values)]

    def _unordered(self, values: Iterable[Any], where: str, depth: int) -> list[Any]:
        # Sorted, so that equal sets give identical files.
        return sorted((self.node(value, f"a value of {where}", depth + 1) for value in values), key=json.dumps)

    def _dict(self, values: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
        if all(type(key) is str and _is_unicode(key) for key in values):
            return {"dict": {key: self.node(value, f"{where}[{key!r}]", depth + 1) for key, value in values.items()}}
        return {"pairs": self._pairs(values, where, depth)}

    def _pairs(self, values: Mapping[Any, Any], where: str, depth: int) -> list[list[Any]]:
        return [
            [self.node(key, f"a key of {where}", depth + 1), self.node(value, f"{where}[{key!r}]", depth + 1)]
            for key, value in values.items()
        ]

    def _with_default(self, values: defaultdict[Any, Any], where: str, depth: int) -> dict[str, Any]:
        for name, factory in FACTORIES.items():
            if values.default_factory is factory:
                return {"defaultdict": [name, self._pairs(values, where, depth)]}
        raise BadInput(
            f"{where} is a defaultdict with the factory {values.default_factory!r:.80}, which cannot "
            f"be saved. {SUPPORTED_TYPES}."
        )

    def _tensor(self, tensor: Tensor, where: str, depth: int) -> dict[str, Any]:
        try:
            refuse_unwritable(
                where, torch.view_as_real(tensor.resolve_conj()) if tensor.dtype in EXTRA_DTYPES.values() else tensor
            )
        except UnsupportedTensor as error:
            raise BadInput(str(error)) from error
        self._refuse_large(tensor.nbytes, where)  # before it is copied
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        values = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        facts = {"dtype": CODE_BY_DTYPE[tensor.dtype], "shape": list(tensor.shape), "data": self._packed(values, where)}
        return {"tensor": {**facts, "requires_grad": True} if tensor.requires_grad else facts}

    def _array(self, array: Any, where: str, depth: int) -> dict[str, Any]:
        """Convert a numpy array, or a numpy scalar, which computes differently from Python's."""
        if array.dtype.name not in NUMPY_DTYPES or not array.dtype.isnative:
            raise BadInput(f"{where} is a numpy {type(array).__name__} of {array.dtype.str}. {SUPPORTED_TYPES}.")
        self._refuse_large(array.nbytes, where)
        facts = {"dtype": array.dtype.name, "shape": list(array.shape), "data": self._packed(array.tobytes(), where)}
        return {"array" if type(array).__name__ == "ndarray" else "numpy": facts}

    def _packed(self, values: bytes | bytearray, where: str) -> str:
        self._refuse_large(len(values), where)
        self._bytes += len(values)
        return base64.b64encode(values).decode()

    def _refuse_large(self, size: int, where: str) -> None:
        if self._bytes + size > MOST_BYTES:
            others = f" and other values have {self._bytes:,}" if self._bytes else ""
            raise BadInput(f"{where} has {size:,} bytes{others}; the limit is {MOST_BYTES:,} in total.")


def _integer(value: int, where: str, depth: int) -> int:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise BadInput(f"{where} is a number of {value.bit_length():,} bits; the limit is {MAX_INTEGER_BITS:,}.")
    return value


def _float_bits(value: float) -> str:
    return DOUBLE.pack(value).hex()


def _is_unicode(text: str) -> bool:
    """Whether text can be encoded as UTF-8; file names that are not UTF-8 have lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _surrogates(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


# --- reading -------------------------------------------------------------------------------------------------------


def _value(node: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(node, list):
        return [_value(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return _scalar(node)
    if len(node) != 1 or next(iter(node)) not in _KINDS:
        raise ValueError(f"a value of unknown type: {', '.join(map(repr, node))[:80]}")
    ((kind, inner),) = node.items()
    return _KINDS[kind](inner, depth)


def _scalar(node: Any) -> Any:
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError("NaN and infinity are not allowed here")
    if isinstance(node, int) and node.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(f"an integer of more than {MAX_INTEGER_BITS:,} bits")
    if node is not None and type(node) not in (bool, int, float, str):
        raise ValueError(f"a {type(node).__name__} is not a JSON value")
    return node


def _list(node: Any, length: int | None = None) -> list[Any]:
    if not isinstance(node, list) or (length is not None and len(node) != length):
        raise ValueError("expected a list" if length is None else f"expected a list of {length}")
    return node


def _items_of(node: Any, depth: int) -> list[Any]:
    return [_value(item, depth + 1) for item in _list(node)]


def _check_distinct(values: list[Any]) -> list[Any]:
    """Check that values are hashable and distinct, as the keys of a dict or the items of a set must be."""
    try:
        if len(set(values)) != len(values):
            raise ValueError("a duplicate key")
    except TypeError:
        raise ValueError("a key that is not hashable") from None
    return values


def _dict_of(node: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair, 2) for pair in _list(node)]
    keys = _check_distinct([_value(key, depth + 1) for key, _ in pairs])
    return dict(zip(keys, (_value(value, depth + 1) for _, value in pairs), strict=True))


def _by_name(node: Any, depth: int) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise ValueError("expected an object")
    return {name: _value(inner, depth + 1) for name, inner in node.items()}


def _defaultdict_of(node: Any, depth: int) -> defaultdict[Any, Any]:
    name, pairs = _list(node, 2)
    if not isinstance(name, str) or name not in FACTORIES:
        raise ValueError("a defaultdict with an unknown factory")
    return defaultdict(FACTORIES[name], _dict_of(pairs, depth))


def _deque_of(node: Any, depth: int) -> deque[Any]:
    longest, items = _list(node, 2)
    if longest is not None and (type(longest) is not int or not len(_list(items)) <= longest < 2**63):
        raise ValueError("a deque longer than its maxlen")
    return deque(_items_of(items, depth), longest)


def _float(node: Any) -> float:
    digits = set("0123456789abcdef")  # fromhex would accept spaces
    if not isinstance(node, str) or len(node) != 2 * DOUBLE.size or not digits.issuperset(node):
        raise ValueError("a float that is not 16 hexadecimal digits")
    (number,) = DOUBLE.unpack(bytes.fromhex(node))
    return float(number)


def _complex(node: Any) -> complex:
    real, imaginary = _list(node, 2)
    return complex(_float(real), _float(imaginary))


def _unpacked(node: Any) -> bytes:
    if not isinstance(node, str):
        raise ValueError("bytes that are not base64")
    try:
        return base64.b64decode(node, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bytes that are not base64 ({error})") from None


def _text(node: Any) -> str:
    return _unpacked(node).decode("utf-8", "surrogatepass")


def _facts(node: Any, optional: str | None = None) -> tuple[str, list[int], bytes]:
    """Return dtype, shape and bytes of an array; only the shape is checked."""
    if not isinstance(node, dict) or set(node) - {optional} != {"dtype", "shape", "data"}:
        raise ValueError("an array without its dtype, shape and data")
    shape = _list(node["shape"])
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise ValueError("an array with an invalid shape")
    if math.prod(filter(None, shape)) >= 2**56:  # torch multiplies them even if one is 0
        raise ValueError("an array with an invalid shape")
    return str(node["dtype"]), shape, _unpacked(node["data"])


def _check_size(name: str, shape: list[int], values: bytes, itemsize: int) -> None:
    if math.prod(shape) * itemsize != len(values):
        raise ValueError(f"{name} of shape {shape} with {len(values):,} bytes")
    if name in ("BOOL", "bool") and values and max(values) > 1:  # torch and numpy compute nonsense with others
        raise ValueError("bools that are neither 0 nor 1")


def _tensor_of(node: Any) -> Tensor:
    name, shape, values = _facts(node, optional="requires_grad")
    if name not in DTYPE_BY_CODE:
        raise ValueError(f"a tensor of dtype {name[:20]!r}, which this torch does not have")
    dtype = DTYPE_BY_CODE[name]
    _check_size(name, shape, values, dtype.itemsize)
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    if "requires_grad" not in node:
        return tensor
    if node["requires_grad"] is not True or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError("requires_grad on a tensor that cannot have a gradient")
    return tensor.requires_grad_()


def _array_of(node: Any) -> Any:
    name, shape, values = _facts(node)
    if name not in NUMPY_DTYPES:
        raise ValueError(f"an array of unsupported dtype {name[:20]!r}")
    import numpy  # needed only if an array was saved

    dtype = numpy.dtype(name)
    _check_size(name, shape, values, dtype.itemsize)
    try:
        return numpy.frombuffer(bytearray(values), dtype=dtype).reshape(shape)
    except ValueError as error:  # numpy allows fewer dimensions than torch
        raise ValueError(f"an array with an invalid shape ({error})") from None


def _numpy_number(node: Any) -> Any:
    array = _array_of(node)
    if array.shape != ():
        raise ValueError("a numpy scalar with a shape")
    return array[()]


_KINDS: dict[str, Callable[[Any, int], Any]] = {
    "float": lambda node, depth: _float(node),
    "text": lambda node, depth: _text(node),
    "complex": lambda node, depth: _complex(node),
    "bytes": lambda node, depth: _unpacked(node),
    "bytearray": lambda node, depth: bytearray(_unpacked(node)),
    "tuple": lambda node, depth: tuple(_items_of(node, depth)),
    "set": lambda node, depth: set(_check_distinct(_items_of(node, depth))),
    "frozenset": lambda node, depth: frozenset(_check_distinct(_items_of(node, depth))),
    "deque": _deque_of,
    "dict": _by_name,
    "pairs": _dict_of,
    "ordered": lambda node, depth: OrderedDict(_dict_of(node, depth)),
    "counter": lambda node, depth: Counter(_dict_of(node, depth)),
    "defaultdict": _defaultdict_of,
    "tensor": lambda node, depth: _tensor_of(node),
    "array": lambda node, depth: _array_of(node),
    "numpy": lambda node, depth: _numpy_number(node),
}
