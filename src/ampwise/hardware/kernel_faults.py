"""Kernels of torch and its libraries with known bugs, from ``kernel_faults.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFault:
    """A kernel with a known bug."""

    ops: str  # a regular expression
    torch: str  # the first version that has it
    what: str
    avoid: str  # code
    link: str
    switch: str  # the attribute of torch.backends.cuda that tells whether the kernel may be chosen
    fixed: str = ""  # the first version without it
    gpus: tuple[int, ...] = ()  # major compute capabilities; empty: all
    calls: Mapping[str, Any] = field(default_factory=dict)

    def is_about(self, op: str) -> bool:
        return re.search(self.ops, op) is not None

    def concerns(self, torch: str, gpu: tuple[int, int] | None) -> bool:
        """Return whether this torch has the bug on a GPU of this compute capability."""
        has_it = version_key(self.torch) <= version_key(torch) and (
            not self.fixed or version_key(torch) < version_key(self.fixed)
        )
        return has_it and gpu is not None and (not self.gpus or gpu[0] in self.gpus)

    def matches(self, keys: int, *, mask: bool) -> bool:
        """Return whether a call of attention with so many keys may run into it."""
        modulo, rest = self.calls.get("keys", (1, 0))
        return (mask or not self.calls.get("mask")) and keys % modulo == rest


def version_key(version: str) -> tuple[int, ...]:
    """
    >>> version_key("2.11.0+cu130") < version_key("2.13")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


@cache
def kernel_faults() -> tuple[KernelFault, ...]:
    """Return all known ones."""
    import tomllib
    from importlib.resources import files

    text = (files("ampwise.hardware") / "kernel_faults.toml").read_text(encoding="utf-8")
    return tuple(KernelFault(**{**each, "gpus": tuple(each.get("gpus", ()))}) for each in tomllib.loads(text)["fault"])


def faults_here() -> list[KernelFault]:
    """Return those of this torch and the current GPU whose kernels may be chosen."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpu = torch.cuda.get_device_capability()
    backends: Any = torch.backends.cuda
    found = [fault for fault in kernel_faults() if fault.concerns(torch.__version__, gpu)]
    return [fault for fault in found if getattr(backends, fault.switch, lambda: True)()]
