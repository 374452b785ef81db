"""Random-number state in a checkpoint, which belongs to one rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.train.random_state import plain_random_state, restore_random
from ampwise.train.ranks import rank

__all__ = ["restore_rng", "rng_state"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random source in use, with this process's rank."""
    return {"rank": rank(), **plain_random_state(device)}


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore random-number state on the rank where it was saved; warn and do nothing on another.

    Restored on all ranks, it would give them the same random numbers: the same dropout everywhere.
    """
    if isinstance(state, Mapping) and state.get("rank", 0) != rank():
        warnings.warn(
            printable(
                f"load_state_dict(): the random state was saved on rank {state.get('rank', 0)} and is not loaded on "
                f"rank {rank()}. To resume bit for bit, save the engine's state on every rank."
            ),
            UserWarning,
            stacklevel=4,
        )
        return
    try:
        restore_random(state, device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"load_state_dict(): the saved random state is damaged ({error}).") from error
