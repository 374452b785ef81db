"""Capturing a CUDA graph, so that a capture that fails leaves torch as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capturing"]


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched within becomes the graph's. On the current device."""
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.set_stream(before)  # torch may still be on the stream of the capture
        _mend_random_numbers()
        raise


def _mend_random_numbers() -> None:
    """A capture that failed leaves torch's generator believing that it goes on; one that ends tells it otherwise."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")
