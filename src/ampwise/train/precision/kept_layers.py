"""Which layers a pretraining recipe for a narrow format leaves in BF16: some blocks and the output layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ampwise.train.precision.policy import WRAPPERS, named_modules

__all__ = ["blocks_kept", "kept_layers"]

SHARE = 0.16  # of the blocks, as in "Pretraining Large Language Models with NVFP4": 10 of 62, of which 2 are the first
FIRST = 0.2  # of those that are kept


def blocks_kept(count: int) -> tuple[int, int]:
    """Return how many of a model's blocks are kept at its beginning and at its end; few, as late ones need it most.

    >>> blocks_kept(62), blocks_kept(24), blocks_kept(12), blocks_kept(6), blocks_kept(2)
    ((2, 8), (1, 3), (0, 2), (0, 1), (0, 0))
    """
    kept = round(SHARE * count)
    first = round(FIRST * kept)
    return first, kept - first


def kept_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers that stay in BF16, with the reason.

    They belong to the first and last blocks of each stack, or are the layers before and after all stacks. In a model
    without a stack of blocks it is not known which layers are sensitive: none is kept.
    """
    stacks = list(_stacks(model))
    in_stacks = {module for stack in stacks for block in stack for module in block.modules()}
    found: dict[nn.Module, str] = {}
    for stack in stacks:
        first, last = blocks_kept(len(stack))
        for place, block in enumerate(stack):
            if first <= place < len(stack) - last:
                continue
            end, count = ("first", first) if place < first else ("last", last)
            why = f"in the {end}{f' {count}' if count > 1 else ''} of {len(stack)} blocks: sensitive"
            found.update((module, why) for module in block.modules() if isinstance(module, nn.Linear))
    linear = [module for module in named_modules(model).values() if isinstance(module, nn.Linear)]
    if stacks and linear:
        for place, why in ((0, "first layer: it reads the data"), (-1, "last layer: its output goes into the loss")):
            if linear[place] not in in_stacks:
                found[linear[place]] = why
    return found


def _stacks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost stacks: numbered modules of one class that contain linear layers."""
    alike: dict[type[nn.Module], list[nn.Module]] = {}
    for key, child in model._modules.items():
        if child is None:
            continue
        contains = any(isinstance(inner, nn.Linear) for inner in child.modules() if inner is not child)
        if key.isdecimal() and contains and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            alike.setdefault(_class(child), []).append(child)
        else:
            yield from _stacks(child)
    for stack in alike.values():
        if len(stack) > 1:
            yield stack
        else:
            yield from _stacks(stack[0])


def _class(module: nn.Module) -> type[nn.Module]:
    """Return the class, without what torch.compile, FSDP and checkpoints put around a module."""
    while len(module._modules) == 1 and next(iter(module._modules)) in WRAPPERS:
        (module,) = (each for each in module._modules.values() if each is not None)
    return type(module)
