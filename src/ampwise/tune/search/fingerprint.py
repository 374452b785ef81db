"""Fingerprint of a search, by which a file of progress is recognized."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten

from ampwise.tune.search.format_choices import FormatChoice
from ampwise.tune.search.passes import SearchBatch
from ampwise.tune.search.units import SearchUnit

__all__ = ["batch_digest", "fingerprint_of"]

PLAIN = bool | int | float | str | bytes | None


def fingerprint_of(
    model: Module,
    units: Sequence[SearchUnit],
    batches: Iterable[SearchBatch],
    choices: Sequence[FormatChoice],
    tolerance: float,
    losses: Sequence[float],
    device: torch.device,
) -> dict[str, Any]:
    """Return checksums by part, so that a mismatch can be named. FP32's ``losses`` identify the function."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modules": _digest([f"{unit.name}:{unit.kind}" for unit in units]),
        "weights": _digest([part for name, tensor in state.items() for part in (name, tensor)]),
        "batches": _digest([batch_digest(batch) for batch in batches]),
        "formats": [choice.name for choice in choices],
        "tolerance": tolerance,
        "losses in FP32": list(losses),
        "device": device.type,
        "torch": torch.__version__,
    }


def batch_digest(batch: SearchBatch) -> str:
    """Return a digest that is equal for equal batches."""
    leaves, tree = tree_flatten((batch.args, dict(batch.kwargs)))
    return _digest([str(tree), *map(_plain, leaves)])


def _plain(leaf: Any) -> Any:
    """Convert to something that can be hashed; an unknown object equals only itself."""
    if isinstance(leaf, Tensor | PLAIN):
        return leaf
    try:
        return pickle.dumps(leaf)
    except Exception:  # from the user's class: it may raise anything
        return id(leaf)


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(_bytes(part))
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    if plain.device.type == "meta" or not plain.numel():
        return b""
    return plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
