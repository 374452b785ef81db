"""Capture a CUDA graph, and restore torch's state if the capture fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture_graph"]


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture the kernels launched within the context into the graph, on the current device."""
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.set_stream(before)  # torch may still be on the capture stream
        _reset_generator()
        raise


def _reset_generator() -> None:
    """Complete an empty capture: a failed one leaves torch's generator in capture mode."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")
