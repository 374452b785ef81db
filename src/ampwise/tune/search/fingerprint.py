"""What a search is about, in a few words and checksums: whether a file of progress belongs to it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten

from ampwise.tune.search.choices import Choice
from ampwise.tune.search.passes import Batch
from ampwise.tune.search.units import Unit

__all__ = ["batch_digest", "fingerprint_of"]

PLAIN = bool | int | float | str | bytes | None


def fingerprint_of(
    model: Module,
    units: Sequence[Unit],
    batches: Iterable[Batch],
    choices: Sequence[Choice],
    tolerance: float,
    losses: Sequence[float],
    device: torch.device,
) -> dict[str, Any]:
    """By part, so that one can say which is another. ``losses`` in FP32 tell what the function does."""
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


def batch_digest(batch: Batch) -> str:
    """The same for batches that hold the same."""
    leaves, tree = tree_flatten((batch.args, dict(batch.kwargs)))
    return _digest([str(tree), *map(_plain, leaves)])


def _plain(leaf: Any) -> Any:
    """What a digest can be made of. What nothing is known about is like nothing else."""
    if isinstance(leaf, Tensor | PLAIN):
        return leaf
    try:
        return pickle.dumps(leaf)
    except Exception:  # of the user's own class: whatever it raises
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
