"""Refuse collectives in a replay that only this rank runs: a collective would wait for the other ranks forever."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.numbers.op_families import is_collective

__all__ = ["CollectiveInReplay", "collectives_refused", "is_multi_rank"]


class CollectiveInReplay(Exception):
    """The replayed code calls a collective, and the other ranks do not replay."""


def is_multi_rank() -> bool:
    """Return whether torch.distributed runs with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def collectives_refused() -> AbstractContextManager[Any]:
    """Return a context in which collectives raise ``Exchange``; it does nothing on a single rank."""
    return _RefuseCollectives() if is_multi_rank() else nullcontext()  # type: ignore[no-untyped-call]


class _RefuseCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(str(func)):
            raise CollectiveInReplay("the model calls a collective, and the other ranks do not replay it")
        return func(*args, **(kwargs or {}))
