"""Immutable records, like frozen dataclasses but fast to define.

Each ``@dataclass`` compiles its methods at import time and imports ``inspect``; modules that the linter imports must
load in a few milliseconds. A record lists its fields in ``__slots__`` and sets each once, in ``__init__``.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

__all__ = ["Frozen"]


class Frozen:
    """Immutable record with equality, hash and repr based on the fields in ``__slots__``."""

    __slots__: tuple[str, ...] = ()

    def parts(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return type(self)(**{**self.parts(), **changes})

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            _refuse(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _refuse(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__slots__))

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value!r}" for name, value in self.parts().items())
        return f"{type(self).__qualname__}({parts})"


def _refuse(message: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(message)
