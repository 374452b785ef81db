"""The state of random numbers in a checkpoint: that of a rank is for this rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ampwise.engine.ranks import rank
from ampwise.errors import BadInput
from ampwise.printers.terminal import printable
from ampwise.randomness import random_state, restore_random

__all__ = ["restore_rng", "rng_state"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of every source in use, and whose it is."""
    return {"rank": rank(), **random_state(device)}


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the numbers that come next, on the rank where they were saved.

    On another they would be the same numbers a second time: the same dropout on every rank.
    """
    if isinstance(state, Mapping) and state.get("rank", 0) != rank():
        warnings.warn(
            printable(
                f"load_state_dict(): random numbers were saved on rank {state.get('rank', 0)}; those of rank {rank()} "
                "stay as they are. To go on to the bit, save the engine's state on every rank."
            ),
            UserWarning,
            stacklevel=4,
        )
        return
    try:
        restore_random(state, device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"load_state_dict(): the saved state of the random numbers is damaged ({error}).") from error
