"""The driver's version, from the text that names it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ampwise.hardware import machine

from ..for_each import for_each

CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)\n"


@for_each(
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
    assert machine.parse_driver_version(text) == expected


def test_the_kernel_module_is_asked_first(monkeypatch, tmp_path):
    banner = tmp_path / "version"
    banner.write_text(CLOSED)
    monkeypatch.setattr(machine, "KERNEL_MODULE", banner)
    monkeypatch.setattr(machine, "PROGRAM", "no-such-command")
    assert machine.driver_version() == "535.129.03"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10), subprocess.CalledProcessError(9, "x")],
    ids=type,
)
def test_no_driver_is_none(monkeypatch, tmp_path, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(machine, "KERNEL_MODULE", tmp_path / "absent")
    monkeypatch.setattr(machine, "PROGRAM", sys.executable)
    monkeypatch.setattr(subprocess, "run", fail)
    assert machine.driver_version() is None


@pytest.mark.parametrize(
    ("path", "expected"), [("", None), (":", None), (".", None), ("bin", None), ("{here}/bin:", "550.54.15")]
)
def test_nvidia_smi_is_asked_by_its_full_path(monkeypatch, tmp_path, path, expected):
    """An empty or relative part of PATH is the current folder, whose programs are anybody's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for folder, version in ((tmp_path, "666.66.66"), (tmp_path / "bin", "550.54.15")):
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho {version}\n")
        (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(machine, "KERNEL_MODULE", tmp_path / "absent")
    monkeypatch.setenv("PATH", path.format(here=tmp_path))
    assert machine.driver_version() == expected
