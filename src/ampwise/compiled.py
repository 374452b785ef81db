"""What torch.compile has made, set aside for a while."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["as_written"]


def as_written() -> AbstractContextManager[Any]:
    """While inside, what is compiled runs as it was written: compiled code shows no operations, and heeds no hooks."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and to load it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
