"""The state of every source of random numbers in use, as plain data and tensors."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ampwise.engine.ranks import rank
from ampwise.errors import BadInput

__all__ = ["restore_rng", "rng_state"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of torch, on the CPU and on the device; of Python; of numpy, where it is in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "rank": rank(),
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
    }
    backend = _backend(device)
    if backend is not None:
        state["device"] = backend.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the numbers that come next, on the rank where they were saved.

    On another they would be the same numbers a second time: the same dropout on every rank.
    """
    if isinstance(state, Mapping) and state.get("rank", 0) != rank():
        warnings.warn(
            f"load_state_dict(): random numbers were saved on rank {state.get('rank', 0)}; those of rank {rank()} "
            "stay as they are. To go on to the bit, save the engine's state on every rank.",
            UserWarning,
            stacklevel=4,
        )
        return
    try:
        torch.set_rng_state(state["torch"].cpu())
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        backend = _backend(device)
        if backend is not None and "device" in state:
            backend.set_rng_state(state["device"].cpu(), device)
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"load_state_dict(): the saved state of the random numbers is damaged ({error}).") from error


def _plain(value: Any) -> Any:
    """Arrays as lists, numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _backend(device: torch.device) -> Any | None:
    """torch.cuda or what corresponds to it; the CPU has no other than torch's own."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)
