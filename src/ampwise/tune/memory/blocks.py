"""Repeated blocks of a model: the units of activation checkpointing and of FSDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.errors import BadInput

__all__ = ["checkpointed", "repeated_blocks"]

PRESERVE_RNG = False  # its state is not on the GPU, and fake tensors draw no numbers


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a class that occurs more than once in a ``ModuleList`` or ``Sequential``."""
    found: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop(0)
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        kinds = Counter(type(child) for child in children)
        lists = isinstance(module, nn.ModuleList | nn.Sequential)
        blocks = [child for child in children if lists and kinds[type(child)] > 1 and _is_composed(child)]
        found += blocks
        pending += [child for child in children if child not in blocks]
    return found


@contextmanager
def checkpointed(model: nn.Module, name: str) -> Iterator[None]:
    """Checkpoint the repeated blocks while inside: each saves only its inputs, and recomputes the rest for backward."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise BadInput(
            f"{name}: checkpointing recomputes block by block, and no repeated blocks were found in this model: put "
            "them into a torch.nn.ModuleList or a torch.nn.Sequential."
        )
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_recomputing(block))
        yield


@contextmanager
def _recomputing(block: nn.Module) -> Iterator[None]:
    own = block.__dict__.get("forward")
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=PRESERVE_RNG)
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


def _is_composed(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
