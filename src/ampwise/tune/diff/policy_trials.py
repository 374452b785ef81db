"""Try policies that bring the log-probabilities of two sides together, and measure each on batches held back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from ampwise.errors import BadInput
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.tune.advise.read_model import read_module
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.repeated_step import PlacedSide, RepeatedStep
from ampwise.tune.diff.runs import DiffRuns, Progress
from ampwise.tune.diff.shared_random import SharedRandom
from ampwise.tune.diff.side import Side
from ampwise.tune.diff.token_difference import TriedPolicy

HALVES = ("bf16", "fp16")
# Kinds of modules that 16 bits may hurt, and that a policy can keep.
PARTS = ("router", "norm by hand", "norm", "logits")
MATMULS = (nn.Linear, nn.modules.conv._ConvNd)

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]  # arguments of the function


def check_trials(batches: Sequence[Batch], models: Mapping[str, Module], b: Side) -> None:
    """Raise BadInput if policies cannot be tried on these; before anything is run."""
    main = ModuleNames(models).main
    if main is None or b.precision not in HALVES or b.recipe is not None or b.policy is not None or b.compiled:
        raise BadInput(
            f"diff: {b.label}: policies are tried for one model in bf16 or fp16, eager and without a policy of its own."
        )
    first, *others = ([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in batches)
    if any(len(own) == len(first) and all(map(torch.equal, own, first)) for own in others):
        raise BadInput(
            "diff: a held-back batch is the compared one, so it verifies nothing: give others. On the command line "
            "MAKE must draw its batch from torch's generator, and not seed it."
        )


def try_policies(
    fn: Callable[..., Any],
    batches: Sequence[Batch],
    models: Mapping[str, Module],
    a: Side,
    b: Side,
    suspects: Sequence[str],
    progress: Progress,
    *,
    b_fn: Callable[..., Any] | None = None,
) -> tuple[TriedPolicy, ...]:
    """Measure what each policy removes of the RMS difference. The first batch is the one that was compared.

    A policy replaces the precision of b, and that of a where it is the same.

    Args:
        suspects: names of modules to keep as well: where the difference begins, and the head.
    """
    main = ModuleNames(models).main
    assert main is not None  # as ``check_trials`` has found
    both = a.precision == b.precision and a.recipe is None and a.policy is None

    def apart(policy: Policy | None) -> list[float]:
        one, other = a, b
        if policy is not None:
            other = replace(b, policy=policy, precision=policy.base)
            one = replace(a, policy=policy, precision=policy.base) if both else a
        return [_token_rms(batch, models, (fn, one), (b_fn, other), progress) for batch in batches]

    before, found = apart(None), []
    if not all(math.isfinite(each) and each > 0 for each in before):
        return ()  # nothing to remove, or not measurable
    for policy, cost in _candidates(main, b, suspects):
        progress(f"trying {policy!r}")
        shares = [1 - after / each for after, each in zip(apart(policy), before, strict=True)]
        if all(map(math.isfinite, shares)):
            removed, *elsewhere = shares
            found.append(
                TriedPolicy(
                    policy=repr(policy),
                    cost=cost,
                    removed=removed,
                    removed_elsewhere=min(elsewhere),
                    batches=len(elsewhere),
                )
            )
    return tuple(found)


def _token_rms(
    batch: Batch,
    models: Mapping[str, Module],
    a: tuple[Callable[..., Any], Side],
    b: tuple[Callable[..., Any] | None, Side],
    progress: Progress,
) -> float:
    """Run both sides forward, each with its function; NaN if they have no log-probabilities of the same targets."""
    names = ModuleNames(models)
    names.looked_into = False  # only the log-probabilities are compared
    with torch.enable_grad(), RepeatedStep(a[0], *batch, names) as step:
        one, other = (PlacedSide(side.on(step.device), step.device, own) for own, side in (a, b))
        draws = SharedRandom(torch.device("cpu") if one.device.type != other.device.type else None)
        runs = DiffRuns(step, one, other, draws, progress)
        runs.forward(floor=False)
        return math.nan if runs.tokens is None else runs.tokens.rms


def _candidates(model: Module, side: Side, suspects: Sequence[str]) -> Iterator[tuple[Policy, float]]:
    """Yield policies, cheapest first, each with the share of the matmul weights that leave 16 bits."""
    modules = named_modules(model)
    parts = {part.kind: part for part in read_module(model, type(model).__name__).parts}
    groups = {kind: (parts[kind].patterns, parts[kind].modules) for kind in PARTS if kind in parts}
    known = {name for _, names in groups.values() for name in names}
    groups |= {name: ((name,), (name,)) for name in suspects if name and name not in known}

    def weights(names: Sequence[str]) -> int:
        kept = {part for name in names for part in modules[name].modules() if isinstance(part, MATMULS)}
        return sum(part.weight.numel() for part in kept)

    whole = max(1, weights(["", *modules]))
    found: list[tuple[Policy, float]] = [(Policy("fp16"), 0.0)] if side.precision == "bf16" else []
    for many in (1, 2, len(groups)):
        for chosen in combinations(groups, many):
            patterns = [pattern for name in chosen for pattern in groups[name][0]]
            names = [name for each in chosen for name in groups[each][1]]
            found.append((Policy(side.precision).keep("fp32", *patterns), weights(names) / whole))
    yield from sorted(dict(found).items(), key=lambda pair: (pair[1], len(pair[0].rules)))
