"""What a rank exchanges, asks of the file system, and says to find the others: noted one by one."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

__all__ = ["Exchanges", "Meetings", "Operations", "Reads", "Seen"]

Seen = dict[str, Any]  # by a rank, by case
KINDS = ("all_reduce", "all_gather", "gather", "scatter", "broadcast")


class Exchanges:
    """Collectives that Python asks torch for, by any thread: kind, bytes that this rank brings or gets, group."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, str]] = []
        self.names: dict[int, str] = {}  # of groups, by id

    def __enter__(self) -> Exchanges:
        self._before = {kind: getattr(distributed_c10d, kind) for kind in KINDS}
        for kind, function in self._before.items():
            self._put(kind, self._noting(kind, function))
        return self

    def __exit__(self, *_: object) -> None:
        for kind, function in self._before.items():
            self._put(kind, function)

    def taken(self) -> list[tuple[str, int, str]]:
        """What was seen since the last call."""
        found, self.found = self.found, []
        return found

    def _put(self, kind: str, function: Callable[..., Any]) -> None:
        for module in (dist, distributed_c10d):  # objects are exchanged by functions of the second
            setattr(module, kind, function)

    def _noting(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        form = inspect.signature(function)

        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            given = form.bind(*args, **kwargs).arguments
            by = self.names.get(id(given.get("group")), "model")
            self.found.append((kind, given["tensor"].nbytes, by))
            return function(*args, **kwargs)

        return noting


class Operations:
    """What is asked of the file system in a folder, counted: names that are made, renamed and opened, and fsyncs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.found = str(folder), Counter[str]()
        fsync = os.fsync

        def noting(descriptor: int) -> None:
            self.found["fsync"] += 1
            fsync(descriptor)

        os.fsync = noting  # type: ignore[assignment]
        sys.addaudithook(self._note)  # for good: the process is a rank's

    def taken(self) -> dict[str, int]:
        """What was seen since the last call."""
        found, self.found = self.found, Counter()
        return dict(sorted(found.items()))

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(self._folder) and isinstance(args[2], int):
            self.found["create" if args[2] & os.O_CREAT else "open"] += 1
        elif event == "os.rename" and str(args[0]).startswith(self._folder):
            self.found["rename"] += 1


class Reads:
    """Files of tensors that a module reads, by name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._before = module, module.read_tensors
        self.found: list[str] = []

    def __enter__(self) -> Reads:
        self._module.read_tensors = self._noting  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self._module.read_tensors = self._before  # type: ignore[attr-defined]

    def _noting(self, path: Path, **options: Any) -> Any:
        self.found.append(path.name)
        return self._before(path, **options)


class Meetings(Store):
    """The store through which a group's ranks find each other: what this rank asks of it."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner, self.calls, self.bytes = inner, Counter[str](), Counter[str]()

    def set(self, key: str, value: Any) -> None:
        self._note("set", value)
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        value = self._inner.get(key)
        self._note("get", value)
        return value

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._inner.wait(keys, *timeout)

    def add(self, key: str, number: int) -> int:
        return self._inner.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def has_extended_api(self) -> bool:
        return False

    def _note(self, what: str, value: Any) -> None:
        self.calls[what] += 1
        self.bytes[what] += len(value)
