from __future__ import annotations

from dataclasses import replace

import pytest

from ampwise.hardware import MachineRequirements
from ampwise.rules.amp7xx_choice.gpu_invisible_to_torch import RULE, check_hardware


@pytest.mark.parametrize(
    ("torch", "message", "fix"),
    [
        ({"version": "2.13.0+cpu", "cuda": None}, "torch 2.13.0+cpu is built without CUDA", "with CUDA"),
        ({"cuda": None, "hip": "6.3"}, "torch 2.13.0 is built for ROCm 6.3", "with CUDA"),
        ({"problem": "the driver is too old"}, "torch 2.13.0 cannot use it: the driver is too old", "update"),
        ({}, "torch 2.13.0 (CUDA 12.8) sees no device", "CUDA_VISIBLE_DEVICES"),
    ],
    ids=["cpu build", "rocm build", "old driver", "hidden"],
)
def test_a_driver_without_devices_is_found(make_machine, torch, message, fix):
    (finding,) = check_hardware(MachineRequirements(machine=make_machine(**torch)))
    assert finding.rule is RULE
    assert finding.message == f"NVIDIA driver 570.86.15 is running, but {message}"
    assert fix in finding.fix


def test_silence_when_torch_sees_a_device(make_machine, make_device):
    assert list(check_hardware(MachineRequirements(machine=make_machine(make_device("NVIDIA H200", "9.0"))))) == []


def test_silence_without_a_driver(make_machine):
    assert list(check_hardware(MachineRequirements(machine=make_machine(driver=None, cuda=None)))) == []


def test_silence_without_torch(make_machine):
    assert list(check_hardware(MachineRequirements(machine=replace(make_machine(), torch=None)))) == []
