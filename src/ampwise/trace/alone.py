"""A replay that other ranks take no part in: one that waited for them would wait for ever."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.evidence.op_families import is_collective

__all__ = ["Exchange", "exchanges_refused", "several_ranks"]


class Exchange(Exception):
    """What is replayed talks to other ranks, which do not replay."""


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def exchanges_refused() -> AbstractContextManager[Any]:
    """Where there are others; else there is nobody to wait for."""
    return _Alone() if several_ranks() else nullcontext()  # type: ignore[no-untyped-call]


class _Alone(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(str(func)):
            raise Exchange("the model talks to other ranks, which do not replay it")
        return func(*args, **(kwargs or {}))
