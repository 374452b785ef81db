"""The repeated blocks of a model: what activation checkpointing recomputes, and what FSDP gathers, one at a time."""

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
    """The outermost modules of a kind that a list of modules or a ``Sequential`` has more than one of."""
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
    """Within, a block keeps its inputs for the backward pass and nothing else; the rest is computed again there."""
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
