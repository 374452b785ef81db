"""The CPU's model, and its instructions for mixed precision."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The flags of /proc/cpuinfo that matter, in the order in which they are shown.
FEATURES = {
    "amx_bf16": "BF16 matrix tiles",
    "amx_fp16": "FP16 matrix tiles",
    "avx512_bf16": "BF16 dot products",
    "avx512_fp16": "FP16 vector arithmetic",
    "bf16": "BF16 dot products and matmuls",
    "svebf16": "BF16 products on SVE vectors",
    "asimdhp": "FP16 vector arithmetic",
    "fphp": "FP16 scalar arithmetic",
    "sve": "scalable vectors",
    "sme": "matrix tiles",
}

# Any of these makes BF16 matmuls fast; best first.
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")

# What macOS calls the same things.
SYSCTL_FEATURES = {
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_SME": "sme",
}
SYSCTL_MODEL = "machdep.cpu.brand_string"
SYSCTL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU; ``features`` are keys of FEATURES, or None if this system does not list them."""

    model: str | None
    features: tuple[str, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"model": self.model, "features": None if self.features is None else list(self.features)}


def describe_cpu() -> Cpu:
    """Read this machine's CPU, from /proc/cpuinfo or from sysctl."""
    if sys.platform == "darwin":
        return parse_sysctl(_sysctl())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        return parse_cpuinfo(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    return Cpu(model=platform.processor() or None, features=None)


def parse_cpuinfo(text: str) -> Cpu:
    """The first processor of a Linux /proc/cpuinfo, x86 or ARM.

    >>> parse_cpuinfo("model name : Xeon\\nflags : fpu avx512_bf16 amx_bf16 amx_tile")
    Cpu(model='Xeon', features=('amx_bf16', 'avx512_bf16'))
    """
    first = _fields(text.strip().split("\n\n")[0])
    model, flags = first.get("model name"), first.get("flags", first.get("Features"))
    if model is None and first.get("CPU implementer") and first.get("CPU part"):
        # Linux on ARM gives numbers only; they are what one looks up.
        model = f"ARM implementer {first['CPU implementer']}, part {first['CPU part']}"
    return Cpu(model=model, features=None if flags is None else _relevant(flags.split()))


def parse_sysctl(text: str) -> Cpu:
    """A Mac's CPU from the lines of ``sysctl machdep.cpu.brand_string hw.optional``.

    >>> parse_sysctl("machdep.cpu.brand_string: Apple M2\\nhw.optional.arm.FEAT_BF16: 1")
    Cpu(model='Apple M2', features=('bf16',))
    """
    values = _fields(text)
    told = SYSCTL_FEATURES.keys() & values.keys()
    present = [SYSCTL_FEATURES[key] for key in told if values[key] == "1"]
    return Cpu(model=values.get(SYSCTL_MODEL), features=_relevant(present) if told else None)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _relevant(flags: Iterable[str]) -> tuple[str, ...]:
    present = frozenset(flags)
    return tuple(feature for feature in FEATURES if feature in present)


def _sysctl() -> str:
    import subprocess  # only on a Mac, and slow to import

    command = ["/usr/sbin/sysctl", SYSCTL_MODEL, "hw.optional"]  # part of macOS
    try:
        # Exits with 1 when one of the keys is missing, and still prints the others.
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSCTL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
