"""The NVIDIA driver's version, read without torch, which may not be able to use the driver."""

from __future__ import annotations

import re
from pathlib import Path

from ampwise.hardware.programs import find_program

__all__ = ["driver_version", "parse_driver_version"]

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=driver_version", "--format=csv,noheader")
QUERY_TIMEOUT_S = 10.0  # without persistence mode, the driver initialises every GPU first


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; None if there is no driver, or it does not answer."""
    try:
        return parse_driver_version(KERNEL_MODULE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return parse_driver_version(_ask_nvidia_smi())


def parse_driver_version(text: str) -> str | None:
    """Return the version in the kernel module's banner or in nvidia-smi's output.

    >>> parse_driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19")
    '535.129.03'
    >>> parse_driver_version("NVIDIA-SMI has failed because it couldn't communicate with the driver") is None
    True
    """
    lines = text.splitlines()
    match = re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?(?![\d.])", lines[0]) if lines else None
    return match[0] if match else None


def _ask_nvidia_smi() -> str:
    import subprocess  # rarely needed, and slow to import

    program = find_program(PROGRAM)
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
