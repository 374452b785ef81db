"""Convert a function's arguments to JSON and named tensors, and back. No class is looked up by its name.

JSON has no tuples, no NaN and no tensors, so each of these is an object with one key that names its type:
{"tuple": [...]}, {"float": the bits}, {"tensor": its name}. Batches that are objects come back as ``Attributes``, whose
values can be read by key and by attribute.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput, UnsupportedTensor
from ampwise.runs.tensor_files import refuse_unwritable

__all__ = ["AttributeDict", "Packer", "Unpacker", "named_tuple"]

MAX_DEPTH = 20  # data nested deeper is a mistake, or contains itself
MAX_INTEGER_BITS = 4096  # bits
MAX_NAME_LENGTH = 200  # characters of a tensor's name
MAX_NAMED_TUPLES = 1000  # named tuple types: each is a class, which takes a kilobyte
DOUBLE = struct.Struct(">d")
SUPPORTED = "A capsule can hold tensors, numbers, strings and None, and lists, tuples and dicts of these"


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


def named_tuple(names: tuple[str, ...]) -> Any:
    """Create a class like that of collections.namedtuple, without compiling code that contains the names.

    >>> named_tuple(("loss", "scale"))(0.5, 1.0).scale
    1.0
    """
    if not all(name.isidentifier() and not name.startswith("_") for name in names):
        raise ValueError("a named tuple with invalid field names")
    parts = {name: property(itemgetter(number)) for number, name in enumerate(names)}
    return type("Named", (tuple,), {**_TUPLE, **parts, "_fields": names})


def _new_tuple(kind: type[tuple[Any, ...]], *values: Any) -> tuple[Any, ...]:
    return tuple.__new__(kind, values)


# The attributes by which torch recognizes a named tuple when it searches for tensors.
_TUPLE: dict[str, Any] = {
    "__slots__": (),
    "__new__": _new_tuple,
    "_make": classmethod(lambda kind, values: kind(*values)),
    "_asdict": lambda self: dict(zip(self._fields, self, strict=True)),
}


class Packer:
    """Converts values to JSON and collects their tensors in ``tensors``; a tensor that occurs twice is stored once."""

    def __init__(self, device: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._device = device  # type of the device that ran the step; tensors on it may be loaded to another
        self._names: dict[int, str] = {}

    def pack(self, value: Any, where: str, depth: int = 0) -> Any:
        """Convert a value to JSON; ``where`` names it in errors."""
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if value is None or isinstance(value, bool | int | float | str):
            return _plain(value, where)
        if depth == MAX_DEPTH:
            raise BadInput(f"{where} is nested more than {MAX_DEPTH} deep, or contains itself.")
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": self._items(value, where, depth)}
        if isinstance(value, list):
            return {"list": self._items(value, where, depth)}
        return self._by_name(value, where, depth)

    def _items(self, values: Iterable[Any], where: str, depth: int) -> list[Any]:
        return [self.pack(value, f"{where}[{number}]", depth + 1) for number, value in enumerate(values)]

    def _by_name(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        kind = type(value).__name__
        if type(value) is dict:
            return {"dict": self._values(value, where, depth)}
        if isinstance(value, tuple):
            fields: tuple[str, ...] = value._fields  # type: ignore[attr-defined]
            return {"named": self._values(dict(zip(fields, value, strict=True)), where, depth)}
        if isinstance(value, Mapping):
            return {"attributes": self._values(value, where, depth), "class": kind}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return {"attributes": self._values(values, where, depth), "class": kind}
        raise BadInput(f"{where} is a {kind}. {SUPPORTED}.")

    def _values(self, values: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
        for key in values:
            if not isinstance(key, str):
                raise BadInput(f"{where} has the key {str(key)[:40]!r}, which is not a string. {SUPPORTED}.")
            _valid(key, where)
        return {str(key): self.pack(value, f"{where}[{key!r}]", depth + 1) for key, value in values.items()}

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        try:
            refuse_unwritable(where, tensor)
        except UnsupportedTensor as error:
            raise BadInput(str(error)) from error
        name = self._names.get(id(tensor))
        if name is None:
            name = where if len(where) <= MAX_NAME_LENGTH else f"tensor {len(self.tensors) + 1}"
            self._names[id(tensor)], self.tensors[name] = name, tensor
        node: dict[str, Any] = {"tensor": name}
        if tensor.device.type == self._device:
            node["on_device"] = True
        if tensor.requires_grad:
            node["requires_grad"] = True
        return node


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return _valid(str(value), where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": DOUBLE.pack(value).hex()}
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise BadInput(
                f"{where} is an integer of {value.bit_length():,} bits; the limit is {MAX_INTEGER_BITS:,} bits."
            )
        return int(value)
    return value


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{where} has text that is not valid Unicode and cannot be written: {text[:40]!r}.") from None
    return text


class Unpacker:
    """Converts the JSON of a ``Packer`` back to values; ValueError for other JSON.

    A tensor that occurs twice is one object again.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._made: dict[str, Tensor] = {}
        self._classes: dict[tuple[str, ...], Any] = {}  # named tuple classes, by their fields
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "list": lambda items, depth: list(self._items(items, depth)),
            "tuple": lambda items, depth: tuple(self._items(items, depth)),
            "dict": self._values,
            "named": self._named,
            "float": lambda text, depth: _float(text),
        }

    def unpack(self, node: Any, depth: int = 0) -> Any:
        if not isinstance(node, dict):
            return _unpacked_plain(node)
        if depth > MAX_DEPTH:
            raise ValueError(f"values nested more than {MAX_DEPTH} deep")
        if "tensor" in node:
            return self._tensor(node)
        if "attributes" in node:
            return self._attributes(node, depth)
        if len(node) != 1 or next(iter(node)) not in self._kinds:
            raise ValueError(f"a value of an unknown type: {', '.join(map(repr, node))[:80]}")
        ((kind, inner),) = node.items()
        return self._kinds[kind](inner, depth)

    def _items(self, items: Any, depth: int) -> Iterator[Any]:
        if not isinstance(items, list):
            raise ValueError("expected a list of values")
        return (self.unpack(item, depth + 1) for item in items)

    def _values(self, values: Any, depth: int) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise ValueError("expected values by name")
        return {key: self.unpack(inner, depth + 1) for key, inner in values.items()}

    def _named(self, values: Any, depth: int) -> tuple[Any, ...]:
        parts = self._values(values, depth)
        names = tuple(parts)
        if names not in self._classes:
            if len(self._classes) == MAX_NAMED_TUPLES:
                raise ValueError(f"more than {MAX_NAMED_TUPLES:,} types of named tuples")
            self._classes[names] = named_tuple(names)
        return self._classes[names](*parts.values())  # type: ignore[no-any-return]

    def _attributes(self, node: dict[str, Any], depth: int) -> AttributeDict:
        if set(node) != {"attributes", "class"} or not isinstance(node["class"], str):
            raise ValueError("an object without values or class name")
        return AttributeDict(self._values(node["attributes"], depth), node["class"][:80])

    def _tensor(self, node: Mapping[str, Any]) -> Tensor:
        tensor, on_device, requires_grad = (node.get(name) for name in ("tensor", "on_device", "requires_grad"))
        if not set(node) <= {"tensor", "on_device", "requires_grad"}:
            raise ValueError(f"a tensor with unknown keys: {', '.join(map(repr, node))[:80]}")
        if not isinstance(tensor, str) or tensor not in self._tensors:
            raise ValueError(f"the tensor {str(tensor)[:80]!r} is missing")
        if tensor not in self._made:
            stored = self._tensors[tensor]
            made = stored.to(self._device) if on_device is True else stored
            if requires_grad is True and not (made.is_floating_point() or made.is_complex()):
                raise ValueError(f"the tensor {tensor[:80]!r} cannot require gradients: it is not floating-point")
            self._made[tensor] = made.requires_grad_(requires_grad is True)
        return self._made[tensor]


def _unpacked_plain(node: Any) -> Any:
    if isinstance(node, list):
        raise ValueError("a list without its type")
    if isinstance(node, int) and node.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(f"an integer of more than {MAX_INTEGER_BITS:,} bits")
    return node


def _float(text: Any) -> float:
    if not isinstance(text, str) or len(text) != 2 * DOUBLE.size or not set(text) <= set("0123456789abcdef"):
        raise ValueError("an invalid number")
    (number,) = DOUBLE.unpack(bytes.fromhex(text))
    return float(number)
