"""Handle CPUs without BF16 instructions: torch falls back, warns at length, and leaves oneDNN off for the process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

FALLBACK_WARNING = "mkldnn_matmul failed"  # followed by the stack; the result is still computed


@contextmanager
def onednn_restored() -> Iterator[None]:
    """Silence the warning while inside; restore oneDNN's setting afterwards."""
    before = torch._C._get_mkldnn_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FALLBACK_WARNING)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(before)
