"""The state of every source of random numbers in use, as plain data and tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["HostDraws", "captured", "host_differs", "plain_random", "random_state", "restore_random"]

NUMPY_WORDS = 624  # of its generator


def captured(device: torch.device, *, host: bool = True) -> dict[str, Any]:
    """Of torch, on the CPU and on the device; of Python; of numpy, where it is in use: the fastest way.

    host: those of Python and numpy, too, which take a hundred times as long as torch's.
    """
    state: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    backend = _backend(device)
    if backend is not None:
        state["device"] = backend.get_rng_state(device)
    if not host:
        return state
    version, words, gauss = random.getstate()
    state["python"] = {"version": version, "words": words, "gauss": gauss}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


class HostDraws:
    """Whether what is watched draws from Python's random numbers, or numpy's: few models do, and their states are slow
    to get. It is looked at in the first passes, and now and then."""

    FIRST, EVERY = 3, 200

    def __init__(self) -> None:
        self._passes = 0
        self.seen = False

    def begin(self, device: torch.device) -> dict[str, Any]:
        """The state before a pass: with that of the host where it may matter."""
        self._passes += 1
        looks = self.seen or self._passes <= self.FIRST or self._passes % self.EVERY == 0
        return captured(device, host=looks)

    def end(self, before: Mapping[str, Any]) -> None:
        """After the pass."""
        if not self.seen and "python" in before:
            self.seen = host_differs(captured(torch.device("cpu")), before)


def host_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether Python's or numpy's numbers were drawn in between. Not by their text, which takes numpy milliseconds."""
    return bool(one["python"] != other["python"]) or _position(one.get("numpy")) != _position(other.get("numpy"))


def _position(numpys: Any) -> Any:
    if numpys is None:
        return None
    inner = {name: part.tobytes() if hasattr(part, "tobytes") else part for name, part in numpys["state"].items()}
    return {**numpys, "state": inner}


def random_state(device: torch.device) -> dict[str, Any]:
    """The same as plain data and tensors, for a file."""
    return plain_random(captured(device))


def plain_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """One that was captured, for a file."""
    return {name: _plain(part) for name, part in state.items()}


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the numbers that came next then; of a source that the state has nothing of, as it is."""
    torch.set_rng_state(state["torch"].cpu())
    backend = _backend(device)
    if backend is not None and "device" in state:
        backend.set_rng_state(state["device"].cpu(), device)
    if "python" in state:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state and "numpy" in sys.modules:
        if not 0 <= state["numpy"]["state"].get("pos", 0) <= NUMPY_WORDS:  # numpy believes any, and reads there
            raise ValueError("the state of numpy's random numbers makes no sense")
        sys.modules["numpy"].random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Arrays and tuples as lists, numbers as Python's; tensors stay."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _backend(device: torch.device) -> Any | None:
    """torch.cuda or what corresponds to it; the CPU has no other than torch's own."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)
