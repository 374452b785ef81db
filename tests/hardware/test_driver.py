"""The driver's version, from the text that names it."""

from __future__ import annotations

import subprocess

import pytest

from ampwise.hardware import driver

CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLOSED, "535.129.03"),
        (OPEN, "570.86.15"),
        ("551.23\n551.23\n", "551.23"),
        ("", None),
        ("No devices were found\n", None),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n", None),
    ],
)
def test_version_is_read_from(text, expected):
    assert driver.parse_driver_version(text) == expected


def test_the_kernel_module_is_asked_first(monkeypatch, tmp_path):
    banner = tmp_path / "version"
    banner.write_text(CLOSED)
    monkeypatch.setattr(driver, "KERNEL_MODULE", banner)
    monkeypatch.setattr(driver, "QUERY", ("no-such-command",))
    assert driver.driver_version() == "535.129.03"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10), subprocess.CalledProcessError(9, "x")],
    ids=type,
)
def test_no_driver_is_none(monkeypatch, tmp_path, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(driver, "KERNEL_MODULE", tmp_path / "absent")
    monkeypatch.setattr(subprocess, "run", fail)
    assert driver.driver_version() is None
