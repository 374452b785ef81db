"""The state of every source of random numbers in use, as plain data and tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ampwise.errors import BadInput

__all__ = ["restore_rng", "rng_state"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of torch, on the CPU and on the device; of Python; of numpy, where it is in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
    }
    backend = _backend(device)
    if backend is not None:
        state["device"] = backend.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "name": str(name),
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the numbers that come next."""
    try:
        torch.set_rng_state(state["torch"].cpu())
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        backend = _backend(device)
        if backend is not None and "device" in state:
            backend.set_rng_state(state["device"].cpu(), device)
        if "numpy" in state and "numpy" in sys.modules:
            saved = state["numpy"]
            keys = sys.modules["numpy"].array(saved["keys"], dtype="uint32")
            sys.modules["numpy"].random.set_state(
                (saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"])
            )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"load_state_dict(): the saved state of the random numbers is damaged ({error}).") from error


def _backend(device: torch.device) -> Any | None:
    """torch.cuda or what corresponds to it; the CPU has no other than torch's own."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)
