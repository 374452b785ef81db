"""Run compiled code eagerly for a while."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def run_eagerly() -> AbstractContextManager[Any]:
    """Run compiled code eagerly within the context: compiled code shows no operations and calls no hooks."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
