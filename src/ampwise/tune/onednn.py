"""A CPU without BF16 instructions: torch goes another way, says so at length, and leaves oneDNN off for the process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["onednn_as_it_was"]

SAID_ONCE = "mkldnn_matmul failed"  # and then the stack; the product is computed all the same


@contextmanager
def onednn_as_it_was() -> Iterator[None]:
    """While inside, that is not said; afterwards oneDNN is on if it was."""
    before = torch._C._get_mkldnn_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SAID_ONCE)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(before)
