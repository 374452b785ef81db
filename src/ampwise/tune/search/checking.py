"""What a search is given: is it what can be searched? If not, what to give instead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten

from ampwise.engine.arguments import where
from ampwise.engine.precision.region import is_forward_in
from ampwise.errors import BadInput
from ampwise.hardware import Gpu, find_gpu, gpu_named
from ampwise.tune.search.fingerprint import batch_digest
from ampwise.tune.search.passes import Batch
from ampwise.tune.search.units import model_called
from ampwise.user_code import kind

__all__ = [
    "MOST_BATCHES",
    "checked_batches",
    "checked_file",
    "checked_gpu",
    "checked_limit",
    "checked_model",
    "checked_tolerance",
]

MOST_BATCHES = 16  # more of a loader are not read


def checked_batches(function: Any, batches: Any) -> tuple[list[Batch], str | None]:
    """As arguments; of several that hold the same, one. And what was left out."""
    if not callable(function):
        raise BadInput(
            f"search() takes the function that makes the loss, and batches for it: search(loss_fn, [(x, y), ...]). Not "
            f"{kind(function)}."
        )
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise BadInput(
            f"search(batches=...): a list of batches is expected, each a tuple of arguments, not {kind(batches)}."
        )
    found = [_batch(each, place) for place, each in enumerate(islice(batches, MOST_BATCHES + 1))]
    if not found:
        raise BadInput("search(batches=[]): without a batch there is nothing to compare; some four are enough.")
    for batch in found:
        if not any(isinstance(leaf, Tensor) for leaf in tree_flatten((batch.args, dict(batch.kwargs)))[0]):
            raise BadInput("search(batches=...): a batch has no tensors in it; each is to be a tuple of arguments.")
    read = found[:MOST_BATCHES]
    different: dict[str, Batch] = {}
    for batch in read:
        different.setdefault(batch_digest(batch), batch)
    left_out = []
    if len(found) > MOST_BATCHES:
        left_out.append(f"the first {MOST_BATCHES} batches were read, and no more")
    if len(different) < len(read):
        left_out.append(f"{len(read)} batches were given, of which {len(different)} hold something else than another")
    return list(different.values()), "; ".join(left_out) or None


def checked_model(function: Callable[..., Any], model: Any, batch: Batch) -> Module:
    """The model asked for, or the one that the function is, belongs to, or calls."""
    if model is not None and not isinstance(model, Module):
        raise BadInput(f"search(model=...): a torch.nn.Module is expected, not {kind(model)}.")
    own = getattr(function, "__self__", None)
    found = model or (function if isinstance(function, Module) else own if isinstance(own, Module) else None)
    if found is None:
        with torch.enable_grad():
            found = model_called(lambda: function(*batch.args, **batch.kwargs), _device(batch))
    if any(is_forward_in(module.__dict__.get("forward")) for module in found.modules()):
        raise BadInput("search(): a policy is on this model. Take it off first: policy.apply(model).remove()")
    where([found])  # which refuses what has no values
    return found


def checked_tolerance(tolerance: Any) -> float:
    """A number above 0."""
    good = isinstance(tolerance, int | float) and not isinstance(tolerance, bool) and 0 < tolerance < math.inf
    if not good:
        raise BadInput(
            f"search(tolerance={tolerance!r}): a number above 0 is expected, such as 0.01: how far loss and gradients "
            "may be from FP32's."
        )
    return float(tolerance)


def checked_file(path: str | PathLike[str] | None) -> Path | None:
    """Where progress is kept: found out before there is any."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        why = "it is a folder" if file.is_dir() else f"{str(file.parent)!r} is no folder that can be written to"
        raise BadInput(f"search(resume={str(path)!r}): {why}.")
    return file


def checked_limit(trials: Any, units: int) -> int:
    """How many trials there may be: by default enough for a handful of sensitive modules in any order."""
    if trials is None:
        return 24 + 6 * math.ceil(math.log2(units + 1))
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise BadInput(f"search(trials={trials!r}): how many assignments may be tried: 1 or more.")
    return trials


def checked_gpu(name: str | None, device: torch.device) -> Gpu | None:
    """The one named, or the one that is here."""
    if name is not None:
        return gpu_named(name)
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _batch(batch: Any, place: int) -> Batch:
    if isinstance(batch, Mapping):
        return Batch((), dict(batch), place)
    return Batch(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, place)


def _device(batch: Batch) -> torch.device:
    tensors = [each for each in tree_flatten((batch.args, dict(batch.kwargs)))[0] if isinstance(each, Tensor)]
    return next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))
