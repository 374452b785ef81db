"""Capture and restore the random state of torch, Python and numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["HostRandomUse", "capture_random", "host_differs", "plain_random_state", "restore_random", "to_plain_random"]

NUMPY_WORDS = 624  # in the state of numpy's generator


def capture_random(device: torch.device, *, host: bool = True) -> dict[str, Any]:
    """Capture the random state of torch on the CPU and the device, of Python, and of numpy if it is loaded.

    host: include Python and numpy, which take a hundred times as long as torch.
    """
    state: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    if device.type == "cuda":  # seed and offset are all there is; torch.cuda.get_rng_state takes ten times as long
        generator = torch.cuda.default_generators[device.index or 0]
        state["device"] = [generator.initial_seed(), generator.get_offset()]
    elif (backend := _backend(device)) is not None:
        state["device"] = backend.get_rng_state(device)
    if not host:
        return state
    version, words, gauss = random.getstate()
    state["python"] = {"version": version, "words": words, "gauss": gauss}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


class HostRandomUse:
    """Detects whether a model draws random numbers from Python or numpy: few do, and their states are slow to capture.

    The first passes are checked, and one now and then.
    """

    FIRST, EVERY = 3, 200

    def __init__(self) -> None:
        self._passes = 0
        self.seen = False

    def begin(self, device: torch.device) -> dict[str, Any]:
        """Capture the state before a pass, including Python and numpy if they may matter."""
        self._passes += 1
        looks = self.seen or self._passes <= self.FIRST or self._passes % self.EVERY == 0
        return capture_random(device, host=looks)

    def end(self, before: Mapping[str, Any]) -> None:
        """Check after a pass whether it drew from Python or numpy."""
        if not self.seen and "python" in before:
            self.seen = host_differs(capture_random(torch.device("cpu")), before)


def host_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the Python or numpy state differs. Compares bytes: numpy's text form takes milliseconds."""
    return bool(one["python"] != other["python"]) or _position(one.get("numpy")) != _position(other.get("numpy"))


def _position(numpys: Any) -> Any:
    if numpys is None:
        return None
    inner = {name: part.tobytes() if hasattr(part, "tobytes") else part for name, part in numpys["state"].items()}
    return {**numpys, "state": inner}


def plain_random_state(device: torch.device) -> dict[str, Any]:
    """Capture the random state as plain data and tensors, for a file."""
    return to_plain_random(capture_random(device))


def to_plain_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a captured state to plain data and tensors, for a file."""
    return {name: _plain(part) for name, part in state.items()}


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a captured state; generators that it does not have are left unchanged."""
    torch.set_rng_state(state["torch"].cpu())
    backend = _backend(device)
    if backend is not None and "device" in state:
        if device.type == "cuda":
            seed, offset = state["device"]
            generator = torch.cuda.default_generators[device.index or 0]
            generator.manual_seed(seed)
            generator.set_offset(offset)
        else:
            backend.set_rng_state(state["device"].cpu(), device)
    if "python" in state:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state and "numpy" in sys.modules:
        if not 0 <= state["numpy"]["state"].get("pos", 0) <= NUMPY_WORDS:  # numpy reads memory there
            raise ValueError("invalid state of numpy's random generator")
        sys.modules["numpy"].random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Convert arrays and tuples to lists, and numbers to Python's; tensors are kept."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _backend(device: torch.device) -> Any | None:
    """Return torch.cuda or the module for the device's type; None for the CPU, which uses torch's own generator."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)
