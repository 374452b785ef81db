"""Check the arguments of a search, and say what is expected instead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from ampwise.errors import BadInput
from ampwise.hardware import Gpu, find_gpu, gpu_named
from ampwise.trace.user_code import describe_type
from ampwise.train.arguments import model_device
from ampwise.train.precision.call_in_precision import is_wrapped_forward
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.search.passes import SavedState, SearchBatch, errors_in_one_line
from ampwise.tune.search.trials import digest_of

MOST_BATCHES = 16  # of a longer loader, no more are read


def checked_batches(function: Any, batches: Any) -> tuple[list[SearchBatch], str | None]:
    """Return the batches as arguments, without duplicates, and a note on what was left out."""
    if not callable(function):
        raise BadInput(
            f"search(): expected the function that computes the loss, and batches: search(loss_fn, [(x, y), ...]); "
            f"got {describe_type(function)}."
        )
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise BadInput(
            f"search(batches=...): expected a list of batches, each a tuple of arguments; got {describe_type(batches)}."
        )
    found: list[SearchBatch] = []
    for place, batch in enumerate(islice(batches, MOST_BATCHES + 1)):
        if isinstance(batch, Mapping):
            found.append(SearchBatch((), dict(batch), place))
        else:
            found.append(SearchBatch(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, place))
    if not found:
        raise BadInput("search(batches=[]): expected at least one batch; four are enough.")
    if not all(map(_tensors, found)):
        raise BadInput("search(batches=...): a batch has no tensors; expected a tuple of arguments for each.")
    read = found[:MOST_BATCHES]
    different: dict[str, SearchBatch] = {}
    for batch in read:
        different.setdefault(digest_of((batch.args, batch.kwargs)), batch)
    left_out = []
    if len(found) > MOST_BATCHES:
        left_out.append(f"only the first {MOST_BATCHES} batches were read")
    if len(different) < len(read):
        left_out.append(f"{len(read) - len(different)} of {len(read)} batches given are duplicates")
    return list(different.values()), "; ".join(left_out) or None


def _tensors(batch: SearchBatch) -> list[Tensor]:
    return [leaf for leaf in tree_flatten((batch.args, batch.kwargs))[0] if isinstance(leaf, Tensor)]


def checked_model(function: Callable[..., Any], model: Any, batch: SearchBatch) -> Module:
    """Return the given model, or the one that the function is, belongs to, or calls."""
    if model is not None and not isinstance(model, Module):
        raise BadInput(f"search(model=...): expected a torch.nn.Module, got {describe_type(model)}.")
    own = getattr(function, "__self__", None)
    found = model or (function if isinstance(function, Module) else own if isinstance(own, Module) else None)
    if found is None:
        devices = (each.device for each in _tensors(batch) if each.device.type != "cpu")
        with torch.enable_grad():
            found = find_called_model(lambda: function(*batch.args, **batch.kwargs), next(devices, torch.device("cpu")))
    if any(is_wrapped_forward(module.__dict__.get("forward")) for module in found.modules()):
        raise BadInput("search(): a policy is applied to this model. Remove it first: policy.apply(model).remove()")
    model_device([found])  # it refuses tensors without values
    return found


def find_called_model(forward: Callable[[], object], device: torch.device) -> Module:
    """Return the one module with parameters that a function calls. All state is restored."""
    called: list[Module] = []
    depth = 0

    def enters(module: Module, args: Any) -> None:
        nonlocal depth
        if not depth and module not in called and next(module.parameters(), None) is not None:
            called.append(module)
            stack.callback(SavedState(module, device).put_back)
        depth += 1

    def leaves(module: Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        stack.callback(restore_random, capture_random(device), device)
        stack.callback(register_module_forward_pre_hook(enters).remove)
        stack.callback(register_module_forward_hook(leaves, always_call=True).remove)
        stack.enter_context(errors_in_one_line())
        forward()
    if len(called) == 1:
        return called[0]
    seen = ", ".join(type(module).__name__ for module in called) or "no module with parameters"
    raise BadInput(f"search(): the function calls {seen}; name the model: search(..., model=model).")


def checked_tolerance(tolerance: Any) -> float:
    """Check that the tolerance is a number above 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise BadInput(
            f"search(tolerance={tolerance!r}): expected a number above 0, such as 0.01: how far loss and gradients may "
            "be from FP32's."
        )
    return float(tolerance)


def checked_file(path: str | PathLike[str] | None) -> Path | None:
    """Check that the file for progress can be written, before there is any."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        why = "it is a folder" if file.is_dir() else f"{str(file.parent)!r} is not a writable folder"
        raise BadInput(f"search(resume={str(path)!r}): {why}.")
    return file


def checked_limit(trials: Any, units: int) -> int:
    """Return how many trials are allowed: by default enough for a handful of sensitive modules in any order."""
    if trials is None:
        return 24 + 6 * math.ceil(math.log2(units + 1))
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise BadInput(f"search(trials={trials!r}): expected the number of assignments to try, at least 1.")
    return trials


def checked_gpu(name: str | None, device: torch.device) -> Gpu | None:
    """Return the named GPU, or the one in this machine."""
    if name is not None:
        return gpu_named(name)
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
