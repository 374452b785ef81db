from __future__ import annotations

import pytest

from ampwise.hardware import MachineRequirements
from ampwise.rules.amp7xx_choice.bf16_without_tensor_cores import RULE, check_hardware


def test_emulated_bf16_is_found(make_machine, make_device):
    machine = make_machine(make_device("Tesla V100-SXM2-16GB", "7.0"))
    (finding,) = check_hardware(MachineRequirements(machine=machine))
    assert finding.rule is RULE
    assert str(finding.place) == "cuda:0"
    assert finding.message == (
        "Tesla V100-SXM2-16GB (compute capability 7.0) has no BF16 tensor cores: `torch.cuda.is_bf16_supported()` "
        "returns True, but BF16 is emulated and slow"
    )
    assert finding.fix == RULE.fix


def test_alike_devices_are_reported_once(make_machine, make_device):
    machine = make_machine(*(make_device("Tesla T4", "7.5", index) for index in range(4)))
    (finding,) = check_hardware(MachineRequirements(machine=machine))
    assert finding.message.startswith("4 × Tesla T4 (compute capability 7.5)")
    assert str(finding.place) == "cuda:0,1,2,3"


def test_a_gpu_without_any_tensor_cores_gets_other_advice(make_machine, make_device):
    machine = make_machine(make_device("Tesla P100-SXM2-16GB", "6.0"))
    (finding,) = check_hardware(MachineRequirements(machine=machine))
    assert finding.fix.startswith("Train in FP32, or in FP16 only to save memory")


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA GeForce RTX 3090", "8.6"), ("NVIDIA H200", "9.0"), ("AMD Instinct MI300X", "gfx942")],
)
def test_native_bf16_is_silent(make_machine, make_device, name, capability):
    assert list(check_hardware(MachineRequirements(machine=make_machine(make_device(name, capability))))) == []


def test_no_device_is_silent(make_machine):
    assert list(check_hardware(MachineRequirements(machine=make_machine()))) == []
